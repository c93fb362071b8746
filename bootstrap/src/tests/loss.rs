use std::sync::Arc;

use super::super::control::{Bootstrap, Member, Timing};
use super::super::world::bring_up;
use super::*;

/// A rank whose control thread runs only on request: to the others it looks like a killed or a stopped
/// process.
pub(super) struct Puppet {
    runtime: tokio::runtime::Runtime,
    bootstrap: Bootstrap,
    pub(super) liveness: Arc<Liveness>,
}

impl Puppet {
    pub(super) fn join(meeting: &Meeting, rank: u32, ranks: u32) -> Self {
        Self::join_within(meeting, rank, ranks, LATE).unwrap()
    }

    /// Stops for ever after `limit`.
    pub(super) fn join_within(
        meeting: &Meeting,
        rank: u32,
        ranks: u32,
        limit: Duration,
    ) -> Option<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let place = RankId { rank, ranks, local_rank: rank };
        let on_failure = meeting.on_failure;
        let liveness = Arc::new(Liveness::new(rank, ranks, on_failure));
        let timing = Timing { deadline: DEADLINE, late: LATE };
        let member = Member::new(place, timing, on_failure, Arc::clone(&liveness));
        let joined =
            async { tokio::time::timeout(limit, bring_up(meeting.enter(place), member)).await };
        let bootstrap = runtime.block_on(joined).ok()?.unwrap();
        Some(Self { runtime, bootstrap, liveness })
    }

    /// Closes the sockets as a dying process does.
    pub(super) fn die(self) {
        drop(self.bootstrap);
        self.runtime.shutdown_background();
    }

    pub(super) fn live(&mut self, time: Duration) {
        let lived = async { tokio::time::timeout(time, self.bootstrap.watch()).await };
        let _ = self.runtime.block_on(lived);
    }
}

/// The ranks that waited for another: the error of each, and the time it waited.
type Waits = Vec<(String, Duration)>;

/// All ranks but `victim`, a puppet, wait in a barrier that it never reaches. Returns their errors
/// and how long each waited after `act`.
fn loss_of(victim: u32, act: impl Fn(Puppet) -> Option<Puppet> + Sync) -> Waits {
    let meeting = Meeting::new();
    let acted = std::sync::Mutex::new(None);
    let done = Gate::new(3);
    let results = on_threads(3, |rank| {
        if rank == victim {
            let mut puppet = Puppet::join(&meeting, rank, 3);
            puppet.live(Duration::from_millis(60));
            *acted.lock().unwrap() = Some(Instant::now());
            let left = act(puppet);
            done.wait();
            drop(left);
            return None;
        }
        let world = meeting.join(rank, 3).unwrap();
        let error = world.barrier("step").unwrap_err();
        let waited = acted.lock().unwrap().unwrap().elapsed();
        done.wait();
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        let liveness = world.liveness();
        let loss = liveness.first_loss().unwrap();
        assert_eq!(loss.rank, victim);
        assert_eq!(liveness.state(victim), &PeerState::Lost { why: loss.why.clone() });
        // Another rank may have left by now, but no rank may report it lost.
        for other in (0..3).filter(|other| *other != victim) {
            assert!(!matches!(liveness.state(other), PeerState::Lost { .. }));
        }
        // Every later collective fails with the same error at once.
        assert_eq!(world.all_gather("next", b"").unwrap_err().message(), error.message());
        Some((error.to_string(), waited))
    });
    results.into_iter().flatten().collect()
}

#[test]
fn a_killed_rank_is_known_to_all_at_once() {
    for victim in [0, 2] {
        let killed = |puppet: Puppet| {
            puppet.die();
            None
        };
        for (text, waited) in loss_of(victim, killed) {
            assert!(text.contains(&format!("rank {victim} closed its connection")), "{text}");
            assert!(waited < LATE, "{waited:?}");
        }
    }
}

#[test]
fn a_stopped_rank_is_known_to_all_after_the_deadline() {
    for victim in [0, 2] {
        for (text, waited) in loss_of(victim, Some) {
            assert!(text.contains(&format!("rank {victim} was silent for")), "{text}");
            // Silence counts from the last heartbeat, which a busy machine may have delayed.
            assert!(waited >= DEADLINE / 2, "{waited:?}");
            assert!(waited < DEADLINE + LATE, "{waited:?}");
        }
    }
}

#[test]
fn a_rank_0_that_hears_no_rank_says_that_it_may_be_cut_off_itself() {
    let meeting = Meeting::new();
    let done = Gate::new(3);
    on_threads(3, |rank| {
        if rank != 0 {
            let puppet = Puppet::join(&meeting, rank, 3);
            done.wait();
            return drop(puppet);
        }
        let world = meeting.join(0, 3).unwrap();
        let text = world.barrier("step").unwrap_err().to_string();
        done.wait();
        assert!(
            text.contains("cut off from rank 0; so is every other rank, so it may be"),
            "{text}"
        );
    });
}

#[test]
fn a_rank_that_is_killed_while_others_are_awaited_ends_the_join() {
    let meeting = Meeting::new();
    on_threads(2, |rank| {
        if rank == 0 {
            let error = meeting.join(0, 3).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PeerLost);
            assert!(error.message().contains("rank 1 closed its connection"), "{error}");
        } else {
            // On a busy machine rank 0 is late: a rank that stops before it has connected is no loss.
            wait_for("rank 0", LATE, || files_in(meeting.folder.path()) > 0);
            let joined = Puppet::join_within(&meeting, 1, 3, Duration::from_secs(1));
            assert!(joined.is_none());
        }
    });
    assert_eq!(files_in(meeting.folder.path()), 0);
}

#[test]
fn a_rank_that_was_stopped_learns_that_it_is_given_up() {
    let meeting = Meeting::new();
    on_threads(2, |rank| {
        if rank == 0 {
            let world = meeting.join(0, 2).unwrap();
            wait_for("the loss", LATE, || world.liveness().first_loss().is_some());
            return;
        }
        let mut puppet = Puppet::join(&meeting, 1, 2);
        std::thread::sleep(2 * DEADLINE);
        puppet.live(Duration::from_millis(100));
        let loss = puppet.liveness.first_loss().unwrap();
        assert!(loss.rank == 1 && loss.why.contains("reported by rank 0"), "{loss:?}");
    });
}

#[test]
fn the_silence_of_a_quiet_rank_reaches_the_others() {
    let meeting = Meeting::new();
    on_threads(3, |rank| {
        if rank == 2 {
            let puppet = Puppet::join(&meeting, 2, 3);
            std::thread::sleep(2 * DEADLINE);
            return drop(puppet);
        }
        let world = meeting.join(rank, 3).unwrap();
        let liveness = world.liveness();
        wait_for("silence", LATE, || liveness.silence(2) > DEADLINE / 2);
        assert!(liveness.silence(1 - rank) < DEADLINE / 2);
        wait_for("loss", LATE, || liveness.first_loss().is_some());
    });
}

#[test]
fn the_failure_of_rank_0_is_known_to_the_others() {
    let meeting = Meeting::new();
    let joined = Gate::new(3);
    on_threads(3, |rank| {
        let world = meeting.join(rank, 3).unwrap();
        joined.wait();
        if rank == 0 {
            return world.report_failure("out of memory");
        }
        let error = world.barrier("step").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert!(error.message().contains("rank 0 failed: out of memory"), "{error}");
    });
}

#[test]
fn a_reported_failure_reaches_every_rank_and_ends_the_reporters_own_calls() {
    let meeting = Meeting::new();
    let joined = Gate::new(3);
    on_threads(3, |rank| {
        let world = meeting.join(rank, 3).unwrap();
        joined.wait();
        if rank == 2 {
            std::thread::scope(|scope| {
                let call = scope.spawn(|| world.barrier("step"));
                std::thread::sleep(Duration::from_millis(50));
                let started = Instant::now();
                world.report_failure(&format!("bad\n{}", "x".repeat(2000)));
                assert!(started.elapsed() < LATE);
                assert_eq!(call.join().unwrap().unwrap_err().kind(), ErrorKind::PeerLost);
            });
            let error = world.barrier("later").unwrap_err();
            assert!(error.message().contains("rank 2 failed: bad?xxx"), "{error}");
            return;
        }
        if rank == 1 {
            let liveness = world.liveness();
            wait_for("the failure", LATE, || liveness.first_loss().is_some());
        }
        let error = world.barrier("step").unwrap_err();
        assert!(error.message().contains("rank 2 failed: bad?xxx"), "{error}");
        assert!(error.message().len() < MAX_REASON + 64);
    });
}

#[test]
fn a_goodbye_is_no_loss_but_ends_the_collectives() {
    let meeting = Meeting::new();
    on_threads(3, |rank| {
        let world = meeting.join(rank, 3).unwrap();
        world.barrier("all").unwrap();
        if rank == 1 {
            return world.leave();
        }
        let liveness = world.liveness();
        wait_for("the goodbye", LATE, || liveness.state(1) == &PeerState::Left);
        let error = world.barrier("without rank 1").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert!(error.message().contains("rank 1 left"), "{error}");
        assert_eq!(liveness.first_loss(), None);
    });
}

#[test]
fn ranks_may_leave_in_any_order_without_a_loss() {
    for first in [0, 1] {
        let meeting = Meeting::new();
        on_threads(3, |rank| {
            let world = meeting.join(rank, 3).unwrap();
            world.barrier("done").unwrap();
            let liveness = world.liveness();
            if rank != first {
                std::thread::sleep(Duration::from_millis(100));
            }
            let started = Instant::now();
            drop(world);
            assert!(started.elapsed() < LATE);
            assert_eq!(liveness.first_loss(), None);
        });
    }
}

#[test]
fn an_idle_world_lives_much_longer_than_its_deadline() {
    in_world(3, |world| {
        std::thread::sleep(3 * DEADLINE);
        world.barrier("awake").unwrap();
        // A busy machine delays heartbeats; they come.
        let heard = || (0..3).all(|rank| world.liveness().silence(rank) < DEADLINE / 2);
        wait_for("heartbeats of all ranks", LATE, heard);
    });
}
