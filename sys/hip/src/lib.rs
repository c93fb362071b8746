//! Bindings to HIP and its run-time compiler, opened at run time: nothing of ROCm is linked.
//!
//! **Nothing here has run on an AMD GPU.** Types and numbers were read in the headers of ROCm 6 and 7.

pub mod consts;
mod library;
mod types;

pub use library::{Hip, Hiprtc, LoadError};
pub use types::{
    AccessDesc, AllocationFlags, AllocationProp, DeviceProp, IpcHandle, Location, Uuid,
};
