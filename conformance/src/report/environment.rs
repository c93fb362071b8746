use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tokenyard_core::capabilities::Declared;
use tokenyard_core::config::{Config, OnFailure};
use tokenyard_core::host::ComponentInfo;
use tokenyard_core::machine;
use tokenyard_core::transport::Capabilities;

use crate::pace::Pace;

/// Where a run took place, and what was tested: enough to compare two runs.
#[derive(Clone, Debug, Serialize)]
pub struct Environment {
    tokenyard: &'static str,
    /// UTC, RFC 3339.
    date: String,
    kernel: String,
    architecture: &'static str,
    cpu: String,
    cores: usize,
    config: String,
    /// The components that the config uses.
    components: Vec<ComponentInfo>,
    capabilities: Declared,
    /// The factor of deadlines and limits.
    slow: Pace,
    /// Settings of the config that the run does not use, and why.
    notes: Vec<&'static str>,
}

/// The note for a config that masks losses.
const PLAYED_WITHOUT_MASKING: &str = "L3 runs with on_failure = \"stop\": its cases check that each rank ends in \
                                      time. No case of this suite checks that other ranks go on; the cases \
                                      l0/*_holds_up_no_other check what a transport does for that";

impl Environment {
    /// The environment of this machine, now. `components` are all that exist; the report names those that
    /// `config` uses.
    pub fn new(
        config: &Config,
        components: &[ComponentInfo],
        capabilities: &Capabilities,
        pace: Pace,
    ) -> Self {
        let uses = |component: &&ComponentInfo| match component.kind {
            "transport" => {
                config.scale_up.iter().chain(&config.scale_out).any(|c| c.name == component.name)
            }
            "topology" => config.topology.name == component.name,
            _ => config.kernels.name == component.name,
        };
        Self {
            tokenyard: env!("CARGO_PKG_VERSION"),
            date: date(SystemTime::now()),
            kernel: machine::kernel_release().unwrap_or_else(unknown),
            architecture: std::env::consts::ARCH,
            cpu: machine::cpu_model().unwrap_or_else(unknown),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            config: config.name.clone(),
            components: components.iter().filter(uses).cloned().collect(),
            capabilities: Declared::from(capabilities),
            slow: pace,
            notes: match config.world.on_failure {
                OnFailure::Mask => vec![PLAYED_WITHOUT_MASKING],
                OnFailure::Stop => Vec::new(),
            },
        }
    }

    /// The assumed pace of the machine.
    pub fn pace(&self) -> Pace {
        self.slow
    }

    /// The declarations of the transport.
    pub(crate) fn capabilities(&self) -> &Declared {
        &self.capabilities
    }

    /// Two lines for the text report, and the notes.
    pub fn summary(&self) -> String {
        let components: Vec<String> = self
            .components
            .iter()
            .map(|component| {
                let from =
                    component.file.as_ref().map_or("built in".into(), |f| f.display().to_string());
                format!("{} {} {} ({from})", component.kind, component.name, component.version)
            })
            .collect();
        let notes: String = self.notes.iter().map(|note| format!("\nnote: {note}")).collect();
        format!(
            "{}: {}\ntransport declares: {}{notes}",
            self.config,
            components.join(", "),
            self.capabilities.flags.join(", ")
        )
    }
}

fn unknown() -> String {
    "unknown".to_owned()
}

/// The date in UTC as RFC 3339, in whole seconds.
fn date(now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    // Days from a civil date, backwards: years of 365.2425 days that begin on 1 March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_right_around_leap_days_and_years() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_709_251_200, "2024-03-01T00:00:00Z"),
            (1_767_225_599, "2025-12-31T23:59:59Z"),
        ] {
            assert_eq!(date(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
        }
    }
}
