//! Waits of the rig for totals and events.

use std::cell::RefCell;

use anyhow::{Result, bail, ensure};
use tokenyard_core::transport::Event;

use super::headway::Headway;
use super::rig::Rig;

/// The expected total of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Total {
    pub(super) queue: u32,
    pub(super) id: u32,
    pub(super) total: u64,
}

/// The most totals that an error lists.
const MOST_LISTED: usize = 64;

/// All totals that differ from the expected ones.
fn list_differences(expected: &[Total], found: &[u64]) -> String {
    let differ: Vec<String> = expected
        .iter()
        .zip(found)
        .filter(|(expected, found)| expected.total != **found)
        .map(|(Total { id, total, .. }, found)| {
            format!("signal {id}: found total {found}; expected {total}")
        })
        .collect();
    let listed = differ[..differ.len().min(MOST_LISTED)].join(", ");
    match differ.len().saturating_sub(MOST_LISTED) {
        0 => listed,
        more => format!("{listed}, and {more} more signals differ"),
    }
}

impl Rig<'_> {
    /// Drives all queues until `ready`, at most for the deadline after the last event.
    pub(super) fn wait(
        &mut self,
        ready: impl Fn(&Self) -> bool,
        missing: impl Fn(&Self) -> String,
    ) -> Result<()> {
        self.wait_for_more(ready, || 0, missing)
    }

    /// As [`wait`](Self::wait); the deadline begins anew where `so_far` grows, too.
    fn wait_for_more(
        &mut self,
        ready: impl Fn(&Self) -> bool,
        so_far: impl Fn() -> u64,
        missing: impl Fn(&Self) -> String,
    ) -> Result<()> {
        let mut headway = Headway::new(self.needs.deadline);
        let mut round = 0_u32;
        while !ready(self) {
            self.drive()?;
            self.check_peers()?;
            let events: usize = self.queues.iter().map(|queue| queue.events().len()).sum();
            if headway.is_over(so_far().wrapping_add(events as u64)) {
                let deadline = self.needs.deadline;
                bail!("nothing more came within {deadline:?}: {}", missing(self));
            }
            round += 1;
            if round > 64 {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Waits until the total of a signal is `total`; more is an error at once.
    pub(super) fn wait_signal(&mut self, queue: u32, id: u32, total: u64) -> Result<()> {
        self.wait_signals(&[Total { queue, id, total }])
    }

    /// Waits until all these totals are as expected; a larger total is an error at once. Where none grows for the
    /// deadline, the error lists all that differ.
    pub(super) fn wait_signals(&mut self, expected: &[Total]) -> Result<()> {
        // One reading decides: the payloads that a case checks next must have arrived by this very reading.
        let found = RefCell::new(vec![0; expected.len()]);
        self.wait_for_more(
            |rig| {
                let mut found = found.borrow_mut();
                for (found, Total { queue, id, total }) in found.iter_mut().zip(expected) {
                    if *found < *total {
                        *found = rig.transport.read_signal(*queue, *id);
                    }
                }
                let mut both = found.iter().zip(expected);
                both.clone().any(|(found, expected)| *found > expected.total)
                    || both.all(|(found, expected)| *found == expected.total)
            },
            || found.borrow().iter().fold(0_u64, |sum, total| sum.wrapping_add(*total)),
            |_| list_differences(expected, &found.borrow()),
        )?;
        let found = found.into_inner();
        ensure!(
            found.iter().zip(expected).all(|(found, expected)| *found == expected.total),
            "{}, no more",
            list_differences(expected, &found)
        );
        Ok(())
    }

    /// Waits until queue `queue` holds `count` events, and takes them; more are an error at once.
    pub(super) fn wait_events(&mut self, queue: u32, count: usize) -> Result<Vec<Event>> {
        let events = self.wait_some_events(queue, count)?;
        let found = events.len();
        ensure!(found == count, "queue {queue}: found {found} events; expected {count}, no more");
        Ok(events)
    }

    /// Waits until queue `queue` holds at least `count` events, and takes all.
    pub(super) fn wait_some_events(&mut self, queue: u32, count: usize) -> Result<Vec<Event>> {
        let queue = queue as usize;
        self.wait(
            |rig| rig.queues[queue].events().len() >= count,
            |rig| {
                let found = rig.queues[queue].events().len();
                format!("queue {queue}: found {found} events; expected {count}")
            },
        )?;
        Ok(self.queues[queue].take())
    }
}
