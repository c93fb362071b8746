//! The hot calls do not allocate. The test is a binary of its own, because it replaces the allocator.

mod common;

use common::{Rank, command, needs};
use tokenyard_core::abi;
use tokenyard_core::transport::NO_EVENT;
use tokenyard_testkit::{Counting, of_this_thread};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn post_poll_and_read_signal_do_not_allocate_even_when_a_command_fails() {
    let mut rank = Rank::open(0, 1, "", &needs());
    let endpoint = rank.transport.endpoint(0).unwrap();
    rank.transport.connect(0, &endpoint).unwrap();
    let ops = [
        abi::TY_OP_PUT,
        abi::TY_OP_PUT_SIGNAL,
        abi::TY_OP_PUT_VALUE,
        abi::TY_OP_SIGNAL,
        abi::TY_OP_GET,
        99,
    ];
    let commands = ops.map(|op| {
        let mut command = command(op, 0);
        (command.flags, command.bytes, command.dst_window) = (abi::TY_FLAG_NOTIFY, 64, 1);
        command
    });
    let mut events = [NO_EVENT; 8];

    let before = of_this_thread();
    for step in 1..=1000 {
        assert_eq!(rank.post(0, &commands), commands.len());
        assert_eq!(rank.transport.poll(0, &mut events).unwrap(), commands.len());
        assert_eq!(rank.signal(0), 2 * step);
    }
    assert_eq!(of_this_thread() - before, 0);

    let probe = std::hint::black_box(Box::new(1));
    assert_eq!(of_this_thread() - before, 1, "the counter counts");
    drop(probe);
}
