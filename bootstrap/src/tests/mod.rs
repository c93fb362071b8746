//! Whole worlds, with threads as ranks.

mod collectives;
mod joining;
mod limits;
mod loss;
mod masking;
mod proofs;
mod strangers;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::interface::Local;
use super::rendezvous::{NextStep, enter};
use super::*;
use crate::config::OnFailure;
use tokenyard_errors::{Error, ErrorKind, Result};

/// Long enough that a rank on a busy machine sends within it.
const DEADLINE: Duration = Duration::from_millis(1200);
const LATE: Duration = Duration::from_secs(5);

/// A folder with a place for a rendezvous file.
struct Meeting {
    folder: tempfile::TempDir,
    on_failure: OnFailure,
}

impl Meeting {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), on_failure: OnFailure::Stop }
    }

    fn masking() -> Self {
        Self { on_failure: OnFailure::Mask, ..Self::new() }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("job")
    }

    fn options(&self, rank: u32, ranks: u32) -> WorldOptions {
        let on_failure = self.on_failure;
        WorldOptions { on_failure, ..options(rank, ranks, Rendezvous::File { path: self.path() }) }
    }

    fn enter(&self, place: RankId) -> NextStep {
        let identity = Identity::new(place, Rendezvous::File { path: self.path() }).unwrap();
        enter(identity, Secret::none(), Local::Any, Launched::default()).unwrap().next
    }

    fn join(&self, rank: u32, ranks: u32) -> Result<World> {
        World::join(self.options(rank, ranks))
    }
}

fn options(rank: u32, ranks: u32, rendezvous: Rendezvous) -> WorldOptions {
    let place = RankId { rank, ranks, local_rank: rank };
    let identity = Identity::new(place, rendezvous).unwrap();
    WorldOptions { deadline: DEADLINE, late: LATE, ..WorldOptions::new(identity) }
}

/// Runs `rank` for every rank on a thread of its own, and returns the results.
fn on_threads<T: Send>(ranks: u32, rank: impl Fn(u32) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|r| {
                scope.spawn({
                    let rank = &rank;
                    move || rank(r)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs `body` on every rank of a world of its own.
fn in_world<T: Send>(ranks: u32, body: impl Fn(&World) -> T + Sync) -> Vec<T> {
    let meeting = Meeting::new();
    on_threads(ranks, |rank| body(&meeting.join(rank, ranks).unwrap()))
}

/// A barrier that fails rather than waits for ever when another thread has failed.
struct Gate {
    threads: u32,
    arrived: AtomicU32,
}

impl Gate {
    fn new(threads: u32) -> Self {
        Self { threads, arrived: AtomicU32::new(0) }
    }

    fn wait(&self) {
        self.arrived.fetch_add(1, Ordering::SeqCst);
        let all_here = || self.arrived.load(Ordering::SeqCst) >= self.threads;
        wait_for("the arrival of all threads", 2 * LATE, all_here);
    }
}

fn wait_for(what: &str, limit: Duration, mut test: impl FnMut() -> bool) {
    let started = Instant::now();
    while !test() {
        assert!(started.elapsed() < limit, "{what} did not happen within {limit:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn files_in(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}
