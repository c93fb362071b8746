use super::Shape;
use crate::{Error, ErrorKind, Result};

const OPERATION: &str = "lay out region";

/// Every array of a region starts on a multiple of this many bytes, and a region's size is one.
pub const REGION_ALIGN: u64 = 128;

/// The arrangement of received rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Layout {
    /// One row per token and rank, by source rank, then source token.
    #[default]
    Flat,
    /// One row per token and local expert, grouped by expert; within an expert in flat order.
    ExpertMajor {
        /// A: each expert's first row is a multiple of it. At least 1.
        alignment: u32,
        /// True if the rows between an expert's last row and the next expert's first are zeroed.
        zero_padding: bool,
    },
    /// `[El, R*M]` rows and a count per local expert, for decoding.
    Packed,
    /// `[R, M]` rows and a count per source rank, for decoding: one row per token and rank. The first rows of a
    /// source's block are its tokens that come here, in their order.
    RankMajor {
        /// True if the rows behind each source's last one are zeroed. Otherwise they may hold anything. Their ids
        /// are -1 in any case.
        zero_padding: bool,
    },
}

impl Layout {
    /// The name used in configs, tables and error messages.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Flat => "flat",
            Self::ExpertMajor { .. } => "expert-major",
            Self::Packed => "packed",
            Self::RankMajor { .. } => "rank-major",
        }
    }

    /// A of the expert-major layout, 1 elsewhere.
    pub const fn alignment(self) -> u32 {
        match self {
            Self::ExpertMajor { alignment, .. } => alignment,
            Self::Flat | Self::Packed | Self::RankMajor { .. } => 1,
        }
    }

    /// True if rows that hold no token are zeroed.
    pub const fn zero_padding(self) -> bool {
        match self {
            Self::ExpertMajor { zero_padding, .. } | Self::RankMajor { zero_padding } => {
                zero_padding
            }
            Self::Flat | Self::Packed => false,
        }
    }

    /// True if a token has one row on each rank that has experts of it. The caller then merges the outputs of the
    /// rank's experts, and combine sums ranks. Elsewhere a token has a row for each expert.
    pub const fn has_a_row_per_token(self) -> bool {
        match self {
            Self::Flat | Self::RankMajor { .. } => true,
            Self::ExpertMajor { .. } | Self::Packed => false,
        }
    }

    /// True if the source alone fixes the places of rows, so that no count crosses before them and the output has
    /// always room for all that may come.
    pub const fn has_fixed_places(self) -> bool {
        match self {
            Self::Packed | Self::RankMajor { .. } => true,
            Self::Flat | Self::ExpertMajor { .. } => false,
        }
    }
}

/// The parts of one received row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowFormat {
    /// Bytes of one row of x: H * element size.
    pub x_bytes: u32,
    /// Bytes of the scales of one row; 0 without scales.
    pub scale_bytes: u32,
    /// True if weights are sent with the rows.
    pub weights: bool,
}

/// All inputs of a region's arrays, except the number of rows that arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionSpec {
    /// The agreed shape.
    pub shape: Shape,
    /// The arrangement of the rows.
    pub layout: Layout,
    /// The parts of a row.
    pub row: RowFormat,
    /// P of a region whose rows are capped (flat and expert-major).
    pub max_rows: Option<u64>,
}

impl RegionSpec {
    /// A region of this layout without a cap.
    pub const fn new(shape: Shape, layout: Layout, row: RowFormat) -> Self {
        Self { shape, layout, row, max_rows: None }
    }
}

/// The number of rows that a region must hold. Packed and rank-major regions have room for all rows; packed ones
/// use only `tokens`, rank-major ones neither.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionRows {
    /// N: one per token and source, as in the flat layout.
    pub tokens: u64,
    /// X: one per token and local expert, padding included, as in the expert-major layout.
    pub experts: u64,
}

impl RegionRows {
    /// The most rows that can arrive: R*M tokens, and
    /// `align_up(R*M*min(K, El) + (A-1)*El, A)` expert rows. Of the rows of x, at most P where they are capped.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the alignment is 0.
    pub fn worst(spec: &RegionSpec) -> Result<Self> {
        let Shape { ranks, topk, max_tokens, .. } = spec.shape;
        let alignment = u64::from(spec.layout.alignment());
        if alignment == 0 {
            return Err(no_alignment());
        }
        let local = u64::from(spec.shape.local_experts());
        let tokens = u64::from(ranks) * u64::from(max_tokens);
        // Below 2^31 * 2^5 + 2^32 * 2^32, which fits: tokens are at most i32::MAX (see Shape).
        let experts = tokens * u64::from(topk).min(local) + (alignment - 1) * local;
        let experts = experts.checked_next_multiple_of(alignment).ok_or_else(too_large)?;
        Ok(Self { tokens, experts }.capped(spec.layout, spec.max_rows))
    }

    /// As many of these rows as a cap leaves. The tokens of expert-major rows are not capped.
    pub fn capped(self, layout: Layout, max_rows: Option<u64>) -> Self {
        let most = max_rows.unwrap_or(u64::MAX);
        match layout {
            Layout::Flat => Self { tokens: self.tokens.min(most), ..self },
            Layout::ExpertMajor { .. } => Self { experts: self.experts.min(most), ..self },
            Layout::Packed | Layout::RankMajor { .. } => self,
        }
    }
}

/// A part of a region. Empty if the layout has no such array.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Bytes from the start of the region; a multiple of [`REGION_ALIGN`].
    pub offset: u64,
    /// Bytes of the array, without the padding after it.
    pub bytes: u64,
}

impl Span {
    /// The first byte after the array.
    pub(crate) const fn end(self) -> u64 {
        self.offset + self.bytes
    }
}

/// The places of the arrays in one output region. All are contiguous, row-major and without pitch.
///
/// "rows" is N in the flat layout, X in the expert-major one, `El * R*M` in the packed one, R*M in the rank-major
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionLayout {
    /// `[rows, H]` of the row type.
    pub x: Span,
    /// `[rows, scale bytes]`; empty without scales.
    pub scales: Span,
    /// f32; `[rows, K]` flat and rank-major (0 where the id is -1), `[X]` expert-major, `[El, R*M]` packed; empty
    /// without weights.
    pub weights: Span,
    /// Flat and rank-major: i32 `[rows, K]`, the local expert of each k, or -1.
    pub ids: Span,
    /// i32, source rank * M + source token; `[N]` flat and expert-major, `[El, R*M]` packed, `[R, M]` rank-major.
    pub source: Span,
    /// Expert-major and packed: i32 `[N, K]`, the row of each k's expert copy, or -1. The N rows
    /// are in flat order.
    pub slots: Span,
    /// u32 `[R]`: rows from each source rank.
    pub rank_counts: Span,
    /// u32 `[El]`: rows of each local expert, without padding.
    pub expert_counts: Span,
    /// Expert-major only: u32 `[El + 1]`, the first row of each local expert, then X.
    pub expert_starts: Span,
    /// Expert-major only: u32 `[El]`, the row after the last one of each local expert, padding left
    /// out.
    pub expert_ends: Span,
    /// u32 `[R]`: rows from each source rank and from all ranks before it.
    pub rank_ends: Span,
    /// Packed only: i64 `[El, R]`, `count | begin << 32` of each source within each local expert.
    pub ranges: Span,
    /// Expert-major and packed: the scales as they arrive, `[N, scale bytes]` in flat order; the owner
    /// copies them to the expert copies.
    pub landed_scales: Span,
    /// Expert-major and packed: the weights as they arrive, f32 `[N, K]` in flat order.
    pub landed_weights: Span,
    /// Packed only: the sources as they arrive, i32 `[N]` in flat order.
    pub landed_source: Span,
    /// i64 `[2]`: the true N and the true number of rows, for callers that learn no count.
    pub totals: Span,
    /// u8 `[R]`: 1 where rows of a source rank are left out, because it was lost.
    pub lost: Span,
    /// Where rows are capped: u32 `[El + 1]`, the dropped rows of each local expert, then 1 where any was dropped.
    pub dropped: Span,
    /// Bytes of the region, a multiple of [`REGION_ALIGN`].
    pub bytes: u64,
}

impl RegionLayout {
    /// The layout of a region for exactly `rows`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the rows exceed the range of an `i32` row index, or the bytes
    /// that of a 64-bit offset.
    pub fn new(spec: &RegionSpec, rows: RegionRows) -> Result<Self> {
        let arrays = arrays(spec, rows)?;
        let mut spans = [Span::default(); ARRAYS];
        let mut end = 0;
        for (span, array) in spans.iter_mut().zip(&arrays) {
            *span = Span { offset: end, bytes: array.bytes };
            end = array
                .bytes
                .checked_next_multiple_of(REGION_ALIGN)
                .and_then(|padded| padded.checked_add(end))
                .ok_or_else(too_large)?;
        }
        // Each array is named once: the order is that of `arrays`.
        macro_rules! layout {
            ($($name:ident),*) => {{
                let [$($name),*] = spans;
                Self { $($name,)* bytes: end }
            }};
        }
        Ok(layout! {
            x, scales, weights, ids, source, slots, rank_counts, expert_counts, expert_starts, expert_ends,
            rank_ends, ranges, landed_scales, landed_weights, landed_source, totals, lost, dropped
        })
    }

    /// The layout for the most rows that can arrive, for captured graphs and for sizing the arena.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new) and [`RegionRows::worst`].
    pub fn worst(spec: &RegionSpec) -> Result<Self> {
        Self::new(spec, RegionRows::worst(spec)?)
    }
}

pub(super) const ARRAYS: usize = 18;

/// One array of a region.
pub(super) struct Array {
    pub(super) name: &'static str,
    /// The most elements, in the project's symbols.
    pub(super) formula: &'static str,
    /// Bytes of one element.
    pub(super) element: u64,
    pub(super) bytes: u64,
}

/// The number of elements of an array.
#[derive(Clone, Copy)]
struct ArrayLength {
    elements: u64,
    /// The maximum, in the project's symbols.
    formula: &'static str,
}

impl ArrayLength {
    const NONE: Self = Self::new(0, "none");

    const fn new(elements: u64, formula: &'static str) -> Self {
        Self { elements, formula }
    }
}

impl Array {
    fn new(name: &'static str, length: ArrayLength, element: u32) -> Result<Self> {
        let element = u64::from(element);
        let bytes = length.elements.checked_mul(element).ok_or_else(too_large)?;
        Ok(Self { name, formula: length.formula, element, bytes })
    }
}

/// The arrays of a region, in their order in memory.
pub(super) fn arrays(spec: &RegionSpec, rows: RegionRows) -> Result<[Array; ARRAYS]> {
    let shape = &spec.shape;
    let (ranks, local) = (u64::from(shape.ranks), u64::from(shape.local_experts()));
    let topk = u64::from(shape.topk);
    let most_tokens = ranks * u64::from(shape.max_tokens);
    let token_rows = index_limit(rows.tokens)?;
    const NONE: ArrayLength = ArrayLength::NONE;
    let is_capped = spec.max_rows.is_some() && !spec.layout.has_fixed_places();
    let (of_tokens, of_topk) = match (is_capped, spec.layout) {
        (true, Layout::Flat) => ("min(P, R*M)", "min(P, R*M) * K"),
        _ => ("R*M", "R*M * K"),
    };
    let tokens = ArrayLength::new(token_rows, of_tokens);
    let by_k = ArrayLength::new(token_rows * topk, of_topk);
    let expert_rows = match is_capped {
        true => "min(P, align_up(R*M * min(K, El) + (A-1) * El, A))",
        false => "align_up(R*M * min(K, El) + (A-1) * El, A)",
    };
    // Lengths of x and scales, weights, ids, source, slots, starts, ranges.
    let (x, weights, ids, source, slots, starts, ranges) = match spec.layout {
        Layout::Flat => (tokens, by_k, by_k, tokens, NONE, NONE, NONE),
        Layout::ExpertMajor { alignment: 0, .. } => return Err(no_alignment()),
        Layout::ExpertMajor { .. } => {
            let x = ArrayLength::new(index_limit(rows.experts)?, expert_rows);
            (x, x, NONE, tokens, by_k, ArrayLength::new(local + 1, "El + 1"), NONE)
        }
        Layout::Packed => {
            // Below 2^32 * 2^31, so the product fits.
            let x = ArrayLength::new(index_limit(local * most_tokens)?, "El * R*M");
            (x, x, NONE, x, by_k, NONE, ArrayLength::new(local * ranks, "El * R"))
        }
        Layout::RankMajor { .. } => {
            let x = ArrayLength::new(index_limit(most_tokens)?, "R*M");
            let by_k = ArrayLength::new(x.elements * topk, "R*M * K");
            (x, by_k, by_k, x, NONE, NONE, NONE)
        }
    };
    let ends = match spec.layout {
        Layout::ExpertMajor { .. } => ArrayLength::new(local, "El"),
        Layout::Flat | Layout::Packed | Layout::RankMajor { .. } => NONE,
    };
    let dropped = if is_capped { ArrayLength::new(local + 1, "El + 1") } else { NONE };
    let spreads = !spec.layout.has_a_row_per_token();
    let landed = |count, wanted: bool| if spreads && wanted { count } else { NONE };
    let landed_scales = landed(tokens, spec.row.scale_bytes > 0);
    let landed_weights = landed(by_k, spec.row.weights);
    let landed_source = if spec.layout == Layout::Packed { tokens } else { NONE };
    let scales = if spec.row.scale_bytes > 0 { x } else { NONE };
    let weights = if spec.row.weights { weights } else { NONE };
    Ok([
        Array::new("x", x, spec.row.x_bytes)?,
        Array::new("scales", scales, spec.row.scale_bytes)?,
        Array::new("weights", weights, 4)?,
        Array::new("ids", ids, 4)?,
        Array::new("source", source, 4)?,
        Array::new("slots", slots, 4)?,
        Array::new("rank_counts", ArrayLength::new(ranks, "R"), 4)?,
        Array::new("expert_counts", ArrayLength::new(local, "El"), 4)?,
        Array::new("expert_starts", starts, 4)?,
        Array::new("expert_ends", ends, 4)?,
        Array::new("rank_ends", ArrayLength::new(ranks, "R"), 4)?,
        Array::new("ranges", ranges, 8)?,
        Array::new("landed scales", landed_scales, spec.row.scale_bytes)?,
        Array::new("landed weights", landed_weights, 4)?,
        Array::new("landed source", landed_source, 4)?,
        Array::new("totals", ArrayLength::new(2, "2"), 8)?,
        Array::new("lost", ArrayLength::new(ranks, "R"), 1)?,
        Array::new("dropped", dropped, 4)?,
    ])
}

/// Rows are named by `i32` in `ids`, `slots` and `source`.
fn index_limit(rows: u64) -> Result<u64> {
    if rows <= i32::MAX as u64 { Ok(rows) } else { Err(too_many_rows(rows)) }
}

#[cold]
fn no_alignment() -> Error {
    Error::new(ErrorKind::InvalidInput, OPERATION, "found alignment = 0; expected at least 1")
        .with_fix("use 1 for no alignment")
}

#[cold]
fn too_many_rows(rows: u64) -> Error {
    Error::new(
        ErrorKind::InvalidInput,
        OPERATION,
        format!("found {rows} rows; expected at most {}, the largest i32", i32::MAX),
    )
    .with_fix("lower max_tokens or the expert alignment, or use the flat layout")
}

#[cold]
fn too_large() -> Error {
    Error::new(ErrorKind::InvalidInput, OPERATION, "the region's bytes do not fit into 64 bits")
        .with_fix("lower max_tokens or hidden")
}

#[cfg(test)]
mod tests;
