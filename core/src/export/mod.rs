//! From a safe trait to the C table: what a component's author gets for free.
//!
//! The tables are constants of generic types, so that nobody can put a function into a wrong slot.
//! Each slot catches panics (an instance that panicked answers `TY_PANIC` for ever), checks the
//! sizes of the structures it was given, and turns [`Error`](crate::Error) into a status and a
//! filled [`TyError`](crate::abi::TyError).

mod call;
mod device;
mod host;
mod kernels;
mod log;
mod topology;
mod transport;

pub(crate) use call::{guarded, kind_of, panic_text, read_error};
pub use device::DeviceComponent;
pub use host::find_transport;
pub(crate) use host::services;
pub use kernels::KernelsComponent;
pub use topology::TopologyComponent;
pub use transport::TransportComponent;

use crate::abi;

/// Lets an export, which holds pointers to other constants, be a `static`.
#[repr(transparent)]
#[derive(Debug)]
pub struct Exported<T>(pub T);

// SAFETY: an export and everything it points to is constant data of the image; nobody writes it.
unsafe impl<T> Sync for Exported<T> {}

/// A string of the image as it crosses the ABI.
pub const fn static_str(text: &'static str) -> abi::TyStr {
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

/// Exports transports from a `cdylib`: `export_transports!(Shm);`
#[macro_export]
macro_rules! export_transports {
    ($($component:ty),+ $(,)?) => {
        /// The transports of this plugin.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals)]
        pub static tokenyard_transport_v1: $crate::export::Exported<
            $crate::abi::TyTransportExport,
        > = {
            const TABLES: &[*const $crate::abi::TyTransportTable] =
                &[$(&raw const *$crate::export::TransportComponent::<$component>::TABLE),+];
            $crate::export::Exported($crate::abi::TyTransportExport {
                header: $crate::export::TRANSPORT_HEADER,
                components: TABLES.as_ptr(),
                count: TABLES.len(),
            })
        };
    };
}

/// Exports kernel sets from a `cdylib`: `export_kernels!(CpuKernels);`
#[macro_export]
macro_rules! export_kernels {
    ($($component:ty),+ $(,)?) => {
        /// The kernel sets of this plugin.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals)]
        pub static tokenyard_kernels_v0: $crate::export::Exported<
            $crate::abi::TyKernelsExport,
        > = {
            const TABLES: &[*const $crate::abi::TyKernelsTable] =
                &[$(&raw const *$crate::export::KernelsComponent::<$component>::TABLE),+];
            $crate::export::Exported($crate::abi::TyKernelsExport {
                header: $crate::export::KERNELS_HEADER,
                components: TABLES.as_ptr(),
                count: TABLES.len(),
            })
        };
    };
}

/// Exports topologies from a `cdylib`: `export_topologies!(HostTopology);`
#[macro_export]
macro_rules! export_topologies {
    ($($component:ty),+ $(,)?) => {
        /// The topologies of this plugin.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals)]
        pub static tokenyard_topology_v1: $crate::export::Exported<
            $crate::abi::TyTopologyExport,
        > = {
            const TABLES: &[*const $crate::abi::TyTopologyTable] =
                &[$(&raw const *$crate::export::TopologyComponent::<$component>::TABLE),+];
            $crate::export::Exported($crate::abi::TyTopologyExport {
                header: $crate::export::TOPOLOGY_HEADER,
                components: TABLES.as_ptr(),
                count: TABLES.len(),
            })
        };
    };
}
