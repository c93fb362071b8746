//! L3 with ranks as processes: this program is also the ranks.

mod players;

use std::process::ExitCode;

use tokenyard_conformance::faults;

const CONFIG: &str = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";

fn main() -> ExitCode {
    players::main(CONFIG, faults::list(1), 4)
}
