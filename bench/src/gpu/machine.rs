//! The GPU and its driver, for the conditions of a report.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokenyard_gpu::probe::About;
use tokenyard_machine::commands::capture_clocks;
use tokenyard_machine::gpu::driver_version;

use super::backend::Backend;

/// How long `nvidia-smi` may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// The GPU of rank 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Its name from the vendor.
    pub gpu: String,
    /// Multiprocessors.
    pub sms: u32,
    /// Its name for the compiler.
    pub architecture: String,
    /// Version of the driver, if known.
    pub driver: Option<String>,
    /// The driver's interface and its version, such as `CUDA 13.0` or `HIP 7.0`.
    pub interface: String,
    /// Clocks right after the measurements in MHz, and the power limit in W; none without
    /// `nvidia-smi`, and of AMD's GPUs.
    pub clocks: Option<Clocks>,
}

/// Clocks and power limit of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clocks {
    /// The clock of the multiprocessors.
    pub sm: String,
    /// The highest clock that the multiprocessors may have.
    pub most_sm: String,
    /// The clock of the memory.
    pub memory: String,
    /// Power limit.
    pub power: String,
}

impl Machine {
    pub(super) fn new(backend: Backend, about: &About, asks_clocks: bool) -> Self {
        let names = &backend.platform().names;
        let (driver, text) = match backend {
            Backend::Cuda => {
                let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok();
                // Clocks of a tool that fails are left out.
                (
                    text.as_deref().and_then(driver_version),
                    asks_clocks.then(|| capture_clocks(PATIENCE).ok()).flatten(),
                )
            }
            // Not there for a driver that is part of the Linux kernel.
            Backend::Rocm => {
                let text = std::fs::read_to_string("/sys/module/amdgpu/version").ok();
                (text.map(|text| text.trim().to_owned()), None)
            }
        };
        Self {
            gpu: about.name.clone(),
            sms: about.processors,
            architecture: about.architecture.clone(),
            driver,
            interface: format!("{} {}", names.interface, about.interface),
            clocks: text.and_then(|text| clocks(&text, &about.name)),
        }
    }

    /// Whether the GPU copies rows in bulk: by compute capability 9.0 and later.
    pub(super) fn has_bulk_copies(&self) -> bool {
        let capability = self.architecture.strip_prefix("sm_").unwrap_or_default();
        let digits = capability.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        digits.parse().is_ok_and(|capability: u32| capability >= 90)
    }

    /// The machine in one line, for people.
    pub fn line(&self, ranks: u32) -> String {
        let driver = self.driver.as_deref().unwrap_or("unknown");
        let clocks = self.clocks.as_ref().map(|clocks| {
            let Clocks { sm, most_sm, memory, power } = clocks;
            format!(" · SM clock {sm} of {most_sm}, memory {memory}, power limit {power}")
        });
        format!(
            "{ranks} x {} ({} SMs, {}) · driver {driver}, {}{}",
            self.gpu,
            self.sms,
            self.architecture,
            self.interface,
            clocks.unwrap_or_default()
        )
    }
}

/// A name of the GPU with this ordinal that no other GPU has: `machine` is that of the process, and `visible` the GPUs
/// that its environment selects.
pub(super) fn gpu_name(machine: &str, visible: Option<&str>, ordinal: i32) -> String {
    let items: Vec<&str> = visible.map_or(Vec::new(), |list| list.split(',').collect());
    let selected = usize::try_from(ordinal).ok().and_then(|at| items.get(at));
    let gpu = selected.map_or_else(|| ordinal.to_string(), |item| item.trim().to_owned());
    format!("{machine}/{gpu}")
}

/// The clocks of the first GPU of this name.
fn clocks(text: &str, name: &str) -> Option<Clocks> {
    let line = text.lines().find(|line| line.split(',').next().map(str::trim) == Some(name))?;
    let mut fields = line.split(',').skip(1).map(|field| field.trim().to_owned());
    let mut next = || fields.next();
    Some(Clocks { sm: next()?, most_sm: next()?, memory: next()?, power: next()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_says_its_version_among_other_words() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n\
                    GCC version:  gcc version 12.3.0\n";
        assert_eq!(driver_version(open).as_deref(), Some("580.95.05"));
        assert_eq!(driver_version("GCC version:  gcc 12.3.0\n"), None);
    }

    #[test]
    fn gpus_copy_in_bulk_from_compute_capability_9_on() {
        let of = |name: &str| Machine { architecture: name.to_owned(), ..Machine::default() };
        let found = ["sm_90a", "sm_100", "sm_120a", "sm_89", "gfx942", ""];
        let found = found.map(|name| of(name).has_bulk_copies());
        assert_eq!(found, [true, true, true, false, false, false]);
    }

    #[test]
    fn clocks_are_those_of_the_first_gpu_of_the_name() {
        let text = "NVIDIA A2, 1, 2, 3, 4\nNVIDIA H200, 1980 MHz, 1980 MHz, 3201 MHz, 700.00 W\n";
        let found = clocks(text, "NVIDIA H200").unwrap();
        assert_eq!((found.sm.as_str(), found.power.as_str()), ("1980 MHz", "700.00 W"));
        assert_eq!(clocks(text, "NVIDIA H100"), None);
        assert_eq!(clocks("NVIDIA H200, 1980 MHz\n", "NVIDIA H200"), None);
    }

    #[test]
    fn a_gpu_is_the_same_under_each_ordinal_that_the_environment_gives_it() {
        assert_eq!(gpu_name("a", Some("3"), 0), gpu_name("a", None, 3));
        assert_eq!(gpu_name("a", Some("1, 3"), 1), gpu_name("a", Some("3"), 0));
        assert_ne!(gpu_name("a", None, 0), gpu_name("b", None, 0));
        assert_ne!(gpu_name("a", Some("0"), 0), gpu_name("a", Some("1"), 0));
    }

    #[test]
    fn a_value_that_is_unknown_is_marked_or_left_out() {
        let machine = Machine {
            gpu: "G".into(),
            sms: 132,
            interface: "CUDA 13.0".into(),
            ..Machine::default()
        };
        let line = machine.line(2);
        assert!(line.contains("2 x G (132 SMs") && line.contains("driver unknown"), "{line}");
        assert!(!line.contains("clock"), "{line}");
    }
}
