//! The CUDA backend as a loadable plugin: the `cuda` kernel set and the `nvlink` transport.
//! Watched by `tests/load.rs`.

tokenyard_core::export_kernels!(tokenyard_cuda::CudaKernels);
tokenyard_core::export_transports!(tokenyard_cuda::Nvlink);
