//! L3 on several hosts, which are network namespaces. This program is also the ranks.

mod players;

use std::process::ExitCode;

use tokenyard_conformance::faults::{self, Phase};

/// A transport that does not leave its host is never opened: the ranks meet, and while they open
/// the yard, something happens to a host.
const CONFIG: &str = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";

fn main() -> ExitCode {
    let while_meeting = |phase| matches!(phase, Phase::Bootstrap | Phase::Connect);
    let faults = faults::on_hosts().into_iter().filter(|fault| while_meeting(fault.phase));
    players::main(CONFIG, faults.collect(), 3)
}
