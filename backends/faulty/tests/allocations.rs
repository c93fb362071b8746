//! The hot calls do not allocate. A binary of its own, for it replaces the allocator.

#![allow(clippy::unwrap_used)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{command, open, post};
use tokenyard_core::transport::NO_EVENT;

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: by the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: by the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn post_poll_and_progress_do_not_allocate_even_when_a_command_fails() {
    let keys = "delay_us = 2\nfault = { kind = \"fail\", rank = 0, at = 100 }";
    let transport = open(1, keys);
    let mut events = [NO_EVENT; 8];
    let (mut accepted, mut ended) = (0, 0);
    let before = COUNT.get();
    for step in 0..5000 {
        accepted += post(&transport, &[command(step), command(step), command(step)]);
        ended += transport.poll(0, &mut events).unwrap();
        transport.progress().unwrap();
        transport.read_signal(0, 3);
    }
    assert_eq!(COUNT.get() - before, 0);
    assert!(transport.health().is_err() && ended > 100, "{accepted} accepted, {ended} ended");

    let before = COUNT.get();
    let probe = std::hint::black_box(Box::new(1));
    assert_eq!(COUNT.get() - before, 1, "the counter counts");
    drop(probe);
}
