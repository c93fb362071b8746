//! Worlds that continue without a lost rank, and let it in again.

use std::sync::Arc;

use super::super::control::{Farewell, Member, Timing};
use super::super::rendezvous::NextStep;
use super::super::spoke::{Route, Spoke};
use super::loss::Puppet;
use super::*;

/// Ranks 0 and 2 of three, and a rank 1 that dies once all have joined; then `body` on both.
pub(super) fn without_rank_1<T: Send>(body: impl Fn(&Meeting, &World) -> T + Sync) -> Vec<T> {
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

/// Joins as a rank of three, lives for half a deadline, and then dies.
fn live_and_die(meeting: &Meeting, rank: u32) {
    let mut puppet = Puppet::join(meeting, rank, 3);
    puppet.live(DEADLINE / 2);
    puppet.die();
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
            return live_and_die(&meeting, 1);
        }
        let world = meeting.join(rank, 3).unwrap();
        world.barrier("without rank 1").unwrap();
        assert_eq!(world.liveness().absent(), [1]);
        // The rank that leaves last ends the world for no other rank.
        world.barrier("both still here").unwrap();
    });
}

#[test]
fn a_rank_that_leaves_or_fails_ends_the_collectives_of_no_other_rank() {
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
        let members = world.admit(Ask::First).unwrap();
        assert!((0..3).all(|rank| members.has(rank)));
        let got = members.all_gather("who", &[10 + world.rank() as u8]).unwrap();
        assert_eq!(got, [vec![10], vec![11], vec![12]]);
        world.barrier("done").unwrap();
    };
    without_rank_1(|meeting, world| {
        assert!(world.admit(Ask::First).unwrap().has(1), "all had joined");
        assert!(!world.admit(Ask::Again).unwrap().has(1), "no rank has come back yet");
        world.barrier("met once without it").unwrap();
        std::thread::scope(|scope| {
            if world.rank() == 0 {
                scope.spawn(|| admitted(&meeting.join(1, 3).unwrap()));
            }
            let liveness = world.liveness();
            wait_for("its wish to come back", LATE, || liveness.waits_to_return(1));
            admitted(world);
            assert!(!liveness.waits_to_return(1));
            // It may have left by now.
            assert_eq!(liveness.life(1), 1);
        });
    });
}

#[test]
fn a_rank_that_comes_back_can_be_lost_again() {
    without_rank_1(|meeting, world| {
        world.admit(Ask::First).unwrap();
        let liveness = world.liveness();
        for life in 1..3 {
            std::thread::scope(|scope| {
                if world.rank() == 0 {
                    scope.spawn(|| Puppet::join(meeting, 1, 3).die());
                }
                wait_for("its wish to come back", LATE, || liveness.waits_to_return(1));
                assert!(world.admit(Ask::First).unwrap().has(1));
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
                    // A lateness that differs from that of rank 0.
                    let error = World::join(options).unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
                    assert!(Puppet::join_within(meeting, 1, 3, DEADLINE).is_none());
                });
            }
            wait_for("its wish to come back", LATE, || liveness.waits_to_return(1));
            wait_for("its end", LATE, || !liveness.waits_to_return(1));
        });
        world.admit(Ask::First).unwrap();
        assert!(!world.admit(Ask::First).unwrap().has(1));
    });
}

#[test]
fn no_process_comes_as_a_rank_that_lives() {
    let meeting = Meeting::masking();
    let done = Gate::new(2);
    on_threads(2, |rank| {
        let _world = meeting.join(rank, 2).unwrap();
        if rank == 0 {
            let error = meeting.join(1, 2).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Deadline);
            let error = format!("{error:?}");
            assert!(error.contains("two processes that claim rank 1"), "{error}");
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
            return live_and_die(&meeting, 0);
        }
        let world = meeting.join(rank, 3).unwrap();
        let error = world.barrier("without rank 0").unwrap_err();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(0)));
        let text = error.to_string();
        assert!(text.contains("all ranks meet there") && text.contains("but rank 0"), "{text}");
    });
}

/// Joins, and declares rank 0 lost at once.
fn give_up_on_rank_0(meeting: &Meeting, rank: u32, ranks: u32) {
    let place = RankId { rank, ranks, local_rank: rank };
    let (on_failure, timing) = (meeting.on_failure, Timing { deadline: DEADLINE, late: LATE });
    let liveness = Arc::new(Liveness::new(rank, ranks, on_failure));
    let member = Member::new(place, timing, on_failure, liveness);
    let NextStep::Spoke { target, credentials, local } = meeting.enter(place) else {
        panic!("it is rank 0")
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let route = Route { target, local };
        let mut spoke = Spoke::join(member, &route, credentials).await.unwrap();
        spoke.lose_hub("was silent".into());
        spoke.leave(Farewell::Goodbye).await;
    });
}

#[test]
fn a_rank_0_that_was_stopped_and_given_up_does_not_go_on_alone() {
    for ranks in [2, 3, 4] {
        let meeting = Meeting::masking();
        let (joined, given_up) = (AtomicU32::new(1), Gate::new(ranks));
        on_threads(ranks, |rank| {
            if rank > 0 {
                let world = meeting.join(rank, ranks).unwrap();
                joined.fetch_add(1, Ordering::SeqCst);
                let error = world.barrier("without rank 0").unwrap_err();
                assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(0)));
                return given_up.wait();
            }
            let mut puppet = Puppet::join(&meeting, 0, ranks);
            wait_for("the join of all", LATE, || {
                puppet.live(Duration::from_millis(10));
                joined.load(Ordering::SeqCst) == ranks
            });
            given_up.wait();
            wait_for("its end", LATE, || {
                puppet.live(Duration::from_millis(10));
                puppet.liveness.gone("next").is_some()
            });
            let error = puppet.liveness.gone("next").unwrap();
            assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(0)));
            assert!(error.to_string().contains("rank 0, this one, was declared lost"), "{error}");
        });
    }
}

#[test]
fn a_rank_0_that_hears_none_of_several_ranks_ends_the_world() {
    let meeting = Meeting::masking();
    let (joined, done) = (AtomicU32::new(0), Gate::new(3));
    on_threads(3, |rank| {
        if rank > 0 {
            let mut puppet = Puppet::join(&meeting, rank, 3);
            joined.fetch_add(1, Ordering::SeqCst);
            // They fall silent together.
            wait_for("the join of all", LATE, || {
                puppet.live(Duration::from_millis(10));
                joined.load(Ordering::SeqCst) == 3
            });
            done.wait();
            return drop(puppet);
        }
        let world = meeting.join(0, 3).unwrap();
        joined.fetch_add(1, Ordering::SeqCst);
        let error = world.barrier("alone").unwrap_err();
        done.wait();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(0)));
        assert!(error.to_string().contains("has received nothing from any rank for"), "{error}");
    });
}

#[test]
fn one_rank_of_several_that_hears_rank_0_no_more_is_lost_like_any_other() {
    let meeting = Meeting::masking();
    on_threads(4, |rank| {
        if rank == 1 {
            return give_up_on_rank_0(&meeting, 1, 4);
        }
        let world = meeting.join(rank, 4).unwrap();
        world.barrier("without rank 1").unwrap();
        assert_eq!(world.liveness().absent(), [1]);
        world.barrier("all still here").unwrap();
    });
}

#[test]
fn a_loss_during_a_bring_up_lets_all_begin_anew_without_the_lost_rank() {
    let meeting = Meeting::masking();
    on_threads(3, |rank| {
        if rank == 1 {
            return live_and_die(&meeting, 1);
        }
        let world = meeting.join(rank, 3).unwrap();
        let members = world.admit(Ask::First).unwrap();
        assert!(members.has(1));
        // Rank 2 alone meets the loss, and starts again while rank 0 is still in this bring-up.
        let error = match rank {
            0 => members.all_gather("first", b"").unwrap_err(),
            _ => Error::new(ErrorKind::Transport, "connect", "rank 1 does not answer"),
        };
        let next = members.after(&error, LATE);
        assert!(matches!(next, Next::Anew(Ask::Again)), "{error}: {next:?}");
        let members = world.admit(Ask::First).unwrap();
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
        let members = world.admit(Ask::First).unwrap();
        for kind in [ErrorKind::Config, ErrorKind::Transport] {
            let error = Error::new(kind, "connect", "no");
            let next = members.after(&error, Duration::from_millis(50));
            assert!(matches!(next, Next::Refuse), "{next:?}");
        }
        world.barrier("done").unwrap();
    });
}

/// Agrees once with others, as a bring-up does. Returns the number of the communicator, equal on all
/// ranks.
fn bring_up_with(
    world: &World,
    hidden: &str,
    ask: Ask,
) -> std::result::Result<(u64, Vec<u32>), Next> {
    let members = world.admit(ask).unwrap();
    let there = (0..3).filter(|rank| members.has(*rank)).collect();
    match members.agree("communicator", &[("hidden".into(), hidden.into())]) {
        Ok(number) => Ok((number, there)),
        Err(error) => Err(members.after(&error, LATE)),
    }
}

#[test]
fn a_rank_lost_between_the_join_and_the_first_communicator_is_a_member_to_all_until_it_is_found_out()
 {
    let meeting = Meeting::masking();
    let (died, begun) = (Gate::new(3), Gate::new(2));
    on_threads(3, |rank| {
        if rank == 1 {
            let puppet = Puppet::join(&meeting, 1, 3);
            died.wait();
            return puppet.die();
        }
        let world = meeting.join(rank, 3).unwrap();
        let liveness = world.liveness();
        // Rank 2 begins before the loss and rank 0 after it.
        let early = (rank == 2).then(|| world.admit(Ask::First).unwrap());
        died.wait();
        wait_for("the loss", LATE, || *liveness.state(1) != PeerState::Alive);
        let members = early.unwrap_or_else(|| world.admit(Ask::First).unwrap());
        assert!(members.has(1), "the join reported that all are there");
        begun.wait();
        let error = members.agree("communicator", &[]).unwrap_err();
        assert!(matches!(members.after(&error, LATE), Next::Anew(Ask::Again)), "{error}");
        assert_eq!(bring_up_with(&world, "64", Ask::Again).unwrap().1, [0, 2]);
        world.barrier("both still here").unwrap();
    });
}

#[test]
fn the_word_of_rank_0_that_another_begins_anew_is_enough_to_do_so() {
    let meeting = Meeting::masking();
    on_threads(2, |rank| {
        let world = meeting.join(rank, 2).unwrap();
        let members = world.admit(Ask::First).unwrap();
        if rank == 1 {
            drop(world.admit(Ask::Again).unwrap());
        } else {
            let error = members.all_gather("first", b"").unwrap_err();
            // No rank has ended.
            assert!(matches!(members.after(&error, LATE), Next::Anew(Ask::Again)), "{error}");
            drop(world.admit(Ask::Again).unwrap());
        }
        world.barrier("both still here").unwrap();
    });
}

#[test]
fn all_know_a_communicator_by_one_number_also_who_came_back() {
    without_rank_1(|meeting, world| {
        let (first, there) = bring_up_with(world, "64", Ask::First)
            .unwrap_or_else(|_| bring_up_with(world, "64", Ask::Again).unwrap());
        assert_eq!(there, [0, 2]);
        let numbers = std::sync::Mutex::new(Vec::new());
        let open = |world: &World| {
            let (number, there) = bring_up_with(world, "64", Ask::First).unwrap();
            assert_eq!(there, [0, 1, 2]);
            numbers.lock().unwrap().push(number);
            let headway = world.liveness().headway(number);
            headway.begin(3);
            wait_for("word that all have begun", LATE, || headway.together().is_some());
            world.barrier("all have heard").unwrap();
        };
        std::thread::scope(|scope| {
            if world.rank() == 0 {
                scope.spawn(|| open(&meeting.join(1, 3).unwrap()));
            }
            wait_for("its wish to come back", LATE, || world.liveness().waits_to_return(1));
            open(world);
        });
        let numbers = numbers.into_inner().unwrap();
        assert!(numbers.iter().all(|n| *n == numbers[0] && *n > first), "{first}: {numbers:?}");
    });
}

#[test]
fn a_rank_that_comes_back_and_differs_is_left_out_and_may_come_with_the_next_bring_up() {
    without_rank_1(|meeting, world| {
        let liveness = world.liveness();
        if bring_up_with(world, "64", Ask::First).is_err() {
            bring_up_with(world, "64", Ask::Again).unwrap();
        }
        let come_back = |hidden: &str| {
            let world = meeting.join(1, 3).unwrap();
            match bring_up_with(&world, hidden, Ask::First) {
                Err(Next::Leave) => world.report_failure("it differs"),
                Err(Next::Anew(ask)) => panic!("it goes on: {ask:?}"),
                other => {
                    other.unwrap();
                    world.barrier("all three").unwrap();
                }
            }
        };
        std::thread::scope(|scope| {
            if world.rank() == 0 {
                scope.spawn(|| come_back("65"));
            }
            wait_for("its wish to come back", LATE, || liveness.waits_to_return(1));
            let next = bring_up_with(world, "64", Ask::First).unwrap_err();
            // A rank that learns of the refusal before its own verdict has a lost member to leave out.
            let Next::Anew(ask) = next else { panic!("{next:?}") };
            // Another process asks to come back at once. It has to wait.
            if world.rank() == 0 {
                wait_for("the end of the first", LATE, || *liveness.state(1) != PeerState::Alive);
                scope.spawn(|| come_back("64"));
                wait_for("another wish", LATE, || liveness.waits_to_return(1));
            }
            assert_eq!(bring_up_with(world, "64", ask).unwrap().1, [0, 2]);
            assert_eq!(bring_up_with(world, "64", Ask::First).unwrap().1, [0, 1, 2]);
            world.barrier("all three").unwrap();
        });
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
