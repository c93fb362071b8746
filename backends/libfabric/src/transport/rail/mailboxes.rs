//! Mailboxes of values: taking them, and returning them to their writers.

use super::State;
use super::outbound::{Attempt, Outbound};
use super::patience::Refusals;
use crate::transport::datum::{Datum, Mailbox};
use crate::transport::shared::Shared;

impl Outbound {
    /// Takes a mailbox of `peer` that this rank may fill. `Err`: the reason why there is none.
    pub(in crate::transport) fn take_mailbox(&mut self, peer: u32) -> Result<u32, Attempt> {
        let Some(known) = self.peers.get_mut(peer as usize) else { return Err(Attempt::Unknown) };
        if known.given_up {
            return Err(Attempt::GivenUp);
        }
        let slot = known.free_values.trailing_zeros();
        if slot == u32::BITS {
            return Err(self.refused(peer as usize, |peer| &mut peer.starved));
        }
        known.free_values &= !(1 << slot);
        Ok(slot)
    }

    /// Frees a mailbox that was taken and not filled.
    pub(in crate::transport) fn leave_mailbox(&mut self, peer: u32, slot: u32) {
        self.peers[peer as usize].free_values |= 1 << slot;
    }

    pub(super) fn credit_came(&mut self, place: Mailbox) -> Result<(), &'static str> {
        match self.peers.get_mut(place.peer as usize) {
            Some(peer) if peer.free_values & 1 << place.slot == 0 => {
                peer.free_values |= 1 << place.slot;
                peer.starved = Refusals::default();
                Ok(())
            }
            _ => Err("a credit for a mailbox that was not taken"),
        }
    }
}

impl State {
    pub(super) fn value_came(
        &mut self,
        shared: &Shared,
        place: Mailbox,
    ) -> Result<(), &'static str> {
        let Some(peer) = self.outbound.peers.get_mut(place.peer as usize) else {
            return Err("a value of a rank that is not in the team");
        };
        shared.deliver(self.index, place)?;
        peer.owed |= 1 << place.slot;
        self.owed += 1;
        Ok(())
    }

    /// Sends credits to writers of values: their mailboxes are empty again.
    pub(super) fn pay(&mut self, shared: &Shared) {
        let me = shared.team.me;
        for peer in 0..self.outbound.peers.len() {
            while self.outbound.peers[peer].owed != 0 {
                let slot = self.outbound.peers[peer].owed.trailing_zeros();
                let credit = Datum::Credit(Mailbox { peer: me, slot });
                // A peer that left needs no credits. The others do not wait for a peer that accepts
                // nothing; if it is lost, writes from it or to it show that.
                if !self.outbound.peers[peer].left
                    && self.outbound.send(peer as u32, credit) == Attempt::Full
                {
                    break;
                }
                self.outbound.peers[peer].owed &= !(1 << slot);
                self.owed -= 1;
            }
        }
    }

    /// Drops the credits that this rank owes.
    pub(in crate::transport) fn forgive(&mut self) {
        self.outbound.peers.iter_mut().for_each(|peer| peer.owed = 0);
        self.owed = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::transport::tests::{connected, until, value};

    #[test]
    fn credits_come_back_although_the_provider_takes_nothing_for_another_writer() {
        const VALUES: u64 = 200;
        let mut ranks = connected(3);
        let [alive, dead, receiver] = [2, 1, 0].map(|rank| ranks.remove(rank));
        dead.die();
        let credit = Datum::Credit(Mailbox { peer: 0, slot: 0 });
        until("the provider takes nothing for the dead rank", || {
            receiver.drive();
            receiver.instance.rail(0).outbound.send(1, credit) == Attempt::Full
        });
        // As if its values had come just before.
        let mut state = receiver.instance.rail(0);
        (state.outbound.peers[1].owed, state.owed) = (0b111, 3);
        drop(state);
        let mut next = 1;
        until("more values of the other arrive than it has mailboxes", || {
            alive.drive();
            receiver.drive();
            next += u64::from(next <= VALUES && alive.offer(value(0, next)));
            (1..=VALUES)
                .all(|place| receiver.memory[place as usize].load(Ordering::Acquire) == place)
        });
    }
}
