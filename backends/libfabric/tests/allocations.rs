//! The hot calls do not allocate, nor does a proxy thread. The test is a separate binary, because
//! it replaces the allocator. Allocations of libfabric itself use another allocator and are not
//! counted.

// The helpers below may panic as a test may.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::transport::{
    Command, NO_COMMAND, NO_EVENT, NO_WINDOW, Team, Transport, TransportNeeds, TransportOpen,
    Window,
};
use tokenyard_libfabric::Libfabric;
use tokenyard_testkit::{Counting, of_all_threads};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A single rank, whose window is `memory`.
fn open(text: &str, memory: &mut [u64]) -> Libfabric {
    let config = ComponentTable::from_text(text, "test.toml").parse("libfabric").unwrap();
    let bytes = size_of_val(memory) as u64;
    let needs = TransportNeeds {
        windows: 1,
        queues: 1,
        signals: 4,
        queue_depth: 16,
        largest_put: bytes,
        deadline: Duration::from_secs(60),
    };
    let mut transport =
        Libfabric::open(config, &TransportOpen::new(&Team::world(0, 1), &needs)).unwrap();
    let window = Window {
        kind: abi::TY_MEMORY_HOST,
        pointer: memory.as_mut_ptr().cast(),
        bytes,
        ..NO_WINDOW
    };
    // SAFETY: the caller drops the memory after the transport.
    unsafe { transport.register(&window).unwrap() };
    let endpoint = transport.endpoint(0).unwrap();
    transport.connect(0, &endpoint).unwrap();
    transport
}

fn hot_calls_take_nothing(text: &str) {
    let mut memory = vec![0; 1024];
    let transport = open(text, &mut memory);
    let ops = [abi::TY_OP_PUT, abi::TY_OP_PUT_SIGNAL, abi::TY_OP_PUT_VALUE, abi::TY_OP_SIGNAL];
    let flags = abi::TY_FLAG_NOTIFY;
    let commands = ops.map(|op| Command { op, flags, signal: 1, add: 1, bytes: 64, ..NO_COMMAND });
    let mut events = [NO_EVENT; 8];
    let mut rounds = |from: u64, to: u64| {
        let start = Instant::now();
        for round in from..to {
            // SAFETY: the commands are in range, and the memory outlives the transport.
            let posted = unsafe { transport.post(0, &commands).unwrap() };
            assert_eq!(posted, commands.len());
            let mut ended = 0;
            while ended < posted || transport.read_signal(0, 1) < 2 * (round + 1) {
                ended += transport.poll(0, &mut events).unwrap();
                transport.progress().unwrap();
                transport.health().unwrap();
                assert!(start.elapsed() < Duration::from_secs(60), "round {round}: {ended} ended");
            }
        }
    };
    // A thread allocates when it starts.
    rounds(0, 100);
    let before = of_all_threads();
    rounds(100, 1100);
    assert_eq!(of_all_threads() - before, 0, "{text}");
    drop(transport);
    drop(memory);
}

#[test]
fn post_poll_progress_and_health_take_no_memory_inline_and_by_a_proxy_thread() {
    hot_calls_take_nothing("");
    hot_calls_take_nothing("proxy_threads = 1");
    let before = of_all_threads();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(of_all_threads() - before, 1, "the counter counts");
}
