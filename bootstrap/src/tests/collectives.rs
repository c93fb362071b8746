use super::*;

fn pairs(items: &[(&str, &str)]) -> Vec<(String, String)> {
    items.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn every_collective_gives_every_rank_its_result() {
    for ranks in [1, 2, 5] {
        in_world(ranks, |world| {
            let me = world.rank();
            assert_eq!((world.ranks(), world.local_rank()), (ranks, me));
            for round in 0..3u32 {
                let mine = vec![me as u8; (me + round) as usize];
                let gathered = world.all_gather("items", &mine).unwrap();
                let expected: Vec<_> =
                    (0..ranks).map(|r| vec![r as u8; (r + round) as usize]).collect();
                assert_eq!(gathered, expected);

                let outgoing = (0..ranks).map(|to| format!("{me} to {to}, {round}").into_bytes());
                let incoming = world.exchange("letters", outgoing.collect()).unwrap();
                let expected =
                    (0..ranks).map(|from| format!("{from} to {me}, {round}").into_bytes());
                assert_eq!(incoming, expected.collect::<Vec<_>>());

                world.barrier("all here").unwrap();
                world.agree("shape", &pairs(&[("hidden", "7168"), ("topk", "8")])).unwrap();
            }
        });
    }
}

#[test]
fn a_barrier_holds_all_ranks_until_the_last_one_comes() {
    let arrived = AtomicU32::new(0);
    in_world(3, |world| {
        std::thread::sleep(Duration::from_millis(30 * u64::from(world.rank())));
        arrived.fetch_add(1, Ordering::SeqCst);
        world.barrier("all").unwrap();
        assert_eq!(arrived.load(Ordering::SeqCst), 3);
    });
}

#[test]
fn items_of_some_megabytes_arrive_whole() {
    let meeting = Meeting::new();
    // Enough for unoptimised hashing on a busy machine.
    let deadline = Duration::from_secs(3);
    on_threads(3, |rank| {
        let world = World::join(WorldOptions { deadline, ..meeting.options(rank, 3) }).unwrap();
        let mine: Vec<u8> = (0..4_000_000u32).map(|i| (i ^ rank) as u8).collect();
        let gathered = world.all_gather("big", &mine).unwrap();
        for (rank, item) in (0u32..).zip(&gathered) {
            assert_eq!(item.len(), mine.len());
            assert!(item.iter().zip(0u32..).all(|(byte, i)| *byte == (i ^ rank) as u8));
        }
    });
}

#[test]
fn threads_of_one_rank_take_turns() {
    in_world(2, |world| {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10).for_each(|_| world.barrier("turn").unwrap()));
            }
        });
    });
}

#[test]
fn different_collectives_are_a_mismatch_that_names_both_on_every_rank() {
    in_world(3, |world| {
        let result = match world.rank() {
            2 => world.all_gather("shape", b"x").map(drop),
            _ => world.barrier("start"),
        };
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        let text = error.to_string();
        assert!(
            text.contains("barrier(\"start\")") && text.contains("all_gather(\"shape\")"),
            "{text}"
        );
        // A mismatch is an answer, not the end of the world.
        world.barrier("after").unwrap();
    });
}

#[test]
fn values_that_differ_are_named_with_their_ranks_on_every_rank() {
    let texts = in_world(5, |world| {
        let hidden = if world.rank() == 3 { "4096" } else { "7168" };
        let items = pairs(&[("topk", "8"), ("hidden", hidden)]);
        let error = world.agree("shape", &items).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        world.agree("again", &pairs(&[("topk", "8")])).unwrap();
        error.to_string()
    });
    for text in &texts {
        assert!(text.contains("hidden: ranks 0-2, 4 have \"7168\", rank 3 has \"4096\""), "{text}");
        assert!(!text.contains("topk"), "{text}");
        assert_eq!(text, &texts[0]);
    }
}

#[test]
fn a_live_rank_that_does_not_arrive_is_waited_for_and_then_named() {
    // The bound holds for joining, too: a busy machine gets more time.
    let met = [700, 4_000, 20_000].into_iter().find_map(|late| {
        let late = Duration::from_millis(late);
        Some((late, waits_for_rank_1(late)?))
    });
    let (late, waits) = met.unwrap();
    for (_, error, is_lost) in waits.iter().flatten() {
        assert_eq!(error.kind(), ErrorKind::Deadline);
        let seconds = late.as_secs_f64();
        let says = format!("rank 1 did not arrive within {seconds:.1} s");
        assert!(error.message().contains(&says), "{error}");
        assert!(!is_lost);
    }
    // The time runs from the first arrival, so the second one waits for less.
    let longest = waits.iter().flatten().map(|(waited, ..)| *waited).max().unwrap();
    assert!(longest >= late && longest < late + LATE, "{longest:?}");
}

/// How long ranks 0 and 2 of three wait in a barrier that rank 1 does not enter, how that ends, and whether a rank is
/// then lost. None where the ranks do not meet in time.
fn waits_for_rank_1(late: Duration) -> Option<Vec<Option<(Duration, Error, bool)>>> {
    let (meeting, left) = (Meeting::new(), Gate::new(3));
    let joined = on_threads(3, |rank| {
        let world = World::join(WorldOptions { late, ..meeting.options(rank, 3) }).ok();
        let started = Instant::now();
        let waited = world.as_ref().filter(|_| rank != 1).map(|world| {
            let error = world.barrier("start").unwrap_err();
            (started.elapsed(), error, world.liveness().first_loss().is_some())
        });
        left.wait();
        world.map(|_| waited)
    });
    joined.into_iter().collect()
}

#[test]
fn arguments_that_cannot_be_are_refused_before_anything_is_sent() {
    in_world(1, |world| {
        let refused = |result: Result<()>, found: &str| {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.message().contains(found), "{error}");
        };
        refused(world.barrier(""), "found topic \"\"");
        refused(world.barrier(&"x".repeat(MAX_TOPIC + 1)), "expected 1 to 128 bytes");
        refused(world.barrier("a\nb"), "control characters");
        refused(world.exchange("t", vec![]).map(drop), "found 0 outgoing items, expected 1");
        let large = vec![0; frame::MAX_PAYLOAD];
        refused(world.all_gather("t", &large).map(drop), "found 67108864 bytes");
        world.barrier("still fine").unwrap();
    });
}

#[test]
fn a_rank_that_cannot_go_on_with_a_bring_up_ends_it_on_all_ranks_and_the_world_goes_on() {
    for meeting in [Meeting::new(), Meeting::masking()] {
        on_threads(3, |rank| {
            let world = meeting.join(rank, 3).unwrap();
            for text in ["found topk = 33", "found hidden = 6"] {
                let members = world.admit(Ask::First).unwrap();
                members.barrier("first step").unwrap();
                if rank == 1 {
                    let error = Error::new(ErrorKind::InvalidInput, "check shape", text);
                    assert!(matches!(members.after(&error, DEADLINE), Next::Refuse));
                    members.refuse(&error);
                } else {
                    let error = members.all_gather("second step", b"").unwrap_err();
                    assert_eq!((error.kind(), error.rank()), (ErrorKind::Refused, Some(1)));
                    let says = format!("rank 1 cannot open communicator: check shape: {text}");
                    assert!(error.to_string().contains(&says), "{error}");
                    assert!(matches!(members.after(&error, DEADLINE), Next::End));
                }
            }
            world.barrier("all go on").unwrap();
        });
    }
}
