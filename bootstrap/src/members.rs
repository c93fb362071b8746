//! The ranks that take part in a bring-up.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::liveness::{Liveness, PeerState};
use super::message::{Admitted, Ask, Op, Start, encode};
use super::world::World;
use crate::config::OnFailure;
use tokenyard_errors::{Error, ErrorKind, Result};

/// The interval at which a rank checks for news of a loss.
const LOOK: Duration = Duration::from_millis(5);

/// The ranks that are present, each in one of its lives. They open a communicator, and this is the
/// communicator's source on the state of its ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The present life of each rank; nothing for an absent rank.
    pub lives: Vec<Option<u32>>,
    /// The consequence of the end of a member.
    pub on_failure: OnFailure,
}

impl Membership {
    fn without(absent: &[u32], liveness: &Liveness, world: &World) -> Self {
        let life = |rank| absent.binary_search(&rank).is_err().then(|| liveness.life(rank));
        Self { lives: (0..world.ranks()).map(life).collect(), on_failure: world.on_failure() }
    }

    /// Members whose life has ended, each with its end.
    pub fn ended<'a>(
        &'a self,
        liveness: &'a Liveness,
    ) -> impl Iterator<Item = (u32, &'a super::liveness::Ended)> {
        let members = (0..).zip(&self.lives).filter_map(|(rank, life)| Some((rank, (*life)?)));
        members.filter_map(|(rank, life)| Some((rank, liveness.end_of(rank, life)?)))
    }
}

/// The collectives of a bring-up: once a member is lost they fail on all ranks, so that all may start
/// again without it.
#[derive(Debug)]
pub struct Members<'a> {
    world: &'a World,
    membership: Membership,
    /// Ranks that came back since the bring-up began.
    on_trial: Vec<u32>,
    /// True once another rank has started again.
    anew: Cell<bool>,
    /// True once a collective has failed, which it does on all ranks.
    all_know: Cell<bool>,
}

/// The next step after a failed bring-up.
#[derive(Debug)]
pub enum Next {
    /// All ranks try again, with [`World::admit`] of this value.
    Anew(Ask),
    /// The bring-up ends with the error, which every rank has.
    End,
    /// The bring-up ends, and the other ranks do not know it yet: [`Members::refuse`] tells them.
    Refuse,
    /// The others go on without this rank, which came back: it leaves the world.
    Leave,
}

impl World {
    /// Agrees on the present ranks, and lets in processes that wait to come back. Collective, except
    /// for the first call after this rank joined: the join has given the same answer to all ranks. The
    /// bring-up detects a rank that was lost since then.
    pub fn admit(&self, ask: Ask) -> Result<Members<'_>> {
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
            all_know: Cell::new(false),
        })
    }

    fn admitted_by(&self, start: &Start) -> Admitted {
        let came_back = start.round > 0;
        let on_trial = came_back.then(|| self.rank()).into_iter().collect();
        Admitted { back: Vec::new(), absent: start.absent.clone(), on_trial }
    }

    /// Tries again where another rank was lost meanwhile, or was still in the previous bring-up.
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
    /// This rank.
    pub fn rank(&self) -> u32 {
        self.world.rank()
    }

    /// Ranks of the world, absent ones too.
    pub fn ranks(&self) -> u32 {
        self.world.ranks()
    }

    /// The index of this process on its machine.
    pub fn machine_index(&self) -> u32 {
        self.world.machine_index()
    }

    /// The present ranks.
    pub fn membership(&self) -> &Membership {
        &self.membership
    }

    /// True if a rank is present.
    pub fn has(&self, rank: u32) -> bool {
        self.membership.lives.get(rank as usize).is_some_and(Option::is_some)
    }

    /// As [`World::all_gather`]; empty for an absent rank.
    pub fn all_gather(&self, topic: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let all = self.met(self.world.all_gather(topic, mine))?;
        self.check().map(|()| all)
    }

    /// As [`World::exchange`]; empty from an absent rank.
    pub fn exchange(&self, topic: &str, outgoing: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        let all = self.met(self.world.exchange(topic, outgoing))?;
        self.check().map(|()| all)
    }

    /// As [`World::agree`]. Returns a number that is the same on all ranks, and differs for each call.
    pub fn agree(&self, topic: &str, items: &[(String, String)]) -> Result<u64> {
        let round = self.met(self.world.agree_on(topic, items))?;
        self.check().map(|()| round)
    }

    /// Succeeds on all ranks or fails on all, so it can end a bring-up. A member that is lost meanwhile
    /// counts as lost to the open communicator, like a member that is lost later.
    pub fn barrier(&self, topic: &str) -> Result<()> {
        self.met(self.world.barrier(topic))
    }

    /// Ends the bring-up on all ranks, which are in its next collective or come to it. The world goes on.
    pub fn refuse(&self, error: &Error) {
        self.world.refuse("open communicator", error);
    }

    /// Records that a collective has failed, and the verdict of rank 0 that another rank has started again.
    fn met<T>(&self, result: Result<T>) -> Result<T> {
        let is_lost = |error: &Error| error.kind() == ErrorKind::PeerLost;
        // An argument that this rank alone may not give is no verdict. Where it is one, all ranks refuse alike.
        let is_verdict = |error: &Error| error.kind() != ErrorKind::InvalidInput;
        if result.as_ref().is_err_and(is_verdict) {
            self.all_know.set(true);
        }
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
            // The next collective fails. This collective failed on no rank.
            return Ok(());
        }
        let liveness = self.world.liveness();
        let Some((rank, ended)) = self.membership.ended(&liveness).next() else { return Ok(()) };
        let what = match &ended.state {
            PeerState::Lost { why } => why,
            _ => "left the world",
        };
        let message = format!("rank {rank} {what} during the bring-up of the communicator");
        Err(Error::new(ErrorKind::PeerLost, "bring up communicator", message).with_rank(rank))
    }

    /// The next step after a failure of the bring-up. A lost member is left out, and so are ranks that
    /// came back, because the other ranks worked before. Each rank comes back at most once in a
    /// bring-up, so the repetition ends.
    pub fn after(&self, error: &Error, deadline: Duration) -> Next {
        if self.lost_one(error, deadline) {
            return Next::Anew(Ask::Again);
        }
        let came_back = self.on_trial.contains(&self.rank());
        if !self.on_trial.is_empty() && !came_back && !self.is_over() {
            return Next::Anew(Ask::Without(error.detail()));
        }
        match (came_back, self.all_know.get()) {
            (true, _) => Next::Leave,
            (false, true) => Next::End,
            (false, false) => Next::Refuse,
        }
    }

    fn is_over(&self) -> bool {
        self.world.liveness().gone("bring up communicator").is_some()
    }

    /// True if the loss of a member caused a failure of the bring-up, so that the others can try again
    /// without it. A call that involves a dying rank may fail before its loss is known: this function
    /// waits for such news, for `deadline` at most.
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
