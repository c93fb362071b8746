//! How loops over rows run: on the worker pool, in chunks.

use tokenyard_core::{Error, ErrorKind};

/// Bytes of a piece per thread that stages: small enough that a core's cache keeps it until it has
/// left, large enough that a command for each costs nothing beside it.
pub const PIECE_BYTES: u64 = 256 << 10;

/// Rows that one task of the pool handles.
pub(crate) const CHUNK: usize = 32;

/// Lets tasks of the pool use raw addresses.
#[derive(Clone, Copy)]
pub(crate) struct Shared<T>(pub(crate) T);

// SAFETY: used for addresses whose tasks touch disjoint rows; each use says so.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The value. A method, so that closures capture the wrapper and not the field in it.
    pub(crate) fn get(&self) -> &T {
        &self.0
    }
}

#[cold]
pub(crate) fn pool_failed(operation: &'static str) -> Error {
    Error::new(ErrorKind::Internal, operation, "a task of the worker pool panicked")
}
