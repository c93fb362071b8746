//! Who takes part in a bring-up.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::liveness::{Liveness, PeerState};
use super::message::{Admitted, Ask, Op, Start, encode};
use super::world::World;
use crate::config::OnFailure;
use crate::transport::Team;
use crate::{Error, ErrorKind, Result};

/// Lets the others learn of a loss while this rank waits for news of it.
const LOOK: Duration = Duration::from_millis(5);

/// The ranks that are there, each in one of its lives. A communicator is brought up by them, and what it knows
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
    /// Ranks that came back since the bring-up began.
    on_trial: Vec<u32>,
    /// Whether another rank has begun anew.
    anew: Cell<bool>,
}

/// How a bring-up goes on that failed.
#[derive(Debug)]
pub(crate) enum Next {
    /// All try again: so says [`World::admit`] of this.
    Anew(Ask),
    /// It does not. The others have to be told where they cannot know.
    End {
        /// Whether they have to be told.
        tell: bool,
    },
}

impl World {
    /// Agrees on who is there, and lets in those who wait to come back. Collective, unless this is the
    /// first time since this rank joined: the join has said it, and to all the same. A rank that was
    /// lost since then is found out by the bring-up.
    pub(crate) fn admit(&self, ask: Ask) -> Result<Members<'_>> {
        let liveness = self.liveness();
        let admitted = match self.on_failure() {
            OnFailure::Stop => Admitted::default(),
            OnFailure::Mask => match self.take_start() {
                Some(start) => self.admitted_by(start),
                None => self.admit_all(&liveness, &ask)?,
            },
        };
        Ok(Members {
            world: self,
            membership: Membership::without(&admitted.absent, &liveness, self),
            on_trial: admitted.on_trial,
            anew: Cell::new(false),
        })
    }

    fn admitted_by(&self, start: &Start) -> Admitted {
        let came_back = start.round > 0;
        let on_trial = came_back.then(|| self.rank()).into_iter().collect();
        Admitted { back: Vec::new(), absent: start.absent.clone(), on_trial }
    }

    /// Tries again where another rank was lost meanwhile, or was still in the bring-up before.
    fn admit_all(&self, liveness: &Liveness, ask: &Ask) -> Result<Admitted> {
        loop {
            match self.call(Op::Admit, "bring up communicator", encode(&ask)) {
                Ok(outcome) => return Admitted::decode(&outcome.items),
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
        Team::new(me, world_ranks)
    }

    /// Whether a rank is there.
    pub(crate) fn has(&self, rank: u32) -> bool {
        self.membership.lives.get(rank as usize).is_some_and(Option::is_some)
    }

    /// As [`World::all_gather`]; empty for a rank that is not there.
    pub(crate) fn all_gather(&self, topic: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let all = self.met(self.world.all_gather(topic, mine))?;
        self.check().map(|()| all)
    }

    /// As [`World::exchange`]; empty from a rank that is not there.
    pub(crate) fn exchange(&self, topic: &str, outgoing: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        let all = self.met(self.world.exchange(topic, outgoing))?;
        self.check().map(|()| all)
    }

    /// As [`World::agree`]. Returns a number that is the same on all ranks, and every time another.
    pub(crate) fn agree(&self, topic: &str, items: &[(String, String)]) -> Result<u64> {
        let round = self.met(self.world.agree_on(topic, items))?;
        self.check().map(|()| round)
    }

    /// Fails on no rank that another passes, so it ends a bring-up: a member that is lost meanwhile is
    /// lost to the communicator, like one that is lost later.
    pub(crate) fn barrier(&self, topic: &str) -> Result<()> {
        self.met(self.world.barrier(topic))
    }

    /// Notes the verdict of rank 0 that another rank has begun anew.
    fn met<T>(&self, result: Result<T>) -> Result<T> {
        let is_lost = |error: &Error| error.kind() == ErrorKind::PeerLost;
        if self.membership.on_failure == OnFailure::Mask
            && result.as_ref().is_err_and(is_lost)
            && !self.is_over()
        {
            self.anew.set(true);
        }
        result
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
        let message = format!("rank {rank} {what} while the communicator was brought up");
        Err(Error::new(ErrorKind::PeerLost, "bring up communicator", message).with_rank(rank))
    }

    /// What a failure of the bring-up leads to. A lost member is left out, and so are ranks that came
    /// back: the others were well before. Each rank comes back once in a bring-up, so this ends.
    pub(crate) fn after(&self, error: &Error, deadline: Duration) -> Next {
        if self.lost_one(error, deadline) {
            return Next::Anew(Ask::Again);
        }
        let came_back = self.on_trial.contains(&self.rank());
        if !self.on_trial.is_empty() && !came_back && !self.is_over() {
            return Next::Anew(Ask::Without(error.detail()));
        }
        // Where all have the same error, all know. But of a rank that came back, all must know that it
        // does not go on.
        let known = matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Mismatch);
        Next::End { tell: came_back || !known }
    }

    fn is_over(&self) -> bool {
        self.world.liveness().gone("bring up communicator").is_some()
    }

    /// Whether a failure of the bring-up is owed to the loss of a member, so that the others can try
    /// again without it. What touches a rank that dies may fail before its loss is known: this waits
    /// for such news, for `deadline` at most.
    pub(super) fn lost_one(&self, error: &Error, deadline: Duration) -> bool {
        let may_be = matches!(
            error.kind(),
            ErrorKind::PeerLost | ErrorKind::Deadline | ErrorKind::Transport | ErrorKind::System
        );
        if !may_be || self.membership.on_failure == OnFailure::Stop {
            return false;
        }
        let (start, liveness) = (Instant::now(), self.world.liveness());
        while !self.is_over() {
            if self.anew.get() || self.membership.ended(&liveness).next().is_some() {
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
