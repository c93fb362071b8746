//! Results of calls before they are filled in.

use std::ptr::null_mut;

use crate::abi;

/// An absent tensor.
pub const NO_TENSOR: abi::TyTensor = abi::TyTensor {
    data: std::ptr::null_mut(),
    dtype: 0,
    reserved: 0,
    shape: [0; 2],
    stride: [0; 2],
};

/// An output without tensors.
pub(crate) const NO_OUTPUT: abi::TyReceived = abi::TyReceived {
    size: size_of::<abi::TyReceived>(),
    region: 0,
    tokens: 0,
    rows: 0,
    x: NO_TENSOR,
    scales: NO_TENSOR,
    ids: NO_TENSOR,
    weights: NO_TENSOR,
    source: NO_TENSOR,
    slots: NO_TENSOR,
    expert_counts: NO_TENSOR,
    expert_starts: NO_TENSOR,
    expert_ends: NO_TENSOR,
    source_counts: NO_TENSOR,
    source_ends: NO_TENSOR,
    ranges: NO_TENSOR,
    totals: NO_TENSOR,
    lost: NO_TENSOR,
    dropped: NO_TENSOR,
    overflow: NO_TENSOR,
};

/// The output of a dispatch, without tensors.
pub(super) fn no_output(operation: u64) -> abi::TyDispatchOutput {
    let size = size_of::<abi::TyDispatchOutput>();
    abi::TyDispatchOutput { size, operation, received: NO_OUTPUT }
}

/// No ring.
pub(super) const NO_RING: abi::TyGpuRing = abi::TyGpuRing {
    size: size_of::<abi::TyGpuRing>(),
    level: 0,
    queue: 0,
    capacity: 0,
    commands: null_mut(),
    status: null_mut(),
    totals: null_mut(),
    signals: 0,
    reserved: 0,
};

/// No counters.
pub(super) const NO_COUNTERS: abi::TyCounters = abi::TyCounters {
    size: size_of::<abi::TyCounters>(),
    ranks: 0,
    signals: 0,
    queue_depth: [0; 2],
    peers: std::ptr::null(),
    raised: std::ptr::null(),
};
