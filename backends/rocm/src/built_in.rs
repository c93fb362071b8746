//! Registers this crate's components in the program that links it.

use tokenyard_core::host::ThreadPart;
use tokenyard_gpu::driver::{of_thread, take_over};

use crate::{PLATFORM, RocmKernels, Xgmi};

tokenyard_core::built_in!(transports(Xgmi), kernels(RocmKernels));

tokenyard_core::export::inventory::submit! {
    ThreadPart {
        kernels: "rocm",
        get: || of_thread(&PLATFORM),
        set: take_over,
    }
}
