//! Ranks can go on without a lost rank: its failure is reported as its own, does not hide that of
//! another, and holds up no other rank. The NICs are stand-ins: software in this process.

// A helper of tests may panic as a test may.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::{Duration, Instant};

use common::{DEPTH, PATIENCE, Rank, command, ends, impatient, needs, ranks};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Transport as _};
use tokenyard_nic::Nic;
use tokenyard_sys_verbs::ffi::{self, Wc};

/// Signals that may wait for a rank that does not drive; the smallest number that a config may
/// have.
const RECEIVES: usize = 64;

/// The ranks that `health` names in this many calls.
fn named(rank: &Rank, calls: usize) -> Vec<Option<u32>> {
    (0..calls).map(|_| rank.transport.health().unwrap_err().rank()).collect()
}

/// Drives a rank as the host does until `what` holds.
fn drive_until(rank: &Rank, mut what: impl FnMut(&Rank) -> bool) {
    let start = Instant::now();
    while !what(rank) {
        assert!(start.elapsed() < PATIENCE, "it does not come");
        rank.transport.progress().unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn fails(rank: &Rank) -> bool {
    rank.transport.health().is_err()
}

fn put_signal(peer: u32, tag: u64) -> Command {
    command(abi::TY_OP_PUT_SIGNAL, peer, tag)
}

fn good(id: u32, qp_num: u32) -> Wc {
    let imm_data = (id << 16 | 1).to_be();
    Wc { opcode: ffi::WC_RECV_RDMA_WITH_IMM, imm_data, qp_num, ..Wc::default() }
}

#[test]
fn every_peer_that_failed_is_reported_in_turn_with_its_first_failure() {
    let mut all = ranks("turns", 4, "", &needs());
    all.truncate(1);
    let rank = &all[0];
    for (peer, first, later) in [(1, 11, 12), (3, 31, 32)] {
        assert_eq!(rank.post(&[put_signal(peer, first)]), 1);
        rank.events(1);
        assert_eq!(rank.post(&[put_signal(peer, later)]), 1);
        assert_eq!(ends(&rank.events(1)), [(later, true)]);
    }
    let mut found = named(rank, 6);
    found[..2].sort_unstable();
    assert_eq!(found[..2], [Some(1), Some(3)], "both are reported");
    assert_eq!((found[2], found[3]), (found[4], found[5]), "in turn, for ever");
    for _ in 0..2 {
        let error = rank.transport.health().unwrap_err();
        let tag = if error.rank() == Some(1) { "tag: 11" } else { "tag: 31" };
        assert!(error.to_string().contains(tag), "its first: {error}");
        assert!(error.to_string().contains("queue pair"), "the link: {error}");
    }
}

#[test]
fn a_failure_that_is_about_no_peer_is_hidden_by_none() {
    let mut all = ranks("no_peer", 2, "signals = \"atomic\"", &needs());
    all.truncate(1);
    let rank = &all[0];
    rank.post(&[put_signal(1, 1)]);
    rank.events(1);
    assert_eq!(named(rank, 1), [Some(1)]);
    rank.nic.report(ffi::EVENT_DEVICE_FATAL);
    drive_until(rank, |rank| named(rank, 1) == [None]);
    assert!(rank.failure().contains("the device reports"), "{}", rank.failure());
    assert_eq!(named(rank, 3), [None; 3]);
}

#[test]
fn a_connection_of_a_rank_to_itself_that_breaks_is_about_no_peer() {
    let ranks = ranks("itself", 2, "", &needs());
    ranks[0].nic.refuse_after(0);
    ranks[0].post(&[put_signal(0, 1)]);
    ranks[0].events(1);
    assert_eq!(named(&ranks[0], 1), [None]);
}

#[test]
fn a_peer_that_does_not_drive_holds_up_no_other_and_is_given_up_alone() {
    let ranks = ranks("silent", 3, &format!("receive_depth = {RECEIVES}"), &impatient());
    let rank = &ranks[0];
    let silent = [put_signal(1, 1)];
    for _ in 0..RECEIVES {
        assert_eq!(rank.post(&silent), 1);
        assert_eq!(ends(&rank.events(1)), [(1, false)]);
    }
    // From here on its device makes senders wait, without end.
    assert_eq!(rank.post(&[silent[0], silent[0]]), 2);
    for tag in 100..200 {
        assert_eq!(rank.post(&[put_signal(2, tag)]), 1);
        assert_eq!(ends(&rank.events(1)), [(tag, false)]);
        ranks[2].transport.progress().unwrap();
    }
    drive_until(rank, fails);
    assert_eq!(ends(&rank.events(2)), [(1, true); 2]);
    assert_eq!(named(rank, 2), [Some(1); 2]);
    assert!(rank.failure().contains("no command of the connection ended"), "{}", rank.failure());
    // Its places are free again, and further commands to it end at once.
    let others: Vec<_> = (0..DEPTH as u64 - 1).map(|tag| put_signal(2, tag)).collect();
    assert_eq!(rank.post(&[&silent, others.as_slice()].concat()), DEPTH);
    let mut found = ends(&rank.events(DEPTH));
    found.sort_unstable_by_key(|(tag, failed)| (!failed, *tag));
    assert_eq!(found[0], (1, true));
    assert!(found[1..].iter().all(|(_, failed)| !failed), "{found:?}");
}

#[test]
fn peers_that_break_together_give_back_each_command_once_and_the_others_go_on() {
    for (name, keys) in
        [("together", "signals = \"immediate\""), ("together_atomic", "signals = \"atomic\"")]
    {
        let mut all = ranks(name, 4, keys, &needs());
        let rest = all.split_off(2);
        let rank = &all[0];
        rank.nic.hold();
        let half = |peer: u32| {
            (0..DEPTH as u64 / 2).map(move |tag| put_signal(peer, 10 * u64::from(peer) + tag))
        };
        let mixed: Vec<_> = half(2).zip(half(3)).flat_map(|(a, b)| [a, b]).collect();
        assert_eq!(rank.post(&mixed), DEPTH);
        drop(rest);
        rank.nic.release();
        let mut found = ends(&rank.events(DEPTH));
        found.sort_unstable();
        let expected: Vec<_> = half(2).chain(half(3)).map(|command| (command.tag, true)).collect();
        assert_eq!(found, expected, "{name}");
        for tag in 0..100 {
            assert_eq!(rank.post(&[put_signal(1, tag)]), 1);
            assert_eq!(ends(&rank.events(1)), [(tag, false)], "{name}");
            all[1].transport.progress().unwrap();
        }
        let journal = rank.nic.journal();
        assert!(!journal.iter().any(|line| line.contains("OVERRUN")), "{journal:?}");
        let mut found = named(rank, 2);
        found.sort_unstable();
        assert_eq!(found, [Some(2), Some(3)], "{name}");
    }
}

#[test]
fn receives_that_fail_are_reported_per_peer_and_good_ones_beside_them_count() {
    for (name, keys) in [("receives", ""), ("receives_flush", "flush = \"always\"")] {
        let ranks = ranks(name, 3, keys, &needs());
        let to = |peer: usize| ranks[0].nic.number_to(ranks[peer].nic);
        let failed = |peer| Wc { status: ffi::WC_LOC_PROT_ERR, ..good(0, to(peer)) };
        ranks[0].nic.arrive(&[failed(2), good(1, to(1)), failed(1), good(1, to(2)), failed(1)]);
        drive_until(&ranks[0], |rank| rank.transport.read_signal(0, 1) == 2);
        let mut found = named(&ranks[0], 2);
        found.sort_unstable();
        assert_eq!(found, [Some(1), Some(2)], "{name}");
        assert!(ranks[0].failure().contains("a receive failed"), "{}", ranks[0].failure());
    }
}

#[test]
fn a_signal_that_is_not_there_is_about_who_raised_it() {
    for (name, keys) in [("unknown", ""), ("unknown_flush", "flush = \"always\"")] {
        let ranks = ranks(name, 3, keys, &needs());
        ranks[0].nic.arrive(&[good(9, ranks[0].nic.number_to(ranks[2].nic))]);
        drive_until(&ranks[0], fails);
        assert_eq!(named(&ranks[0], 2), [Some(2); 2], "{name}");
        assert!(ranks[0].failure().contains("signal 9"), "{}", ranks[0].failure());
    }
}

#[test]
fn an_event_of_a_queue_pair_is_about_its_peer() {
    let ranks = ranks("pair_event", 3, "", &needs());
    let number = ranks[0].nic.number_to(ranks[2].nic);
    ranks[0].nic.report_of(ffi::EVENT_QP_ACCESS_ERR, number);
    drive_until(&ranks[0], fails);
    assert_eq!(named(&ranks[0], 2), [Some(2); 2]);
    assert!(ranks[0].failure().contains(&format!("queue pair {number}")), "{}", ranks[0].failure());
}

#[test]
fn a_port_that_is_down_is_no_peers_failure_and_others_blame_its_rank_alone() {
    let ranks = ranks("port", 3, "", &needs());
    ranks[1].nic.cut();
    for (rank, peer, blamed) in [(0, 1, Some(1)), (1, 0, None), (1, 2, None)] {
        assert_eq!(ranks[rank].post(&[put_signal(peer, 7)]), 1);
        assert_eq!(ends(&ranks[rank].events(1)), [(7, true)]);
        assert_eq!(named(&ranks[rank], 2), [blamed; 2], "rank {rank} to rank {peer}");
    }
    let failure = ranks[1].failure();
    for words in ["the port of this rank is down", "a command to rank 0", "queue pair"] {
        assert!(failure.contains(words), "{failure}; expected {words}");
    }
    assert_eq!(ranks[0].post(&[put_signal(2, 8)]), 1);
    assert_eq!(ends(&ranks[0].events(1)), [(8, false)]);
}

/// Repeats unanswered requests for at least 8 ms.
const QUICK: &str = "timeout = 8\nretry_count = 7\n";

#[test]
fn a_port_that_stays_down_is_found_without_a_command() {
    for signals in ["immediate", "atomic"] {
        let keys = format!("{QUICK}signals = \"{signals}\"");
        let ranks = ranks(&format!("stays_{signals}"), 2, &keys, &needs());
        ranks[0].nic.cut();
        drive_until(&ranks[0], fails);
        assert_eq!(named(&ranks[0], 2), [None; 2]);
        assert!(ranks[0].failure().contains("port of this rank is down"), "{}", ranks[0].failure());
        assert!(ranks[0].failure().contains("port 1 gid"), "the device: {}", ranks[0].failure());
    }
}

#[test]
fn a_port_that_comes_back_in_time_is_no_failure() {
    let ranks = ranks("flap", 2, "", &needs());
    ranks[0].nic.cut();
    for step in [Nic::restore, |_| ()] {
        // The watchdog checks several times.
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(300) {
            ranks[0].transport.progress().unwrap();
        }
        step(ranks[0].nic);
    }
    assert_eq!(ranks[0].post(&[put_signal(1, 1)]), 1);
    assert_eq!(ends(&ranks[0].events(1)), [(1, false)]);
    ranks[0].transport.health().unwrap();
}

#[test]
fn peers_that_end_take_no_receives_along() {
    let mut all = ranks("receives_left", 3, &format!("receive_depth = {RECEIVES}"), &needs());
    for round in 0..RECEIVES as u64 {
        for peer in [1, 2] {
            assert_eq!(all[peer].post(&[put_signal(0, round)]), 1);
            all[peer].events(1);
        }
        all[0].transport.progress().unwrap();
    }
    let last = all.pop().unwrap();
    drop(last);
    drive_until(&all[0], |rank| rank.transport.read_signal(0, 0) == 2 * RECEIVES as u64);
    // At most a quarter is posted again later, together.
    assert!(all[0].nic.receives() > RECEIVES * 3 / 4, "{} are left", all[0].nic.receives());
    all[1].post(&[put_signal(0, 1)]);
    assert_eq!(ends(&all[1].events(1)), [(1, false)]);
    all[0].transport.health().unwrap();
}
