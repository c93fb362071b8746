//! The collectives from the view of rank 0: the ranks that contributed, the missing ranks, the result
//! for each.
//!
//! No input or output happens here. Collective number n of every rank is round n. Ranks may be in different
//! rounds only after a failed round: the verdict goes at once to the ranks that have arrived, and to the
//! others when they arrive.
//!
//! Where losses are masked, rounds continue without ranks that ended, and an *admit* round lets in
//! processes that wait to come back: they begin with the round after it.

mod round;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::frame::FrameKind;
use super::message::{Admitted, Contribution, Op, Start, encode, encode_outcome};
use super::text::name_ranks;
use round::{Parts, Round, refuse};
use tokenyard_errors::{ErrorKind, Result};

/// The result for one rank. Ranks with the same result share the payload.
pub(super) struct Delivery {
    pub(super) rank: u32,
    /// [`FrameKind::Outcome`] or [`FrameKind::Verdict`]; [`FrameKind::Start`] to a rank that comes back.
    pub(super) kind: FrameKind,
    pub(super) payload: Arc<Vec<u8>>,
}

/// All rounds that are under way.
pub(super) struct Rounds {
    late: Duration,
    ranks: Vec<RankProgress>,
    open: BTreeMap<u64, Round>,
}

/// The progress of one rank.
#[derive(Clone, Default)]
struct RankProgress {
    next: u64,
    waits: bool,
    /// It ended: nothing is expected of it.
    gone: bool,
    /// A process waits to come back as it.
    returning: bool,
    /// It came back since the bring-up began.
    on_trial: bool,
    /// It came back since the bring-up began, and ended: it may come back with the next bring-up.
    barred: bool,
}

impl Rounds {
    pub(super) fn new(ranks: u32, late: Duration) -> Self {
        Self { late, ranks: vec![RankProgress::default(); ranks as usize], open: BTreeMap::new() }
    }

    /// Adds the contribution of `rank`, and returns all results that are due now.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] when a working rank could not have sent this; nothing is changed.
    pub(super) fn contribute(
        &mut self,
        rank: u32,
        part: Contribution,
        now: Instant,
    ) -> Result<Vec<Delivery>> {
        let count = self.ranks.len();
        let number = part.round;
        let Some(progress) = self.ranks.get_mut(rank as usize) else {
            return Err(refuse(format!("found rank {rank}, expected it below {count}")));
        };
        if progress.waits || progress.next != number {
            let waits = if progress.waits { ", after the last one's result" } else { "" };
            return Err(refuse(format!(
                "found a contribution to collective {number}, expected {}{waits}",
                progress.next
            )));
        }
        let round = self.open.entry(number).or_insert_with(|| Round::new(rank, &part, count, now));
        let (op, topic) = (part.op, part.topic.clone());
        let same = (op, &topic) == (round.op, &round.topic);
        let refusal = (op == Op::Refuse).then(|| part.clone());
        let is_refused = refusal.is_some() || round.refusal.is_some();
        if same
            && !is_refused
            && round.verdict.is_none()
            && let Err(error) = round.add(rank, part.data, count)
        {
            if !round.arrived.contains(&true) {
                self.open.remove(&number);
            }
            return Err(error);
        }
        *progress = RankProgress { next: number + 1, waits: true, ..*progress };
        if let Some(arrived) = round.arrived.get_mut(rank as usize) {
            *arrived = true;
        }
        let due = match (&round.verdict, refusal) {
            (Some(verdict), _) => vec![round.delivery(rank, FrameKind::Verdict, verdict)],
            (None, Some(refusal)) => {
                round.refuse(rank, &refusal);
                Vec::new()
            }
            (None, None) if !same && !is_refused => {
                let text = round.other_topic(rank, op, &topic);
                // An admit means that its rank starts a bring-up again because of a loss.
                let anew = op == Op::Admit || round.op == Op::Admit;
                let kind = if anew { ErrorKind::PeerLost } else { ErrorKind::Mismatch };
                round.fail(number, kind, text)
            }
            (None, None) => Vec::new(),
        };
        Ok(self.settle(number, due))
    }

    /// Continues without `rank`, which ended. Only where losses are masked.
    pub(super) fn leave(&mut self, rank: u32) -> Vec<Delivery> {
        if let Some(progress) = self.ranks.get_mut(rank as usize) {
            let barred = progress.barred || progress.on_trial;
            *progress = RankProgress { gone: true, barred, on_trial: false, ..*progress };
        }
        let open: Vec<u64> = self.open.keys().copied().collect();
        open.into_iter().flat_map(|number| self.settle(number, Vec::new())).collect()
    }

    /// Records whether a process waits to come back as `rank`, which ended.
    pub(super) fn set_returning(&mut self, rank: u32, returning: bool) {
        if let Some(progress) = self.ranks.get_mut(rank as usize) {
            progress.returning = returning;
        }
    }

    /// Ranks that came back since the bring-up began, in order.
    pub(super) fn on_trial(&self) -> Vec<u32> {
        self.ranks_that(|progress| progress.on_trial)
    }

    fn ranks_that(&self, test: impl Fn(&RankProgress) -> bool) -> Vec<u32> {
        (0u32..).zip(&self.ranks).filter(|(_, p)| test(p)).map(|(rank, _)| rank).collect()
    }

    /// Finishes a round if all expected ranks have arrived; adds the results that are then due.
    fn settle(&mut self, number: u64, mut due: Vec<Delivery>) -> Vec<Delivery> {
        let Some(round) = self.open.get_mut(&number) else { return self.released(due) };
        let complete = round.arrived.iter().zip(&self.ranks).all(|(a, rank)| *a || rank.gone);
        if !complete {
            return self.released(due);
        }
        if round.verdict.is_none() {
            due = match round.op {
                Op::Admit if round.refusal.is_none() => self.admit(number),
                _ => round.finish(number),
            };
        }
        self.open.remove(&number);
        self.released(due)
    }

    /// Lets waiting processes in, and reports the returned ranks and the absent ranks to all.
    fn admit(&mut self, number: u64) -> Vec<Delivery> {
        let Some(round) = self.open.get(&number) else { return Vec::new() };
        if let Parts::Asks { first: true } = round.parts {
            for progress in &mut self.ranks {
                *progress = RankProgress { on_trial: false, barred: false, ..*progress };
            }
        }
        let comes = |p: &RankProgress| p.gone && p.returning && !p.barred;
        let back = self.ranks_that(comes);
        let absent = self.ranks_that(|p| p.gone && !comes(p));
        for rank in &back {
            if let Some(progress) = self.ranks.get_mut(*rank as usize) {
                *progress =
                    RankProgress { next: number + 1, on_trial: true, ..RankProgress::default() };
            }
        }
        let admitted = Admitted { back, absent, on_trial: self.on_trial() };
        let payload = Arc::new(encode_outcome(number, &[encode(&admitted)]));
        let Admitted { back, absent, .. } = admitted;
        let start = Arc::new(encode(&Start { round: number + 1, absent }));
        let starts = back.iter().map(|rank| Delivery {
            rank: *rank,
            kind: FrameKind::Start,
            payload: Arc::clone(&start),
        });
        let arrived = round.ranks_that(|arrived| arrived);
        let stayed = arrived.into_iter().filter(|rank| !back.contains(rank));
        starts
            .chain(stayed.map(|rank| round.delivery(rank, FrameKind::Outcome, &payload)))
            .collect()
    }

    /// Fails the rounds that have waited for longer than `late`. `processes` describes ranks, as text that follows
    /// their list.
    pub(super) fn expire(
        &mut self,
        now: Instant,
        processes: impl Fn(&[u32]) -> String,
    ) -> Vec<Delivery> {
        let mut due = Vec::new();
        for (number, round) in &mut self.open {
            let waited = now.saturating_duration_since(round.started);
            if round.verdict.is_none() && waited > self.late {
                let missing: Vec<u32> = round.ranks_that(|arrived| !arrived);
                let expected = |rank: &u32| self.ranks.get(*rank as usize).is_some_and(|p| !p.gone);
                let missing: Vec<u32> = missing.into_iter().filter(expected).collect();
                let text = format!(
                    "{:?}: {} did not arrive within {:.1} s, expected all {} ranks{}",
                    round.topic,
                    name_ranks(&missing),
                    self.late.as_secs_f64(),
                    round.arrived.len(),
                    processes(&missing)
                );
                due.extend(round.fail(*number, ErrorKind::Deadline, text));
            }
        }
        self.released(due)
    }

    fn released(&mut self, due: Vec<Delivery>) -> Vec<Delivery> {
        for delivery in &due {
            if let Some(progress) = self.ranks.get_mut(delivery.rank as usize) {
                progress.waits = false;
            }
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::super::frame::MAX_PAYLOAD;
    use super::super::message::{Ask, CollectiveFailure, decode, decode_outcome, encode_items};
    use super::*;

    fn part(round: u64, op: Op, topic: &str, data: &[u8]) -> Contribution {
        Contribution { round, op, topic: topic.into(), data: data.to_vec() }
    }

    fn rounds() -> Rounds {
        Rounds::new(3, Duration::from_secs(1))
    }

    fn verdict(delivery: &Delivery) -> CollectiveFailure {
        assert_eq!(delivery.kind, FrameKind::Verdict);
        decode::<(u64, _)>(&delivery.payload).unwrap().1
    }

    fn to(due: &[Delivery]) -> Vec<u32> {
        due.iter().map(|delivery| delivery.rank).collect()
    }

    #[test]
    fn the_result_of_an_all_gather_is_shared_by_all_ranks() {
        let (mut rounds, now) = (rounds(), Instant::now());
        for rank in [2, 0] {
            assert!(
                rounds
                    .contribute(rank, part(0, Op::AllGather, "t", &[rank as u8]), now)
                    .unwrap()
                    .is_empty()
            );
        }
        let due = rounds.contribute(1, part(0, Op::AllGather, "t", b"one"), now).unwrap();
        assert_eq!(to(&due), [0, 1, 2]);
        assert!(due.iter().all(|delivery| Arc::ptr_eq(&delivery.payload, &due[0].payload)));
        let (round, items) = decode_outcome(&due[0].payload, 3).unwrap();
        assert_eq!((round, items), (0, vec![vec![0], b"one".to_vec(), vec![2]]));
        assert!(rounds.open.is_empty());
    }

    #[test]
    fn another_topic_fails_the_round_at_once_and_for_those_who_come_later() {
        let (mut rounds, now) = (rounds(), Instant::now());
        rounds.contribute(0, part(0, Op::Barrier, "start", b""), now).unwrap();
        let due = rounds.contribute(2, part(0, Op::AllGather, "shape", b"x"), now).unwrap();
        assert_eq!(to(&due), [0, 2]);
        let text = verdict(&due[0]).text;
        assert!(text.contains("rank 0 called barrier(\"start\")"), "{text}");
        assert!(text.contains("rank 2 called all_gather(\"shape\")"), "{text}");
        // Rank 0 continues with its next collective before rank 1 has arrived at this one.
        assert!(rounds.contribute(0, part(1, Op::Barrier, "next", b""), now).unwrap().is_empty());
        let late = rounds.contribute(1, part(0, Op::Barrier, "start", b""), now).unwrap();
        assert_eq!((to(&late), verdict(&late[0])), (vec![1], verdict(&due[0])));
        for rank in [1, 2] {
            rounds.contribute(rank, part(1, Op::Barrier, "next", b""), now).unwrap();
        }
        assert!(rounds.open.is_empty());
    }

    #[test]
    fn a_rank_that_cannot_take_part_fails_the_round_for_all_and_no_other_round() {
        let (mut rounds, now) = (rounds(), Instant::now());
        rounds.contribute(0, part(0, Op::AllGather, "t", b"x"), now).unwrap();
        let refusal = part(0, Op::Refuse, "open communicator", b"found 33\n");
        // No rank may leave before all have the verdict.
        assert!(rounds.contribute(1, refusal, now).unwrap().is_empty());
        // The first refusal counts, and all ranks have the same one.
        let due = rounds.contribute(2, part(0, Op::Refuse, "open", b"found 34"), now).unwrap();
        assert_eq!(to(&due), [0, 1, 2]);
        for delivery in &due {
            let failure = verdict(delivery);
            assert_eq!((failure.kind, failure.rank), (ErrorKind::Refused, Some(1)));
            assert_eq!(failure.text, "rank 1 cannot open communicator: found 33?");
        }
        for rank in 0..3 {
            let due = rounds.contribute(rank, part(1, Op::Barrier, "next", b""), now).unwrap();
            assert!(due.iter().all(|delivery| delivery.kind == FrameKind::Outcome));
        }
        assert!(rounds.open.is_empty());
    }

    #[test]
    fn a_round_that_waits_too_long_names_who_is_missing() {
        let (mut rounds, now) = (rounds(), Instant::now());
        rounds.contribute(1, part(0, Op::Barrier, "start", b""), now).unwrap();
        let processes = |ranks: &[u32]| format!("; processes {ranks:?}");
        assert!(rounds.expire(now + Duration::from_millis(900), processes).is_empty());
        let due = rounds.expire(now + Duration::from_millis(1100), processes);
        assert_eq!(to(&due), [1]);
        let CollectiveFailure { kind, text, .. } = verdict(&due[0]);
        assert_eq!(kind, ErrorKind::Deadline);
        assert!(text.contains("ranks 0, 2 did not arrive within 1.0 s"), "{text}");
        assert!(text.ends_with("expected all 3 ranks; processes [0, 2]"), "{text}");
        assert!(rounds.expire(now + Duration::from_secs(9), processes).is_empty());
    }

    #[test]
    fn what_no_working_rank_sends_is_refused_and_changes_nothing() {
        let (mut rounds, now) = (rounds(), Instant::now());
        let refused = |rounds: &mut Rounds, rank, part| {
            let error = rounds.contribute(rank, part, now).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Protocol);
        };
        refused(&mut rounds, 9, part(0, Op::Barrier, "t", b""));
        refused(&mut rounds, 1, part(4, Op::Barrier, "t", b""));
        refused(&mut rounds, 1, part(0, Op::Barrier, "t", b"not empty"));
        refused(&mut rounds, 1, part(0, Op::Exchange, "t", b"no list"));
        refused(&mut rounds, 1, part(0, Op::Agree, "t", b"no items"));
        rounds.contribute(1, part(0, Op::Exchange, "t", &encode_items(&[b""; 3])), now).unwrap();
        refused(&mut rounds, 1, part(1, Op::Barrier, "ahead", b""));
    }

    #[test]
    fn a_result_beyond_the_limit_is_refused_on_every_rank() {
        let (mut rounds, now) = (rounds(), Instant::now());
        let third = vec![0; MAX_PAYLOAD / 3];
        let mut due = Vec::new();
        for rank in 0..3 {
            due = rounds.contribute(rank, part(0, Op::AllGather, "t", &third), now).unwrap();
        }
        assert_eq!(to(&due), [0, 1, 2]);
        assert_eq!(verdict(&due[2]).kind, ErrorKind::InvalidInput);
    }

    #[test]
    fn a_round_goes_on_without_a_rank_that_ended() {
        let (mut rounds, now) = (rounds(), Instant::now());
        for rank in [0, 2] {
            let data = [rank as u8];
            rounds.contribute(rank, part(0, Op::AllGather, "t", &data), now).unwrap();
        }
        let due = rounds.leave(1);
        let (_, items) = decode_outcome(&due[0].payload, 3).unwrap();
        assert_eq!(items, [vec![0], vec![], vec![2]]);
        assert!(rounds.open.is_empty());
        rounds.contribute(2, part(1, Op::Barrier, "next", b""), now).unwrap();
        let due = rounds.contribute(0, part(1, Op::Barrier, "next", b""), now).unwrap();
        assert!(to(&due).contains(&0) && to(&due).contains(&2));
    }

    #[test]
    fn a_rank_that_waits_comes_back_with_an_admit_round_and_begins_with_the_next() {
        let (mut rounds, now) = (rounds(), Instant::now());
        rounds.leave(1);
        rounds.leave(2);
        rounds.set_returning(1, true);
        let due = rounds.contribute(0, part(0, Op::Admit, "a", &encode(&Ask::First)), now).unwrap();
        assert_eq!(to(&due), [1, 0]);
        assert_eq!(due[0].kind, FrameKind::Start);
        let start: Start = decode(&due[0].payload).unwrap();
        assert_eq!(start, Start { round: 1, absent: vec![2] });
        let (_, items) = decode_outcome(&due[1].payload, 1).unwrap();
        let admitted = Admitted { back: vec![1], absent: vec![2], on_trial: vec![1] };
        assert_eq!(Admitted::decode(&items).unwrap(), admitted);
        assert!(rounds.contribute(0, part(1, Op::Barrier, "b", b""), now).unwrap().is_empty());
        assert!(!rounds.contribute(1, part(1, Op::Barrier, "b", b""), now).unwrap().is_empty());
    }

    #[test]
    fn an_admit_that_meets_another_collective_lets_all_begin_anew() {
        let (mut rounds, now) = (rounds(), Instant::now());
        rounds.contribute(0, part(0, Op::Barrier, "communicator ready", b""), now).unwrap();
        let due = rounds.contribute(2, part(0, Op::Admit, "a", &encode(&Ask::First)), now).unwrap();
        assert_eq!(to(&due), [0, 2]);
        assert_eq!(verdict(&due[0]).kind, ErrorKind::PeerLost);
    }
}
