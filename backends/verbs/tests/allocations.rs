//! The hot calls do not allocate. A binary of its own, for it replaces the allocator.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{command, needs, ranks};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_EVENT, Transport as _};

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

/// The stand-in NIC executes on the calling thread, so what it allocated would count too.
#[test]
fn post_poll_progress_and_read_signal_do_not_allocate_even_when_a_command_fails() {
    for (name, keys) in [
        ("immediate", "signals = \"immediate\""),
        ("atomic", "signals = \"atomic\""),
        ("flush", "flush = \"always\""),
    ] {
        let ranks = ranks(name, 1, keys, &needs());
        let rank = &ranks[0].transport;
        let ops = [
            abi::TY_OP_PUT,
            abi::TY_OP_PUT_SIGNAL,
            abi::TY_OP_PUT_VALUE,
            abi::TY_OP_SIGNAL,
            abi::TY_OP_GET,
            99,
        ];
        let commands = ops.map(|op| command(op, 0, 1));
        let quiet = commands.map(|command| Command { flags: 0, ..command });
        let mut events = [NO_EVENT; 8];

        let before = COUNT.get();
        for step in 1..=1000 {
            let (batch, reported) = if step % 2 == 0 { (&commands, 6) } else { (&quiet, 1) };
            assert_eq!(ranks[0].post(batch), batch.len());
            let mut found = 0;
            while found < reported || rank.read_signal(0, 0) < 2 * step {
                found += rank.poll(0, &mut events).unwrap();
                rank.progress().unwrap();
            }
        }
        assert_eq!(COUNT.get() - before, 0, "{name}");

        let probe = std::hint::black_box(Box::new(1));
        assert_eq!(COUNT.get() - before, 1, "the counter counts");
        drop(probe);
    }
}
