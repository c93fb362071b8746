//! Records and signals.

use tokenyard_core::moe::{RECORD_HEADER, RECORD_TEXT};
use tokenyard_core::refusal::CallRefusal;
use tokenyard_core::signature::Signature;

/// The signals of one operation slot and place. The place's peer raises them on its queue 0, for the place's source.
/// Where losses are masked among domains, peers report by one more raise which refusals they know: see `verdicts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    /// A source entered the operation; its entry record is here.
    Entry = 0,
    /// An owner granted places; its grant record is here. On a rail, a domain's verdict is here instead.
    Grant = 1,
    /// Counts rows, once per array of a row that has arrived.
    Rows = 2,
    /// The writer has left the operation: it has read all that this rank wrote for it. The amount of
    /// the rise says how the operation ended there ([`End`](crate::engine::ends::End)).
    Done = 3,
}

pub(crate) const KINDS: u32 = 4;

/// Signal ids of one link, equal on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ids {
    /// Places of the exchange.
    pub(crate) places: u32,
    pub(crate) in_flight: u32,
}

impl Ids {
    /// Signals in all.
    pub(crate) fn count(&self) -> u32 {
        KINDS.saturating_mul(self.places).saturating_mul(self.in_flight)
    }

    /// The id of a place.
    pub(crate) fn id(&self, signal: Signal, slot: usize, place: u32) -> u32 {
        (signal as u32 * self.in_flight + slot as u32) * self.places + place
    }
}

/// A rank's verdict on an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Go = 0,
    Refused = 1,
    Full = 2,
    /// A forwarder reports that the source which it represents is lost, where losses are masked. The rest
    /// of the record is the forwarder's own, and counts.
    Gone = 3,
}

impl Verdict {
    /// The verdict of a rank that passes on a refusal.
    pub(crate) fn of(refusal: &CallRefusal<'_>) -> Self {
        if refusal.is_full { Self::Full } else { Self::Refused }
    }
}

/// The header of a record: eight words, then counts or a text.
///
/// Entry: operation, verdict, signature, rows, base of x, base of weights, text bytes and above them the
/// extent of the signature, number of the dispatch that made the handle; then u32 `[El]`, rows per expert.
/// Grant: operation, verdict, region offset, N, X, first flat row, text bytes, zero; then u32 `[El]`,
/// the first row of each expert. In a round without rows only the verdict counts. In a refusal word 5 is the
/// rank whose it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Header(pub(crate) [u64; 8]);

const _: () = assert!(size_of::<Header>() as u64 == RECORD_HEADER);

impl Header {
    pub(crate) fn operation(&self) -> u64 {
        self.0[0]
    }

    /// The verdict, or `None` for an unknown code.
    pub(crate) fn verdict(&self) -> Option<Verdict> {
        match self.0[1] {
            0 => Some(Verdict::Go),
            1 => Some(Verdict::Refused),
            2 => Some(Verdict::Full),
            3 => Some(Verdict::Gone),
            _ => None,
        }
    }

    /// How a source entered.
    pub(crate) fn signature(&self) -> Signature {
        Signature { word: self.0[2], extent: (self.0[6] >> 32) as u32 }
    }

    /// Length of the text, never longer than its room.
    pub(crate) fn text_bytes(&self) -> usize {
        (self.0[6] & 0xffff_ffff).min(RECORD_TEXT) as usize
    }

    /// This header, for a text of `bytes` bytes.
    pub(crate) fn with_text(mut self, bytes: u64) -> Self {
        self.0[6] = self.0[6] >> 32 << 32 | bytes;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_ids_are_distinct_and_dense() {
        let ids = Ids { places: 5, in_flight: 3 };
        let mut all: Vec<u32> = Vec::new();
        for signal in [Signal::Entry, Signal::Grant, Signal::Rows, Signal::Done] {
            for slot in 0..3 {
                all.extend((0..5).map(|writer| ids.id(signal, slot, writer)));
            }
        }
        all.sort_unstable();
        assert_eq!(all, (0..ids.count()).collect::<Vec<_>>());
    }
}
