//! From a safe trait to the C table, derived for the author of a component.
//!
//! The tables are constants of generic types, so that no function can end up in a wrong slot. Each slot
//! catches panics (an instance that panicked answers `TY_PANIC` for ever), checks the sizes of the
//! structures that it receives, and turns [`Error`](crate::Error) into a status and a filled
//! [`TyError`](crate::abi::TyError).
//!
//! Watched by `core/tests/plugin_panics` and `plugin_handshake.rs`.

mod call;
mod device;
mod host;
mod kernels;
mod log;
mod macros;
mod topology;
mod transport;

pub(crate) use call::{guarded, kind_of, panic_text, read_error};
pub use device::DeviceComponent;
/// For [`built_in!`](crate::built_in).
#[doc(hidden)]
pub use inventory;

pub use host::find_transport;
pub(crate) use host::services;
pub(crate) use kernels::TypedCalls;
pub use kernels::{InProcess, KernelsComponent};
pub use topology::TopologyComponent;
pub use transport::TransportComponent;

use crate::abi;

/// Lets an export, which holds pointers to other constants, be a `static`.
#[repr(transparent)]
#[derive(Debug)]
pub struct Exported<T>(pub T);

// SAFETY: an export and everything it points to is constant data of the image; no code writes it.
unsafe impl<T> Sync for Exported<T> {}

/// A string of the image in the form of the ABI.
pub(crate) const fn static_str(text: &'static str) -> abi::TyStr {
    abi::TyStr { data: text.as_ptr(), bytes: text.len() }
}

/// The header of a transport export compiled against this version.
pub const TRANSPORT_HEADER: abi::TyExportHeader = abi::TyExportHeader {
    magic: abi::TY_MAGIC,
    major: abi::TY_TRANSPORT_MAJOR,
    minor: abi::TY_TRANSPORT_MINOR,
    layout: abi::TY_TRANSPORT_LAYOUT,
    size: size_of::<abi::TyTransportExport>(),
};

/// The header of a kernel set export compiled against this version.
pub const KERNELS_HEADER: abi::TyExportHeader = abi::TyExportHeader {
    magic: abi::TY_MAGIC,
    major: abi::TY_KERNELS_MAJOR,
    minor: abi::TY_KERNELS_MINOR,
    layout: abi::TY_KERNELS_LAYOUT,
    size: size_of::<abi::TyKernelsExport>(),
};

/// The header of a topology export compiled against this version.
pub const TOPOLOGY_HEADER: abi::TyExportHeader = abi::TyExportHeader {
    magic: abi::TY_MAGIC,
    major: abi::TY_TOPOLOGY_MAJOR,
    minor: abi::TY_TOPOLOGY_MINOR,
    layout: abi::TY_TOPOLOGY_LAYOUT,
    size: size_of::<abi::TyTopologyExport>(),
};
