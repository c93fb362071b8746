//! The promises of a proxy, one per test.

use std::time::{Duration, Instant};

use crate::scripted::{Fatal, Remote, Script, Scripted};
use tokenyard_core::proxy::{Proxy, ProxyOptions};
use tokenyard_core::transport::{Command, Event, NO_COMMAND, NO_EVENT};
use tokenyard_core::{ErrorKind, abi};

/// The deadline of expected events.
const DEADLINE: Duration = Duration::from_secs(60);
/// Long enough that only a bell ends it in time.
const LONG_NAP: Duration = Duration::from_secs(3600);

fn one(script: Script, options: &ProxyOptions) -> (Proxy, Remote) {
    let (share, remote) = Scripted::new(script);
    (Proxy::start(vec![share], options).unwrap(), remote)
}

fn commands(queue: u32, flags: u16, tags: std::ops::Range<u64>) -> Vec<Command> {
    tags.map(|tag| Command { queue, flags, tag, value: tag, peer: 5, ..NO_COMMAND }).collect()
}

fn post(proxy: &Proxy, commands: &[Command]) -> usize {
    // SAFETY: the shares of these tests access no memory.
    unsafe { proxy.post(commands[0].queue, commands).unwrap() }
}

fn until(what: &str, mut found: impl FnMut() -> bool) {
    let start = Instant::now();
    while !found() {
        assert!(start.elapsed() < DEADLINE, "{what}");
        std::thread::yield_now();
    }
}

fn events(proxy: &Proxy, queue: u32, count: usize) -> Vec<Event> {
    let mut all = Vec::new();
    until("events come", || {
        let mut some = [NO_EVENT; 7];
        let found = proxy.poll(queue, &mut some).unwrap();
        all.extend_from_slice(&some[..found]);
        all.len() >= count
    });
    assert_eq!(all.len(), count);
    all
}

fn form(event: &Event) -> (u32, u32, u32, i32, u64) {
    (event.kind, event.queue, event.peer, event.status, event.tag)
}

#[test]
fn a_done_command_comes_back_with_its_tag_and_peer_if_it_was_asked_for() {
    let (proxy, remote) = one(Script::default(), &ProxyOptions::new(2, 8));
    assert_eq!(post(&proxy, &commands(1, 0, 1..4)), 3);
    assert_eq!(post(&proxy, &commands(1, abi::TY_FLAG_NOTIFY, 4..6)), 2);
    let events = events(&proxy, 1, 2);
    let done = |tag| (abi::TY_EVENT_DONE, 1, 5, abi::TY_OK, tag);
    assert_eq!(events.iter().map(form).collect::<Vec<_>>(), [done(4), done(5)]);
    assert_eq!(remote.seen().accepted, (1..6).map(|tag| (1, tag)).collect::<Vec<_>>());
    assert_eq!(remote.seen().thread.as_deref(), Some("ty-proxy-0"));
    proxy.health().unwrap();
}

#[test]
fn room_comes_back_when_commands_are_done_and_not_when_they_are_picked_up() {
    let script = Script { stuck: true, ..Script::default() };
    let (proxy, remote) = one(script, &ProxyOptions::new(1, 4));
    assert_eq!(post(&proxy, &commands(0, 0, 0..9)), 4);
    until("the share has them", || remote.seen().accepted.len() == 4);
    let polls = remote.seen().polls;
    until("it is polled", || remote.seen().polls > polls + 2);
    assert_eq!(post(&proxy, &commands(0, 0, 4..9)), 0, "picked up is not done (INV-5)");
    remote.script().stuck = false;
    until("they are done", || post(&proxy, &commands(0, 0, 4..5)) == 1);
}

#[test]
fn an_unread_event_holds_its_room() {
    let (proxy, _) = one(Script::default(), &ProxyOptions::new(1, 2));
    assert_eq!(post(&proxy, &commands(0, abi::TY_FLAG_NOTIFY, 0..3)), 2);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(post(&proxy, &commands(0, 0, 2..3)), 0);
    events(&proxy, 0, 2);
    assert_eq!(post(&proxy, &commands(0, 0, 2..5)), 2);
}

#[test]
fn a_full_queue_stops_no_other() {
    let script = Script { stuck: true, ..Script::default() };
    let (stuck, _) = Scripted::new(script);
    let (well, _) = Scripted::new(Script::default());
    let proxy = Proxy::start(vec![stuck, well], &ProxyOptions::new(4, 2)).unwrap();
    assert_eq!(post(&proxy, &commands(2, 0, 0..9)), 2);
    assert_eq!(post(&proxy, &commands(3, abi::TY_FLAG_NOTIFY, 0..9)), 2);
    events(&proxy, 3, 2);
    assert_eq!(
        post(&proxy, &commands(0, 0, 0..9)),
        2,
        "the queue has room, though its thread is stuck"
    );
}

#[test]
fn a_post_wakes_a_thread_that_naps() {
    let options = ProxyOptions { nap: LONG_NAP, ..ProxyOptions::new(1, 4) };
    let (proxy, remote) = one(Script::default(), &options);
    for tag in 0..5 {
        let mut before = u64::MAX;
        until("the thread sleeps", || {
            let polls = remote.seen().polls;
            std::thread::sleep(Duration::from_millis(20));
            std::mem::replace(&mut before, polls) == polls
        });
        assert_eq!(post(&proxy, &commands(0, 0, tag..tag + 1)), 1);
        // Without a poll of the queue, which would wake it too.
        until("it is posted", || remote.seen().accepted.len() as u64 == tag + 1);
    }
}

#[test]
fn a_poll_wakes_a_thread_that_naps_for_it_may_wait_for_the_fabric() {
    let options = ProxyOptions { nap: LONG_NAP, ..ProxyOptions::new(1, 4) };
    let (proxy, remote) = one(Script::default(), &options);
    let mut before = u64::MAX;
    until("the thread sleeps", || {
        let polls = remote.seen().polls;
        std::thread::sleep(Duration::from_millis(20));
        std::mem::replace(&mut before, polls) == polls
    });
    until("the share is polled", || {
        assert_eq!(proxy.poll(0, &mut [NO_EVENT]), Ok(0));
        remote.seen().polls > before
    });
}

#[test]
fn a_failed_command_is_an_event_and_the_others_go_on() {
    let script = Script { failing: vec![1], ..Script::default() };
    let (proxy, remote) = one(script, &ProxyOptions::new(1, 8));
    assert_eq!(post(&proxy, &commands(0, 0, 10..13)), 3);
    let failed = (abi::TY_EVENT_ERROR, 0, 5, abi::TY_DEADLINE, 11);
    assert_eq!(form(&events(&proxy, 0, 1)[0]), failed);
    assert_eq!(post(&proxy, &commands(0, abi::TY_FLAG_NOTIFY, 13..14)), 1);
    assert_eq!(events(&proxy, 0, 1)[0].kind, abi::TY_EVENT_DONE);
    assert!(!remote.seen().dropped);
    proxy.health().expect("only the transport can tell whom a failed command is about");
}

/// Three commands in flight; at the fourth the share fails for good.
fn fail_for_good(fatal: Fatal) -> String {
    let at = if matches!(fatal, Fatal::Post | Fatal::Panic) { 3 } else { 4 };
    let script = Script { stuck: true, fatal: Some((at, fatal)), ..Script::default() };
    let options = ProxyOptions { nap: LONG_NAP, ..ProxyOptions::new(1, 8) };
    let (proxy, remote) = one(script, &options);
    assert_eq!(post(&proxy, &commands(0, 0, 0..3)), 3);
    until("three are in flight", || remote.seen().accepted.len() == 3);
    assert_eq!(post(&proxy, &commands(0, 0, 3..4)), 1);
    let mut ended = events(&proxy, 0, 4);
    assert!(remote.seen().dropped, "ended before the share was dropped (INV-8)");
    // Posted after the share was dropped.
    assert_eq!(post(&proxy, &commands(0, 0, 4..6)), 2);
    ended.extend(events(&proxy, 0, 2));
    let mut tags: Vec<_> = ended.iter().map(|event| event.tag).collect();
    tags.sort_unstable();
    assert_eq!(tags, [0, 1, 2, 3, 4, 5]);
    assert!(ended.iter().all(|event| event.kind == abi::TY_EVENT_ERROR && event.status < 0));
    proxy.health().unwrap_err().to_string()
}

#[test]
fn a_share_that_fails_ends_everything_with_an_error() {
    assert_eq!(
        fail_for_good(Fatal::Post),
        "drive share: post failed: peer_lost (status -5) [thread: 0]"
    );
    assert_eq!(
        fail_for_good(Fatal::Poll),
        "drive share: poll failed: system (status -4) [thread: 0]"
    );
}

#[test]
fn a_share_that_panics_ends_everything_with_an_error() {
    let error = fail_for_good(Fatal::Panic);
    assert!(error.starts_with("drive share: the share panicked: scripted [thread: 0]"), "{error}");
}

#[test]
fn a_share_that_ends_a_command_twice_is_given_up() {
    let error = fail_for_good(Fatal::Stranger);
    let expected = "poll ended tag 0x1000000000000000 of queue 0, which is not in flight";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn a_drop_flushes_what_was_posted() {
    let (proxy, remote) =
        one(Script { moody: true, ..Script::default() }, &ProxyOptions::new(3, 64));
    for queue in 0..3 {
        assert_eq!(post(&proxy, &commands(queue, 0, 0..64)), 64);
    }
    drop(proxy);
    assert_eq!(remote.seen().accepted.len(), 3 * 64);
    assert!(remote.seen().dropped);
}

#[test]
fn a_drop_waits_for_no_command_that_never_ends() {
    let flush = Duration::from_millis(50);
    let options = ProxyOptions { flush, nap: LONG_NAP, ..ProxyOptions::new(1, 4) };
    let (proxy, remote) = one(Script { stuck: true, ..Script::default() }, &options);
    assert_eq!(post(&proxy, &commands(0, 0, 0..2)), 2);
    let start = Instant::now();
    drop(proxy);
    assert!(start.elapsed() < DEADLINE, "{:?}", start.elapsed());
    assert!(remote.seen().dropped);
}

#[test]
fn a_thread_is_pinned_to_the_processors_of_its_share() {
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let cpu = (0..rustix::thread::CpuSet::MAX_CPU).rfind(|cpu| allowed.is_set(*cpu)).unwrap();
    let (mut share, remote) = Scripted::new(Script::default());
    share.cpus = vec![cpu as u32];
    let _proxy = Proxy::start(vec![share], &ProxyOptions::new(1, 4)).unwrap();
    until("the share runs", || remote.seen().polls > 0);
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let pinned = tasks.filter(|task| {
        // Other tests start threads of the same name, and theirs may end meanwhile.
        let read = |file: &str| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let cpus = format!("Cpus_allowed_list:\t{cpu}\n");
        read("comm") == "ty-proxy-0\n" && read("status").contains(&cpus)
    });
    assert_eq!(pinned.count(), 1);
}

#[test]
fn a_thread_that_cannot_be_pinned_works_all_the_same() {
    for cpus in [vec![u32::MAX], vec![rustix::thread::CpuSet::MAX_CPU as u32 - 1]] {
        let (mut share, _) = Scripted::new(Script::default());
        share.cpus = cpus;
        let proxy = Proxy::start(vec![share], &ProxyOptions::new(1, 4)).unwrap();
        assert_eq!(post(&proxy, &commands(0, abi::TY_FLAG_NOTIFY, 0..1)), 1);
        events(&proxy, 0, 1);
    }
}

#[test]
fn wrong_sizes_are_refused_with_what_was_expected() {
    let refused = |shares: usize, queues, depth| {
        let shares = (0..shares).map(|_| Scripted::new(Script::default()).0).collect();
        let error = Proxy::start(shares, &ProxyOptions::new(queues, depth)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        error.message().to_owned()
    };
    assert_eq!(refused(0, 1, 1), "found shares = 0; expected at least 1");
    assert_eq!(refused(1, 0, 1), "found queues = 0; expected at least 1");
    assert_eq!(refused(1, 1, 0), "found queue_depth = 0; expected 1 to 1048576");
    assert_eq!(refused(1, 1, 1 << 21), "found queue_depth = 2097152; expected 1 to 1048576");
}

#[test]
fn an_unknown_queue_is_an_error() {
    let (proxy, _) = one(Script::default(), &ProxyOptions::new(2, 4));
    assert_eq!(proxy.poll(2, &mut [NO_EVENT]), Err(abi::TY_INTERNAL));
}
