//! The 32 bits of completion data of a write, as the receiver's completion queue shows them.
//!
//! A signal is `id << 16 | add`, and add is never 0. So data with add 0 are available for the
//! transport's own messages: `kind << 14 | place` in the upper half.

/// Most values in flight from one peer to another, per rail. The number is odd. A reader that drives the
/// transport itself sees the last value of a burst of this length. If the number were even, two alternating
/// values would always leave the same one.
pub(super) const VALUES_PER_PEER: u32 = 15;
/// Most ranks of a team.
pub(super) const MAX_PEERS: u32 = 1024;

/// A place has 14 bits.
const _: () = assert!(MAX_PEERS * VALUES_PER_PEER <= 1 << 14);

const VALUE: u32 = 0;
const CREDIT: u32 = 1;
const WORD: u32 = 2;

/// Messages, encoded in place of a mailbox's number.
const HELLO: u32 = 0;
const BYE: u32 = 1;

/// A mailbox: number `slot` among those of `peer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mailbox {
    pub(super) peer: u32,
    pub(super) slot: u32,
}

impl Mailbox {
    /// Its number among all mailboxes of a rail.
    pub(super) fn index(self) -> u32 {
        self.peer * VALUES_PER_PEER + self.slot
    }

    fn at(index: u32) -> Self {
        Self { peer: index / VALUES_PER_PEER, slot: index % VALUES_PER_PEER }
    }
}

/// The meaning of a datum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Datum {
    /// Add `add` to signal `id`.
    Signal { id: u32, add: u32 },
    /// The writer, `peer` of the mailbox, has written a value into that mailbox of the receiver.
    Value(Mailbox),
    /// `peer` of the mailbox has emptied the mailbox that the receiver of this datum had filled.
    Credit(Mailbox),
    /// This peer can reach the receiver.
    Hello(u32),
    /// This peer closes, and will accept nothing more.
    Bye(u32),
}

impl Datum {
    #[inline]
    pub(super) fn encode(self) -> u64 {
        let own = |kind: u32, place: u32| u64::from((kind << 14 | place) << 16);
        match self {
            Self::Signal { id, add } => u64::from(id << 16 | add),
            Self::Value(place) => own(VALUE, place.index()),
            Self::Credit(place) => own(CREDIT, place.index()),
            Self::Hello(peer) => own(WORD, Mailbox { peer, slot: HELLO }.index()),
            Self::Bye(peer) => own(WORD, Mailbox { peer, slot: BYE }.index()),
        }
    }

    /// `None`: no version of this transport writes such data.
    #[inline]
    pub(super) fn decode(data: u64) -> Option<Self> {
        let data = u32::try_from(data).ok()?;
        let (upper, add) = (data >> 16, data & 0xffff);
        if add != 0 {
            return Some(Self::Signal { id: upper, add });
        }
        let place = Mailbox::at(upper & 0x3fff);
        match upper >> 14 {
            VALUE => Some(Self::Value(place)),
            CREDIT => Some(Self::Credit(place)),
            WORD if place.slot == HELLO => Some(Self::Hello(place.peer)),
            WORD if place.slot == BYE => Some(Self::Bye(place.peer)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_datum_survives_the_trip() {
        let places = [0, 1, MAX_PEERS - 1].into_iter().flat_map(|peer| {
            [0, VALUES_PER_PEER - 1].into_iter().map(move |slot| Mailbox { peer, slot })
        });
        for place in places {
            for datum in [
                Datum::Value(place),
                Datum::Credit(place),
                Datum::Hello(place.peer),
                Datum::Bye(place.peer),
            ] {
                assert_eq!(Datum::decode(datum.encode()), Some(datum));
            }
        }
        for (id, add) in [(0, 1), (65_535, 1), (0, 65_535), (65_535, 65_535), (7, 3)] {
            let datum = Datum::Signal { id, add };
            assert_eq!(Datum::decode(datum.encode()), Some(datum));
        }
    }

    #[test]
    fn bytes_that_no_peer_writes_are_not_a_datum() {
        for data in [3 << 30, 2 << 30 | 2 << 16, 1 << 32, u64::MAX] {
            assert_eq!(Datum::decode(data), None, "{data:#x}");
        }
    }
}
