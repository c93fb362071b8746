//! The behaviour of the transport with NICs that work, and with NICs that fail. The NICs are
//! stand-ins: software in this process.

// A helper of tests may panic as a test may.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{DEADLINE, DEPTH, PATIENCE, Rank, WORDS, command, ends, impatient, needs, ranks};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_EVENT, Transport as _, TransportNeeds};
use tokenyard_sys_verbs::ffi::{self, Wc};

/// Drives a rank as the host does while no thread polls, until something fails.
fn drive_until_failure(rank: &Rank) {
    let start = Instant::now();
    while rank.transport.health().is_ok() {
        assert!(start.elapsed() < PATIENCE, "nothing failed");
        rank.transport.progress().unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn every_op_does_its_work_with_either_kind_of_signal_and_with_a_read_back() {
    for (name, keys) in [
        ("ops_immediate", "signals = \"immediate\""),
        ("ops_atomic", "signals = \"atomic\""),
        ("ops_flush", "flush = \"always\""),
    ] {
        let mut ranks = ranks(name, 2, keys, &needs());
        ranks[0].write(0, 7);
        let value = Command { value: 9, dst_offset: 160, ..command(abi::TY_OP_PUT_VALUE, 1, 1) };
        let put = Command { dst_offset: 168, ..command(abi::TY_OP_PUT, 1, 2) };
        let signal = command(abi::TY_OP_SIGNAL, 1, 3);
        let both = command(abi::TY_OP_PUT_SIGNAL, 1, 4);
        assert_eq!(ranks[0].post(&[value, put, signal, both]), 4);
        assert_eq!(ends(&ranks[0].events(4)), [(1, false), (2, false), (3, false), (4, false)]);
        let start = Instant::now();
        while ranks[1].transport.read_signal(0, 0) < 2 {
            assert!(start.elapsed() < PATIENCE, "{name}");
            ranks[1].transport.progress().unwrap();
        }
        assert_eq!([20, 21, WORDS / 2].map(|at| ranks[1].read(at)), [9, 7, 7], "{name}");
        let get = Command { src_offset: 8, dst_offset: 160, ..command(abi::TY_OP_GET, 1, 5) };
        assert_eq!(ranks[0].post(&[get]), 1);
        ranks[0].events(1);
        assert_eq!(ranks[0].read(1), 9, "{name}");
        ranks.iter().for_each(|rank| rank.transport.health().unwrap());
    }
}

#[test]
fn commands_before_one_that_the_device_refuses_end_and_give_their_room_back() {
    for (name, keys) in [
        ("refused_immediate", "signals = \"immediate\""),
        ("refused_atomic", "signals = \"atomic\""),
    ] {
        let ranks = ranks(name, 2, keys, &needs());
        // None of them requests an event, so only the last would have a completion.
        let quiet = |tag| Command { flags: 0, ..command(abi::TY_OP_PUT_SIGNAL, 1, tag) };
        ranks[0].nic.refuse_after(3);
        assert_eq!(ranks[0].post(&[1, 2, 3, 4, 5].map(quiet)), 5);
        let mut tags: Vec<_> = ends(&ranks[0].events(5));
        tags.sort_unstable();
        assert_eq!(tags, [1, 2, 3, 4, 5].map(|tag| (tag, true)), "{name}");
        assert!(ranks[0].failure().contains("ibv_post_send"), "{}", ranks[0].failure());
        let to_itself = |tag| command(abi::TY_OP_PUT, 0, tag);
        let all: Vec<_> = (0..DEPTH as u64).map(to_itself).collect();
        assert_eq!(ranks[0].post(&all), DEPTH, "{name}: the queue is empty again");
        assert!(ends(&ranks[0].events(DEPTH)).iter().all(|(_, failed)| !failed), "{name}");
    }
}

#[test]
fn the_command_that_the_device_refuses_is_the_one_that_the_failure_names() {
    let ranks = ranks("refused_name", 1, "", &needs());
    ranks[0].nic.refuse_after(2);
    ranks[0].post(&[11, 12, 13, 14].map(|tag| command(abi::TY_OP_PUT, 0, tag)));
    assert!(ranks[0].failure().contains("tag: 13"), "{}", ranks[0].failure());
    let events = ends(&ranks[0].events(4));
    assert_eq!(events, [(11, false), (12, false), (13, true), (14, true)], "two were reported");
}

#[test]
fn naming_a_link_and_looking_after_queues_never_fail_a_hot_call_beside() {
    let ranks = ranks("beside", 1, "", &needs());
    let over = AtomicBool::new(false);
    let rank = &ranks[0];
    std::thread::scope(|scope| {
        for beside in [
            (|rank| assert!(rank.transport.link_name(0).contains("queue pair"))) as fn(&Rank),
            |rank| assert!(rank.transport.progress().is_ok()),
        ] {
            let over = &over;
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    beside(rank);
                }
            });
        }
        // This guard ends the threads also when an assertion fails.
        let end = End(&over);
        for tag in 0..20_000 {
            while rank.post(&[command(abi::TY_OP_PUT, 0, tag)]) == 0 {}
            assert_eq!(ends(&rank.events(1)), [(tag, false)]);
        }
        drop(end);
    });
}

struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn good_signals_count_that_come_together_with_a_bad_one() {
    for (name, keys) in [("bad_beside", ""), ("bad_beside_flush", "flush = \"always\"")] {
        let ranks = ranks(name, 1, keys, &needs());
        let good = |id: u32, add: u32| Wc {
            opcode: ffi::WC_RECV_RDMA_WITH_IMM,
            imm_data: (id << 16 | add).to_be(),
            ..Wc::default()
        };
        let failed = Wc { status: ffi::WC_LOC_PROT_ERR, ..good(0, 1) };
        ranks[0].nic.arrive(&[good(0, 5), failed, good(9, 1), good(0, 2), good(1, 3)]);
        let start = Instant::now();
        while [0, 1].map(|id| ranks[0].transport.read_signal(0, id)) != [7, 3] {
            assert!(start.elapsed() < PATIENCE, "{name}: a signal is lost");
            ranks[0].transport.progress().unwrap();
        }
        assert!(ranks[0].failure().contains("a receive failed"), "{}", ranks[0].failure());
    }
}

#[test]
fn a_connection_that_stands_still_is_found_while_no_thread_polls() {
    let ranks = ranks("still", 2, "", &impatient());
    ranks[0].nic.hold();
    assert_eq!(ranks[0].post(&[1, 2].map(|tag| command(abi::TY_OP_PUT, 1, tag))), 2);
    drive_until_failure(&ranks[0]);
    let failure = ranks[0].failure();
    assert!(failure.contains("no command of the connection ended"), "{failure}");
    assert!(failure.contains("tag: 1,"), "the oldest one is named: {failure}");
    assert_eq!(ends(&ranks[0].events(2)), [(1, true), (2, true)]);
    // Later ones end at once.
    assert_eq!(ranks[0].post(&[command(abi::TY_OP_PUT, 1, 3)]), 1);
    assert_eq!(ends(&ranks[0].events(1)), [(3, true)]);
}

#[test]
fn commands_end_on_a_device_that_does_not_even_break_off() {
    let ranks = ranks("unbreakable", 2, "", &impatient());
    ranks[0].nic.hold();
    ranks[0].nic.refuse_to_break();
    assert_eq!(ranks[0].post(&[1, 2].map(|tag| command(abi::TY_OP_PUT, 1, tag))), 2);
    drive_until_failure(&ranks[0]);
    assert_eq!(ends(&ranks[0].events(2)), [(1, true), (2, true)]);
    assert_eq!(ranks[0].nic.journal(), ["destroy_qp"], "their memory is out of reach");
}

#[test]
fn a_connection_whose_completions_wait_behind_many_does_not_stand_still() {
    let depth = 400;
    let ranks = ranks("behind", 2, "", &TransportNeeds { queue_depth: depth, ..impatient() });
    ranks[0].nic.hold();
    for tag in 0..u64::from(depth) - 1 {
        assert_eq!(ranks[0].post(&[command(abi::TY_OP_PUT, 0, tag)]), 1);
    }
    assert_eq!(ranks[0].post(&[command(abi::TY_OP_PUT, 1, 1000)]), 1);
    let poll = |times: u32| {
        (0..times).map(|_| ranks[0].transport.poll(0, &mut [NO_EVENT; 512]).unwrap()).sum::<usize>()
    };
    // The watchdog sees both connections with commands in flight, and then all of them end while
    // this rank does something else.
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!(poll(64), 0);
    assert_eq!(poll(63), 0);
    ranks[0].nic.release();
    std::thread::sleep(2 * DEADLINE);
    // The watchdog checks again in the first of these polls, which does not take all completions.
    assert_eq!(poll(64), depth as usize);
    ranks[0].transport.health().unwrap();
}

#[test]
fn what_the_device_reports_is_heard_while_no_thread_polls() {
    let ranks = ranks("events", 1, "signals = \"atomic\"", &needs());
    ranks[0].nic.report(ffi::EVENT_DEVICE_FATAL);
    drive_until_failure(&ranks[0]);
    assert!(ranks[0].failure().contains("the device reports"), "{}", ranks[0].failure());
}

#[test]
fn completions_of_connections_that_break_fit_their_queue() {
    let mut all = ranks("overrun", 2, "signals = \"atomic\"", &needs());
    let gone = all.pop();
    let rank = &all[0];
    rank.nic.hold();
    let puts = |peer| [0; DEPTH].map(|_| command(abi::TY_OP_PUT_SIGNAL, peer, 1));
    assert_eq!(rank.post(&puts(1)), DEPTH);
    drop(gone);
    rank.nic.release();
    for _ in 0..4 {
        // Each command that ends makes room for one to this rank itself.
        rank.events(1);
        while rank.post(&puts(0)[..1]) == 1 {}
    }
    let journal = rank.nic.journal();
    assert!(!journal.iter().any(|line| line.contains("OVERRUN")), "{journal:?}");
    assert!(rank.failure().contains("did not answer"), "{}", rank.failure());
}

#[test]
fn connections_end_before_memory_and_everything_before_the_device() {
    for (name, keys) in
        [("drop_immediate", "flush = \"always\""), ("drop_atomic", "signals = \"atomic\"")]
    {
        let mut ranks = ranks(name, 1, keys, &needs());
        let nic = ranks[0].nic;
        ranks.clear();
        let journal = nic.journal();
        let first = |what| journal.iter().position(|line| *line == what);
        let last = |what| journal.iter().rposition(|line| *line == what);
        // INV-8: no write reaches memory whose registration has ended.
        assert!(last("destroy_qp") < first("dereg_mr"), "{name}: {journal:?}");
        assert!(last("dereg_mr") < first("dealloc_pd"), "{name}: {journal:?}");
        assert_eq!(journal.last(), Some(&"close_device"), "{name}: {journal:?}");
    }
}

#[test]
fn a_second_connect_is_refused_and_leaves_the_first_as_it_is() {
    let mut ranks = ranks("twice", 1, "", &needs());
    let endpoint = ranks[0].transport.endpoint(0).unwrap();
    let error = ranks[0].transport.connect(0, &endpoint).unwrap_err().to_string();
    assert!(error.contains("a connect to this peer before"), "{error}");
    assert_eq!(ranks[0].post(&[command(abi::TY_OP_PUT, 0, 1)]), 1);
    assert_eq!(ends(&ranks[0].events(1)), [(1, false)]);
}
