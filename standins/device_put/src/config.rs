//! The table `[transport.LEVEL.device-put]`.

use serde::Deserialize;
use tokenyard_core::Result;
use tokenyard_core::config::ComponentTable;
use tokenyard_gpu::Devices;

pub(crate) const COMPONENT: &str = "device-put";
const MOST_HOLD_US: u32 = 100_000;

/// The promise that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// A signal is raised before its payload has arrived (INV-1).
    SignalFirst,
    /// One put of 64 is never executed, and counts as done.
    Lost,
    /// A put counts as done before its source was read (INV-4).
    DoneEarly,
    /// Signals are raised as if the put had been posted on the next queue.
    WrongQueue,
}

/// The component's own table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DevicePutConfig {
    /// The seed of all draws; a draw also depends on the rank.
    #[serde(default)]
    pub seed: u64,
    /// Longest time that a command is held, in microseconds: up to 100,000.
    #[serde(default = "hold_us")]
    pub hold_us: u32,
    /// The device that this rank drives; several ranks may share one. Default: as `nvlink` chooses.
    #[serde(default)]
    pub device: Option<Devices>,
    /// The one promise that is broken.
    #[serde(default)]
    pub fault: Option<Fault>,
}

fn hold_us() -> u32 {
    50
}

impl DevicePutConfig {
    pub(crate) fn read(table: &ComponentTable) -> Result<Self> {
        let config: Self = table.parse(COMPONENT)?;
        if config.hold_us > MOST_HOLD_US {
            let found = format!("found {}; expected at most {MOST_HOLD_US}", config.hold_us);
            return Err(table.invalid(COMPONENT, "hold_us", &found));
        }
        Ok(config)
    }
}
