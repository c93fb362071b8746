//! The libfabric backend as a loadable plugin.

tokenyard_core::export_transports!(tokenyard_libfabric::Libfabric, tokenyard_libfabric::Efa);
