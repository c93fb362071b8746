//! The bare link: a network library by direct calls, without tokenyard in between. The measurements of it are those
//! of the link through a transport, too.

mod fabric;
mod verbs;

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::ComponentChoice;

use super::{DEPTH, PATIENCE};

/// One end of a link, with its own memory: `DEPTH` large sources, then as many places that the
/// other rank writes.
pub(super) trait Raw {
    /// The library's name for the link.
    fn name(&self) -> String;

    /// Whether this end sends first.
    fn is_first(&self) -> bool;

    /// Puts that were sent, and puts of the other rank that arrived.
    fn seen(&self) -> Seen;

    /// Posts a small put; false if the queue is full.
    fn put_small(&mut self) -> Result<bool>;

    /// Posts the large put of a slot; false if the queue is full.
    fn put_large(&mut self, slot: usize) -> Result<bool>;

    /// Polls completions.
    fn drive(&mut self) -> Result<()>;
}

/// The completions on one end so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    /// Puts of this rank whose sources may be used again; of a bare link, large ones alone.
    pub(super) done: u64,
    /// Puts of the other rank that arrived.
    pub(super) arrived: u64,
}

/// Opens the bare link under the transport that a config names. Collective.
pub(super) fn open(world: &World, choice: &ComponentChoice) -> Result<Box<dyn Raw>> {
    let table = choice.table.text();
    match choice.name.as_str() {
        "libfabric" => Ok(Box::new(fabric::Fabric::open(world, &fabric::provider(table)?)?)),
        "efa" => Ok(Box::new(fabric::Fabric::open(world, "efa")?)),
        "verbs" => Ok(Box::new(verbs::Verbs::open(world, table)?)),
        other => bail!(
            "found transport `{other}`; expected `libfabric`, `efa` or `verbs`, whose bare link can \
             be measured"
        ),
    }
}

/// Small puts in round trips; returns the total time.
pub(super) fn ping(link: &mut dyn Raw, pings: u32) -> Result<Duration> {
    let start = Instant::now();
    for _ in 0..pings {
        let wanted = link.seen().arrived + 1;
        if link.is_first() {
            post(link, |link| link.put_small())?;
        }
        wait(link, |seen| seen.arrived >= wanted)?;
        if !link.is_first() {
            post(link, |link| link.put_small())?;
        }
    }
    Ok(start.elapsed())
}

/// Large puts in both directions at once; returns the time until all have arrived on both ranks.
pub(super) fn stream(link: &mut dyn Raw, puts: u32) -> Result<Duration> {
    let start = Instant::now();
    let Seen { done, arrived } = link.seen();
    let puts = u64::from(puts);
    for index in 0..puts {
        wait(link, |seen| done + index - seen.done < DEPTH as u64)?;
        post(link, |link| link.put_large(index as usize % DEPTH))?;
    }
    wait(link, |seen| seen.done >= done + puts && seen.arrived >= arrived + puts)?;
    Ok(start.elapsed())
}

fn post(link: &mut dyn Raw, put: impl Fn(&mut dyn Raw) -> Result<bool>) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    while !put(link)? {
        ensure!(Instant::now() < until, "put: the queue was full for {PATIENCE:?}");
        link.drive()?;
    }
    Ok(())
}

pub(super) fn wait(link: &mut dyn Raw, holds: impl Fn(Seen) -> bool) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    let mut looks = 0_u32;
    while !holds(link.seen()) {
        link.drive()?;
        looks = looks.wrapping_add(1);
        if looks.is_multiple_of(1024) {
            ensure!(Instant::now() < until, "nothing came from the other rank in {PATIENCE:?}");
            // Both ranks may share a core.
            std::thread::yield_now();
        }
    }
    Ok(())
}
