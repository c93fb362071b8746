//! The cpu backend as a loadable plugin.
//! Watched by `tests/load.rs`.

tokenyard_core::export_transports!(tokenyard_cpu::Shm);
tokenyard_core::export_topologies!(tokenyard_topology::HostTopology);
tokenyard_core::export_kernels!(tokenyard_cpu::CpuKernels);
