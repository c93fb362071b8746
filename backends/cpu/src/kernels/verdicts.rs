//! Whether an operation is refused, as all ranks agree.
//!
//! A refusal is in the refuser's entry, or, where places are counted, in its grants. Where losses are
//! masked among domains, a forwarder may be lost, and its domain hears nothing of its rail. So there the ranks
//! of a domain tell each other, then those of a rail, then those of a domain again: also whoever has lost
//! its partners on the rail, or in its domain, hears it.

use tokenyard_core::Result;
use tokenyard_core::abi;
use tokenyard_core::signature::Signature;

use super::agree::{Enter, Refusal, bad_record, checked, verdict_of};
use super::commands::{Body, Raise, Record};
use super::control::{Header, Signal, Verdict};
use super::counters::Way;
use super::engine::{Engine, QUEUE, Wait};

/// The record that a rank refuses, or has no room.
pub(super) fn refusal_record(
    operation: u64,
    (verdict, rank): (Verdict, u32),
    text: &[u8],
) -> (Header, Body<'_>) {
    let header = Header([operation, verdict as u64, 0, 0, 0, rank.into(), 0, 0]);
    (header, Body::Text(text))
}

impl Engine {
    /// The first refusal, in order of ranks, is everybody's answer. Not everybody may have heard it
    /// where losses are masked among domains: then those grant places, and hear it from who does not.
    pub(super) fn conclude(
        &mut self,
        slot: usize,
        enter: &Enter<'_>,
        refused: Option<Refusal>,
    ) -> Result<()> {
        let refused = if self.masks_domains() {
            let heard = match refused {
                Some(refusal) if enter.signature.carries_counts() => {
                    self.refuse_grants(slot, enter.operation, &refusal)?;
                    self.hear_grants(slot, enter.operation, None)?
                }
                _ => None,
            };
            let refused = heard.map_or(refused, |heard| Refusal::first(refused, heard));
            self.settle_verdict(slot, (enter.operation, enter.signature), refused)?
        } else {
            refused
        };
        refused.map_or(Ok(()), |refusal| Err(refusal.error()))
    }

    /// Hears every peer's grants, for the rows of every domain; then whether the other domains
    /// granted theirs.
    pub(super) fn gather_grants(
        &mut self,
        slot: usize,
        (operation, signature): (u64, Signature),
        handle: usize,
    ) -> Result<()> {
        let refused = self.hear_grants(slot, operation, Some(handle))?;
        let refused = self.settle_verdict(slot, (operation, signature), refused)?;
        refused.map_or(Ok(()), |refusal| Err(refusal.error()))
    }

    /// Hears the grants of this domain, and keeps the places in a handle; returns the first refusal.
    fn hear_grants(
        &mut self,
        slot: usize,
        operation: u64,
        handle: Option<usize>,
    ) -> Result<Option<Refusal>> {
        let mut refused = None;
        for (domain, peer) in self.domains.pairs() {
            let rank = self.domains.place(self.domains.mine, peer);
            let place = self.domains.place(domain, peer);
            let wait = Wait { operation, add: 1, phase: abi::TY_PHASE_GRANT, rank };
            if !self.wait(Signal::Grant, slot, place, wait)? {
                continue;
            }
            let record = self.record_from(Signal::Grant, slot, place);
            match (self.refusal_in(record, rank, operation)?, handle) {
                (Some(refusal), _) => refused = Refusal::first(refused, refusal),
                (None, Some(handle)) => self.accept_grant((domain, peer), record, handle),
                (None, None) => {}
            }
        }
        Ok(refused)
    }

    /// Grants nothing, because of a refusal that was heard.
    fn refuse_grants(&self, slot: usize, operation: u64, refusal: &Refusal) -> Result<()> {
        for (domain, peer) in self.domains.pairs() {
            let who = (refusal.verdict, refusal.rank);
            let record = refusal_record(operation, who, refusal.text());
            self.send_record(Signal::Grant, slot, (domain, peer), record)?;
        }
        Ok(())
    }

    /// Tells others what this rank has heard, and hears the same of them. Returns the first refusal.
    pub(super) fn settle_verdict(
        &mut self,
        slot: usize,
        (operation, signature): (u64, Signature),
        refused: Option<Refusal>,
    ) -> Result<Option<Refusal>> {
        let refused = self.exchange_verdicts(slot, operation, refused)?;
        if !self.masks_domains() {
            return Ok(refused);
        }
        // One that has no other use in the operation, or whose first one is over: who granted had heard all
        // entries.
        let signal = if signature.carries_counts() { Signal::Entry } else { Signal::Grant };
        self.share_verdict(slot, operation, signal, refused)
    }

    /// The same over the rail.
    fn exchange_verdicts(
        &mut self,
        slot: usize,
        operation: u64,
        mut refused: Option<Refusal>,
    ) -> Result<Option<Refusal>> {
        for domain in self.domains.others() {
            let record = match &refused {
                Some(refusal) => {
                    refusal_record(operation, (refusal.verdict, refusal.rank), refusal.text())
                }
                None => refusal_record(operation, (Verdict::Go, 0), &[]),
            };
            self.send_rail_record(Signal::Grant, slot, domain, record)?;
        }
        // Where not everybody hears everybody, a rank may have to wait for one that waits for a late one.
        let phase = if self.masks_domains() { abi::TY_PHASE_ENTRY } else { abi::TY_PHASE_GRANT };
        for domain in self.domains.others() {
            let forwarder = self.domains.place(domain, self.domains.index);
            let wait = Wait { operation, add: 1, phase, rank: forwarder };
            if !self.wait_rail(Signal::Grant, slot, domain, wait)? {
                continue;
            }
            let record = self.rail_record_from(Signal::Grant, slot, domain);
            if let Some(refusal) = self.refusal_in(record, forwarder, operation)? {
                refused = Refusal::first(refused, refusal);
            }
        }
        Ok(refused)
    }

    /// The same in the domain, by how far a signal rises: the records of the operation are in use. So whom it
    /// reaches first here gets no text.
    fn share_verdict(
        &mut self,
        slot: usize,
        operation: u64,
        signal: Signal,
        mut refused: Option<Refusal>,
    ) -> Result<Option<Refusal>> {
        let place = self.domains.place(self.domains.mine, self.domains.index);
        let id = self.channel.ids.id(signal, slot, place);
        let raise = Raise { operation, add: 1 + refused.as_ref().map_or(0, Refusal::code) };
        for peer in self.domains.peers() {
            self.raise(&self.channel, slot, (peer, id), raise)?;
        }
        for peer in self.domains.peers() {
            let rank = self.domains.place(self.domains.mine, peer);
            let wait = Wait { operation, add: 1, phase: abi::TY_PHASE_ENTRY, rank };
            if !self.wait(signal, slot, rank, wait)? {
                continue;
            }
            let (id, expected) = self.channel.expect(signal, slot, rank, 0);
            // One command raised it, and nothing raises it again before this rank has left the operation.
            let code = self.channel.link.read_signal(QUEUE, id).wrapping_sub(expected);
            self.channel.expect(signal, slot, rank, code);
            self.counters.add_seen(Way { level: self.channel.level, rank }, code);
            if code > 2 * u64::from(self.shape.ranks) {
                return Err(bad_record(rank, format!("verdict {code}")));
            }
            refused = Refusal::decode(code).map_or(refused, |told| Refusal::first(refused, told));
        }
        Ok(refused)
    }

    /// Whose refusal the record of a grant or verdict is, if it is one.
    fn refusal_in(&self, record: Record, writer: u32, operation: u64) -> Result<Option<Refusal>> {
        let header = checked(record, writer, operation)?;
        let verdict = verdict_of(&header, writer)?;
        if verdict == Verdict::Go {
            return Ok(None);
        }
        let rank = u32::try_from(header.0[5]).unwrap_or(u32::MAX);
        // Of its own domain, unless it has heard of more than this rank.
        let is_known = match self.masks_domains() {
            true => rank < self.shape.ranks,
            false => rank / self.domains.size == writer / self.domains.size,
        };
        if !is_known {
            return Err(bad_record(writer, format!("a refusal of rank {rank}")));
        }
        Ok(Some(Refusal { rank, verdict, record: Some(record) }))
    }
}

impl Refusal {
    /// A number for it, above 0; room for 2 R.
    fn code(&self) -> u64 {
        1 + 2 * u64::from(self.rank) + u64::from(self.verdict == Verdict::Full)
    }

    /// The refusal behind a number; 0 is none.
    fn decode(code: u64) -> Option<Self> {
        let code = code.checked_sub(1)?;
        let verdict = if code % 2 == 1 { Verdict::Full } else { Verdict::Refused };
        Some(Self { rank: (code / 2) as u32, verdict, record: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_told_apart_by_how_far_a_signal_rises() {
        assert!(Refusal::decode(0).is_none());
        for rank in 0..4 {
            for verdict in [Verdict::Refused, Verdict::Full] {
                let code = Refusal { rank, verdict, record: None }.code();
                let told = Refusal::decode(code).map(|told| (told.rank, told.verdict));
                assert_eq!(told, Some((rank, verdict)));
                assert!((1..=8).contains(&code), "{code}");
            }
        }
    }
}
