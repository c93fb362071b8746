//! Jobs that go wrong, each with ranks as processes of this program: their reports, and the verdict
//! of `tokenyard explain`.
//!
//! With TOKENYARD_RECORD_REPORTS=FOLDER the reports of each job are stored there, in a folder of
//! its name. The recorded sets of `reports/tests/recorded` were made like this.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

mod job;
mod plays;
mod rank;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

/// The option before the name of a play, on a rank.
const RANK: &str = "--as-rank";

fn main() -> ExitCode {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    tokenyard_faulty::link();
    let words: Vec<String> = std::env::args().collect();
    if let [_, mode, name, config] = &words[..]
        && mode == RANK
    {
        return rank::main(name, config);
    }
    let mut arguments = Arguments::from_args();
    // Ranks mostly wait, so several jobs run at the same time.
    arguments.test_threads = arguments.test_threads.or(Some(3));
    let trials = plays::all().into_iter().map(|play| {
        Trial::test(play.name, move || {
            job::check(&play);
            Ok(())
        })
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}
