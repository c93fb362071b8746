//! Registers this crate's components in the program that links it.

use tokenyard_core::host::ThreadPart;
use tokenyard_gpu::driver::{of_thread, take_over};

use crate::{CudaKernels, Nvlink, PLATFORM};

tokenyard_core::built_in!(transports(Nvlink), kernels(CudaKernels));

tokenyard_core::export::inventory::submit! {
    ThreadPart {
        kernels: "cuda",
        get: || of_thread(&PLATFORM),
        set: take_over,
    }
}
