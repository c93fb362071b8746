//! Bindings to HIP and its run-time compiler, opened at run time: nothing of ROCm is linked.
//!
//! **Nothing here has run on an AMD GPU.** Types and numbers were read in the headers of ROCm 6 and 7.
//!
//! Watched by `tests`: numbers and layouts against bindings that were generated from AMD's headers, and loading.

pub mod consts;
mod library;
mod types;

pub use library::{Hip, Hiprtc};
pub use tokenyard_sys_load::LoadError;
pub use types::{
    AccessDesc, AllocationFlags, AllocationProp, DeviceProp, IpcHandle, Location, Uuid,
};
