//! Calls as a kernel set gets them: typed once, where they cross the plugin ABI.
//!
//! The types of a call have no wrong values. Tensors stay plain descriptions of memory; the
//! communicator has validated them.

use std::ffi::c_void;

use crate::abi;
use crate::moe::{Cast, Compression, DType, Layout, RowFormat, ScaleLayout, SourceIndex};
use crate::refusal::CallRefusal;
use crate::signature::Signature;
use crate::{Error, ErrorKind, Result};

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
}

/// The exchange that a call is about. With one domain, or domains of one rank, there is that with owners alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangeKind {
    /// With the owners of experts: all ranks, or those of this domain.
    Owners,
    /// With the ranks of other domains that have this rank's index there.
    Rail,
}

impl ExchangeKind {
    fn of(code: u32) -> Result<Self> {
        match code {
            abi::TY_EXCHANGE_OWNERS => Ok(Self::Owners),
            abi::TY_EXCHANGE_RAIL => Ok(Self::Rail),
            other => unknown("exchange", other, "that of owners (0) or that on the rail (1)"),
        }
    }
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

impl Layout {
    /// The code that crosses the plugin ABI, one of `TY_LAYOUT_*`.
    pub fn code(self) -> u32 {
        match self {
            Self::Flat => abi::TY_LAYOUT_FLAT,
            Self::ExpertMajor { .. } => abi::TY_LAYOUT_EXPERT_MAJOR,
            Self::Packed => abi::TY_LAYOUT_PACKED,
        }
    }
}

fn unknown<T>(what: &str, found: u32, expected: &str) -> Result<T> {
    let message = format!("found {what} {found}; expected {expected}");
    Err(Error::new(ErrorKind::Unsupported, "read call", message)
        .with_fix("use a host and a plugin of matching versions"))
}

fn layout_of(call: &abi::TyDispatch) -> Result<Layout> {
    Ok(match call.layout {
        abi::TY_LAYOUT_FLAT => Layout::Flat,
        abi::TY_LAYOUT_EXPERT_MAJOR => Layout::ExpertMajor {
            alignment: call.alignment,
            zero_padding: call.flags & abi::TY_DISPATCH_ZERO_PADDING != 0,
        },
        abi::TY_LAYOUT_PACKED => Layout::Packed,
        other => return unknown("layout", other, "flat (1), expert-major (2) or packed (3)"),
    })
}

fn cast_of(code: u32) -> Result<Cast> {
    let all = [Cast::None, Cast::Fp8, Cast::Fp8Round, Cast::Fp8Ue8m0];
    let known = all.into_iter().find(|cast| cast.code() == code);
    known.map_or_else(|| unknown("cast", code, "0 to 3"), Ok)
}

impl WireFormat {
    fn of(call: &abi::TyDispatch, cast: Cast) -> Self {
        let width = call.x.shape[1] as u32;
        let (x_dtype, scale_dtype, scale_cols) = match cast.quant() {
            None if call.scales.data.is_null() => (call.x.dtype, DType::F32.code(), 0),
            None => (call.x.dtype, call.scales.dtype, call.scales.shape[1]),
            Some(quant) => (
                DType::Fp8E4m3.code(),
                quant.scale.dtype().code(),
                u64::from(quant.scale_words(width)),
            ),
        };
        let element = DType::from_code(x_dtype).map_or(1, DType::bytes) as u32;
        let row = RowFormat {
            x_bytes: width.saturating_mul(element),
            scale_bytes: (scale_cols as u32).saturating_mul(4),
            weights: !call.topk_weights.data.is_null(),
        };
        let scale_layout = ScaleLayout::of_flags(call.flags);
        let source_index = SourceIndex::of_flags(call.flags);
        Self { row, width, x_dtype, scale_dtype, scale_cols, scale_layout, source_index }
    }
}

impl CallOrder {
    /// From the flags of a call: those for a stream, for no synchronisation, and for both halves at once.
    fn of(flags: u32, [on_stream, no_sync, at_once]: [u32; 3], stream: *mut c_void) -> Self {
        let is_set = |flag: u32| flags & flag != 0;
        let stream = is_set(on_stream).then_some(stream);
        Self { stream, no_sync: is_set(no_sync) && stream.is_some(), at_once: is_set(at_once) }
    }

    /// The same order for a part of the call, for whose outcome the host waits.
    pub fn waiting(self) -> Self {
        Self { no_sync: false, at_once: false, ..self }
    }
}

impl<'a> DispatchCall<'a> {
    /// The typed call.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`]: codes that this version does not know.
    ///
    /// # Safety
    /// The refusal is valid for `'a`.
    pub unsafe fn from_abi(call: &abi::TyDispatch) -> Result<Self> {
        let cast = cast_of(call.cast)?;
        let flags =
            [abi::TY_DISPATCH_ON_STREAM, abi::TY_DISPATCH_NO_SYNC, abi::TY_DISPATCH_AT_ONCE];
        Ok(Self {
            operation: call.operation,
            handle: call.handle,
            is_replay: call.flags & abi::TY_DISPATCH_REPLAY != 0,
            layout: layout_of(call)?,
            worst_case: call.flags & abi::TY_DISPATCH_WORST_CASE != 0,
            cast,
            format: WireFormat::of(call, cast),
            max_tokens: call.max_tokens,
            exchange: ExchangeKind::of(call.exchange)?,
            x: call.x,
            scales: call.scales,
            topk_idx: call.topk_idx,
            topk_weights: call.topk_weights,
            tokens: call.tokens,
            expert_totals: call.expert_totals,
            waited_ns: call.waited_ns,
            order: CallOrder::of(call.flags, flags, call.stream),
            // SAFETY: by this function's contract.
            refusal: unsafe { CallRefusal::from_abi(&call.refusal) },
            signature: Signature::dispatch(call),
        })
    }
}

impl<'a> CombineCall<'a> {
    /// The typed call.
    ///
    /// # Errors
    /// As [`DispatchCall::from_abi`].
    ///
    /// # Safety
    /// The refusal is valid for `'a`.
    pub unsafe fn from_abi(call: &abi::TyCombine) -> Result<Self> {
        let is_set = |flag: u32| call.flags & flag != 0;
        let flags = [abi::TY_COMBINE_ON_STREAM, abi::TY_COMBINE_NO_SYNC, abi::TY_COMBINE_AT_ONCE];
        Ok(Self {
            operation: call.operation,
            handle: call.handle,
            exchange: ExchangeKind::of(call.exchange)?,
            weighted: is_set(abi::TY_COMBINE_WEIGHTED),
            round_once: is_set(abi::TY_COMBINE_ROUND_ONCE),
            sum_weights: is_set(abi::TY_COMBINE_SUM_WEIGHTS),
            compression: match is_set(abi::TY_COMBINE_LOGFMT10) {
                true => Compression::LogFmt10,
                false => Compression::None,
            },
            x: call.x,
            weights: call.weights,
            beside: call.beside,
            bias: [call.bias0, call.bias1],
            out: call.out,
            out_weights: call.out_weights,
            missing: call.missing,
            topk_weights: call.topk_weights,
            topk_idx: call.topk_idx,
            waited_ns: call.waited_ns,
            order: CallOrder::of(call.flags, flags, call.stream),
            // SAFETY: by this function's contract.
            refusal: unsafe { CallRefusal::from_abi(&call.refusal) },
            signature: Signature::combine(call),
        })
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

    /// The typed call.
    ///
    /// # Errors
    /// As [`DispatchCall::from_abi`].
    ///
    /// # Safety
    /// The refusal is valid for the life of the call.
    pub unsafe fn from_abi(call: &abi::TyAgree) -> Result<Self> {
        Ok(Self {
            operation: call.operation,
            exchange: ExchangeKind::of(call.exchange)?,
            is_combine: call.is_combine != 0,
            // SAFETY: by this function's contract.
            refusal: unsafe { CallRefusal::from_abi(&call.refusal) },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::NO_TENSOR;

    const BLANK: abi::TyDispatch = abi::TyDispatch {
        size: size_of::<abi::TyDispatch>(),
        operation: 3,
        handle: 1,
        flags: 0,
        layout: abi::TY_LAYOUT_FLAT,
        alignment: 1,
        cast: abi::TY_CAST_NONE,
        max_tokens: 8,
        exchange: abi::TY_EXCHANGE_OWNERS,
        reserved: 0,
        x: abi::TyTensor { dtype: 1, shape: [4, 384], ..NO_TENSOR },
        scales: NO_TENSOR,
        topk_idx: NO_TENSOR,
        topk_weights: NO_TENSOR,
        refusal: CallRefusal::NONE,
        stream: std::ptr::null_mut(),
        tokens: std::ptr::null(),
        expert_totals: std::ptr::null_mut(),
        waited_ns: std::ptr::null_mut(),
    };

    fn typed(call: &abi::TyDispatch) -> Result<DispatchCall<'static>> {
        // SAFETY: texts of these calls are static.
        unsafe { DispatchCall::from_abi(call) }
    }

    #[test]
    fn a_cast_decides_how_rows_look_on_their_way() {
        let of = |cast| {
            let WireFormat { row, x_dtype, scale_dtype, scale_cols, width, .. } =
                typed(&abi::TyDispatch { cast, ..BLANK }).unwrap().format;
            (row.x_bytes, row.scale_bytes, x_dtype, scale_dtype, scale_cols, width)
        };
        assert_eq!(of(abi::TY_CAST_NONE), (768, 0, 1, 3, 0, 384));
        assert_eq!(of(abi::TY_CAST_FP8), (384, 12, 4, 3, 3, 384));
        assert_eq!(of(abi::TY_CAST_FP8_ROUND), (384, 12, 4, 3, 3, 384));
        assert_eq!(of(abi::TY_CAST_FP8_UE8M0), (384, 4, 4, 6, 1, 384));
    }

    #[test]
    fn scales_of_the_caller_pass_with_their_type() {
        let data = std::ptr::dangling_mut();
        let scales = abi::TyTensor { data, dtype: 6, shape: [4, 7], ..NO_TENSOR };
        let call = typed(&abi::TyDispatch { scales, ..BLANK }).unwrap();
        assert_eq!((call.format.scale_dtype, call.format.row.scale_bytes), (6, 28));
    }

    #[test]
    fn flags_decide_how_arrays_of_packed_rows_look_and_change_nothing_that_ranks_compare() {
        let of = |flags| typed(&abi::TyDispatch { flags, ..BLANK }).unwrap();
        let forms = |flags| (of(flags).format.scale_layout, of(flags).format.source_index);
        let both = abi::TY_DISPATCH_COLUMN_SCALES | abi::TY_DISPATCH_SOURCE_TOKENS;
        assert_eq!(forms(0), (ScaleLayout::RowMajor, SourceIndex::RankAndToken));
        assert_eq!(forms(both), (ScaleLayout::ColumnMajor, SourceIndex::Token));
        assert_eq!(of(both).signature, of(0).signature);
    }

    #[test]
    fn codes_that_are_not_known_are_refused_by_name() {
        let text = |call| typed(&call).unwrap_err().to_string();
        assert!(text(abi::TyDispatch { layout: 9, ..BLANK }).contains("found layout 9"));
        assert!(text(abi::TyDispatch { cast: 4, ..BLANK }).contains("found cast 4"));
        assert!(text(abi::TyDispatch { exchange: 2, ..BLANK }).contains("found exchange 2"));
    }

    #[test]
    fn a_null_stream_counts_where_its_flag_is_set_and_alone_no_host_goes_ahead() {
        let order = |flags| typed(&abi::TyDispatch { flags, ..BLANK }).unwrap().order;
        assert_eq!(order(abi::TY_DISPATCH_NO_SYNC), CallOrder::default());
        let ahead = order(abi::TY_DISPATCH_ON_STREAM | abi::TY_DISPATCH_NO_SYNC);
        assert_eq!((ahead.stream, ahead.no_sync), (Some(std::ptr::null_mut()), true));
        assert_eq!(ahead.waiting(), order(abi::TY_DISPATCH_ON_STREAM));
    }
}
