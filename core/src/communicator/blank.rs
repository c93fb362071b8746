//! Calls of kernel sets without tensors.

use crate::abi;
use crate::host::NO_TENSOR;
use crate::moe::Layout;
use crate::refusal::CallRefusal;

fn layout_code(layout: Layout) -> (u32, u32, u32) {
    match layout {
        Layout::Flat => (abi::TY_LAYOUT_FLAT, 1, 0),
        Layout::ExpertMajor { alignment, zero_padding } => {
            let zero = if zero_padding { abi::TY_DISPATCH_ZERO_PADDING } else { 0 };
            (abi::TY_LAYOUT_EXPERT_MAJOR, alignment, zero)
        }
        Layout::Packed => (abi::TY_LAYOUT_PACKED, 1, 0),
    }
}

/// A dispatch without tensors: the whole of a refused dispatch, and the start of every other.
pub(super) fn blank_dispatch(operation: u64, handle: u32, layout: Layout) -> abi::TyDispatch {
    let (layout, alignment, flags) = layout_code(layout);
    abi::TyDispatch {
        size: size_of::<abi::TyDispatch>(),
        operation,
        handle,
        flags,
        layout,
        alignment,
        cast: abi::TY_CAST_NONE,
        max_tokens: 0,
        exchange: abi::TY_EXCHANGE_OWNERS,
        reserved: 0,
        x: NO_TENSOR,
        scales: NO_TENSOR,
        topk_idx: NO_TENSOR,
        topk_weights: NO_TENSOR,
        refusal: CallRefusal::NONE,
        stream: std::ptr::null_mut(),
        tokens: std::ptr::null(),
        expert_totals: std::ptr::null_mut(),
        waited_ns: std::ptr::null_mut(),
    }
}

/// A combine without tensors: the whole of a refused combine, and the start of every other.
pub(super) fn blank_combine(operation: u64, handle: u32) -> abi::TyCombine {
    abi::TyCombine {
        size: size_of::<abi::TyCombine>(),
        operation,
        handle,
        flags: 0,
        exchange: abi::TY_EXCHANGE_OWNERS,
        reserved: 0,
        x: NO_TENSOR,
        weights: NO_TENSOR,
        beside: NO_TENSOR,
        bias0: NO_TENSOR,
        bias1: NO_TENSOR,
        out: NO_TENSOR,
        out_weights: NO_TENSOR,
        missing: NO_TENSOR,
        refusal: CallRefusal::NONE,
        stream: std::ptr::null_mut(),
        topk_weights: NO_TENSOR,
        topk_idx: NO_TENSOR,
        waited_ns: std::ptr::null_mut(),
    }
}
