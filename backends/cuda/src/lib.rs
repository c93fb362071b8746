//! The backend for NVIDIA GPUs: the `nvlink` transport between the GPUs of one machine, and the
//! `cuda` kernel set.
//!
//! Nothing of CUDA is linked: driver and compiler are loaded at run time, and `probe` says where
//! they are missing. `docs.md` in this folder is the page for operators.

mod built_in;

pub use built_in::link;
pub use tokenyard_gpu::{
    CudaConfig, CudaKernels, Nvlink, NvlinkConfig, Outside, RowCopy, Sms, compile, kernels, probe,
};
