//! The verbs backend as a loadable plugin.
//! Watched by the steps `hca` and `vm` of `cargo xtask test`: tests of the suite over it.

tokenyard_core::export_transports!(tokenyard_verbs::Verbs);
