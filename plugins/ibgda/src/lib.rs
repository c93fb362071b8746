//! The ibgda backend as a loadable plugin.
//! Watched by `cli/tests/software_hca.rs`.

tokenyard_core::export_transports!(tokenyard_ibgda::Ibgda);
