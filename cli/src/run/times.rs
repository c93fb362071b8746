//! The times of operations. The caller's work around them does not count: rows are in the memory of
//! the kernel set before the clock starts, and are fetched and checked after it has stopped. The
//! time for which a rank waits for others to begin does not count either: hosts start an operation
//! some 100 us apart.

use std::time::{Duration, Instant};

use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::Communicator;
use tokenyard_core::{ErrorKind, Result};

use super::message::Clock;

/// The times of one kind of operation, and their clock.
#[derive(Debug)]
pub(super) struct Times {
    us: Vec<f64>,
    pub(super) clock: Clock,
    /// The operation that has run, until it is known how long other ranks have waited.
    last: Option<Timed>,
}

/// One operation on this rank.
#[derive(Clone, Copy, Debug)]
struct Timed {
    /// The time of the call.
    host: Duration,
    /// The time of the kernels, where they record it.
    device: Option<DeviceTime>,
}

/// An operation by the device's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DeviceTime {
    /// The time from the first kernel's begin until the last row was there.
    whole: Duration,
    /// The part of it in which this rank waited for the records of all ranks.
    waited: Duration,
}

/// The shortest wait for records of any rank: the wait of the rank that began last. The rest of a
/// longer wait is the difference between the starts of the hosts, and no part of the operation.
pub(super) fn settle(world: &World, kinds: [&mut Times; 2]) -> Result<()> {
    let mine: Vec<u8> = kinds.iter().flat_map(|times| times.waited_ns().to_le_bytes()).collect();
    let all = world.all_gather("waits", &mine)?;
    for (index, times) in kinds.into_iter().enumerate() {
        // A lost rank contributes no bytes.
        let waits = all.iter().filter_map(|bytes| bytes.as_chunks().0.get(index));
        let least = waits.map(|wait| u64::from_le_bytes(*wait)).min().unwrap_or(0);
        times.end(Duration::from_nanos(least));
    }
    Ok(())
}

impl Default for Times {
    /// The device's clock counts until an operation has no time by it.
    fn default() -> Self {
        Self { us: Vec::new(), clock: Clock::Device, last: None }
    }
}

impl Times {
    /// Runs an operation and measures how long it takes; [`settle`] notes it. A kernel set of a
    /// device records when its kernels began and when the last row was there, so neither
    /// compilation nor launches count, nor the host's work before and after. Where a kernel set
    /// records nothing, such as on CPUs, the time is that of the call.
    pub(super) fn time<T>(
        &mut self,
        comm: &mut Communicator,
        operation: impl FnOnce(&mut Communicator) -> Result<T>,
    ) -> Result<T> {
        let start = Instant::now();
        let done = operation(comm)?;
        let host = start.elapsed();
        self.last = Some(Timed { host, device: device_time(comm)? });
        Ok(done)
    }

    /// How long this rank has waited for others to begin, in nanoseconds; `u64::MAX` for a rank
    /// that records no wait, so that its wait is never the shortest.
    fn waited_ns(&self) -> u64 {
        let device = self.last.and_then(|timed| timed.device);
        device.map_or(u64::MAX, |device| device.waited.as_nanos() as u64)
    }

    /// Notes the operation that has run. `least` is the wait of the rank that began last.
    fn end(&mut self, least: Duration) {
        let Some(Timed { host, device }) = self.last.take() else { return };
        let device = device.map(|time| time.whole - time.waited.saturating_sub(least));
        if device.is_none() && self.clock == Clock::Device {
            // Times of the two clocks are not mixed.
            self.clock = Clock::Host;
            self.us.clear();
        }
        let time = if self.clock == Clock::Device { device } else { None };
        self.us.push(time.unwrap_or(host).as_secs_f64() * 1e6);
    }

    /// The median; 0 without any time.
    pub(super) fn median_us(mut self) -> f64 {
        self.us.sort_unstable_by(f64::total_cmp);
        let middle = |i: usize| self.us.get(i).copied().unwrap_or(0.0);
        (middle(self.us.len().saturating_sub(1) / 2) + middle(self.us.len() / 2)) / 2.0
    }
}

/// How long the last operation took by the device's clock, if its kernel set records that.
fn device_time(comm: &mut Communicator) -> Result<Option<DeviceTime>> {
    let trace = match comm.trace(0) {
        Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(None),
        trace => trace?,
    };
    let between = |from: u64, to: u64| to.checked_sub(from).map(Duration::from_nanos);
    let whole = between(trace.begun, trace.arrived).filter(|_| trace.begun > 0);
    let waited = between(trace.counted, trace.entered).unwrap_or_default();
    Ok(whole.map(|whole| DeviceTime { whole, waited: waited.min(whole) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_the_device_s_where_every_operation_has_one_and_else_the_host_s() {
        let host = Duration::from_millis(68);
        let whole = Duration::from_micros(200);
        let device = Some(DeviceTime { whole, waited: Duration::ZERO });
        let mut times = Times::default();
        let mut note = |device| {
            times.last = Some(Timed { host, device });
            times.end(Duration::ZERO);
            (times.clock, times.us.clone())
        };
        note(device);
        assert_eq!(note(device), (Clock::Device, vec![200.0, 200.0]));
        note(None);
        let times_are = note(device);
        assert_eq!(times_are, (Clock::Host, vec![68_000.0, 68_000.0]));
    }

    #[test]
    fn a_wait_for_ranks_that_begin_later_is_no_part_of_the_operation() {
        let us = Duration::from_micros;
        let mut times = Times::default();
        let device = Some(DeviceTime { whole: us(450), waited: us(255) });
        times.last = Some(Timed { host: us(900), device });
        assert_eq!(times.waited_ns(), 255_000);
        // The rank that began last has waited for 5 us, which is the time that records take to
        // cross.
        times.end(us(5));
        assert_eq!((times.us.as_slice(), times.waited_ns()), (&[200.0][..], u64::MAX));
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
