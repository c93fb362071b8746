//! The ibgda backend as a loadable plugin.

tokenyard_core::export_transports!(tokenyard_ibgda::Ibgda);
