//! All kinds of faults.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Pair, SECOND, inline};
use tokenyard_hca::{Config, Event, Fault, FaultPlan};
use tokenyard_sys_mlx5::cqe::{Kind, syndrome};
use tokenyard_sys_mlx5::wqe::Request;

fn pair(fault: Fault) -> Pair {
    Pair::new(Config { faults: FaultPlan::one(7, fault), ..Config::default() }, 6)
}

/// Writes values of 1 to `count`, each with a doorbell and a completion.
fn write_values(pair: &mut Pair, count: u64) {
    for value in 1..=count {
        let to = pair.b.remote(8 * (value - 1));
        pair.post(&[Request::WriteInline { to, data: inline(value) }]);
    }
}

fn values(pair: &Pair, count: u64) -> Vec<u64> {
    (0..count).map(|at| pair.b.word(8 * at)).collect()
}

#[test]
fn late_completions_come_in_order() {
    let mut pair = pair(Fault::CompletionsLate { most: 1_000_000 });
    let (mut seen, mut now) = (Vec::new(), 0);
    while seen.last() != Some(&19) {
        assert!(now < SECOND, "{seen:?}");
        if pair.a.next < 20 && now.is_multiple_of(200_000) {
            pair.post(&[Request::Nop]);
        }
        now += 10_000;
        pair.switch.run(now);
        let word = pair.a.completed();
        if word.kind == Kind::Request && seen.last() != Some(&word.counter) {
            seen.push(word.counter);
        }
    }
    assert!(seen.is_sorted() && seen.len() > 3, "{seen:?}");
    assert!(pair.switch.now() > 100_000, "some were late");
}

#[test]
fn merged_completions_tell_the_last_one_only() {
    let mut pair = pair(Fault::CompletionsMerged { most: 8 });
    write_values(&mut pair, 20);
    let mut seen = Vec::new();
    while pair.switch.step() {
        let word = pair.a.completed();
        if word.kind == Kind::Request && seen.last() != Some(&word.counter) {
            seen.push(word.counter);
        }
    }
    assert_eq!(seen.last(), Some(&19));
    assert!(seen.len() <= 4, "{seen:?}");
}

#[test]
fn completions_at_the_end_come_when_nothing_is_under_way() {
    let mut pair = pair(Fault::CompletionsAtEnd);
    write_values(&mut pair, 20);
    assert_eq!(pair.a.completed().kind, Kind::None);
    pair.run();
    assert_eq!(pair.a.completed().counter, 19);
    assert_eq!(values(&pair, 20), (1..=20).collect::<Vec<_>>());
}

#[test]
fn a_request_fails_with_any_syndrome_and_the_rest_is_flushed() {
    for code in [
        syndrome::LOCAL_LENGTH,
        syndrome::LOCAL_QP_OPERATION,
        syndrome::LOCAL_PROTECTION,
        syndrome::BAD_RESPONSE,
        syndrome::LOCAL_ACCESS,
        syndrome::REMOTE_INVALID_REQUEST,
        syndrome::REMOTE_ACCESS,
        syndrome::REMOTE_OPERATION,
        syndrome::RETRIES,
        syndrome::RNR_RETRIES,
        syndrome::REMOTE_ABORTED,
    ] {
        let mut pair = pair(Fault::Error { request: 3, syndrome: code });
        write_values(&mut pair, 3);
        pair.run();
        let failed = pair.a.completion();
        assert_eq!((failed.word.kind, failed.word.counter), (Kind::RequestError, 2));
        assert_eq!(failed.syndrome, code);
        pair.post(&[Request::Nop]);
        pair.run();
        assert_eq!((pair.a.completion().syndrome, pair.a.completed().counter), (0x05, 3));
        assert_eq!(values(&pair, 3), [1, 2, 0], "those before it are done");
    }
}

#[test]
fn a_silent_peer_shows_when_the_repetitions_run_out() {
    let mut pair = pair(Fault::PeerSilent { request: 2 });
    write_values(&mut pair, 2);
    pair.switch.run(4 * (4096 << 14) - 1);
    assert_eq!(pair.a.completed().counter, 0, "not before");
    pair.run();
    let failed = pair.a.completion();
    assert_eq!((failed.word.counter, failed.syndrome), (1, syndrome::RETRIES));
}

#[test]
fn late_and_lost_doorbells_lose_nothing() {
    for fault in [Fault::DoorbellLate { most: 50_000 }, Fault::DoorbellLost { every: 3 }] {
        let mut pair = pair(fault);
        write_values(&mut pair, 20);
        pair.run();
        assert_eq!(values(&pair, 20), (1..=20).collect::<Vec<_>>(), "{fault:?}");
    }
    // The work of a lost doorbell shows at the next.
    let mut pair = pair(Fault::DoorbellLost { every: 3 });
    write_values(&mut pair, 3);
    pair.run();
    assert_eq!(values(&pair, 3), [1, 2, 0]);
    pair.post(&[Request::Nop]);
    pair.run();
    assert_eq!(values(&pair, 3), [1, 2, 3]);
}

#[test]
fn slots_that_are_written_again_before_a_late_ring_are_left_alone() {
    let mut pair = pair(Fault::DoorbellLate { most: 50_000 });
    write_values(&mut pair, 1);
    pair.run();
    // All slots at once, also that of the first request.
    pair.post(&[Request::Nop; 64]);
    pair.run();
    assert_eq!(pair.a.completed().counter, 64);
}

#[test]
fn late_payloads_are_late_and_complete_later() {
    let mut pair = pair(Fault::PayloadLate { most: 1_000_000 });
    write_values(&mut pair, 10);
    pair.run();
    assert_eq!(values(&pair, 10), (1..=10).collect::<Vec<_>>());
    assert!(pair.switch.now() > 100_000);
}

#[test]
fn a_device_that_stops_does_nothing_any_more() {
    let mut pair = pair(Fault::DeviceStops { request: 3 });
    write_values(&mut pair, 5);
    pair.run();
    assert_eq!(values(&pair, 5)[2..], [0, 0, 0]);
    assert!(pair.hca().is_stopped() && pair.hca().violations().is_empty());
}

#[test]
fn a_port_that_goes_down_is_an_event_and_then_an_error() {
    let mut pair = pair(Fault::PortDown { request: 2 });
    write_values(&mut pair, 1);
    pair.run();
    pair.post(&[Request::WriteInline { to: pair.b.remote(0), data: inline(2) }]);
    pair.run();
    assert_eq!(pair.hca().take_events(), [Event::PortDown]);
    assert!(!pair.hca().port_is_up());
    assert_eq!(pair.a.completion().syndrome, syndrome::RETRIES);
}
