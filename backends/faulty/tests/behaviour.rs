//! The wrapper behaves as documented, both for a caller and for the inner transport. Only the test
//! of delays depends on a clock.

#![allow(clippy::unwrap_used)]

mod common;

use std::time::{Duration, Instant};

use common::{DEPTH, command, component, notes, open, poll, post, run, table, tags};
use tokenyard_core::abi;
use tokenyard_core::transport::{Event, Team, TransportNeeds, TransportOpen};

const PLAIN: &str = "reorder = 0\nback_pressure = 0\nquiet = 0\n";

fn sorted(mut tags: Vec<u64>) -> Vec<u64> {
    tags.sort_unstable();
    tags
}

fn event_tags(events: &[Event]) -> Vec<u64> {
    events.iter().map(|event| event.tag).collect()
}

#[test]
fn every_command_goes_on_once_and_in_an_order_that_the_seed_decides() {
    let order = |id, seed: u64| {
        run(&open(id, &format!("seed = {seed}")), 400);
        tags(id)
    };
    let (first, again, other) = (order(1, 7), order(2, 7), order(3, 8));
    let all: Vec<u64> = (0..400).collect();
    assert_eq!(sorted(first.clone()), all);
    assert_ne!(first, all);
    assert_eq!(first, again);
    assert_ne!(first, other);
}

#[test]
fn at_most_as_many_commands_are_held_as_the_config_says() {
    let transport = open(4, "reorder = 3\nback_pressure = 0\nquiet = 0");
    let mut most = 0;
    for tag in 0..300 {
        assert_eq!(post(&transport, &[command(tag)]), 1);
        let held = tag as usize + 1 - tags(4).len();
        assert!(held <= 3, "{held} commands are held");
        most = most.max(held);
        poll(&transport);
    }
    assert_eq!(most, 3);
}

#[test]
fn a_command_is_done_only_when_the_inner_transport_says_so() {
    let transport = open(5, "reorder = 8\nback_pressure = 0\nquiet = 0");
    let mut done = Vec::new();
    for tag in 0..200 {
        post(&transport, &[command(tag)]);
        done.extend(event_tags(&poll(&transport)));
        let given = tags(5);
        assert!(done.iter().all(|tag| given.contains(tag)), "{done:?} of {given:?}");
    }
}

#[test]
fn nothing_is_reordered_refused_or_late_where_the_config_says_so() {
    let transport = open(6, PLAIN);
    for tag in 0..200 {
        assert_eq!(post(&transport, &[command(tag)]), 1);
        assert_eq!(event_tags(&poll(&transport)), [tag]);
    }
    assert_eq!(tags(6), (0..200).collect::<Vec<_>>());
}

#[test]
fn events_come_late_and_in_pieces_and_once() {
    let transport = open(7, "reorder = 0\nback_pressure = 0\nquiet = 3");
    let commands: Vec<_> = (0..100).map(command).collect();
    assert_eq!(post(&transport, &commands), 100);
    let (mut events, mut empty, mut in_a_row) = (Vec::new(), 0, 0);
    while events.len() < 100 {
        let now = poll(&transport);
        in_a_row = if now.is_empty() { in_a_row + 1 } else { 0 };
        assert!(in_a_row <= 3, "{in_a_row} polls in a row report nothing");
        empty += usize::from(now.is_empty());
        assert!(now.len() < 100, "all at once");
        events.extend(event_tags(&now));
    }
    assert!(empty > 0);
    assert_eq!(sorted(events), (0..100).collect::<Vec<_>>());
}

#[test]
fn some_posts_accept_less_and_an_idle_queue_always_takes_something() {
    let transport = open(8, "reorder = 0\nback_pressure = 90\nquiet = 0");
    let (mut refused, mut next) = (0, 0);
    for _ in 0..300 {
        poll(&transport);
        let batch: Vec<_> = (next..next + 4).map(command).collect();
        let first = post(&transport, &batch);
        assert!(first >= 1, "an idle queue refuses");
        next += first as u64;
        let second = post(&transport, &[command(next)]);
        next += second as u64;
        refused += usize::from(first < 4) + usize::from(second < 1);
    }
    assert!(refused > 200, "{refused} posts accepted less");
    assert_eq!(tags(8), (0..next).collect::<Vec<_>>());
}

#[test]
fn a_delayed_command_waits_and_then_goes_on() {
    let transport = open(9, "reorder = 64\ndelay_us = 1000000\nback_pressure = 0\nquiet = 0");
    let commands: Vec<_> = (0..64).map(command).collect();
    let start = Instant::now();
    assert_eq!(post(&transport, &commands), 64);
    for _ in 0..1000 {
        poll(&transport);
    }
    // Only on a machine that stands still for a second would none be held.
    let held = 64 - tags(9).len();
    assert!(held > 0 || start.elapsed() > Duration::from_millis(900));
    while tags(9).len() < 64 {
        assert!(start.elapsed() < Duration::from_secs(20), "{} went on", tags(9).len());
        poll(&transport);
    }
}

#[test]
fn whoever_drives_the_transport_moves_what_its_owner_left_behind() {
    let transport = open(10, "reorder = 16\nback_pressure = 0");
    assert!(transport.capabilities().flags & abi::TY_CAP_MANUAL_PROGRESS != 0);
    post(&transport, &(0..16).map(command).collect::<Vec<_>>());
    assert!(tags(10).is_empty());
    let mut moved = 0;
    for _ in 0..1000 {
        moved += usize::from(transport.progress().unwrap());
    }
    assert!(moved > 0);
    assert_eq!(tags(10).len(), 16);
    assert!(!transport.progress().unwrap());
}

#[test]
fn what_is_held_goes_on_when_the_instance_is_dropped() {
    let transport = open(11, "reorder = 16\ndelay_us = 1000000\nback_pressure = 0");
    post(&transport, &(0..16).map(command).collect::<Vec<_>>());
    assert!(tags(11).is_empty());
    drop(transport);
    assert_eq!(sorted(tags(11)), (0..16).collect::<Vec<_>>());
}

#[test]
fn capabilities_are_those_of_the_inner_transport_less_what_is_no_longer_true() {
    let flags = |keys| component().probe(&table(12, keys)).unwrap().flags;
    let driven = abi::TY_CAP_MANUAL_PROGRESS;
    let (bounded, masking) = (abi::TY_CAP_BOUNDED_PUT, abi::TY_CAP_MASKING);
    assert_eq!(flags(""), abi::TY_CAP_GET | bounded | masking | driven);
    assert_eq!(flags("fault = { kind = \"stop\", rank = 0, at = 1 }"), abi::TY_CAP_GET | driven);
    let failing = "fault = { kind = \"fail\", rank = 0, at = 1 }";
    assert_eq!(flags(failing), abi::TY_CAP_GET | bounded | driven);
    let loads = abi::TY_CAP_LOAD_STORE;
    assert_eq!(flags("load_store = true"), abi::TY_CAP_GET | bounded | masking | loads | driven);
    let found = component().probe(&table(12, "")).unwrap();
    assert_eq!((found.max_queue_depth, found.max_signals), (1024, 16));
    assert_eq!(open(12, "").read_signal(0, 9), 9);
    assert_eq!(open(12, "").link_name(1), "faulty: over notebook");
}

#[test]
fn an_unknown_inner_transport_and_a_wrong_inner_table_are_named() {
    let probe = |text: &str| {
        let table = tokenyard_core::config::ComponentTable::from_text(text, "a.toml");
        component().probe(&table).unwrap_err().to_string()
    };
    let error = probe("inner = \"efa\"");
    assert!(error.contains("no transport is called `efa`") && error.contains("Fix: "), "{error}");
    let error = probe("inner = \"notebook\"\n\nnotebook.id = 1\nnotebook.ids = 2");
    assert!(error.contains("a.toml:4: unknown key `ids`"), "{error}");
}

fn fault(kind: &str, at: u64, more: &str) -> String {
    format!("{PLAIN}fault = {{ kind = \"{kind}\", rank = 0, at = {at}{more} }}")
}

#[test]
fn the_command_that_fails_ends_once_as_an_error_and_health_stays_bad() {
    let mut moved = [0; 3];
    for seed in 0..60 {
        let transport = open(100 + seed, &format!("seed = {seed}\n{}", fault("fail", 10, "")));
        for tag in 0..20 {
            assert_eq!(post(&transport, &[command(tag)]), 1);
            let events = poll(&transport);
            assert_eq!(event_tags(&events), [tag]);
            let kind = if tag == 10 { abi::TY_EVENT_ERROR } else { abi::TY_EVENT_DONE };
            assert_eq!((events[0].kind, events[0].peer), (kind, (tag % 3) as u32));
            assert_eq!(events[0].status < 0, tag == 10);
            assert_eq!(transport.health().is_err(), tag >= 10);
        }
        let given = notes(100 + seed);
        let failed = given.iter().find(|command| command.tag == 10);
        // Nothing, the payload alone, or all of it.
        moved[failed.map_or(0, |c| if c.op == abi::TY_OP_PUT { 1 } else { 2 })] += 1;
        let error = transport.health().unwrap_err();
        assert!(error.to_string().contains("command: 10, to rank: 1"), "{error}");
    }
    assert!(moved.iter().all(|count| *count > 0), "{moved:?}");
}

#[test]
fn nothing_moves_or_ends_after_a_stop_not_even_by_a_drop() {
    let transport = open(20, &fault("stop", 10, ""));
    let mut events = Vec::new();
    let mut accepted = 0;
    for tag in 0..2000 {
        accepted += post(&transport, &[command(tag)]);
        events.extend(event_tags(&poll(&transport)));
    }
    // The queue slots of commands that never end stay taken (INV-5).
    assert_eq!(accepted, 10 + DEPTH as usize);
    assert_eq!(events, (0..10).collect::<Vec<_>>());
    transport.health().unwrap();
    drop(transport);
    assert_eq!(tags(20), (0..10).collect::<Vec<_>>());
}

#[test]
fn what_is_late_moves_when_the_instance_is_dropped() {
    let transport = open(21, &fault("late", 10, ""));
    let mut events = Vec::new();
    for tag in 0..50 {
        post(&transport, &[command(tag)]);
        events.extend(event_tags(&poll(&transport)));
    }
    assert_eq!(events, (0..10).collect::<Vec<_>>());
    assert_eq!(tags(21), (0..10).collect::<Vec<_>>());
    drop(transport);
    assert_eq!(sorted(tags(21)), (0..50).collect::<Vec<_>>());
}

#[test]
fn a_link_that_is_lost_takes_the_commands_to_its_peer_and_no_others() {
    for (id, kind) in [(22, "link_error"), (23, "link_silent")] {
        let transport = open(id, &fault(kind, 10, ", peer = 2"));
        let mut events = Vec::new();
        for tag in 0..60 {
            post(&transport, &[command(tag)]);
            events.extend(poll(&transport));
        }
        let lost = |tag: u64| tag >= 10 && tag % 3 == 2;
        let others: Vec<u64> = (0..60).filter(|tag| !lost(*tag)).collect();
        assert_eq!(tags(id), others, "{kind}");
        let ended: Vec<_> = events.iter().map(|e| (e.tag, e.kind == abi::TY_EVENT_ERROR)).collect();
        let expected: Vec<_> = (0..60)
            .filter(|tag| kind == "link_error" || !lost(*tag))
            .map(|tag| (tag, lost(tag)))
            .collect();
        assert_eq!(ended, expected, "{kind}");
        assert_eq!(transport.health().is_err(), kind == "link_error");
    }
}

#[test]
fn a_fault_of_another_rank_leaves_this_one_alone() {
    let keys = format!("{PLAIN}fault = {{ kind = \"stop\", rank = 1, at = 0 }}");
    let transport = open(24, &keys);
    assert_eq!(run(&transport, 50).len(), 50);
}

#[test]
fn a_link_to_a_rank_outside_the_team_is_refused() {
    let keys = "fault = { kind = \"link_error\", rank = 0, at = 0, peer = 3 }";
    let needs = TransportNeeds {
        windows: 1,
        queues: 1,
        signals: 1,
        queue_depth: 1,
        largest_put: 1,
        deadline: Duration::from_secs(1),
    };
    let error = component()
        .open(&table(25, keys), &TransportOpen::new(&Team::world(0, 3), &needs))
        .unwrap_err();
    assert!(error.to_string().contains("found fault.peer = 3; expected one of"), "{error}");
}
