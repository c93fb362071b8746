//! The ROCm backend as a loadable plugin: the `rocm` kernel set and the `xgmi` transport.
//! Watched by `tests/load.rs`.

tokenyard_core::export_kernels!(tokenyard_rocm::RocmKernels);
tokenyard_core::export_transports!(tokenyard_rocm::Xgmi);
