//! Lets processes in: at the start, and where losses are masked, later too.

use std::sync::Arc;
use std::time::Instant;

use super::super::frame::FrameKind;
use super::super::handshake::{Claim, refuse};
use super::super::headway::Begun;
use super::super::link::{ControlLink, Inbox, What};
use super::super::liveness::PeerState;
use super::super::message::{End, Proof, Refusal, encode};
use super::{Difference, Hub, JoinedRank};

impl Hub {
    /// Lets a process in, or sends it the reason of a refusal. A process of this job whose config
    /// differs ends the join for all ranks: the world that the others wait for cannot come about.
    pub(super) fn admit(&mut self, claim: Claim) {
        let Proof { rank, pid, host, .. } = &claim.proof;
        let rank = *rank;
        let name = format!("pid {pid} on {host} at {}", claim.address);
        let difference = self.find_difference(&claim);
        if let Some(why) = difference.as_ref().filter(|_| !self.started) {
            let text = format!("rank {rank} ({name}) differs: {why}");
            self.difference.get_or_insert_with(|| Difference { rank, text, since: Instant::now() });
        }
        let refusal = match difference {
            Some(why) => Some((Refusal::Claim, why)),
            None => self.judge(&claim, &name).err(),
        };
        if let Some((refusal, why)) = refusal {
            tracing::warn!("refused {name}: {why}");
            tokio::spawn(async move {
                let mut secured = claim.secured;
                refuse(&mut secured.stream, &mut secured.sealer, refusal, &why).await;
            });
            return;
        }
        let Some(place) = self.peers.get_mut(rank as usize) else { return };
        // Closes the connection of a former life, if there was one.
        *place = None;
        self.links += 1;
        let inbox = Inbox {
            peer: rank,
            link: self.links,
            events: self.event_sender.clone(),
            liveness: Arc::clone(&self.member.liveness),
        };
        let link = ControlLink::start(claim.secured, inbox);
        link.send(FrameKind::Welcome, Arc::default());
        let peer =
            JoinedRank { link, id: self.links, name, begun: Begun::new(), call: String::new() };
        if self.started {
            tracing::info!("rank {rank} ({}) waits to come back", peer.name);
            self.returning.insert(rank, peer);
            self.report_returning(rank, true);
        } else {
            tracing::debug!(rank, "joined: {}", peer.name);
            *place = Some(peer);
        }
    }

    /// Reports to all ranks whether a process waits to come back as `rank`.
    fn report_returning(&mut self, rank: u32, waits: bool) {
        self.rounds.set_returning(rank, waits);
        self.member.liveness.set_waiting(rank, waits);
        let payload = Arc::new(encode(&(rank, waits)));
        for to in 1..self.member.place.ranks {
            self.send(to, FrameKind::Returning, Arc::clone(&payload));
        }
    }

    pub(super) fn stop_returning(&mut self, rank: u32, why: &str) {
        tracing::warn!("rank {rank} does not wait to come back any more: it {why}");
        self.returning.remove(&rank);
        self.report_returning(rank, false);
    }

    /// The difference between the world that a process expects and that of rank 0, if there is one.
    fn find_difference(&self, claim: &Claim) -> Option<String> {
        let ranks = self.member.place.ranks;
        let timing = self.member.timing;
        let mode = (claim.proof.on_failure.name(), self.member.on_failure.name());
        let theirs = (claim.proof.deadline_ms, claim.proof.late_ms);
        let ours = (timing.deadline.as_millis() as u64, timing.late.as_millis() as u64);
        if claim.proof.ranks != ranks {
            return Some(format!(
                "found a world of {} ranks, rank 0 expects {ranks}",
                claim.proof.ranks
            ));
        }
        if mode.0 != mode.1 {
            return Some(format!("found on_failure = {:?}, rank 0 has {:?}", mode.0, mode.1));
        }
        (theirs != ours).then(|| {
            format!(
                "found deadline and lateness of {} and {} ms, rank 0 has {} and {}",
                theirs.0, theirs.1, ours.0, ours.1
            )
        })
    }

    fn judge(&self, claim: &Claim, name: &str) -> std::result::Result<(), (Refusal, String)> {
        let (rank, ranks) = (claim.proof.rank, self.member.place.ranks);
        let two = |holder: &JoinedRank| {
            format!(
                "found two processes that claim rank {rank}: {name}, and before it {}",
                holder.name
            )
        };
        let ended = *self.member.liveness.state(rank) != PeerState::Alive;
        match (self.peers.get(rank as usize), self.returning.get(&rank)) {
            (Some(None), None) if rank != 0 => Ok(()),
            (Some(Some(_)), None) if self.started && ended => Ok(()),
            // The process that holds the rank may be dead already, before rank 0 has noticed.
            (_, Some(holder)) => Err((Refusal::Busy, two(holder))),
            (Some(Some(holder)), None) if self.started => Err((Refusal::Busy, two(holder))),
            (Some(Some(holder)), None) => Err((Refusal::Claim, two(holder))),
            _ => {
                let expected = format!("expected 1 to {}", ranks - 1);
                let why = format!("found a claim of rank {rank} by {name}, {expected}");
                Err((Refusal::Claim, why))
            }
        }
    }

    /// Handles a frame of a process that waits to come back.
    pub(super) fn on_returning(&mut self, rank: u32, what: What) {
        match what {
            What::Closed(why) => self.stop_returning(rank, &why),
            What::Frame(frame) => match frame.kind {
                FrameKind::Heartbeat => {}
                FrameKind::Goodbye | FrameKind::Failed => self.stop_returning(rank, "left"),
                _ => self.stop_returning(rank, "sent a frame before it was let in"),
            },
        }
    }

    /// Ends the ranks that came back, because rank `by` found that no communicator can be opened with
    /// them.
    pub(super) fn refuse_on_trial(&mut self, by: u32, why: &str) {
        for rank in self.rounds.on_trial() {
            let why = format!(
                "came back, and no communicator could be opened with it: rank {by} found: {why}"
            );
            self.depart(rank, End::Lost(why));
        }
    }

    /// Makes a process that waited a rank again.
    pub(super) fn let_in(&mut self, rank: u32) {
        let peer = self.returning.remove(&rank);
        if let (Some(place), Some(peer)) = (self.peers.get_mut(rank as usize), peer) {
            tracing::info!("rank {rank} ({}) came back", peer.name);
            *place = Some(peer);
            self.gave_up.remove(&rank);
            self.member.liveness.returns(rank);
        }
    }
}
