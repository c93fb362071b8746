//! The order in which writes land, and the two ways to raise a signal behind a payload.
//!
//! A fetch-and-add is executed after the writes of its connection. A write of the new total is not, where the
//! fabric reorders. These tests show that `Order` has an effect, and that the choice of signals matters.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Pair, inline};
use tokenyard_hca::{Config, FaultPlan, Memory as _, Order};
use tokenyard_sys_mlx5::wqe::{Local, Remote, Request};

const ROUNDS: u64 = 50;
/// Offsets of payloads and of the signal's total in the window.
const PAYLOAD: u64 = 0;
const BYTES: u32 = 2048;
const TOTAL: u64 = 8192;

fn config(order: Order, seed: u64) -> Config {
    Config { order, faults: FaultPlan { seed, faults: Vec::new() }, ..Config::default() }
}

/// Makes the signal's request from an address, a sink and the new total.
type Signal = fn(Remote, Local, u64) -> Request;

fn fetch_add(to: Remote, sink: Local, _: u64) -> Request {
    Request::FetchAdd { to, add: 1, sink }
}

fn write_total(to: Remote, _: Local, total: u64) -> Request {
    Request::WriteInline { to, data: inline(total) }
}

/// Sends payloads with signals, and looks at every step whether a signal was there before its payload.
/// Returns the number of rounds in which it was.
fn early_signals(order: Order, seed: u64, signal: Signal) -> u64 {
    let mut pair = Pair::new(config(order, seed), 6);
    let mut early = 0;
    for round in 1..=ROUNDS {
        let payload = [round as u8; BYTES as usize];
        pair.arena.write(pair.a.window, &payload).unwrap();
        let (to, from) = (pair.b.remote(PAYLOAD), pair.a.local(0, BYTES));
        let sink = pair.a.local(TOTAL, 8);
        let raise = signal(pair.b.remote(TOTAL), sink, round);
        pair.post(&[Request::Write { to, from }, raise]);
        let mut was_early = false;
        while pair.switch.step() {
            let is_raised = pair.b.word(TOTAL) >= round;
            was_early |= is_raised && pair.b.bytes(PAYLOAD, BYTES as usize) != payload;
        }
        early += u64::from(was_early);
        pair.run();
        assert_eq!(pair.b.bytes(PAYLOAD, BYTES as usize), payload);
        assert_eq!(pair.b.word(TOTAL), round, "seed {seed}");
    }
    early
}

#[test]
fn additions_come_behind_their_payload_whatever_the_order() {
    for seed in 0..4 {
        assert_eq!(early_signals(Order::InOrder, seed, fetch_add), 0);
        assert_eq!(early_signals(Order::Adaptive, seed, fetch_add), 0);
    }
}

#[test]
fn written_totals_come_before_their_payload_where_the_fabric_reorders() {
    for seed in 0..4 {
        assert_eq!(early_signals(Order::InOrder, seed, write_total), 0);
        let early = early_signals(Order::Adaptive, seed, write_total);
        assert!(early > ROUNDS / 2, "{early} of {ROUNDS}");
    }
}

#[test]
fn written_totals_may_stay_behind_where_the_fabric_reorders() {
    // Two totals are on their way at once: the smaller may land last, and then stays.
    let mut smaller = 0;
    for seed in 0..20 {
        let mut pair = Pair::new(config(Order::Adaptive, seed), 6);
        let to = pair.b.remote(TOTAL);
        pair.post(&[1, 2].map(|total| Request::WriteInline { to, data: inline(total) }));
        pair.run();
        smaller += u64::from(pair.b.word(TOTAL) == 1);
    }
    assert!((1..20).contains(&smaller), "{smaller} of 20");
}

#[test]
fn a_run_is_the_same_on_the_same_seed() {
    let order = |seed| {
        let mut pair = Pair::new(config(Order::Adaptive, seed), 6);
        let (to, from) = (pair.b.remote(0), pair.a.local(0, BYTES));
        pair.arena.write(pair.a.window, &[1; BYTES as usize]).unwrap();
        pair.post(&[Request::Write { to, from }]);
        let mut seen = Vec::new();
        while pair.switch.step() {
            seen.push(pair.b.bytes(0, BYTES as usize));
        }
        seen
    };
    assert_eq!(order(3), order(3));
    assert_ne!(order(3), order(4));
}
