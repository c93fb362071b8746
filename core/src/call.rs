//! Calls as a kernel set gets them: typed once, by the communicator. `c_form`: as they cross the plugin ABI.
//!
//! The types of a call have no wrong values. Tensors stay plain descriptions of memory; the
//! communicator has validated them.

mod c_form;

pub(crate) use c_form::CForm;

use std::ffi::c_void;

use crate::abi;
use crate::host::NO_TENSOR;
use crate::moe::{Cast, Compression, DType, Layout, RowCap, RowFormat, ScaleLayout, SourceIndex};
use crate::refusal::CallRefusal;
use crate::signature::Signature;

/// How a dispatched row looks on its way and at the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireFormat {
    /// Bytes, and whether weights go along.
    pub row: RowFormat,
    /// Numbers of a row.
    pub width: u32,
    /// Type code of the received numbers.
    pub x_dtype: u32,
    /// Type code of the received scales.
    pub scale_dtype: u32,
    /// Scales of a row.
    pub scale_cols: u64,
    /// How received packed scales lie in memory.
    pub scale_layout: ScaleLayout,
    /// The numbers in `source` of received packed rows.
    pub source_index: SourceIndex,
}

/// The order of a call among the work of a device, and what the host waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallOrder {
    /// The caller's stream; without one, the call is in the order of the host.
    pub stream: Option<*mut c_void>,
    /// The host waits for nothing. Only with a stream.
    pub no_sync: bool,
    /// The receive follows at once: nothing is computed between the halves.
    pub at_once: bool,
    /// The multiprocessors that kernels of the call occupy; 0: the set's own number. Only with a stream.
    pub sms: u32,
}

/// The exchange that a call is about. With one domain, or domains of one rank, there is that with owners alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangeKind {
    /// With the owners of experts: all ranks, or those of this domain.
    Owners,
    /// With the ranks of other domains that have this rank's index there.
    Rail,
}

/// A dispatch, or a replay with the routing of a handle.
#[derive(Clone, Copy, Debug)]
pub struct DispatchCall<'a> {
    /// The operation's number: the same on all ranks.
    pub operation: u64,
    /// The handle slot to fill, or to replay.
    pub handle: u32,
    /// Whether the routing is that of the handle.
    pub is_replay: bool,
    /// How received rows are arranged.
    pub layout: Layout,
    /// Outputs have room for the most rows that may come.
    pub worst_case: bool,
    /// A cap on the rows of this rank's output. None in a replay, which has that of its dispatch.
    pub cap: Option<RowCap>,
    /// The conversion of rows on their way.
    pub cast: Cast,
    /// Rows on their way, after the cast. Of no meaning where the call is refused.
    pub format: WireFormat,
    /// M of the call.
    pub max_tokens: u32,
    /// The exchange. With several domains of several ranks, the rows of that with owners are those that came
    /// over the rail, and not those of the tensors.
    pub exchange: ExchangeKind,
    /// `[T, H]`, or of another width in a replay.
    pub x: abi::TyTensor,
    /// `[T, S]`, absent unless the caller has quantised the rows.
    pub scales: abi::TyTensor,
    /// `[T, K]` i64; absent in a replay.
    pub topk_idx: abi::TyTensor,
    /// `[T, K]` f32, or absent.
    pub topk_weights: abi::TyTensor,
    /// T in device memory, or null.
    pub tokens: *const u32,
    /// Where the rows of each local expert are added, or null.
    pub expert_totals: *mut i32,
    /// Where the time of waits for each rank is added, or null.
    pub waited_ns: *mut i64,
    /// Its place among the device's work.
    pub order: CallOrder,
    /// Why this rank does not take part: then no tensor is read.
    pub refusal: Option<CallRefusal<'a>>,
    /// The signature of the call, which ranks compare. It is that of the caller's call in both exchanges.
    pub signature: Signature,
}

/// A combine.
#[derive(Clone, Copy, Debug)]
pub struct CombineCall<'a> {
    /// The operation's number: the same on all ranks.
    pub operation: u64,
    /// The handle of the dispatch.
    pub handle: u32,
    /// Each row is multiplied by its weight.
    pub weighted: bool,
    /// The exchange. With several domains of several ranks, the sums of that with owners are the rows of that on
    /// the rail.
    pub exchange: ExchangeKind,
    /// Sums are rounded once, on the rank of their token.
    pub round_once: bool,
    /// Returned weights are sums over ranks.
    pub sum_weights: bool,
    /// The format of partial rows.
    pub compression: Compression,
    /// `[rows, H]`.
    pub x: abi::TyTensor,
    /// f32, of the shape of the dispatch's weights, or absent.
    pub weights: abi::TyTensor,
    /// Weights of this call, in front of each row, or absent.
    pub beside: abi::TyTensor,
    /// Up to two `[T, H]`.
    pub bias: [abi::TyTensor; 2],
    /// `[T, H]`.
    pub out: abi::TyTensor,
    /// `[T, K]` f32, or absent.
    pub out_weights: abi::TyTensor,
    /// `[T, 1]` u8, or absent.
    pub missing: abi::TyTensor,
    /// Weights of this call, `[T, K]` f32, or absent.
    pub topk_weights: abi::TyTensor,
    /// `[T, K]` i64 beside them, or absent: negative ids leave rows out.
    pub topk_idx: abi::TyTensor,
    /// As in [`DispatchCall`].
    pub waited_ns: *mut i64,
    /// Its place among the device's work.
    pub order: CallOrder,
    /// As in [`DispatchCall`].
    pub refusal: Option<CallRefusal<'a>>,
    /// As in [`DispatchCall`].
    pub signature: Signature,
}

/// A round without rows, in which ranks pass on refusals.
#[derive(Clone, Copy, Debug)]
pub struct AgreeCall<'a> {
    /// The operation's number.
    pub operation: u64,
    /// The exchange.
    pub exchange: ExchangeKind,
    /// Whether the operation is a combine, which begins on the rail with this round. A dispatch ends with it.
    pub is_combine: bool,
    /// The refusal that this rank knows.
    pub refusal: Option<CallRefusal<'a>>,
}

impl WireFormat {
    fn of(call: &DispatchCall<'_>, scale_layout: ScaleLayout, source_index: SourceIndex) -> Self {
        let width = call.x.shape[1] as u32;
        let (x_dtype, scale_dtype, scale_cols) = match call.cast.quant() {
            None if call.scales.data.is_null() => (call.x.dtype, DType::F32.code(), 0),
            None => (call.x.dtype, call.scales.dtype, call.scales.shape[1]),
            Some(quant) => (
                DType::Fp8E4m3.code(),
                quant.scale_dtype().code(),
                u64::from(quant.scale_words(width)),
            ),
        };
        let element = DType::from_code(x_dtype).map_or(1, DType::bytes) as u32;
        let row = RowFormat {
            x_bytes: width.saturating_mul(element),
            scale_bytes: (scale_cols as u32).saturating_mul(4),
            weights: !call.topk_weights.data.is_null(),
        };
        Self { row, width, x_dtype, scale_dtype, scale_cols, scale_layout, source_index }
    }
}

/// The format of a row without bytes.
const NO_ROW: WireFormat = WireFormat {
    row: RowFormat { x_bytes: 0, scale_bytes: 0, weights: false },
    width: 0,
    x_dtype: 0,
    scale_dtype: 0,
    scale_cols: 0,
    scale_layout: ScaleLayout::RowMajor,
    source_index: SourceIndex::RankAndToken,
};

impl CallOrder {
    /// The same order for a part of the call, for whose outcome the host waits.
    pub fn waiting(self) -> Self {
        Self { no_sync: false, at_once: false, ..self }
    }
}

impl DispatchCall<'_> {
    /// A dispatch without tensors: the whole of a refused dispatch, and the start of every other.
    pub fn blank(operation: u64, handle: u32, layout: Layout) -> Self {
        Self {
            operation,
            handle,
            is_replay: false,
            layout,
            worst_case: false,
            cap: None,
            cast: Cast::None,
            format: NO_ROW,
            max_tokens: 0,
            exchange: ExchangeKind::Owners,
            x: NO_TENSOR,
            scales: NO_TENSOR,
            topk_idx: NO_TENSOR,
            topk_weights: NO_TENSOR,
            tokens: std::ptr::null(),
            expert_totals: std::ptr::null_mut(),
            waited_ns: std::ptr::null_mut(),
            order: CallOrder::default(),
            refusal: None,
            signature: Signature::default(),
        }
    }

    /// Derives the format of its rows, and its signature, from the other fields.
    pub(crate) fn complete(&mut self, scale_layout: ScaleLayout, source_index: SourceIndex) {
        self.format = WireFormat::of(self, scale_layout, source_index);
        self.signature = Signature::dispatch(self);
    }
}

impl CombineCall<'_> {
    /// A combine without tensors: the whole of a refused combine, and the start of every other.
    pub fn blank(operation: u64, handle: u32) -> Self {
        Self {
            operation,
            handle,
            weighted: false,
            exchange: ExchangeKind::Owners,
            round_once: false,
            sum_weights: false,
            compression: Compression::None,
            x: NO_TENSOR,
            weights: NO_TENSOR,
            beside: NO_TENSOR,
            bias: [NO_TENSOR; 2],
            out: NO_TENSOR,
            out_weights: NO_TENSOR,
            missing: NO_TENSOR,
            topk_weights: NO_TENSOR,
            topk_idx: NO_TENSOR,
            waited_ns: std::ptr::null_mut(),
            order: CallOrder::default(),
            refusal: None,
            signature: Signature::default(),
        }
    }

    /// Derives its signature from the other fields.
    pub(crate) fn complete(&mut self) {
        self.signature = Signature::combine(self);
    }

    /// Whether weights return with the rows.
    pub fn returns_weights(&self) -> bool {
        !self.weights.data.is_null()
    }
}

impl AgreeCall<'_> {
    /// The signature of the round, for sets whose ranks compare one in each.
    pub fn signature(&self) -> Signature {
        Signature::round(self.is_combine)
    }
}
