//! The libfabric backend as a loadable plugin.
//! Watched by `tests/load.rs`.

tokenyard_core::export_transports!(tokenyard_libfabric::Libfabric, tokenyard_libfabric::Efa);
