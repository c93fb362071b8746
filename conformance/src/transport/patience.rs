//! Time: how long a call takes, and how long a case lets it take, also on a machine that is slow or busy.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;

use super::clock::NAP;
use super::needs::Needs;
use super::rig::{self, Rig};
use crate::suite::Rank;

/// The time that a connect, or a commit, may wait for a peer: the deadline of cases in which a peer is missing.
pub(super) const PATIENCE: Duration = Duration::from_millis(200);

/// The longest time of some calls, each of which may wait for `deadline`.
pub(super) fn longest(rank: &Rank<'_>, calls: u32, deadline: Duration) -> Duration {
    calls * deadline + rig::short(rank)
}

/// Calls, and measures by the naps of a thread beside it: where the machine does not let this process run, that thread
/// takes no nap.
pub(super) fn timed<T>(call: impl FnOnce() -> T) -> (T, Duration) {
    std::thread::scope(|scope| {
        let running = Arc::new(());
        let runs = Arc::downgrade(&running);
        let naps = scope.spawn(move || {
            let mut naps = 0;
            while runs.strong_count() > 0 {
                std::thread::sleep(NAP);
                naps += 1;
            }
            naps
        });
        let result = call();
        drop(running);
        (result, NAP * naps.join().unwrap_or(0))
    })
}

/// Opens an instance with a short deadline, and calls what comes before its connect to `peer`. A slow machine takes
/// longer than that to connect to itself, and gets the time. Collective.
pub(super) fn open_before<'a>(rank: &Rank<'a>, needs: &Needs, peer: u32) -> Result<Rig<'a>> {
    for deadline in [PATIENCE / 4, PATIENCE, 10 * PATIENCE] {
        let mut rig = Rig::open(rank, needs, deadline)?;
        let late = rig.prepare(peer).is_err();
        if !rig::of_any(rank.world, late)? {
            return Ok(rig);
        }
    }
    let mut rig = Rig::open(rank, needs, rank.config.world.deadline)?;
    rig.prepare(peer)?;
    Ok(rig)
}

/// Connects the whole team within a short deadline, or within a longer one where this machine takes that. It leaves out
/// the first ones of these deadlines, as many as the case has found too short. Collective.
pub(super) fn bring_up_soon<'a>(
    rank: &Rank<'a>,
    needs: &Needs,
    too_short: usize,
) -> Result<Rig<'a>> {
    for parts in [2, 4, 9].into_iter().skip(too_short) {
        let mut rig = Rig::open(rank, needs, parts * rig::short(rank) / 3)?;
        let endpoints = rig.exchange_endpoints()?;
        let late = rig.connect_to(&endpoints).is_err();
        if !rig::of_any(rank.world, late)? {
            return Ok(rig);
        }
    }
    Rig::bring_up(rank, needs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_takes_as_long_as_it_sleeps() {
        let (result, took) = timed(|| std::thread::sleep(Duration::from_millis(100)));
        assert_eq!(result, ());
        assert!(took > Duration::from_millis(20), "{took:?}");
    }
}
