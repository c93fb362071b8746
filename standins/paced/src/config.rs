//! The table `[transport.LEVEL.paced]`.

use serde::Deserialize;
use tokenyard_core::Result;
use tokenyard_core::config::ComponentTable;
use tokenyard_gpu::Devices;
use tokenyard_gpu::twin::GPUS;

pub(crate) const COMPONENT: &str = "paced";
const MOST_BLOCKS: u32 = 16;
const MOST_RATE: f64 = 10_000.0;
const MOST_US: f64 = 100_000.0;

/// The side that writes requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Poster {
    /// Kernels, by the device API.
    #[default]
    Kernels,
    /// The host: there is no device API, so kernels post through a ring.
    Host,
}

/// The order in which puts of different requests arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// As the wire carries them.
    #[default]
    In,
    /// Any: `spread_us` decides how far they part.
    Any,
}

/// The promise that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// A signal is raised before its payload has arrived (INV-1).
    SignalFirst = 1,
    /// One put of 64 is never executed, and counts as done.
    Lost = 2,
    /// A put counts as done before its source was read (INV-4).
    DoneEarly = 3,
    /// Signals are raised as if the put had been posted on the next queue.
    WrongQueue = 4,
}

/// The component's own table.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PacedConfig {
    /// Bytes that leave a rank, in GB/s: up to 10,000; 0 is without a limit.
    #[serde(default = "rate")]
    pub rate: f64,
    /// Time from the last byte on the wire to the signal, in microseconds: up to 100,000.
    #[serde(default = "latency_us")]
    pub latency_us: f64,
    /// Requests of a rank, in millions a second: up to 10,000; 0 is without a limit.
    #[serde(default)]
    pub million_messages: f64,
    /// The order of arrival.
    #[serde(default)]
    pub order: Order,
    /// With `order = "any"`, the longest time that is added to a latency, in microseconds.
    #[serde(default = "spread_us")]
    pub spread_us: f64,
    /// The seed of these times and of faults; a draw also depends on the rank.
    #[serde(default)]
    pub seed: u64,
    /// Multiprocessors of the engine: 1 to 16. One carries some 40 GB/s.
    #[serde(default = "blocks")]
    pub blocks: u32,
    /// The side that writes requests.
    #[serde(default)]
    pub posts: Poster,
    /// The device that this rank drives; several ranks may share one. Default: as `nvlink` chooses.
    #[serde(default)]
    pub device: Option<Devices>,
    /// In a twin, its GPUs, of which each drives one rank of the first domain: 2 or 4. Their rails are loops, and other
    /// ranks have no engine.
    #[serde(default)]
    pub twin: Option<u32>,
    /// The one promise that is broken.
    #[serde(default)]
    pub fault: Option<Fault>,
}

fn rate() -> f64 {
    46.0
}

fn latency_us() -> f64 {
    4.0
}

fn spread_us() -> f64 {
    20.0
}

fn blocks() -> u32 {
    3
}

impl PacedConfig {
    pub(crate) fn read(table: &ComponentTable) -> Result<Self> {
        let config: Self = table.parse(COMPONENT)?;
        let numbers = [
            ("rate", config.rate, MOST_RATE),
            ("latency_us", config.latency_us, MOST_US),
            ("million_messages", config.million_messages, MOST_RATE),
            ("spread_us", config.spread_us, MOST_US),
        ];
        for (key, found, most) in numbers {
            if !(0.0..=most).contains(&found) {
                let found = format!("found {found}; expected 0 to {most}");
                return Err(table.invalid(COMPONENT, key, &found));
            }
        }
        if !(1..=MOST_BLOCKS).contains(&config.blocks) {
            let found = format!("found {}; expected 1 to {MOST_BLOCKS}", config.blocks);
            return Err(table.invalid(COMPONENT, "blocks", &found));
        }
        if let Some(found) = config.twin.filter(|gpus| !GPUS.contains(gpus)) {
            let found = format!("found {found}; expected one of {GPUS:?}");
            return Err(table.invalid(COMPONENT, "twin", &found));
        }
        Ok(config)
    }

    /// Units of 2^-20 ns that a byte has the wire.
    pub(crate) fn byte_cost(&self) -> u64 {
        cost(self.rate, 20)
    }

    /// Units of 2^-10 ns that a request has the wire at least.
    pub(crate) fn message_cost(&self) -> u64 {
        cost(self.million_messages / 1e3, 10)
    }

    /// The latency, and the most that is added to it, in ns.
    pub(crate) fn times_ns(&self) -> [u64; 2] {
        let spread = if self.order == Order::Any { self.spread_us } else { 0.0 };
        [self.latency_us, spread].map(|us| (us * 1e3).round() as u64)
    }
}

/// The time of one thing in units of 2^-bits ns, where there are `rate` of them in a ns; 0 without a limit.
fn cost(rate: f64, bits: u32) -> u64 {
    if rate == 0.0 { 0 } else { (2_f64.powi(bits as i32) / rate).round() as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The defaults of `Pace` in `bench/src/gpu/nic.rs` are these.
    #[test]
    fn the_defaults_are_those_to_which_benchmarks_hold_the_engine() {
        let config = PacedConfig::read(&ComponentTable::from_text("", "a.toml")).unwrap();
        assert_eq!((config.rate, config.latency_us, config.million_messages), (46.0, 4.0, 0.0));
    }

    #[test]
    fn a_twin_has_2_or_4_gpus() {
        let read = |text| PacedConfig::read(&ComponentTable::from_text(text, "a.toml"));
        assert_eq!(read("twin = 4").unwrap().twin, Some(4));
        let text = read("twin = 1").unwrap_err().to_string();
        assert!(text.contains("found 1; expected one of [2, 4]"), "{text}");
    }

    #[test]
    fn costs_are_those_of_the_rate_to_a_thousandth() {
        for rate in [0.5, 23.0, 46.0, 92.0, 400.0] {
            let ns = cost(rate, 20) as f64 / f64::from(1 << 20);
            assert!((ns * rate - 1.0).abs() < 1e-3, "{rate} GB/s: a byte has {ns} ns");
        }
        assert_eq!((cost(0.0, 20), cost(0.01, 10)), (0, 102_400));
    }
}
