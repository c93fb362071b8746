//! Registers this crate's components in the program that links it.

use crate::{RocmKernels, Xgmi};

tokenyard_core::built_in!(transports(Xgmi), kernels(RocmKernels));
