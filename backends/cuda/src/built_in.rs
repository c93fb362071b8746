//! Registers this crate's parts in the program that links it.

use std::hint::black_box;

use tokenyard_core::abi;
use tokenyard_core::export::{
    Exported, KERNELS_HEADER, KernelsPart, TRANSPORT_HEADER, TransportPart,
};
use tokenyard_core::host::BuiltIn;

use crate::{CudaKernels, Nvlink};

const TRANSPORT_TABLES: &[*const abi::TyTransportTable] =
    &[&raw const *TransportPart::<Nvlink>::TABLE];
static TRANSPORTS: Exported<abi::TyTransportExport> = Exported(abi::TyTransportExport {
    header: TRANSPORT_HEADER,
    parts: TRANSPORT_TABLES.as_ptr(),
    count: TRANSPORT_TABLES.len(),
});

const KERNELS_TABLES: &[*const abi::TyKernelsTable] =
    &[&raw const *KernelsPart::<CudaKernels>::TABLE];
static KERNELS: Exported<abi::TyKernelsExport> = Exported(abi::TyKernelsExport {
    header: KERNELS_HEADER,
    parts: KERNELS_TABLES.as_ptr(),
    count: KERNELS_TABLES.len(),
});

inventory::submit! { BuiltIn::Transport(&TRANSPORTS) }
inventory::submit! { BuiltIn::Kernels(&KERNELS) }

/// Keeps this crate's parts in the calling program. A program that wants the parts built in calls
/// this once, anywhere: the compiler drops a crate that nobody names.
pub fn link() {
    black_box((&TRANSPORTS, &KERNELS));
}
