//! The conditions under which results were measured, for reports and JSON.

use crate::machine;
use serde::Serialize;

/// The facts that a reader needs to compare figures. A fact that the system does not give is `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Conditions {
    /// The processor's name in `/proc/cpuinfo`.
    pub cpu: Option<String>,
    /// Cores this process may use.
    pub cores: Option<usize>,
    /// Kernel release.
    pub kernel: Option<String>,
    /// Frequency governor of the first core.
    pub governor: Option<String>,
    /// Processes that wanted to run in the last minute, on average: more than 0 is load from other
    /// programs.
    pub load: Option<f64>,
    /// Version of this program.
    pub version: &'static str,
    /// The commit of the build, if the build has `TOKENYARD_COMMIT`.
    pub commit: Option<&'static str>,
    /// True if the build was optimised.
    pub optimised: bool,
}

impl Conditions {
    /// Reads the conditions from the system.
    pub fn find() -> Self {
        Self {
            cpu: machine::cpu_model(),
            cores: std::thread::available_parallelism().ok().map(usize::from),
            kernel: machine::kernel_release(),
            governor: first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            load: first_line("/proc/loadavg")
                .and_then(|line| line.split_whitespace().next()?.parse().ok()),
            version: env!("CARGO_PKG_VERSION"),
            commit: option_env!("TOKENYARD_COMMIT"),
            optimised: !cfg!(debug_assertions),
        }
    }

    /// True if other programs used the cores before the run began. That distorts ratios: an exchange
    /// waits for a rank that has no core, and a plain copy waits for no rank.
    pub fn is_busy(&self) -> bool {
        self.load.zip(self.cores).is_some_and(|(load, cores)| load > cores as f64)
    }

    /// All conditions in one line of text.
    pub fn line(&self) -> String {
        let known = |name: &str, value: &Option<String>| {
            value.as_ref().map(|value| format!("{name} {value}"))
        };
        [
            self.cpu.clone(),
            self.cores.map(|cores| format!("{cores} cores")),
            known("kernel", &self.kernel),
            known("governor", &self.governor),
            self.load.map(|load| format!("load {load:.2}")),
            Some(format!("tokenyard {}", self.version)),
            self.commit.map(|commit| format!("commit {commit}")),
            (!self.optimised).then(|| "a DEBUG build".to_owned()),
        ]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(" · ")
    }
}

fn first_line(path: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().next().map(|line| line.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_with_more_work_than_cores_is_busy() {
        let with = |load| Conditions { load: Some(load), cores: Some(2), ..Conditions::default() };
        assert!(with(2.01).is_busy() && !with(1.99).is_busy());
        assert!(!Conditions::default().is_busy());
    }
}
