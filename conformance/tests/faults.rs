//! L3 with ranks as processes: this program is also the ranks.

mod players;

use std::process::ExitCode;

use tokenyard_conformance::faults;
use tokenyard_conformance::pace::Pace;

const CONFIG: &str = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";

fn main() -> ExitCode {
    players::main(Pace::USUAL, faults::list(1).into_iter().map(|fault| (fault, CONFIG)).collect())
}
