//! The config table of the transport.

use serde::Deserialize;

/// The table `[transport.scale_up.shm]` (or `scale_out`).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShmConfig {
    /// Whether kernels may use plain loads and stores on peers' windows. With `false` they have to
    /// put, as they would over a network: for tests and comparisons. Default: `true`.
    pub load_store: bool,
}

impl Default for ShmConfig {
    fn default() -> Self {
        Self { load_store: true }
    }
}
