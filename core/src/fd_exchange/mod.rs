//! How ranks of one machine hand each other the descriptors of their memory while they connect.
//!
//! Who the other is comes from the bootstrap: an [`Endpoint`] names a socket and a token. The
//! descriptors then cross an abstract Unix socket (`SCM_RIGHTS`), with a record that says what they
//! are; both sides compare what core promised to be equal. What a descriptor is, and how it is
//! mapped, is the business of a transport: it implements [`Memory`]. Windows in host memory are
//! [`SealedMemory`].

mod links;
mod offer;
mod sealed;
mod socket;
mod wire;

pub use links::Links;
pub use offer::{Handed, Memory, Offer};
pub use sealed::SealedMemory;
pub use socket::{DESCRIPTOR_FIX, probe};
pub use wire::{Endpoint, Extent, MAX_WINDOWS};
