//! L3 with ranks as processes: this program is also the ranks.

#![allow(clippy::expect_used, reason = "a test may end where its own setup is wrong")]

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Failed, Trial};
use tokenyard_conformance::faults::{self, Fault};
use tokenyard_conformance::runner::{Program, Verdict, rank_main, run_fault};

const CONFIG: &str = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";

/// More of it: two domains, with puts between them.
const SPLIT: &str = "[transport.scale_out]\nuse = \"shm\"\n\
                     [transport.scale_out.shm]\nload_store = false\n[topology]\ndomains = 2\n";

/// Stands before the order of a rank.
const RANK: &str = "--as-rank";

fn main() -> ExitCode {
    tokenyard_cpu::link();
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
    launch()
}

fn launch() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Ranks mostly wait, so more jobs than cores run beside each other; each has three ranks.
    arguments.test_threads = arguments.test_threads.or(Some(4));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = std::env::current_exe().expect("this program");
    let program = Arc::new(Program::new(path, vec![RANK.into()]));
    let worlds = [(1, CONFIG.to_owned()), (2, format!("{CONFIG}{SPLIT}"))];
    let trials = worlds
        .into_iter()
        .flat_map(|(domains, text)| {
            let config = folder.path().join(format!("{domains}.toml"));
            std::fs::write(&config, text).expect("the config is written");
            faults::list(domains).into_iter().map(move |fault| (config.clone(), fault))
        })
        .map(|(config, fault)| {
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
