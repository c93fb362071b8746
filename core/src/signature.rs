//! The signature that ranks compare when they enter an operation.

use crate::abi;
use crate::call::{CombineCall, DispatchCall};
use crate::moe::Compression;

/// The values that must be equal on all ranks for one operation, packed into words that can be
/// compared, and decoded for messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signature {
    /// Kind, layout, types, optional tensors.
    pub word: u64,
    /// M in a dispatch, the numbers of a row in a replay, 0 in a combine.
    pub extent: u32,
}

const DISPATCH: u64 = 1;
const REPLAY: u64 = 2;
const COMBINE: u64 = 3;
/// Of a dispatch: whether its word has M of the call.
const HAS_EXTENT: u64 = 1 << 18;

impl Signature {
    /// The signature of a dispatch or a replay.
    pub(crate) fn dispatch(call: &DispatchCall<'_>) -> Self {
        let scale_cols = if call.scales.data.is_null() { 0 } else { call.scales.shape[1] };
        let word = if call.is_replay { REPLAY } else { DISPATCH }
            | u64::from(call.layout.code()) << 4
            | u64::from(call.x.dtype) << 8
            | u64::from(call.cast.code()) << 12
            | u64::from(!call.topk_weights.data.is_null()) << 16
            | u64::from(call.worst_case) << 17
            | u64::from(call.layout.alignment() & 0xffff) << 20
            | (scale_cols & 0xfff_ffff) << 36;
        Self { word, extent: if call.is_replay { call.x.shape[1] as u32 } else { call.max_tokens } }
    }

    /// The signature of a combine.
    pub(crate) fn combine(call: &CombineCall<'_>) -> Self {
        let word = COMBINE
            | u64::from(call.x.dtype) << 8
            | u64::from(call.returns_weights()) << 16
            | u64::from(call.weighted) << 17
            | u64::from(call.round_once) << 18
            | u64::from(call.sum_weights) << 19
            | u64::from(!call.beside.data.is_null()) << 20
            | u64::from(!call.topk_weights.data.is_null()) << 21
            | u64::from(call.compression == Compression::LogFmt10) << 22;
        Self { word, extent: 0 }
    }

    /// The signature of a round without rows, in a dispatch or in a combine.
    pub(crate) fn round(is_combine: bool) -> Self {
        Self { word: if is_combine { COMBINE } else { DISPATCH }, extent: 0 }
    }

    /// The signature of a dispatch with an M of its own, as one word for records that have room for one: M takes bits
    /// of the scale columns. None where M has more than 19 bits, or the columns more than 10.
    pub fn in_one_word(self) -> Option<Self> {
        let m = u64::from(self.extent);
        let fits = self.is_fresh() && m < 1 << 19 && self.field(46, 18) == 0;
        let word = self.word | HAS_EXTENT | (m & 1) << 19 | (m >> 1) << 46;
        fits.then_some(Self { word, extent: 0 })
    }

    /// The signature that such a word has. The extent is 0 where M is the communicator's.
    pub fn of_word(word: u64) -> Self {
        let whole = Self { word, extent: 0 };
        if !whole.is_fresh() || word & HAS_EXTENT == 0 {
            return whole;
        }
        let m = whole.field(46, 18) << 1 | whole.field(19, 1);
        let of_extent = HAS_EXTENT | 1 << 19 | 0x3_ffff << 46;
        Self { word: word & !of_extent, extent: m as u32 }
    }

    /// Kind and layout of the operation. They decide its steps, so they must be equal even where a rank
    /// refuses, and so has no rows to describe.
    pub fn sort(self) -> u64 {
        self.word & 0xff
    }

    /// The number of arrays of each row of a dispatch; the row signal counts each array. Taken from the
    /// sender's signature, because a rank that refuses has no format of its own.
    pub fn arrays(self) -> u64 {
        let scales = self.field(12, 4) != u64::from(abi::TY_CAST_NONE) || self.field(36, 28) > 0;
        // x, ids or slots, source; then the optional ones.
        3 + u64::from(scales) + self.field(16, 1)
    }

    fn field(self, shift: u32, bits: u32) -> u64 {
        (self.word >> shift) & ((1 << bits) - 1)
    }

    /// True for a dispatch with its own routing.
    pub fn is_fresh(self) -> bool {
        self.word & 0xf == DISPATCH
    }

    /// True if its entries carry counts: rows with places that the source alone fixes need none.
    pub fn carries_counts(self) -> bool {
        let layout = self.field(4, 4) as u32;
        self.is_fresh() && ![abi::TY_LAYOUT_PACKED, abi::TY_LAYOUT_RANK_MAJOR].contains(&layout)
    }

    /// The call of a rank, for messages.
    pub fn describe(self) -> String {
        let field = |shift, bits| self.field(shift, bits);
        let dtype = crate::moe::DType::from_code(field(8, 4) as u32)
            .map_or("no rows", crate::moe::DType::name);
        let weights = if field(16, 1) == 1 { "with weights" } else { "without weights" };
        match field(0, 4) {
            COMBINE => {
                let weighted = if field(17, 1) == 1 { "weighted" } else { "unweighted" };
                let of = if field(20, 1) == 1 { " by the weights of the call" } else { "" };
                let once = if field(18, 1) == 1 { ", rounded once" } else { "" };
                let sums = if field(19, 1) == 1 { " summed over ranks" } else { "" };
                let coded = if field(22, 1) == 1 { " in LogFMT-10" } else { "" };
                format!("combine of {dtype} rows{coded}, {weighted}{of}{once}, {weights}{sums}")
            }
            DISPATCH | REPLAY => {
                let call = if field(0, 4) == REPLAY { "replayed dispatch" } else { "dispatch" };
                let layout = match field(4, 4) as u32 {
                    abi::TY_LAYOUT_FLAT => "flat".to_owned(),
                    abi::TY_LAYOUT_EXPERT_MAJOR => format!("expert-major by {}", field(20, 16)),
                    abi::TY_LAYOUT_PACKED => "packed".to_owned(),
                    abi::TY_LAYOUT_RANK_MAJOR => "rank-major".to_owned(),
                    other => format!("layout {other}"),
                };
                let sizes = if field(17, 1) == 1 { "worst-case sizes" } else { "exact sizes" };
                let most = match (field(0, 4), self.extent) {
                    (DISPATCH, 0) => "at most max_tokens of the communicator".to_owned(),
                    (DISPATCH, tokens) => format!("at most {tokens} tokens"),
                    (_, width) => format!("{width} wide"),
                };
                format!(
                    "{layout} {call} of {dtype} rows, cast {}, {} scale columns, {sizes}, {weights}, {most}",
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
    use crate::moe::Layout;

    #[test]
    fn entries_carry_counts_where_rows_are_placed_by_them_and_not_in_a_replay() {
        let layouts = [
            (Layout::Flat, true),
            (Layout::ExpertMajor { alignment: 4, zero_padding: false }, true),
            (Layout::Packed, false),
            (Layout::RankMajor { zero_padding: false }, false),
            (Layout::RankMajor { zero_padding: true }, false),
        ];
        for (layout, counts) in layouts {
            let fresh = Signature::dispatch(&DispatchCall::blank(1, 0, layout));
            assert_eq!((fresh.is_fresh(), fresh.carries_counts()), (true, counts), "{layout:?}");
            let replay = DispatchCall { is_replay: true, ..DispatchCall::blank(1, 0, layout) };
            let replay = Signature::dispatch(&replay);
            assert_eq!((replay.is_fresh(), replay.carries_counts()), (false, false), "{layout:?}");
            assert_eq!(fresh.arrays(), 3, "{layout:?}: x, ids or slots, source");
        }
    }

    #[test]
    fn each_layout_is_another_sort_of_call_and_has_its_name() {
        let layouts = [
            Layout::Flat,
            Layout::ExpertMajor { alignment: 4, zero_padding: false },
            Layout::Packed,
            Layout::RankMajor { zero_padding: false },
        ];
        let all = layouts.map(|layout| Signature::dispatch(&DispatchCall::blank(1, 0, layout)));
        let mut sorts = all.map(Signature::sort).to_vec();
        sorts.sort_unstable();
        sorts.dedup();
        assert_eq!(sorts.len(), layouts.len());
        for (layout, signature) in layouts.into_iter().zip(all) {
            let text = signature.describe();
            assert!(text.starts_with(layout.name()), "{text}");
        }
    }

    /// A dispatch with weights, an alignment of 16 bits, and this many scale columns.
    fn dispatch(extent: u32, scale_cols: u64) -> Signature {
        Signature { word: DISPATCH | 1 << 4 | 1 << 16 | 0xffff << 20 | scale_cols << 36, extent }
    }

    #[test]
    fn a_word_with_m_of_a_call_differs_by_m_and_by_all_else_and_can_be_read_again() {
        let mut words = std::collections::BTreeSet::new();
        for extent in [1, 2, 3, 127, 128, 65_536, (1 << 19) - 1] {
            for scale_cols in [0, 1, 56, 1023] {
                let signature = dispatch(extent, scale_cols);
                let one = signature.in_one_word().unwrap();
                assert_eq!((one.extent, one.sort()), (0, signature.sort()));
                assert_ne!(one.word, signature.word);
                assert_eq!(Signature::of_word(one.word), signature);
                assert!(words.insert(one.word));
            }
        }
        // Words without one are read as they are: a combine uses the same bits.
        for word in [dispatch(0, 0xfff_ffff).word, COMBINE | HAS_EXTENT, REPLAY | HAS_EXTENT] {
            assert_eq!(Signature::of_word(word), Signature { word, extent: 0 });
        }
        for signature in [dispatch(1 << 19, 0), dispatch(8, 1024), Signature::round(true)] {
            assert_eq!(signature.in_one_word(), None);
        }
    }
}
