//! Registers this crate's components in the program that links it.

use crate::{CpuKernels, Shm};

tokenyard_core::built_in!(transports(Shm), kernels(CpuKernels));
