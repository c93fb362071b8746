//! The transport for tests, `faulty`, as a loadable plugin: no program has it built in.

tokenyard_core::export_transports!(tokenyard_faulty::Faulty);
