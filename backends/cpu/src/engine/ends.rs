//! How operations end, and what they leave open.

use tokenyard_core::moe::Region;

/// How an operation ended on a rank: how far it raises `Done`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Refused = 1,
    Done = 2,
}

/// Memory that other ranks may read or write, because they do not know yet that the operation is
/// refused: memory of this rank's caller, and a region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exposed {
    pub(crate) region: Option<Region>,
}
