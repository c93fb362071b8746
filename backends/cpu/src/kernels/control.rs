//! Records and signals, of a domain and of a rail.

use tokenyard_core::abi;
use tokenyard_core::moe::{RECORD_HEADER, RECORD_TEXT};

/// The signals of one operation slot and place. In a domain there are R places: that of `(domain,
/// peer)` is raised by `peer`, on its lane 0, for what concerns the source of `domain` on a rail. On
/// a rail there are D: that of `domain` is raised by the rail's rank there. Where losses are masked among
/// domains, peers say by one more raise what they heard of refusals: see `verdicts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signal {
    /// A source entered the operation; its entry record is here.
    Entry = 0,
    /// An owner granted places; its grant record is here. On a rail: all owners of a domain did.
    Grant = 1,
    /// Counts rows, once per array of a row that has arrived.
    Rows = 2,
    /// The writer is through with the operation: it has read what this rank wrote for it. How far it
    /// rises says how the operation ended there ([`End`](super::slots::End)).
    Done = 3,
}

const KINDS: u32 = 4;

/// Signal ids of one link, equal on all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ids {
    /// R in a domain, D on a rail.
    pub(super) places: u32,
    pub(super) in_flight: u32,
}

impl Ids {
    /// Signals in all.
    pub(super) fn count(&self) -> u32 {
        KINDS.saturating_mul(self.places).saturating_mul(self.in_flight)
    }

    /// The id of a place.
    pub(super) fn id(&self, signal: Signal, slot: usize, place: u32) -> u32 {
        (signal as u32 * self.in_flight + slot as u32) * self.places + place
    }
}

/// What a rank thinks of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Go = 0,
    Refused = 1,
    Full = 2,
    /// Said by an agent of the source that it stands for, where losses are masked: it is lost. What
    /// the record says of the agent itself holds.
    Gone = 3,
}

/// The header of a record: eight words, then counts or a text.
///
/// Entry: operation, verdict, signature, rows, base of x, base of weights, text bytes, number of the
/// dispatch that made the handle; then u32 `[El]`, rows per expert. On a rail the rows are those that
/// go to the domain, and u32 `[S]`, rows per rank, and u32 `[S * El]` follow.
/// Grant: operation, verdict, region offset, N, X, first flat row, text bytes, zero; then u32 `[El]`,
/// the first row of each expert. Where it is a refusal, and on a rail, only the verdict counts, and word 5 is
/// the rank whose it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Header(pub(super) [u64; 8]);

const _: () = assert!(size_of::<Header>() as u64 == RECORD_HEADER);

impl Header {
    pub(super) fn operation(&self) -> u64 {
        self.0[0]
    }

    /// The verdict, or `None` for an unknown code.
    pub(super) fn verdict(&self) -> Option<Verdict> {
        match self.0[1] {
            0 => Some(Verdict::Go),
            1 => Some(Verdict::Refused),
            2 => Some(Verdict::Full),
            3 => Some(Verdict::Gone),
            _ => None,
        }
    }

    /// Length of the text, never longer than its room.
    pub(super) fn text_bytes(&self) -> usize {
        self.0[6].min(RECORD_TEXT) as usize
    }
}

/// What must be equal on all ranks for one operation, packed into a word that can be told apart
/// and read again for messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Signature(pub(super) u64);

const DISPATCH: u64 = 1;
const REPLAY: u64 = 2;
const COMBINE: u64 = 3;

impl Signature {
    pub(super) fn dispatch(call: &abi::TyDispatch) -> Self {
        let replay = call.flags & abi::TY_DISPATCH_REPLAY != 0;
        let scale_cols = if call.scales.data.is_null() { 0 } else { call.scales.shape[1] };
        Self(
            if replay { REPLAY } else { DISPATCH }
                | u64::from(call.layout) << 4
                | u64::from(call.x.dtype) << 8
                | u64::from(call.cast) << 12
                | u64::from(!call.topk_weights.data.is_null()) << 16
                | u64::from(call.flags & abi::TY_DISPATCH_WORST_CASE != 0) << 17
                | u64::from(call.alignment & 0xffff) << 20
                | (scale_cols & 0xfff_ffff) << 36,
        )
    }

    pub(super) fn combine(call: &abi::TyCombine) -> Self {
        Self(
            COMBINE
                | u64::from(call.x.dtype) << 8
                | u64::from(!call.weights.data.is_null()) << 16
                | u64::from(call.flags & abi::TY_COMBINE_WEIGHTED) << 17,
        )
    }

    /// What sort of operation it is: kind and layout. They decide how ranks go through it, so they
    /// must be equal even where a rank refuses, and so has no rows to describe.
    pub(super) fn sort(self) -> u64 {
        self.0 & 0xff
    }

    /// Arrays that each row of a dispatch is spread over; the row signal counts each. Taken from
    /// the sender's signature, because a rank that refuses has no format of its own.
    pub(super) fn arrays(self) -> u64 {
        let scales = self.field(12, 4) != u64::from(abi::TY_CAST_NONE) || self.field(36, 28) > 0;
        // x, ids or slots, source; then what is optional.
        3 + u64::from(scales) + self.field(16, 1)
    }

    fn field(self, shift: u32, bits: u32) -> u64 {
        (self.0 >> shift) & ((1 << bits) - 1)
    }

    /// Whether it is a dispatch that brings its own routing.
    pub(super) fn is_fresh(self) -> bool {
        self.0 & 0xf == DISPATCH
    }

    /// Whether its entries carry counts: the packed layout needs none.
    pub(super) fn carries_counts(self) -> bool {
        self.is_fresh() && self.field(4, 4) != u64::from(abi::TY_LAYOUT_PACKED)
    }

    /// For messages: what a rank called.
    pub(super) fn describe(self) -> String {
        let field = |shift, bits| self.field(shift, bits);
        let dtype = tokenyard_core::moe::DType::from_code(field(8, 4) as u32)
            .map_or("no rows", |d| d.name());
        let weights = if field(16, 1) == 1 { "with weights" } else { "without weights" };
        match field(0, 4) {
            COMBINE => {
                let weighted = if field(17, 1) == 1 { "weighted" } else { "unweighted" };
                format!("combine of {dtype} rows, {weighted}, {weights}")
            }
            DISPATCH | REPLAY => {
                let call = if field(0, 4) == REPLAY { "replayed dispatch" } else { "dispatch" };
                let layout = match field(4, 4) as u32 {
                    abi::TY_LAYOUT_FLAT => "flat".to_owned(),
                    abi::TY_LAYOUT_EXPERT_MAJOR => format!("expert-major by {}", field(20, 16)),
                    abi::TY_LAYOUT_PACKED => "packed".to_owned(),
                    other => format!("layout {other}"),
                };
                let sizes = if field(17, 1) == 1 { "worst-case sizes" } else { "exact sizes" };
                format!(
                    "{layout} {call} of {dtype} rows, cast {}, {} scale columns, {sizes}, {weights}",
                    field(12, 4),
                    field(36, 28)
                )
            }
            other => format!("unknown call {other}"),
        }
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
