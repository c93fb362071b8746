//! Worlds on transports with permanent faults. The tests show four things. Every wait ends with the right error
//! (INV-6, INV-7). The late writes of a rank that was given up do no harm (INV-8). Reordering reveals code that
//! relies on order (INV-2). Bytes of a rank that lies are refused.

// Helpers of tests may panic as tests may.
#![allow(clippy::unwrap_used, clippy::panic)]

mod breaks;
mod late_writer;
mod lies;
mod order;
mod wrapper;

use std::time::Duration;

use tokenyard_conformance::moe::oracle::{Case, Tokens};
use tokenyard_core::config::Config;

/// The deadline, and the lateness, of a communicator that must give up.
const DEADLINE: Duration = Duration::from_millis(1000);

/// The config of the rendezvous: its limits are long, because the machine may be busy.
fn meeting() -> Config {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    tokenyard_faulty::link();
    config("use = \"shm\"", Duration::from_secs(30))
}

/// A config with this scale-up transport.
fn config(transport: &str, deadline: Duration) -> Config {
    let ms = deadline.as_millis();
    let text = format!(
        "[world]\ndeadline_ms = {ms}\nlate_ms = {ms}\n[kernels]\nuse = \"cpu\"\n\
         [transport.scale_up]\n{transport}\n"
    );
    Config::parse(&text, "bad_days").unwrap()
}

/// A few tokens for every rank.
fn small(ranks: usize) -> Case {
    Case {
        ranks,
        experts: 4 * ranks,
        topk: 3,
        hidden: 64,
        max_tokens: 12,
        tokens: Tokens::Exactly(vec![4; ranks]),
        ..Case::default()
    }
}
