//! The capabilities of a transport in words, for reports and JSON.

use crate::abi;
use crate::transport::Capabilities;

/// The declared capabilities of a transport, by name.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Declared {
    /// Names of the flags that are set, as in [`FLAGS`].
    pub flags: Vec<&'static str>,
    /// Kinds of memory that can be registered: `host`, `cuda`, `hip`.
    pub memory: Vec<&'static str>,
    /// Most ranks of a team.
    pub max_peers: u32,
    /// Most queues.
    pub max_queues: u32,
    /// Most signals on one rank.
    pub max_signals: u32,
    /// Most commands of a queue that are not done.
    pub max_queue_depth: u32,
    /// Most windows.
    pub max_windows: u32,
    /// Most bytes of one put.
    pub largest_put: u64,
}

/// The flags and their names.
pub const FLAGS: [(u64, &str); 11] = [
    (abi::TY_CAP_LOAD_STORE, "load_store"),
    (abi::TY_CAP_ORDERED, "ordered"),
    (abi::TY_CAP_NATIVE_ATOMICS, "native_atomics"),
    (abi::TY_CAP_IMMEDIATE, "immediate"),
    (abi::TY_CAP_GET, "get"),
    (abi::TY_CAP_BOUNDED_PUT, "bounded_put"),
    (abi::TY_CAP_MANUAL_PROGRESS, "manual_progress"),
    (abi::TY_CAP_OWNS_MEMORY, "owns_memory"),
    (abi::TY_CAP_MASKING, "masking"),
    (abi::TY_CAP_DEVICE_API, "device_api"),
    (abi::TY_CAP_PLACED_NICS, "placed_nics"),
];

const KINDS: [(u32, &str); 3] =
    [(abi::TY_MEMORY_HOST, "host"), (abi::TY_MEMORY_CUDA, "cuda"), (abi::TY_MEMORY_HIP, "hip")];

impl Declared {
    /// Names of the flags that are not set.
    pub fn missing(&self) -> Vec<&'static str> {
        FLAGS.iter().map(|(_, name)| *name).filter(|name| !self.flags.contains(name)).collect()
    }
}

impl From<&Capabilities> for Declared {
    fn from(c: &Capabilities) -> Self {
        let flags = FLAGS.iter().filter(|(bit, _)| c.flags & bit != 0).map(|(_, name)| *name);
        let kinds = KINDS.iter().filter(|(bit, _)| c.memory_kinds & bit != 0);
        Self {
            flags: flags.collect(),
            memory: kinds.map(|(_, name)| *name).collect(),
            max_peers: c.max_peers,
            max_queues: c.max_queues,
            max_signals: c.max_signals,
            max_queue_depth: c.max_queue_depth,
            max_windows: c.max_windows,
            largest_put: c.largest_put,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::NO_CAPABILITIES;

    #[test]
    fn every_flag_is_either_declared_or_missing() {
        let some = Capabilities {
            flags: abi::TY_CAP_GET | abi::TY_CAP_ORDERED,
            memory_kinds: abi::TY_MEMORY_HOST,
            ..NO_CAPABILITIES
        };
        let declared = Declared::from(&some);
        assert_eq!(declared.flags, ["ordered", "get"]);
        assert_eq!(declared.memory, ["host"]);
        assert_eq!(declared.flags.len() + declared.missing().len(), FLAGS.len());
    }
}
