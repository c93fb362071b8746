//! Which NICs a rank uses.

pub(crate) mod rails;
pub(crate) mod share;

pub use share::share_nics;
