//! L3 with ranks as processes: this program is also the ranks.

mod players;

use std::process::ExitCode;

use tokenyard_conformance::faults;

const CONFIG: &str = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";

/// More of it: two domains, with puts between them.
const SPLIT: &str = "[transport.scale_out]\nuse = \"shm\"\n\
                     [transport.scale_out.shm]\nload_store = false\n[topology]\ndomains = 2\n";

fn main() -> ExitCode {
    let split = (format!("{CONFIG}{SPLIT}"), faults::list(2));
    players::main(&[(CONFIG.to_owned(), faults::list(1)), split], 4)
}
