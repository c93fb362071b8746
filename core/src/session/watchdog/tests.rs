//! Events that end a wait, and events that do not.

use std::time::Instant;

use super::*;
use crate::bootstrap::{Ask, Identity, RankId, Rendezvous, WorldOptions};
use crate::wait::{WaitFor, Waiter};

const DEADLINE: Duration = Duration::from_secs(2);
const LATE: Duration = Duration::from_secs(120);

/// Runs `body` on every rank, on threads, each with its watchdog.
fn in_world(ranks: u32, on_failure: OnFailure, body: impl Fn(World, Watchdog) + Sync) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("job");
    let body = &body;
    std::thread::scope(|scope| {
        for rank in 0..ranks {
            let rendezvous = Rendezvous::File { path: path.clone() };
            scope.spawn(move || {
                let place = RankId { rank, ranks, local_rank: rank };
                let identity = Identity::new(place, rendezvous).expect("a place");
                let options = WorldOptions::new(identity);
                let world = World::join(WorldOptions {
                    deadline: DEADLINE,
                    late: LATE,
                    on_failure,
                    ..options
                })
                .expect("all come");
                let bounds = Bounds { deadline: DEADLINE, late: LATE };
                let membership =
                    world.admit(Ask::First).expect("all are there").membership().clone();
                let headway = world.liveness().headway(0);
                let watchdog = Watchdog::start(&world, headway, bounds, membership);
                let watchdog = watchdog.expect("starts");
                body(world, watchdog);
            });
        }
    });
}

/// Waits for the entry of `peer`, which does not come; returns the watchdog's error.
fn wait_for_entry(watchdog: &Watchdog, peer: u32) -> Error {
    let what = waiting(peer, Duration::ZERO).what;
    let waiter = Waiter::new(watchdog.board(), LATE);
    assert!(waiter.until(&what, || 0, || Ok(())).is_err());
    watchdog.verdict().expect("the watchdog ended the wait")
}

#[test]
fn a_wait_for_an_entry_ends_a_deadline_after_the_last_rank_has_begun() {
    const LATER: Duration = Duration::from_secs(1);
    in_world(2, OnFailure::Stop, |world, watchdog| {
        let start = Instant::now();
        world.barrier("start").expect("both are there");
        if world.rank() == 1 {
            std::thread::sleep(LATER);
            watchdog.begin(1);
            // The other rank leaves once its wait has ended.
            assert!(world.barrier("end").is_ok());
            return;
        }
        watchdog.begin(1);
        let error = wait_for_entry(&watchdog, 1);
        assert!(start.elapsed() >= LATER + DEADLINE, "{:?}: {error}", start.elapsed());
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Deadline, Some(1)), "{error}");
        let text = error.to_string();
        assert!(text.contains("deadline_ms = 2000 is over; all ranks have begun"), "{text}");
        world.barrier("end").expect("both are there");
    });
}

/// Where a graph launched the operation, the bound of a late rank does not depend on the operations
/// that hosts have begun.
#[test]
fn an_entry_that_a_graph_waits_for_may_come_late() {
    in_world(2, OnFailure::Stop, |world, watchdog| {
        // Neither rank has begun more than the other.
        watchdog.begin(0);
        world.barrier("start").expect("both are there");
        let numbered = waiting(1 - world.rank(), Duration::ZERO);
        assert_eq!(watchdog.shared.limit(&numbered).key, "deadline_ms");
        let what = WaitFor { operation: abi::TY_OPERATION_OF_GRAPH, ..numbered.what };
        assert_eq!(watchdog.shared.limit(&Waiting { what, ..numbered }).key, "late_ms");
        let rows = WaitFor { phase: abi::TY_PHASE_ROWS, ..what };
        let limit = watchdog.shared.limit(&Waiting { what: rows, ..numbered });
        assert_eq!((limit.key, limit.bound), ("deadline_ms", DEADLINE));
        world.barrier("end").expect("both are there");
    });
}

#[test]
fn a_wait_ends_when_rank_0_has_left_and_no_news_can_come_any_more() {
    in_world(3, OnFailure::Stop, |world, watchdog| {
        world.barrier("start").expect("all are there");
        match world.rank() {
            0 => drop(world),
            1 => {
                let error = wait_for_entry(&watchdog, 2);
                let about = (error.kind(), error.rank());
                assert_eq!(about, (ErrorKind::PeerLost, Some(0)), "{error}");
            }
            // The rank lives, and does not arrive.
            _ => assert!(world.barrier("never").is_err()),
        }
    });
}

/// A wait for an entry of `peer` that has lasted for `lasted`.
fn waiting(peer: u32, lasted: Duration) -> Waiting {
    let what = WaitFor {
        phase: abi::TY_PHASE_ENTRY,
        peer,
        signal: 0,
        expected: 1,
        operation: 0,
        level: abi::TY_LEVEL_SCALE_UP,
    };
    Waiting { what, found: 0, lasted }
}

#[test]
fn waits_for_a_rank_that_left_end_some_time_after_its_goodbye_and_not_each_after_that_time() {
    in_world(2, OnFailure::Stop, |world, watchdog| {
        world.barrier("start").expect("both are there");
        if world.rank() == 1 {
            return drop(world);
        }
        let shared = &watchdog.shared;
        let start = Instant::now();
        let since = || shared.liveness.since_goodbye(1);
        while since().is_none() {
            assert!(start.elapsed() < LATE, "rank 1 did not leave");
            std::thread::sleep(LOOK);
        }
        // For any duration of the wait: data that the rank had sent may be on its way.
        let old = waiting(1, LATE);
        let (left, innocent) = (shared.left(&old), shared.may_be_innocent(&old, LATE));
        if since() < Some(GRACE) {
            assert!(left.is_none() && innocent, "{left:?}, {innocent}");
        }
        while since() < Some(GRACE * 3 / 2) {
            std::thread::sleep(LOOK);
        }
        assert!(shared.left(&old).is_some() && !shared.may_be_innocent(&old, LATE));
        // A wait that begins now looks for data that arrived meanwhile.
        assert!(shared.left(&waiting(1, LAST_FETCH - LOOK)).is_none());
        let verdict = shared.left(&waiting(1, LAST_FETCH)).expect("a second wait is short");
        assert_eq!((verdict.kind, verdict.rank), (ErrorKind::PeerLost, 1));
        // The goodbye affects only a wait.
        assert!(watchdog.verdict().is_none());
    });
}

#[test]
fn the_grace_of_a_goodbye_is_counted_once_whenever_waits_begin() {
    let bounds = Bounds { deadline: DEADLINE, late: LATE };
    // The time from the goodbye to the end of a wait without an arrival that begins `begin` after the
    // goodbye.
    let end = |begin: Duration| {
        let mut now = begin;
        while !bounds.is_over(now, now - begin, LAST_FETCH) {
            now += LOOK;
        }
        now
    };
    let ms = Duration::from_millis;
    assert_eq!(end(ms(0)), GRACE);
    assert_eq!(end(ms(700)), GRACE);
    // Data that arrived just in time starts another wait, which is short.
    assert_eq!(end(ms(990)), ms(990) + LAST_FETCH);
    // This rank computed meanwhile, and no thread read the data that is here.
    assert_eq!(end(ms(9000)), ms(9000) + LAST_FETCH);
    // A wait that began long before the goodbye gets as much time as any other.
    assert!(!bounds.is_over(GRACE - LOOK, LATE, LAST_FETCH));
    assert!(bounds.is_over(GRACE, LATE, LAST_FETCH));
    // No grace is longer than the deadline.
    let short = Bounds { deadline: ms(100), late: LATE };
    assert!(short.is_over(ms(100), ms(100), LAST_FETCH));
}

#[test]
fn a_goodbye_of_rank_0_spoils_nothing_that_was_done_and_ends_waits_after_a_moment() {
    in_world(3, OnFailure::Mask, |world, watchdog| {
        world.barrier("start").expect("all are there");
        if world.rank() == 0 {
            return drop(world);
        }
        let start = Instant::now();
        while *watchdog.shared.liveness.state(0) != PeerState::Left {
            assert!(start.elapsed() < LATE, "rank 0 did not leave");
            std::thread::sleep(LOOK);
        }
        watchdog.confirm().expect("what was done is done");
        assert!(watchdog.verdict().is_none());
        let error = wait_for_entry(&watchdog, 3 - world.rank());
        assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(0)), "{error}");
        assert!(error.to_string().contains("left the world"), "{error}");
    });
}

#[test]
fn after_a_stop_of_this_process_nothing_is_believed_before_news_had_time_to_come() {
    in_world(2, OnFailure::Mask, |world, watchdog| {
        world.barrier("start").expect("both are there");
        let shared = &watchdog.shared;
        let resumed = || shared.resumed.lock().expect("no panic");
        let start = Instant::now();
        *resumed() = None;
        // The watchdog itself may look at the same moment and overwrite this.
        while resumed().is_none() {
            assert!(start.elapsed() < LATE, "the stop was not noticed");
            let stopped = (DEADLINE / 3).as_nanos() as u64;
            shared.looked.store(masking::boottime_ns() - stopped, Ordering::Release);
        }
        watchdog.confirm().expect("it was not given up");
        assert!(start.elapsed() >= SILENT, "{:?}", start.elapsed());
        world.barrier("end").expect("both are there");
    });
}

#[test]
fn where_losses_are_masked_the_cap_has_room_for_bounds_that_stand_still() {
    let bounds = Bounds { deadline: DEADLINE, late: LATE };
    let room = bounds.cap(OnFailure::Mask) - bounds.cap(OnFailure::Stop);
    assert_eq!(room, bounds.excuse(OnFailure::Mask));
    assert!(room > Duration::ZERO && bounds.excuse(OnFailure::Stop) == Duration::ZERO);
}

#[test]
fn among_domains_one_waits_longer_for_a_peer_that_hands_rows_on() {
    in_world(2, OnFailure::Stop, |world, mut watchdog| {
        world.barrier("start").expect("both are there");
        if world.rank() == 0 {
            // Its whole rail is lost, and its peers still forward data.
            let names = [vec![(1, "a link".to_owned())], Vec::new()];
            watchdog.name_links(WatchedLinks { names, domains: 2 });
            watchdog.begin(1);
            let start = Instant::now();
            let error = wait_for_entry(&watchdog, 1);
            let lasted = start.elapsed();
            assert!(lasted >= DEADLINE + DEADLINE / 8, "{lasted:?}: {error}");
        } else {
            watchdog.begin(1);
        }
        world.barrier("end").expect("both are there");
    });
}

/// The board points to the totals, which must not move with their owner.
#[test]
fn what_waits_took_is_added_up_where_reports_look() {
    in_world(2, OnFailure::Stop, |world, watchdog| {
        world.barrier("start").expect("both are there");
        let (me, other) = (world.rank(), 1 - world.rank());
        let what = waiting(other, Duration::ZERO).what;
        let (start, lasts) = (Instant::now(), Duration::from_millis(50));
        let come = || u64::from(start.elapsed() >= lasts);
        Waiter::new(watchdog.board(), LATE).until(&what, come, || Ok(())).expect("it comes");
        let watched = watchdog.watched();
        let (took, most) = (watched.waited(other), start.elapsed());
        assert!(took > lasts / 2 && took <= most, "{took:?} of {most:?}");
        assert_eq!(watched.waited(me), Duration::ZERO);
        assert_eq!(watched.waited(2), Duration::ZERO, "a rank beyond the world");
        world.barrier("end").expect("both are there");
    });
}
