//! A graph whose outputs and handles were dropped in its capture, as frameworks do.

use anyhow::{Context, Result};
use tokenyard_core::communicator::Communicator;

use super::super::streams::{Plan, Track};
use super::fixed_memory::{FixedMemory, Variant, most_rows};
use crate::moe::oracle::{self, Case};
use crate::moe::round::Round;

/// How often each place is recorded: as many outputs as no arena of a test holds at once.
const RECORDED: usize = 200;

pub(super) fn dropped(case: &Case, comm: &mut Communicator) -> Result<bool> {
    let me = comm.rank() as usize;
    // Both have equal sizes, so that results of one may land in the room of the other.
    let tokens = oracle::Tokens::Exactly(vec![3; case.ranks]);
    let case = Case { tokens, ..case.clone() };
    let most = most_rows(comm, &case)?;
    let plan = |n| Plan::new(comm, &Case { seed: n, ..case.clone() });
    let mut all: Vec<Variant> =
        (0..2).map(|n| Variant::new(comm, plan(n)?, most)).collect::<Result<_>>()?;
    let mut places = [FixedMemory::new(comm, &case)?, FixedMemory::new(comm, &case)?];
    places.iter_mut().try_for_each(|place| place.make_room(comm, most))?;
    let track = Track::new(comm)?;
    track.stream.begin_capture()?;
    let recorded = record(comm, &track, &mut places, &mut all);
    let graph = track.stream.end_capture();
    recorded?;
    let graph = graph?;
    for launch in 0..20 {
        // Its output and its handle live while the graph is launched.
        let beside = Round::new(&Case { seed: 90 + launch, ..case.clone() }, comm.rank());
        let live = beside.dispatch(comm).context("with the host, before a launch")?;
        let first = launch as usize % 2;
        for (n, place) in places.iter_mut().enumerate() {
            place.bring(&track, &all[(first + n) % 2], me)?;
        }
        // SAFETY: the memory that was recorded lives in the places and the variants; the communicator's other
        // operations wait for this stream below.
        unsafe { track.stream.launch(&graph)? }
        check(&mut all, first).with_context(|| format!("launch {launch}"))?;
        beside.finish(comm, &live).with_context(|| format!("beside launch {launch}"))?;
    }
    comm.flush()?;
    Ok(true)
}

/// Records dispatches and combines whose outputs and handles are dropped at once. Results are copied in the graph.
fn record(
    comm: &mut Communicator,
    track: &Track,
    places: &mut [FixedMemory],
    all: &mut [Variant],
) -> Result<()> {
    let me = comm.rank() as usize;
    for n in 0..RECORDED {
        for (place, one) in places.iter_mut().zip(&mut *all) {
            let again = || format!("capture {n}");
            let (received, handle) = place.dispatch(comm, track).with_context(again)?;
            place.combine(comm, track, &handle).with_context(again)?;
            place.keep(track, one, &received, me)?;
        }
    }
    Ok(())
}

/// Compares what the graph has left; `first` is the variant that the first place had. Waits for the stream.
fn check(all: &mut [Variant], first: usize) -> Result<()> {
    let [a, b] = all else { anyhow::bail!("found {} variants; expected 2", all.len()) };
    if first == 0 {
        return a.check().and_then(|()| b.check());
    }
    std::mem::swap(&mut a.kept, &mut b.kept);
    let checked = a.check().and_then(|()| b.check());
    std::mem::swap(&mut a.kept, &mut b.kept);
    checked
}
