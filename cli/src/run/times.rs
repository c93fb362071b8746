//! How long operations take. What a caller does around them is not counted: rows are where the kernel set
//! works before the clock starts, and are fetched and checked after it has stopped.

use std::time::{Duration, Instant};

use tokenyard_core::yard::Yard;
use tokenyard_core::{ErrorKind, Result};

use super::message::Clock;

/// The times of one kind of operation, and whose clock they are by.
#[derive(Debug)]
pub(super) struct Times {
    us: Vec<f64>,
    pub(super) clock: Clock,
}

impl Default for Times {
    /// By the device's clock, until an operation has no time by it.
    fn default() -> Self {
        Self { us: Vec::new(), clock: Clock::Device }
    }
}

impl Times {
    /// Runs an operation and notes how long it took. A kernel set of a device notes itself when its kernels
    /// began and when the last row was there; so neither compilation nor launches count, nor what the host does
    /// before and after. Where none does, on CPUs for example, the time is that of the call.
    pub(super) fn time<T>(
        &mut self,
        yard: &mut Yard,
        operation: impl FnOnce(&mut Yard) -> Result<T>,
    ) -> Result<T> {
        let start = Instant::now();
        let done = operation(yard)?;
        let host = start.elapsed();
        self.note(host, device_time(yard)?);
        Ok(done)
    }

    /// Notes the time of an operation by the host's clock, and by the device's if there is one.
    fn note(&mut self, host: Duration, device: Option<Duration>) {
        if device.is_none() && self.clock == Clock::Device {
            // The two are not mixed.
            self.clock = Clock::Host;
            self.us.clear();
        }
        let time = if self.clock == Clock::Device { device } else { None };
        self.us.push(time.unwrap_or(host).as_secs_f64() * 1e6);
    }

    /// The median; 0 of none.
    pub(super) fn median_us(mut self) -> f64 {
        self.us.sort_unstable_by(f64::total_cmp);
        let middle = |i: usize| self.us.get(i).copied().unwrap_or(0.0);
        (middle(self.us.len().saturating_sub(1) / 2) + middle(self.us.len() / 2)) / 2.0
    }
}

/// How long the last operation took by the device's clock, if its kernel set notes that.
fn device_time(yard: &mut Yard) -> Result<Option<Duration>> {
    let trace = match yard.trace(0) {
        Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(None),
        trace => trace?,
    };
    let nanoseconds = trace.arrived.checked_sub(trace.begun).filter(|_| trace.begun > 0);
    Ok(nanoseconds.map(Duration::from_nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_the_device_s_where_every_operation_has_one_and_else_the_host_s() {
        let (host, device) = (Duration::from_millis(68), Some(Duration::from_micros(200)));
        let mut times = Times::default();
        times.note(host, device);
        times.note(host, device);
        assert_eq!((times.clock, times.us.as_slice()), (Clock::Device, &[200.0, 200.0][..]));
        times.note(host, None);
        times.note(host, device);
        assert_eq!((times.clock, times.us.as_slice()), (Clock::Host, &[68_000.0, 68_000.0][..]));
    }

    #[test]
    fn the_median_is_that_of_sorted_times() {
        let median = |us: &[f64]| Times { us: us.to_vec(), ..Times::default() }.median_us();
        assert_eq!(median(&[9.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[9.0, 1.0, 2.0, 4.0]), 3.0);
        assert_eq!(median(&[7.0]), 7.0);
        assert_eq!(median(&[]), 0.0);
    }
}
