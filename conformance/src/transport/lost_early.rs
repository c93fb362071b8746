//! A peer that is lost before this rank has connected to it.

use anyhow::{Result, ensure};

use super::bring_up::is_a_loss;
use super::lost_peer::{await_loss, processes};
use super::needs::Needs;
use super::patience::{PATIENCE, longest, timed};
use super::rig::Rig;
use super::teams::Teams;
use super::{Body, TransportCase};
use crate::names::{Watch, used_by};
use crate::suite::{Loss, Outcome, Rank};

/// Rank 0 holds the world together.
const VICTIM: u32 = 1;

const EARLY: TransportCase = TransportCase {
    invariants: "INV-6",
    ranks: &[2],
    needs: Needs { teams: Teams::Backwards(1), ..Needs::SMALL },
    ..TransportCase::BARE
};

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "connecting_to_a_killed_peer_ends",
        about: "connect and commit end within the deadline where a peer was killed before, and the survivor's names go",
        body: Body::OwnProcess(|rank, needs| connecting_ends(rank, needs, Loss::Killed)),
        ..EARLY
    },
    TransportCase {
        name: "connecting_to_a_stopped_peer_ends",
        about: "connect and commit end within the deadline where a peer was stopped before",
        body: Body::OwnProcess(|rank, needs| connecting_ends(rank, needs, Loss::Stopped)),
        ..EARLY
    },
];

/// World rank 1, which is peer 0, is lost once rank 0 has its endpoint.
fn connecting_ends(rank: &Rank<'_>, needs: &Needs, loss: Loss) -> Result<Outcome> {
    let mut names = Watch::start();
    let mut rig = Rig::open(rank, needs, PATIENCE)?;
    // The names are of this rank alone: it has not connected.
    names.note([std::process::id()]);
    let endpoints = rig.exchange_endpoints()?;
    let pids = processes(rank)?;
    let theirs = used_by(pids[VICTIM as usize]);
    rank.world.barrier("a rank is lost")?;
    if rank.world.rank() == VICTIM {
        // Its transport stays open.
        std::mem::forget(rig);
        return Ok(Outcome::IsLost(loss));
    }
    await_loss(rank, pids[VICTIM as usize], loss)?;
    // Success is right as well: a transport need not wait for its peers.
    let (connected, took) = timed(|| rig.connect_to(&endpoints));
    // Both connects, and the commit.
    let longest = longest(rank, 3, PATIENCE);
    ensure!(
        took < longest,
        "connect and commit took {took:?} beside a peer that is lost; expected at most {longest:?} (INV-6)"
    );
    if let Some(error) = connected.as_ref().err().and_then(|error| error.downcast_ref()) {
        is_a_loss(error, VICTIM, rank.world.rank())?;
    }
    // The names of the victim may stay: no rank had opened what is behind them when it was lost. A survivor removes
    // its own, also those that it has made since.
    names.note([std::process::id()]);
    names.forget(&theirs);
    drop(rig);
    let mut left = names.left(|| PATIENCE).own;
    left.extend(names.left_files(|_| true));
    ensure!(
        left.is_empty(),
        "after close beside a peer that was lost early: {}; expected no name of this rank",
        left.join(", ")
    );
    Ok(Outcome::Pass)
}
