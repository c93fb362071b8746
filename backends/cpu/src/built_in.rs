//! Registers this crate's components in the program that links it.

use std::hint::black_box;

use tokenyard_core::abi;
use tokenyard_core::export::{
    Exported, KERNELS_HEADER, KernelsComponent, TRANSPORT_HEADER, TransportComponent,
};
use tokenyard_core::host::BuiltIn;

use crate::{CpuKernels, Shm};

const TRANSPORT_TABLES: &[*const abi::TyTransportTable] =
    &[&raw const *TransportComponent::<Shm>::TABLE];
static TRANSPORTS: Exported<abi::TyTransportExport> = Exported(abi::TyTransportExport {
    header: TRANSPORT_HEADER,
    components: TRANSPORT_TABLES.as_ptr(),
    count: TRANSPORT_TABLES.len(),
});

const KERNELS_TABLES: &[*const abi::TyKernelsTable] =
    &[&raw const *KernelsComponent::<CpuKernels>::TABLE];
static KERNELS: Exported<abi::TyKernelsExport> = Exported(abi::TyKernelsExport {
    header: KERNELS_HEADER,
    components: KERNELS_TABLES.as_ptr(),
    count: KERNELS_TABLES.len(),
});

inventory::submit! { BuiltIn::Transport(&TRANSPORTS) }
inventory::submit! { BuiltIn::Kernels(&KERNELS) }

/// Keeps this crate's components in the calling program, so that
/// [`Registry::built_in`](tokenyard_core::host::Registry::built_in) finds them.
///
/// The components register themselves before `main`; but the compiler drops a crate that a program
/// depends on and never names. A program that wants the components built in calls this once, anywhere.
pub fn link() {
    black_box((&TRANSPORTS, &KERNELS));
}
