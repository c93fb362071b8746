//! L3 with ranks as processes: this program is also the ranks.

mod players;

use std::process::ExitCode;

use tokenyard_conformance::faults::{self, Phase};
use tokenyard_conformance::pace::Pace;

const CONFIG: &str = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";
/// A config that masks losses: even with it, a fault must end every rank.
const MASKED: &str = "[world]\non_failure = \"mask\"\n[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";

fn main() -> ExitCode {
    let all = faults::list(1);
    // For machines with two devices, and for transports that take two ranks.
    let of_two = all.iter().filter(|fault| {
        matches!(fault.phase, Phase::Connect | Phase::DispatchReceive | Phase::Bootstrap)
    });
    let of_two = of_two.map(|fault| (fault.clone().within(2), CONFIG));
    let masked = all.iter().filter(|fault| fault.phase == Phase::CombineSend);
    let masked = masked.map(|fault| (fault.clone(), MASKED));
    let plays = of_two.chain(masked).collect::<Vec<_>>();
    players::main(
        Pace::USUAL,
        all.iter().map(|fault| (fault.clone(), CONFIG)).chain(plays).collect(),
    )
}
