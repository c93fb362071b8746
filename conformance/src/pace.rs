//! The pace of the machine that a run is on.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The factor for every deadline and time limit of a run, for machines that are emulated or busy. Only the
/// time that an event may take grows: the required events and the required errors stay the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Pace(u32);

impl Pace {
    /// Limits without a change.
    pub const USUAL: Self = Self(1);
    /// The largest factor.
    pub const SLOWEST: u32 = 100;

    /// A pace that makes limits `slow` times as long, 1 to 100.
    ///
    /// # Errors
    /// A factor out of range.
    pub fn new(slow: u32) -> Result<Self, String> {
        if (1..=Self::SLOWEST).contains(&slow) {
            return Ok(Self(slow));
        }
        Err(format!("found {slow}; expected 1 to {}", Self::SLOWEST))
    }

    /// The factor.
    pub fn slow(self) -> u32 {
        self.0
    }

    /// The limit at this pace.
    pub fn stretch(self, limit: Duration) -> Duration {
        limit.saturating_mul(self.0)
    }
}

impl TryFrom<u32> for Pace {
    type Error = String;

    fn try_from(slow: u32) -> Result<Self, String> {
        Self::new(slow)
    }
}

impl From<Pace> for u32 {
    fn from(pace: Pace) -> Self {
        pace.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults;

    #[test]
    fn a_slow_machine_gets_longer_and_the_usual_one_what_the_fault_says() {
        let fault = faults::list(1).remove(0);
        let (deadline, grace) = (fault.deadline(), fault.grace());
        let slow = fault.at(Pace::new(5).unwrap());
        assert_eq!((slow.deadline(), slow.grace()), (5 * deadline, 5 * grace));
        assert_eq!(Pace::USUAL.stretch(deadline), deadline);
    }

    #[test]
    fn a_factor_that_would_switch_limits_off_is_refused() {
        for slow in [0, 101, u32::MAX] {
            assert!(Pace::new(slow).unwrap_err().contains("expected 1 to 100"), "{slow}");
        }
        assert!(serde_json::from_str::<Pace>("0").is_err());
        assert_eq!(serde_json::from_str::<Pace>("7").unwrap(), Pace(7));
    }
}
