//! The exchange of memory descriptors among ranks of one machine while they connect.
//!
//! The bootstrap carries the identity of each rank: an [`Endpoint`] names a socket and a token. The
//! descriptors then cross an abstract Unix socket (`SCM_RIGHTS`), with a record that describes them;
//! both sides compare the values that core promises to be equal. A transport decides the type of
//! descriptors and maps them: it implements [`Memory`]. Windows in host memory are [`SealedMemory`].
//!
//! Watched by the tests in these files, and `backends/cpu/tests/connect.rs`.

mod links;
mod offer;
mod sealed;
mod socket;
mod wire;

pub use links::Links;
pub use offer::{Handed, Memory, Offer, SignalMemory};
pub use sealed::SealedMemory;
pub use socket::{DESCRIPTOR_FIX, probe};
pub use wire::{Endpoint, Extent, MAX_WINDOWS};
