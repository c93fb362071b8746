//! Messages without a payload: single data, farewells, fences.

use super::outbound::{Attempt, Outbound, Peer, Transfer};
use crate::transport::datum::Datum;
use crate::transport::instance::STAGING_REGION;

impl Outbound {
    /// Sends a single datum.
    #[inline]
    pub(in crate::transport) fn send(&mut self, peer: u32, datum: Datum) -> Attempt {
        let transfer = self.nothing(peer, Some(datum));
        self.inject(&transfer)
    }

    /// Notifies the connected peers that stay that this rank closes.
    pub(in crate::transport) fn say_goodbye(&mut self, me: u32) {
        for peer in (0..self.peers.len() as u32).filter(|peer| *peer != me) {
            if self.knows(peer) && !self.peers[peer as usize].left {
                // A peer that cannot accept it now learns it from the provider, or waits for a
                // short time in its own drop.
                let _ = self.send(peer, Datum::Bye(me));
            }
        }
    }

    /// A write of no bytes.
    #[inline]
    fn nothing(&self, peer: u32, datum: Option<Datum>) -> Transfer {
        // Nothing is read there, but providers use the descriptor before they check the length.
        Transfer {
            peer,
            local: self.spare,
            descriptor: self.objects.descriptor(STAGING_REGION),
            bytes: 0,
            window: self.mailboxes,
            offset: 0,
            datum,
        }
    }

    pub(super) fn word_came(&mut self, peer: u32, note: fn(&mut Peer)) -> Result<(), &'static str> {
        let peer = self.peers.get_mut(peer as usize);
        peer.map(note).ok_or("a message of a rank that is not in the team")
    }

    /// Ends a batch whose last write was not accepted.
    #[cold]
    pub(super) fn ring(&mut self) {
        if let Some(peer) = self.doorbell
            && self.post_fence(peer) != Attempt::Full
        {
            self.doorbell = None;
        }
    }

    /// Posts an empty write to `peer`; its completion comes when everything before it was sent,
    /// where the provider preserves that order.
    pub(in crate::transport) fn post_fence(&mut self, peer: u32) -> Attempt {
        if self.fence_is_out {
            return Attempt::Full;
        }
        let context = self.fence.get().cast();
        let transfer = self.nothing(peer, None);
        let attempt = self.write(&transfer, context, false);
        self.fence_is_out = attempt == Attempt::Posted;
        attempt
    }

    pub(in crate::transport) fn fence_is_out(&self) -> bool {
        self.fence_is_out
    }
}
