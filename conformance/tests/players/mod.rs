//! Runs faults with processes of this program as ranks.

#![allow(clippy::expect_used, reason = "a test may end where its own setup is wrong")]

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Failed, Trial};
use tokenyard_conformance::faults::Fault;
use tokenyard_conformance::pace::Pace;
use tokenyard_conformance::runner::{Program, Verdict, rank_main, run_fault};

/// The argument before the order of a rank.
const RANK: &str = "--as-rank";
/// Faults that run at the same time.
const AT_ONCE: usize = 4;

/// Acts as a rank if the arguments say so. Otherwise runs these faults, each with the text of its config,
/// on a machine of this pace; on a slow one they run one after the other.
pub(crate) fn main(pace: Pace, plays: Vec<(Fault, &str)>) -> ExitCode {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let args: Vec<_> = std::env::args_os().collect();
    if let [_, mode, order] = &args[..]
        && mode == RANK
    {
        return match rank_main(Path::new(order)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error:#}");
                ExitCode::FAILURE
            }
        };
    }
    launch(pace, plays)
}

fn launch(pace: Pace, plays: Vec<(Fault, &str)>) -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Ranks mostly wait, so there are more jobs at the same time than cores.
    let at_once = if pace == Pace::USUAL { AT_ONCE } else { 1 };
    arguments.test_threads = arguments.test_threads.or(Some(at_once));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = std::env::current_exe().expect("this program");
    let program = Arc::new(Program { pace, ..Program::new(path, vec![RANK.into()]) });
    let trials = plays
        .into_iter()
        .enumerate()
        .map(|(number, (fault, text))| {
            let config = folder.path().join(format!("config-{number}.toml"));
            std::fs::write(&config, text).expect("the config is written");
            let program = Arc::clone(&program);
            Trial::test(fault.name.clone(), move || play(&program, &config, &fault))
        })
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    conclusion.exit_code()
}

fn play(program: &Program, config: &Path, fault: &Fault) -> Result<(), Failed> {
    match run_fault(program, config, fault)?.verdict {
        Verdict::Pass => Ok(()),
        Verdict::NotSupported(why) | Verdict::Fail(why) => Err(Failed::from(why)),
    }
}
