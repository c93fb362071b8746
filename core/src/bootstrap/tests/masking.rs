//! Worlds that go on without a rank that was lost, and let it in again.

use super::loss::Puppet;
use super::*;

/// Ranks 0 and 2 of three, and a rank 1 that dies once all have joined; then `body` on both.
fn without_rank_1<T: Send>(body: impl Fn(&Meeting, &World) -> T + Sync) -> Vec<T> {
    let meeting = Meeting::masking();
    let results = on_threads(3, |rank| {
        if rank == 1 {
            Puppet::join(&meeting, 1, 3).die();
            return None;
        }
        let world = meeting.join(rank, 3).unwrap();
        let liveness = world.liveness();
        wait_for("the loss", LATE, || *liveness.state(1) != PeerState::Alive);
        Some(body(&meeting, &world))
    });
    results.into_iter().flatten().collect()
}

#[test]
fn collectives_go_on_without_a_lost_rank() {
    without_rank_1(|_, world| {
        let mine = [world.rank() as u8];
        assert_eq!(world.all_gather("gather", &mine).unwrap(), [vec![0], vec![], vec![2]]);
        let got = world.exchange("exchange", vec![mine.to_vec(); 3]).unwrap();
        assert_eq!(got, [vec![0], vec![], vec![2]]);
        world.agree("agree", &[("hidden".into(), "64".into())]).unwrap();
        world.barrier("barrier").unwrap();
    });
}

#[test]
fn a_barrier_under_way_ends_when_the_missing_rank_is_lost() {
    let meeting = Meeting::masking();
    on_threads(3, |rank| {
        if rank == 1 {
            let mut puppet = Puppet::join(&meeting, 1, 3);
            puppet.live(DEADLINE / 2);
            return puppet.die();
        }
        let world = meeting.join(rank, 3).unwrap();
        world.barrier("without rank 1").unwrap();
        assert_eq!(world.liveness().absent(), [1]);
        // The last to leave ends the world for nobody.
        world.barrier("both still here").unwrap();
    });
}

#[test]
fn a_rank_that_leaves_or_fails_ends_the_collectives_of_nobody_else() {
    for fails in [false, true] {
        let meeting = Meeting::masking();
        on_threads(3, |rank| {
            let world = meeting.join(rank, 3).unwrap();
            world.barrier("all").unwrap();
            if rank == 1 {
                if fails {
                    world.report_failure("out of memory");
                }
                return;
            }
            world.barrier("without rank 1").unwrap();
            world.barrier("both still here").unwrap();
        });
    }
}

#[test]
fn a_lost_rank_comes_back_when_the_others_admit_it() {
    let admitted = |world: &World| {
        let members = world.admit().unwrap();
        assert!((0..3).all(|rank| members.has(rank)));
        let got = members.all_gather("who", &[10 + world.rank() as u8]).unwrap();
        assert_eq!(got, [vec![10], vec![11], vec![12]]);
        world.barrier("done").unwrap();
    };
    without_rank_1(|meeting, world| {
        let members = world.admit().unwrap();
        assert!(!members.has(1), "nobody has come back yet");
        world.barrier("met once without it").unwrap();
        std::thread::scope(|scope| {
            if world.rank() == 0 {
                scope.spawn(|| admitted(&meeting.join(1, 3).unwrap()));
            }
            let liveness = world.liveness();
            wait_for("its wish to come back", LATE, || liveness.waits_to_return(1));
            admitted(world);
            assert!(!liveness.waits_to_return(1));
            assert_eq!(liveness.life(1), 1);
            // It leaves once it has met the others.
            assert!(matches!(liveness.state(1), PeerState::Alive | PeerState::Left));
        });
    });
}

#[test]
fn a_rank_that_comes_back_can_be_lost_again() {
    without_rank_1(|meeting, world| {
        world.admit().unwrap();
        let liveness = world.liveness();
        for life in 1..3 {
            std::thread::scope(|scope| {
                if world.rank() == 0 {
                    scope.spawn(|| Puppet::join(meeting, 1, 3).die());
                }
                wait_for("its wish to come back", LATE, || liveness.waits_to_return(1));
                assert!(world.admit().unwrap().has(1));
            });
            wait_for("its loss", LATE, || *liveness.state(1) != PeerState::Alive);
            assert_eq!(liveness.life(1), life);
            world.barrier("without it again").unwrap();
        }
    });
}

#[test]
fn a_process_that_gives_up_waiting_is_not_let_in() {
    without_rank_1(|meeting, world| {
        let liveness = world.liveness();
        std::thread::scope(|scope| {
            if world.rank() == 0 {
                scope.spawn(|| {
                    let options = WorldOptions { late: DEADLINE, ..meeting.options(1, 3) };
                    // Another lateness than rank 0 has.
                    let error = World::join(options).unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
                    assert!(Puppet::join_within(meeting, (1, 3), DEADLINE).is_none());
                });
            }
            wait_for("its wish to come back", LATE, || liveness.waits_to_return(1));
            wait_for("its end", LATE, || !liveness.waits_to_return(1));
        });
        world.admit().unwrap();
        assert!(!world.admit().unwrap().has(1));
    });
}

#[test]
fn nobody_comes_as_a_rank_that_lives() {
    let meeting = Meeting::masking();
    let done = Gate::new(2);
    on_threads(2, |rank| {
        let _world = meeting.join(rank, 2).unwrap();
        if rank == 0 {
            let second = Puppet::join_within(&meeting, (1, 2), Duration::from_millis(600));
            assert!(second.is_none(), "two processes are rank 1");
        }
        done.wait();
    });
}

#[test]
fn a_stopped_rank_finds_out_that_the_others_went_on_without_it() {
    let meeting = Meeting::masking();
    let given_up = Gate::new(2);
    on_threads(2, |rank| {
        if rank == 0 {
            let world = meeting.join(0, 2).unwrap();
            world.barrier("without rank 1").unwrap();
            given_up.wait();
            return std::thread::sleep(DEADLINE / 2);
        }
        let mut puppet = Puppet::join(&meeting, 1, 2);
        given_up.wait();
        puppet.live(Duration::from_millis(100));
        let error = puppet.liveness.gone("next").unwrap();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(1)));
        assert!(error.to_string().contains("the others go on without it"), "{error}");
    });
}

#[test]
fn the_loss_of_rank_0_ends_the_world_and_says_why() {
    let meeting = Meeting::masking();
    on_threads(3, |rank| {
        if rank == 0 {
            let mut puppet = Puppet::join(&meeting, 0, 3);
            puppet.live(DEADLINE / 2);
            return puppet.die();
        }
        let world = meeting.join(rank, 3).unwrap();
        let error = world.barrier("without rank 0").unwrap_err();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(0)));
        let text = error.to_string();
        assert!(text.contains("all ranks meet there") && text.contains("but rank 0"), "{text}");
    });
}

#[test]
fn a_loss_during_a_bring_up_lets_all_begin_anew_without_the_lost_rank() {
    let meeting = Meeting::masking();
    on_threads(3, |rank| {
        if rank == 1 {
            let mut puppet = Puppet::join(&meeting, 1, 3);
            puppet.live(DEADLINE / 2);
            return puppet.die();
        }
        let world = meeting.join(rank, 3).unwrap();
        let members = world.admit().unwrap();
        assert!(members.has(1));
        // Rank 2 meets the loss on its own, and begins anew while rank 0 is still at this one.
        let error = match rank {
            0 => members.all_gather("first", b"").unwrap_err(),
            _ => Error::new(ErrorKind::Transport, "connect", "rank 1 does not answer"),
        };
        assert!(members.lost_one(&error, LATE), "{error}");
        let members = world.admit().unwrap();
        assert!(!members.has(1) && members.has(0) && members.has(2));
        members.barrier("second").unwrap();
        world.barrier("both still here").unwrap();
    });
}

#[test]
fn an_error_that_no_loss_explains_is_no_reason_to_begin_anew() {
    let meeting = Meeting::masking();
    on_threads(2, |rank| {
        let world = meeting.join(rank, 2).unwrap();
        let members = world.admit().unwrap();
        for kind in [ErrorKind::Config, ErrorKind::Transport] {
            let error = Error::new(kind, "connect", "no");
            assert!(!members.lost_one(&error, Duration::from_millis(50)));
        }
        world.barrier("done").unwrap();
    });
}

#[test]
fn ranks_that_differ_in_what_a_loss_leads_to_do_not_join() {
    let meeting = Meeting::masking();
    on_threads(2, |rank| {
        let mut options = meeting.options(rank, 2);
        options.on_failure = if rank == 0 { OnFailure::Stop } else { OnFailure::Mask };
        let error = World::join(options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        let text = error.to_string();
        assert!(text.contains("found on_failure = \"mask\", rank 0 has \"stop\""), "{text}");
    });
}
