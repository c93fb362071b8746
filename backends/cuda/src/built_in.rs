//! Registers this crate's components in the program that links it.

use crate::{CudaKernels, Nvlink};

tokenyard_core::built_in!(transports(Nvlink), kernels(CudaKernels));
