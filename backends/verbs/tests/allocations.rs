//! The hot calls do not allocate. The test is a separate binary, because it replaces the allocator.

mod common;

use common::{command, needs, ranks};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_EVENT, Transport as _};
use tokenyard_testkit::{Counting, of_this_thread};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The stand-in NIC executes on the calling thread, so its allocations would count too.
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

        let before = of_this_thread();
        for step in 1..=1000 {
            let (batch, reported) = if step % 2 == 0 { (&commands, 6) } else { (&quiet, 1) };
            assert_eq!(ranks[0].post(batch), batch.len());
            let mut found = 0;
            while found < reported || rank.read_signal(0, 0) < 2 * step {
                found += rank.poll(0, &mut events).unwrap();
                rank.progress().unwrap();
            }
        }
        assert_eq!(of_this_thread() - before, 0, "{name}");

        let probe = std::hint::black_box(Box::new(1));
        assert_eq!(of_this_thread() - before, 1, "the counter counts");
        drop(probe);
    }
}
