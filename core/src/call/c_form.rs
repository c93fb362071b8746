//! The C form of calls, for kernel sets in other images: codes and flags, and the structures `TyDispatch`,
//! `TyCombine` and `TyAgree`.

use std::ffi::c_void;

use super::{AgreeCall, CallOrder, CombineCall, DispatchCall, ExchangeKind};
use crate::abi;
use crate::kernels::Copies;
use crate::moe::{Cast, Compression, Layout, Overflow, RowCap, ScaleLayout, SourceIndex};
use crate::refusal::CallRefusal;
use crate::{Error, ErrorKind, Result};

/// Arguments of a call that cross the plugin ABI in another form.
pub(crate) trait CForm: Sized {
    /// A structure of the ABI that starts with its size.
    type Form;

    /// The arguments as they cross the ABI. All that they name must live as long.
    fn as_abi(&self) -> Self::Form;

    /// The typed arguments.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`]: codes that this version does not know.
    ///
    /// # Safety
    /// All that the form names is valid for the life of the arguments.
    unsafe fn from_abi(form: &Self::Form) -> Result<Self>;
}

/// Arguments that are plain already.
macro_rules! plain {
    ($($form:ident),+) => {$(
        impl CForm for abi::$form {
            type Form = Self;

            fn as_abi(&self) -> Self {
                *self
            }

            unsafe fn from_abi(form: &Self) -> Result<Self> {
                Ok(*form)
            }
        }
    )+};
}

plain!(TyRoutingCounts, TyMask, TyReleaseAfter, TyMessage, TyGather, TyReduce, TyEntries, TyFetch);

impl CForm for Copies<'_> {
    type Form = abi::TyCopies;

    fn as_abi(&self) -> abi::TyCopies {
        abi::TyCopies {
            size: size_of::<abi::TyCopies>(),
            copies: self.copies.as_ptr(),
            count: self.copies.len() as u32,
            flags: flag(self.stream.is_some(), abi::TY_COPIES_ON_STREAM),
            totals: self.totals,
            stream: self.stream.unwrap_or(std::ptr::null_mut()),
        }
    }

    unsafe fn from_abi(form: &abi::TyCopies) -> Result<Self> {
        let abi::TyCopies { copies, count, flags, totals, stream, .. } = *form;
        let stream = (flags & abi::TY_COPIES_ON_STREAM != 0).then_some(stream);
        // SAFETY: by this function's contract.
        let copies = unsafe { std::slice::from_raw_parts(copies, count as usize) };
        Ok(Self { copies, totals, stream })
    }
}

const DISPATCH_ORDER: [u32; 3] =
    [abi::TY_DISPATCH_ON_STREAM, abi::TY_DISPATCH_NO_SYNC, abi::TY_DISPATCH_AT_ONCE];
const COMBINE_ORDER: [u32; 3] =
    [abi::TY_COMBINE_ON_STREAM, abi::TY_COMBINE_NO_SYNC, abi::TY_COMBINE_AT_ONCE];

fn flag(is_set: bool, flag: u32) -> u32 {
    if is_set { flag } else { 0 }
}

fn refusal(of: Option<&CallRefusal<'_>>) -> abi::TyRefusal {
    of.map_or(CallRefusal::NONE, CallRefusal::as_abi)
}

fn unknown<T>(what: &str, found: u32, expected: &str) -> Result<T> {
    let message = format!("found {what} {found}; expected {expected}");
    Err(Error::new(ErrorKind::Unsupported, "read call", message)
        .with_fix("use a host and a plugin of matching versions"))
}

impl ExchangeKind {
    fn code(self) -> u32 {
        match self {
            Self::Owners => abi::TY_EXCHANGE_OWNERS,
            Self::Rail => abi::TY_EXCHANGE_RAIL,
        }
    }

    fn of(code: u32) -> Result<Self> {
        match code {
            abi::TY_EXCHANGE_OWNERS => Ok(Self::Owners),
            abi::TY_EXCHANGE_RAIL => Ok(Self::Rail),
            other => unknown("exchange", other, "that of owners (0) or that on the rail (1)"),
        }
    }
}

impl Layout {
    /// The code that crosses the plugin ABI, one of `TY_LAYOUT_*`.
    pub fn code(self) -> u32 {
        match self {
            Self::Flat => abi::TY_LAYOUT_FLAT,
            Self::ExpertMajor { .. } => abi::TY_LAYOUT_EXPERT_MAJOR,
            Self::Packed => abi::TY_LAYOUT_PACKED,
            Self::RankMajor { .. } => abi::TY_LAYOUT_RANK_MAJOR,
        }
    }

    fn of(call: &abi::TyDispatch) -> Result<Self> {
        let zero_padding = call.flags & abi::TY_DISPATCH_ZERO_PADDING != 0;
        Ok(match call.layout {
            abi::TY_LAYOUT_FLAT => Self::Flat,
            abi::TY_LAYOUT_EXPERT_MAJOR => {
                Self::ExpertMajor { alignment: call.alignment, zero_padding }
            }
            abi::TY_LAYOUT_PACKED => Self::Packed,
            abi::TY_LAYOUT_RANK_MAJOR => Self::RankMajor { zero_padding },
            other => {
                let known = "flat (1), expert-major (2), packed (3) or rank-major (4)";
                return unknown("layout", other, known);
            }
        })
    }

    fn flags(self) -> u32 {
        flag(self.zero_padding(), abi::TY_DISPATCH_ZERO_PADDING)
    }
}

fn cap_of(call: &abi::TyDispatch) -> Option<RowCap> {
    let overflow = match call.flags & abi::TY_DISPATCH_DROP {
        0 => Overflow::Error,
        _ => Overflow::Drop,
    };
    (call.max_rows > 0).then_some(RowCap { rows: call.max_rows, overflow })
}

fn cast_of(code: u32) -> Result<Cast> {
    let all = [Cast::None, Cast::Fp8, Cast::Fp8Round, Cast::Fp8Ue8m0];
    let known = all.into_iter().find(|cast| cast.code() == code);
    known.map_or_else(|| unknown("cast", code, "0 to 3"), Ok)
}

impl CallOrder {
    /// From the flags of a call, those for a stream, for no synchronisation, and for both halves at once; and from its
    /// stream and multiprocessors.
    fn of(
        flags: u32,
        [on_stream, no_sync, at_once]: [u32; 3],
        stream: *mut c_void,
        sms: u32,
    ) -> Self {
        let is_set = |flag: u32| flags & flag != 0;
        let at_once = is_set(at_once);
        match is_set(on_stream) {
            true => Self { stream: Some(stream), no_sync: is_set(no_sync), at_once, sms },
            false => Self { at_once, ..Self::default() },
        }
    }

    fn flags(self, [on_stream, no_sync, at_once]: [u32; 3]) -> u32 {
        flag(self.stream.is_some(), on_stream)
            | flag(self.no_sync, no_sync)
            | flag(self.at_once, at_once)
    }

    fn raw_stream(self) -> *mut c_void {
        self.stream.unwrap_or(std::ptr::null_mut())
    }
}

impl CForm for DispatchCall<'_> {
    type Form = abi::TyDispatch;

    fn as_abi(&self) -> abi::TyDispatch {
        let format = &self.format;
        let flags = flag(self.is_replay, abi::TY_DISPATCH_REPLAY)
            | flag(self.worst_case, abi::TY_DISPATCH_WORST_CASE)
            | flag(self.cap.is_some_and(RowCap::drops), abi::TY_DISPATCH_DROP)
            | format.scale_layout.flag()
            | format.source_index.flag()
            | self.layout.flags()
            | self.order.flags(DISPATCH_ORDER);
        abi::TyDispatch {
            size: size_of::<abi::TyDispatch>(),
            operation: self.operation,
            handle: self.handle,
            flags,
            layout: self.layout.code(),
            alignment: self.layout.alignment(),
            cast: self.cast.code(),
            max_tokens: self.max_tokens,
            exchange: self.exchange.code(),
            sms: self.order.sms,
            x: self.x,
            scales: self.scales,
            topk_idx: self.topk_idx,
            topk_weights: self.topk_weights,
            refusal: refusal(self.refusal.as_ref()),
            stream: self.order.raw_stream(),
            tokens: self.tokens,
            expert_totals: self.expert_totals,
            waited_ns: self.waited_ns,
            max_rows: self.cap.map_or(0, |cap| cap.rows),
        }
    }

    unsafe fn from_abi(call: &abi::TyDispatch) -> Result<Self> {
        let mut typed = Self {
            is_replay: call.flags & abi::TY_DISPATCH_REPLAY != 0,
            worst_case: call.flags & abi::TY_DISPATCH_WORST_CASE != 0,
            cap: cap_of(call),
            cast: cast_of(call.cast)?,
            max_tokens: call.max_tokens,
            exchange: ExchangeKind::of(call.exchange)?,
            x: call.x,
            scales: call.scales,
            topk_idx: call.topk_idx,
            topk_weights: call.topk_weights,
            tokens: call.tokens,
            expert_totals: call.expert_totals,
            waited_ns: call.waited_ns,
            order: CallOrder::of(call.flags, DISPATCH_ORDER, call.stream, call.sms),
            // SAFETY: by this function's contract.
            refusal: unsafe { CallRefusal::from_abi(&call.refusal) },
            ..Self::blank(call.operation, call.handle, Layout::of(call)?)
        };
        let (scales, source) =
            (ScaleLayout::of_flags(call.flags), SourceIndex::of_flags(call.flags));
        typed.complete(scales, source);
        Ok(typed)
    }
}

impl CForm for CombineCall<'_> {
    type Form = abi::TyCombine;

    fn as_abi(&self) -> abi::TyCombine {
        let flags = flag(self.weighted, abi::TY_COMBINE_WEIGHTED)
            | flag(self.round_once, abi::TY_COMBINE_ROUND_ONCE)
            | flag(self.sum_weights, abi::TY_COMBINE_SUM_WEIGHTS)
            | flag(self.compression == Compression::LogFmt10, abi::TY_COMBINE_LOGFMT10)
            | self.order.flags(COMBINE_ORDER);
        abi::TyCombine {
            size: size_of::<abi::TyCombine>(),
            operation: self.operation,
            handle: self.handle,
            flags,
            exchange: self.exchange.code(),
            sms: self.order.sms,
            x: self.x,
            weights: self.weights,
            beside: self.beside,
            bias0: self.bias[0],
            bias1: self.bias[1],
            out: self.out,
            out_weights: self.out_weights,
            missing: self.missing,
            refusal: refusal(self.refusal.as_ref()),
            stream: self.order.raw_stream(),
            topk_weights: self.topk_weights,
            topk_idx: self.topk_idx,
            waited_ns: self.waited_ns,
        }
    }

    unsafe fn from_abi(call: &abi::TyCombine) -> Result<Self> {
        let is_set = |flag: u32| call.flags & flag != 0;
        let mut typed = Self {
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
            order: CallOrder::of(call.flags, COMBINE_ORDER, call.stream, call.sms),
            // SAFETY: by this function's contract.
            refusal: unsafe { CallRefusal::from_abi(&call.refusal) },
            ..Self::blank(call.operation, call.handle)
        };
        typed.complete();
        Ok(typed)
    }
}

impl CForm for AgreeCall<'_> {
    type Form = abi::TyAgree;

    fn as_abi(&self) -> abi::TyAgree {
        abi::TyAgree {
            size: size_of::<abi::TyAgree>(),
            operation: self.operation,
            exchange: self.exchange.code(),
            is_combine: self.is_combine.into(),
            refusal: refusal(self.refusal.as_ref()),
        }
    }

    unsafe fn from_abi(call: &abi::TyAgree) -> Result<Self> {
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
    use super::super::WireFormat;
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
        sms: 0,
        x: abi::TyTensor { dtype: 1, shape: [4, 384], ..NO_TENSOR },
        scales: NO_TENSOR,
        topk_idx: NO_TENSOR,
        topk_weights: NO_TENSOR,
        refusal: CallRefusal::NONE,
        stream: std::ptr::null_mut(),
        tokens: std::ptr::null(),
        expert_totals: std::ptr::null_mut(),
        waited_ns: std::ptr::null_mut(),
        max_rows: 0,
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

    #[test]
    fn a_number_of_multiprocessors_counts_with_a_stream_alone() {
        let sms = |flags| typed(&abi::TyDispatch { flags, sms: 24, ..BLANK }).unwrap().order.sms;
        assert_eq!([abi::TY_DISPATCH_ON_STREAM, 0].map(sms), [24, 0]);
    }

    /// Each option of a dispatch changes the C form, and comes back from it.
    #[test]
    fn a_dispatch_that_crosses_the_abi_comes_out_as_it_went_in() {
        let blank = |layout| DispatchCall::blank(7, 2, layout);
        let aligned = |zero_padding| Layout::ExpertMajor { alignment: 16, zero_padding };
        let stream = Some(std::ptr::dangling_mut());
        let refusal = Some(CallRefusal { rank: 3, is_full: true, why: "no room" });
        let order = |no_sync, at_once| CallOrder { stream, no_sync, at_once, sms: 0 };
        let of_sms = CallOrder { sms: 24, ..order(false, false) };
        let x = abi::TyTensor { dtype: 1, shape: [4, 384], ..NO_TENSOR };
        let calls = [
            blank(Layout::Flat),
            blank(aligned(false)),
            blank(aligned(true)),
            DispatchCall { is_replay: true, ..blank(Layout::Packed) },
            blank(Layout::RankMajor { zero_padding: false }),
            blank(Layout::RankMajor { zero_padding: true }),
            DispatchCall { worst_case: true, ..blank(Layout::Flat) },
            DispatchCall { cap: Some(RowCap::dropping(5)), ..blank(Layout::Flat) },
            DispatchCall {
                cap: Some(RowCap { rows: 5, overflow: Overflow::Error }),
                ..blank(Layout::Flat)
            },
            DispatchCall { cast: Cast::Fp8Ue8m0, x, ..blank(Layout::Flat) },
            DispatchCall { max_tokens: 9, ..blank(Layout::Flat) },
            DispatchCall { exchange: ExchangeKind::Rail, ..blank(Layout::Flat) },
            DispatchCall { order: order(false, false), ..blank(Layout::Flat) },
            DispatchCall { order: order(true, true), ..blank(Layout::Flat) },
            DispatchCall { order: of_sms, ..blank(Layout::Flat) },
            DispatchCall { refusal, ..blank(Layout::Flat) },
        ];
        let forms = [
            (ScaleLayout::RowMajor, SourceIndex::RankAndToken),
            (ScaleLayout::ColumnMajor, SourceIndex::Token),
        ];
        let mut seen = std::collections::BTreeSet::new();
        for (mut call, (scales, source)) in calls.into_iter().flat_map(|c| forms.map(|f| (c, f))) {
            call.complete(scales, source);
            let crossed = typed(&call.as_abi()).unwrap();
            assert_eq!(format!("{crossed:?}"), format!("{call:?}"));
            assert!(seen.insert(format!("{:?}", call.as_abi())), "{call:?} looks like another");
        }
    }

    #[test]
    fn a_combine_that_crosses_the_abi_comes_out_as_it_went_in() {
        let blank = CombineCall::blank(7, 2);
        let stream = Some(std::ptr::null_mut());
        let plain = CallOrder::default();
        let calls = [
            blank,
            CombineCall { weighted: true, ..blank },
            CombineCall { round_once: true, ..blank },
            CombineCall { sum_weights: true, ..blank },
            CombineCall { compression: Compression::LogFmt10, ..blank },
            CombineCall { exchange: ExchangeKind::Rail, ..blank },
            CombineCall { order: CallOrder { stream, no_sync: true, ..plain }, ..blank },
            CombineCall { order: CallOrder { at_once: true, ..plain }, ..blank },
            CombineCall { order: CallOrder { stream, sms: 24, ..plain }, ..blank },
        ];
        let mut seen = std::collections::BTreeSet::new();
        for mut call in calls {
            call.complete();
            // SAFETY: there is no refusal.
            let crossed = unsafe { CombineCall::from_abi(&call.as_abi()) }.unwrap();
            assert_eq!(format!("{crossed:?}"), format!("{call:?}"));
            assert!(seen.insert(format!("{:?}", call.as_abi())), "{call:?} looks like another");
        }
    }
}
