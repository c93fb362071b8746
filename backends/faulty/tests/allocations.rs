//! The hot calls do not allocate. The test is a separate binary, because it replaces the allocator.

#![allow(clippy::unwrap_used)]

mod common;

use common::{command, open, post};
use tokenyard_core::transport::NO_EVENT;
use tokenyard_testkit::{Counting, of_this_thread};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn post_poll_and_progress_do_not_allocate_even_when_a_command_fails() {
    let keys = "delay_us = 2\nfault = { kind = \"fail\", rank = 0, at = 100 }";
    let transport = open(1, keys);
    let mut events = [NO_EVENT; 8];
    let (mut accepted, mut ended) = (0, 0);
    let before = of_this_thread();
    for step in 0..5000 {
        accepted += post(&transport, &[command(step), command(step), command(step)]);
        ended += transport.poll(0, &mut events).unwrap();
        transport.progress().unwrap();
        transport.read_signal(0, 3);
    }
    assert_eq!(of_this_thread() - before, 0);
    assert!(transport.health().is_err() && ended > 100, "{accepted} accepted, {ended} ended");

    let before = of_this_thread();
    let probe = std::hint::black_box(Box::new(1));
    assert_eq!(of_this_thread() - before, 1, "the counter counts");
    drop(probe);
}
