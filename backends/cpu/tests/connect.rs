//! Connecting ranks, as a host sees it; a real process as a peer; no files left behind.

// The helpers below may panic as a test may.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command as Process, Stdio};
use std::time::{Duration, Instant};

use common::{Rank, command, needs};
use tokenyard_core::transport::TransportNeeds;
use tokenyard_core::{ErrorKind, abi};

/// The variable that makes the test binary the other process.
const CHILD: &str = "TOKENYARD_TEST_CHILD";

#[test]
fn endpoint_bytes_that_fail_a_check_are_refused_with_a_message() {
    let mut rank = Rank::open(0, 2, "", &needs());
    let good = rank.transport.endpoint(1).unwrap();
    let mut refused = |data: &[u8], text: &str| {
        let error = rank.transport.connect(1, data).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
        assert!(error.to_string().contains(text), "{error}");
    };
    refused(&[], "found 0 bytes; expected at least 16");
    refused(&good[..20], "do not fit their checksum");
    refused(&[good.as_slice(), &[0]].concat(), "do not fit their checksum");
    refused(&[&[9, 0, 0, 0], &good[4..]].concat(), "expected TYSM");
    refused(&[&good[..4], &[9, 0, 0, 0], &good[8..]].concat(), "found version 9; expected 2");
    rank.transport.health().unwrap();
    assert!(rank.transport.connect(0, &[&good[..35], &[!good[35]]].concat()).is_err());
    rank.transport.connect(0, &good).unwrap();
}

#[test]
fn a_peer_that_never_answers_is_named_at_the_deadline() {
    let soon = TransportNeeds { deadline: Duration::from_millis(100), ..needs() };
    let (mut zero, mut one) = (Rank::open(0, 2, "", &soon), Rank::open(1, 2, "", &soon));
    let endpoint = one.transport.endpoint(0).unwrap();
    let start = Instant::now();
    let error = zero.transport.connect(1, &endpoint).unwrap_err();
    assert_eq!((error.kind(), error.rank()), (ErrorKind::Deadline, Some(1)));
    assert!(error.to_string().contains("rank 1 did not introduce itself within 100ms"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn an_endless_deadline_is_no_overflow() {
    let endless = TransportNeeds { deadline: Duration::MAX, ..needs() };
    common::with_ranks_that_need(&endless, 2, "", |rank| {
        assert_eq!(rank.post(0, &[command(abi::TY_OP_SIGNAL, 1 - rank.me)]), 1);
        rank.wait(0, 1);
    });
}

#[test]
fn a_real_process_is_a_peer_and_nothing_is_left_behind() {
    if std::env::var_os(CHILD).is_some() {
        return be_the_child();
    }
    let me = std::env::current_exe().unwrap();
    let mut child = Process::new(me)
        .args(["--exact", "a_real_process_is_a_peer_and_nothing_is_left_behind", "--nocapture"])
        .env(CHILD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let rank = {
        let mut rank = Rank::open(0, 2, "", &needs());
        let endpoint = rank.transport.endpoint(1).unwrap();
        writeln!(child.stdin.as_mut().unwrap(), "{}", to_hex(&endpoint)).unwrap();
        let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        let theirs = lines.map_while(Result::ok).find_map(|line| from_line(&line)).unwrap();
        rank.transport.connect(0, &endpoint).unwrap();
        rank.transport.connect(1, &theirs).unwrap();
        rank
    };
    // The child doubles each value and puts it back.
    for round in 1..=1000 {
        rank.windows[0].write(1, round);
        let mut put = command(abi::TY_OP_PUT_SIGNAL, 1);
        (put.src_offset, put.dst_offset, put.bytes) = (8, 16, 8);
        assert_eq!(rank.post(0, &[put]), 1);
        rank.wait(0, round);
        assert_eq!(rank.windows[1].read(3), 2 * round);
    }
    assert!(child.wait().unwrap().success(), "the child found something left behind");
    // The peer is dead, but its memory still exists: this process lives and its commands end (INV-6).
    assert_eq!(rank.post(0, &[command(abi::TY_OP_PUT_SIGNAL, 1)]), 1);
}

/// Rank 1. It runs one test only, so that its open files and mappings are its own.
fn be_the_child() {
    let _ = common::shm();
    let before = open_files();
    let mut rank = Rank::open(1, 2, "", &needs());
    let endpoint = rank.transport.endpoint(0).unwrap();
    println!("\nendpoint {}", to_hex(&endpoint));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    // In the opposite order of the parent.
    rank.transport.connect(0, &from_hex(line.trim())).unwrap();
    rank.transport.connect(1, &endpoint).unwrap();
    for round in 1..=1000 {
        rank.wait(0, round);
        rank.windows[1].write(7, 2 * rank.windows[0].read(2));
        let mut put = command(abi::TY_OP_PUT_SIGNAL, 0);
        (put.src_window, put.src_offset) = (1, 56);
        (put.dst_window, put.dst_offset, put.bytes) = (1, 24, 8);
        assert_eq!(rank.post(0, &[put]), 1);
    }
    assert_eq!(shared_mappings(), 6, "two windows of each rank and two areas of signals");
    assert_eq!(open_files(), before + 3, "own windows and signals; no socket, nothing of the peer");
    drop(rank);
    assert_eq!(shared_mappings(), 0);
    assert_eq!(open_files(), before);
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn shared_mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("/memfd:tokenyard")).count()
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    digits.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

fn from_line(line: &str) -> Option<Vec<u8>> {
    line.strip_prefix("endpoint ").map(from_hex)
}
