//! Model checks of all schedules of a poster and a proxy thread. With the feature `loom`:
//! `cargo test -p tokenyard-core --features loom --lib proxy::`.

use std::time::Duration;

use loom::thread;

use super::bell::Bell;
use super::queue::{Queue, Server, queue};
use super::ring::ring;
use super::sync::Arc;
use crate::abi;
use crate::transport::{Command, NO_COMMAND, NO_EVENT};

/// Checks every interleaving with at most `preemptions`; without a limit it takes too long.
fn check(preemptions: usize, f: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(f);
}

#[test]
fn items_cross_a_ring_in_order_and_whole() {
    check(3, || {
        let (mut producer, mut consumer) = ring(2, 0);
        let filler = thread::spawn(move || {
            for item in 1..=3 {
                while !producer.stage(item) {
                    thread::yield_now();
                }
                producer.publish();
            }
        });
        let mut expected = 1;
        while expected <= 3 {
            let mut items = [0; 2];
            let count = consumer.peek(&mut items);
            for item in &items[..count] {
                assert_eq!(*item, expected);
                expected += 1;
            }
            consumer.take(count);
            consumer.free(count);
            thread::yield_now();
        }
        filler.join().unwrap();
    });
}

/// Ends `commands` commands of the queues, each at once, and waits by `pause` whenever there are none.
fn serve(servers: &mut [Server], commands: usize, mut pause: impl FnMut(&mut [Server])) {
    let mut ended = 0;
    while ended < commands {
        let before = ended;
        for server in &mut *servers {
            let mut batch = [NO_COMMAND; 2];
            let count = server.pick(&mut batch);
            server.accepted(count);
            for command in &batch[..count] {
                assert!(server.end(command.tag, Ok(())));
            }
            server.publish();
            ended += count;
        }
        if ended == before {
            pause(servers);
        }
    }
}

/// Sleeps until the bell rings: a lost ring is found as a deadlock.
fn asleep(bell: &Bell, servers: &mut [Server]) {
    bell.sleep(Duration::ZERO, || servers.iter_mut().any(Server::has_waiting));
}

fn post_all(queue: &mut Queue, commands: &[Command]) {
    let mut posted = 0;
    while posted < commands.len() {
        posted += queue.post(&commands[posted..]);
        if posted < commands.len() {
            thread::yield_now();
        }
    }
}

#[test]
fn a_post_is_never_missed_by_a_thread_that_falls_asleep() {
    check(3, || {
        let bell = Arc::new(Bell::new());
        let (mut poster, server) = queue(0, 1, Arc::clone(&bell));
        let thread = thread::spawn(move || {
            serve(&mut [server], 2, |servers| asleep(&bell, servers));
        });
        // Room for one: the second is posted when the first is seen to be done.
        post_all(&mut poster, &[NO_COMMAND, NO_COMMAND]);
        thread.join().unwrap();
    });
}

#[test]
fn two_posters_share_a_thread_that_sleeps() {
    check(2, || {
        let bell = Arc::new(Bell::new());
        let (mut first, first_server) = queue(0, 1, Arc::clone(&bell));
        let (mut second, second_server) = queue(1, 1, Arc::clone(&bell));
        let thread = thread::spawn(move || {
            serve(&mut [first_server, second_server], 2, |servers| asleep(&bell, servers));
        });
        let other = thread::spawn(move || post_all(&mut second, &[NO_COMMAND]));
        post_all(&mut first, &[NO_COMMAND]);
        other.join().unwrap();
        thread.join().unwrap();
    });
}

/// An event that finds no room fails an assertion in `Server::end`.
#[test]
fn every_event_has_room_and_comes_once_where_some_are_asked_for() {
    check(3, || {
        let (mut poster, server) = queue(0, 1, Arc::new(Bell::new()));
        let thread = thread::spawn(move || serve(&mut [server], 3, |_| thread::yield_now()));
        let commands = [abi::TY_FLAG_NOTIFY, abi::TY_FLAG_NOTIFY, 0]
            .map(|flags| Command { flags, ..NO_COMMAND });
        let (mut posted, mut seen) = (0, 0);
        while posted < 3 || seen < 2 {
            posted += poster.post(&commands[posted..]);
            seen += poster.poll(&mut [NO_EVENT; 2]);
            thread::yield_now();
        }
        assert_eq!((seen, poster.poll(&mut [NO_EVENT])), (2, 0));
        thread.join().unwrap();
    });
}
