//! The state of an operation between its send and its receive.

use tokenyard_core::call::WireFormat;
use tokenyard_core::moe::{Layout, Region};

use crate::engine::mode::Mode;
use crate::moe::handle::Output;

/// An operation between its send and its receive.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant, reason = "one per slot, and an operation allocates nothing")]
pub(crate) enum Operation {
    None,
    Dispatch(DispatchOp),
    Combine(CombineOp),
}

/// A dispatch between send and receive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DispatchOp {
    pub(crate) operation: u64,
    pub(crate) format: WireFormat,
    pub(crate) output: Output,
    pub(crate) arrangement: Layout,
    pub(crate) mode: Mode,
    pub(crate) handle: u32,
    pub(crate) worst: bool,
    /// True N, or the most that it may be.
    pub(crate) received: u64,
    /// Whether only the device knows N and X.
    pub(crate) is_open: bool,
    /// Where kernels put: the sources of their puts.
    pub(crate) staging: Option<Region>,
}

/// A combine between send and receive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CombineOp {
    pub(crate) operation: u64,
    /// Copies of the caller's rows from outside the arena; where rows are put or pushed, also memory for
    /// the rows that return.
    pub(crate) staging: Option<Region>,
    pub(crate) handle: u32,
    pub(crate) mode: Mode,
}
