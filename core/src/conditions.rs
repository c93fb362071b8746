//! Under which conditions results were taken, for reports and JSON.

use crate::machine;
use serde::Serialize;

/// What a reader must know to compare figures. What the system does not tell is `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Conditions {
    /// As `/proc/cpuinfo` names it.
    pub cpu: Option<String>,
    /// Cores this process may use.
    pub cores: Option<usize>,
    /// Kernel release.
    pub kernel: Option<String>,
    /// Frequency governor of the first core.
    pub governor: Option<String>,
    /// Processes that wanted to run in the last minute, on average: more than 0 is company.
    pub load: Option<f64>,
    /// Version of this program.
    pub version: &'static str,
    /// Commit that was built from, if the build was told (`TOKENYARD_COMMIT`).
    pub commit: Option<&'static str>,
    /// Whether the build was optimised.
    pub optimised: bool,
}

impl Conditions {
    /// Asks the system.
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

    /// Whether other programs wanted the cores before the run began. Ratios suffer from that: an
    /// exchange waits for whoever is kept from a core, a plain copy waits for nobody.
    pub fn is_busy(&self) -> bool {
        self.load.zip(self.cores).is_some_and(|(load, cores)| load > cores as f64)
    }

    /// In one line, for people.
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
