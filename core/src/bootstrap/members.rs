//! Who takes part in a bring-up.

use std::time::{Duration, Instant};

use super::liveness::{Liveness, PeerState};
use super::message::{Op, decode_ranks};
use super::world::World;
use crate::config::OnFailure;
use crate::transport::Team;
use crate::{Error, ErrorKind, Result};

/// Lets the others learn of a loss while this rank waits for news of it.
const LOOK: Duration = Duration::from_millis(5);

/// The ranks that are there, each in one of its lives. A yard is brought up by them, and what it knows
/// of the others it knows from here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Membership {
    /// By rank; nothing for a rank that is not there.
    pub(crate) lives: Vec<Option<u32>>,
    /// What the end of a member leads to.
    pub(crate) on_failure: OnFailure,
}

impl Membership {
    fn without(absent: &[u32], liveness: &Liveness, world: &World) -> Self {
        let life = |rank| absent.binary_search(&rank).is_err().then(|| liveness.life(rank));
        Self { lives: (0..world.ranks()).map(life).collect(), on_failure: world.on_failure() }
    }

    /// Members whose life has ended, and how.
    pub(crate) fn ended<'a>(
        &'a self,
        liveness: &'a Liveness,
    ) -> impl Iterator<Item = (u32, &'a super::liveness::Ended)> {
        let members = (0..).zip(&self.lives).filter_map(|(rank, life)| Some((rank, (*life)?)));
        members.filter_map(|(rank, life)| Some((rank, liveness.end_of(rank, life)?)))
    }
}

/// The collectives of a bring-up: they fail once a member is lost, on all ranks, so that all may begin
/// anew without it.
#[derive(Debug)]
pub(crate) struct Members<'a> {
    world: &'a World,
    membership: Membership,
}

impl World {
    /// Agrees on who is there, and lets in those who wait to come back. Collective, unless this is the
    /// first time since this rank joined: the join has said it.
    pub(crate) fn admit(&self) -> Result<Members<'_>> {
        let liveness = self.liveness();
        let absent = match self.on_failure() {
            OnFailure::Stop => Vec::new(),
            OnFailure::Mask if self.take_freshness() => liveness.absent(),
            OnFailure::Mask => self.admit_all(&liveness)?,
        };
        Ok(Members { world: self, membership: Membership::without(&absent, &liveness, self) })
    }

    /// Tries again where another rank was lost meanwhile, or was still in the bring-up before.
    fn admit_all(&self, liveness: &Liveness) -> Result<Vec<u32>> {
        loop {
            match self.call(Op::Admit, "bring up yard", Vec::new()) {
                Ok(items) => return decode_ranks(items.get(1).map_or(&[], Vec::as_slice)),
                Err(error) if error.kind() == ErrorKind::PeerLost => {
                    if liveness.gone("admit").is_some() {
                        return Err(error);
                    }
                    tracing::debug!("admitting again: {error}");
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl Members<'_> {
    pub(crate) fn rank(&self) -> u32 {
        self.world.rank()
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.world.ranks()
    }

    pub(crate) fn local_rank(&self) -> u32 {
        self.world.local_rank()
    }

    pub(crate) fn membership(&self) -> &Membership {
        &self.membership
    }

    /// All that are there.
    pub(crate) fn team(&self) -> Team {
        let world_ranks: Vec<u32> = (0..self.ranks()).filter(|rank| self.has(*rank)).collect();
        let me = world_ranks.partition_point(|rank| *rank < self.rank()) as u32;
        Team { me, world_ranks }
    }

    /// Whether a rank is there.
    pub(crate) fn has(&self, rank: u32) -> bool {
        self.membership.lives.get(rank as usize).is_some_and(Option::is_some)
    }

    /// As [`World::all_gather`]; empty for a rank that is not there.
    pub(crate) fn all_gather(&self, topic: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let all = self.world.all_gather(topic, mine)?;
        self.check().map(|()| all)
    }

    /// As [`World::exchange`]; empty from a rank that is not there.
    pub(crate) fn exchange(&self, topic: &str, outgoing: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        let all = self.world.exchange(topic, outgoing)?;
        self.check().map(|()| all)
    }

    /// As [`World::agree`].
    pub(crate) fn agree(&self, topic: &str, items: &[(String, String)]) -> Result<()> {
        self.world.agree(topic, items)?;
        self.check()
    }

    /// Fails on no rank that another passes, so it ends a bring-up: a member that is lost meanwhile is
    /// lost to the yard, like one that is lost later.
    pub(crate) fn barrier(&self, topic: &str) -> Result<()> {
        self.world.barrier(topic)
    }

    fn check(&self) -> Result<()> {
        if self.membership.on_failure == OnFailure::Stop {
            // The next collective fails. This one did not, on any rank.
            return Ok(());
        }
        let liveness = self.world.liveness();
        let Some((rank, ended)) = self.membership.ended(&liveness).next() else { return Ok(()) };
        let what = match &ended.state {
            PeerState::Lost { why } => why,
            _ => "left the world",
        };
        let message = format!("rank {rank} {what} while the yard was brought up");
        Err(Error::new(ErrorKind::PeerLost, "bring up yard", message).with_rank(rank))
    }

    /// Whether a failure of the bring-up is owed to the loss of a member, so that the others can try
    /// again without it. What touches a rank that dies may fail before its loss is known: this waits
    /// for such news, for `deadline` at most.
    pub(crate) fn lost_one(&self, error: &Error, deadline: Duration) -> bool {
        let may_be = matches!(
            error.kind(),
            ErrorKind::PeerLost | ErrorKind::Deadline | ErrorKind::Transport | ErrorKind::System
        );
        if !may_be || self.membership.on_failure == OnFailure::Stop {
            return false;
        }
        let (start, liveness) = (Instant::now(), self.world.liveness());
        while liveness.gone("bring up yard").is_none() {
            if self.membership.ended(&liveness).next().is_some() {
                return true;
            }
            if start.elapsed() > deadline {
                return false;
            }
            std::thread::sleep(LOOK);
        }
        false
    }
}
