//! The state of an operation between its send and its receive.

use tokenyard_core::call::WireFormat;
use tokenyard_core::moe::{Layout, Region};

use super::handle::Output;
use super::mode::Mode;

/// An operation between its send and its receive.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant, reason = "one per slot, and an operation allocates nothing")]
pub(super) enum Operation {
    None,
    Dispatch(DispatchOp),
    Combine(CombineOp),
}

/// A dispatch between send and receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct DispatchOp {
    pub(super) operation: u64,
    pub(super) format: WireFormat,
    pub(super) output: Output,
    pub(super) arrangement: Layout,
    pub(super) mode: Mode,
    pub(super) handle: u32,
    pub(super) worst: bool,
    /// True N, or the most that it may be.
    pub(super) received: u64,
    /// Whether only the device knows N and X.
    pub(super) is_open: bool,
    /// Where kernels put: the sources of their puts.
    pub(super) staging: Option<Region>,
}

/// A combine between send and receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct CombineOp {
    pub(super) operation: u64,
    /// Copies of the caller's rows from outside the arena; where rows are put or pushed, also memory for
    /// the rows that return.
    pub(super) staging: Option<Region>,
    pub(super) handle: u32,
    pub(super) mode: Mode,
}
