//! The backend for NVIDIA GPUs: the `nvlink` transport between the GPUs of one machine, and the
//! `cuda` kernel set.
//!
//! Nothing of CUDA is linked: driver and compiler are loaded at run time, and `probe` says where
//! they are missing. Kernels are templates over a transport's device face
//! (`backends/gpu/device/transport.cuh`) and compiled for the device that is there. One process drives
//! one device. `docs.md` in this folder is the page for operators.

pub mod compile;
mod config;
mod driver;
pub mod kernels;
pub mod probe;
mod transport;

pub use config::{CudaConfig, NvlinkConfig, Outside, RowCopy, Sms};
pub use kernels::CudaKernels;
pub use transport::Nvlink;
