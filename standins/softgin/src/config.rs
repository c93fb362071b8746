//! Faults, delays and the order of operations: `TOKENYARD_SOFTGIN=seed=1,reorder=8,delay_us=50,fail_at=100`.

use std::time::Duration;

/// The variable. NCCL passes no other config to its plugins.
pub(crate) const VARIABLE: &str = "TOKENYARD_SOFTGIN";
const MOST_REORDER: u64 = 1024;
const MOST_DELAY_US: u64 = 1_000_000;

/// The config of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Config {
    /// All random draws depend on this and on the rank.
    pub(crate) seed: u64,
    /// The next operation is drawn from the oldest and this many more. A strong signal still settles all earlier puts.
    pub(crate) reorder: u64,
    /// The longest time that an operation is held.
    pub(crate) delay: Duration,
    /// The number, from 1 on, of the operation that fails; so does every test after it. 0: none.
    pub(crate) fail_at: u64,
    /// The number of the first operation that is never executed. 0: none.
    pub(crate) stop_at: u64,
}

impl Config {
    /// Reads the text of the variable.
    ///
    /// # Errors
    /// The error says what was found and what was expected.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut config = Self::default();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let number = |most: u64| {
                let value = part.split_once('=').and_then(|(_, value)| value.parse::<u64>().ok());
                value.filter(|value| *value <= most).ok_or_else(|| {
                    format!("{VARIABLE}: found `{part}`; expected KEY=NUMBER of at most {most}")
                })
            };
            match part.split('=').next().unwrap_or_default() {
                "seed" => config.seed = number(u64::MAX)?,
                "reorder" => config.reorder = number(MOST_REORDER)?,
                "delay_us" => config.delay = Duration::from_micros(number(MOST_DELAY_US)?),
                "fail_at" => config.fail_at = number(u64::MAX)?,
                "stop_at" => config.stop_at = number(u64::MAX)?,
                _ => {
                    return Err(format!(
                        "{VARIABLE}: found `{part}`; expected seed, reorder, delay_us, fail_at or stop_at"
                    ));
                }
            }
        }
        Ok(config)
    }

    /// Reads the config of this process.
    pub(crate) fn of_environment() -> Result<Self, String> {
        Self::parse(&std::env::var(VARIABLE).unwrap_or_default())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests fail by panic")]
mod tests {
    use super::*;

    #[test]
    fn an_empty_text_is_a_good_day_and_every_key_is_read() {
        assert_eq!(Config::parse("").unwrap(), Config::default());
        let found = Config::parse("seed=7,reorder=8,delay_us=50,fail_at=3,stop_at=9").unwrap();
        let delay = Duration::from_micros(50);
        assert_eq!(found, Config { seed: 7, reorder: 8, delay, fail_at: 3, stop_at: 9 });
    }

    #[test]
    fn unknown_keys_and_numbers_out_of_range_are_refused() {
        for text in ["lose=1", "seed", "seed=-1", "reorder=1025", "delay_us=many"] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.contains(text) && error.contains("expected"), "{error}");
        }
    }
}
