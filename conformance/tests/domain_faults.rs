//! L3 among two domains, with puts between them; this program is also the ranks.

mod players;

use std::process::ExitCode;

use tokenyard_conformance::faults;
use tokenyard_conformance::pace::Pace;

const CONFIG: &str = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n\
                      [transport.scale_out]\nuse = \"shm\"\n\
                      [transport.scale_out.shm]\nload_store = false\n[topology]\ndomains = 2\n";

fn main() -> ExitCode {
    players::main(Pace::USUAL, faults::list(2).into_iter().map(|fault| (fault, CONFIG)).collect())
}
