//! A peer that is lost before this rank has connected to it.

use anyhow::{Result, ensure};

use super::errors::{has_status, is_about};
use super::lost_peer::{await_loss, processes};
use super::needs::Needs;
use super::patience::{PATIENCE, longest, timed};
use super::rig::Rig;
use super::teams::Teams;
use super::{Body, TransportCase};
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
        about: "connect and commit end within the deadline where a peer was killed before",
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
    let mut rig = Rig::open(rank, needs, PATIENCE)?;
    let endpoints = rig.exchange_endpoints()?;
    let pids = processes(rank)?;
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
        has_status(error)?;
        is_about(error, VICTIM)?;
    }
    Ok(Outcome::Pass)
}
