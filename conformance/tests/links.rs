//! L3 over RDMA: the link of a device is cut. It needs the test machine: `cargo xtask test vm` runs it. This
//! program is also the ranks.

#[path = "masking/components.rs"]
mod components;
mod players;

use std::process::ExitCode;

use tokenyard_conformance::faults;
use tokenyard_conformance::pace::Pace;

// The device is named, because a rank whose link is down would take another one.
const CONFIG: &str = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"none\"\n\
     [transport.scale_out]\nuse = \"verbs\"\n\
     [transport.scale_out.verbs]\ndevice = [\"rxe0\", \"rxe1\", \"rxe2\"]\n";
/// The machine is emulated.
const SLOW: u32 = 10;

fn main() -> ExitCode {
    match Pace::new(SLOW) {
        Ok(pace) => {
            players::main(pace, faults::on_links().into_iter().map(|f| (f, CONFIG)).collect())
        }
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}
