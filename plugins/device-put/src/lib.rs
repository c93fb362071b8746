//! The transport for tests `device-put` as a loadable plugin: no program has it built in.

tokenyard_core::export_transports!(tokenyard_device_put::DevicePut);
