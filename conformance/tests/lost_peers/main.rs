//! L0 with peers whose processes are killed and stopped, on correct transports, and on the broken ones of
//! the table of claims; the mutants of the C examples; and the names of calls that hang, in each kind of
//! job. This program is also the ranks.

#![allow(clippy::unwrap_used, reason = "a test may end where its own setup is wrong")]

mod buffered;
mod c_mutants;
mod noticing;

use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use tokenyard_conformance::claims::{CLAIMS, Proof};
use tokenyard_conformance::faults::Fault;
use tokenyard_conformance::runner::{
    Program, RunEvent, Settings, Verdict, rank_main, run_fault, run_in_processes,
};
use tokenyard_conformance::suite::{self, Level};
use tokenyard_core::config::Config;
use tokenyard_core::transport::Transport as _;

use crate::buffered::BufferedPuts;
use crate::noticing::{HangsInPoll, LostIsError, Reaction};

/// The argument before the order of a rank.
const RANK: &str = "--as-rank";
/// The time after which a mutant counts as hanging.
const HANGS: Duration = Duration::from_secs(25);
/// Cases of L0 in which no rank is lost are more than this, where a transport declares little.
const MOST_OF_L0: usize = 30;
/// Jobs at the same time: their ranks mostly wait.
const AT_ONCE: usize = 4;

/// Correct transports, by their tables. Where memory outlives a peer, a put to it is done; where it does
/// not, the put is an error.
const RIGHT: [(&str, &str); 5] = [
    ("shm", "use = \"shm\""),
    ("shm_put", "use = \"shm\"\nshm.load_store = false"),
    ("faulty", "use = \"faulty\"\nfaulty = { inner = \"shm\", seed = 3 }"),
    (LostIsError::NAME, "use = \"lost_is_error\""),
    (BufferedPuts::NAME, "use = \"buffered_puts\""),
];

fn main() -> ExitCode {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    tokenyard_faulty::link();
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
    let mut arguments = Arguments::from_args();
    arguments.test_threads = arguments.test_threads.or(Some(AT_ONCE));
    let path = std::env::current_exe().unwrap();
    let program = Arc::new(Program::new(path, vec![RANK.into()]));
    let mut trials = Vec::new();
    for (name, table) in RIGHT {
        for test in losing(table) {
            let label = format!("{name}/{test}");
            let program = Arc::clone(&program);
            let run = move || match verdict(&program, table, &test) {
                Verdict::Pass => Ok(()),
                Verdict::NotSupported(why) | Verdict::Fail(why) => Err(Failed::from(why)),
            };
            trials.push(trial(label, false, run));
        }
    }
    for (case, mutant, says) in rows() {
        let program = Arc::clone(&program);
        let run = move || caught(&program, case, mutant, says);
        trials.push(trial(format!("{mutant}/{case}"), false, run));
    }
    trials.extend(c_mutants::trials(&program));
    let own = Arc::clone(&program);
    let all = format!("{}/all_of_l0", BufferedPuts::NAME);
    trials.push(trial(all, false, move || buffered_passes(&own)));
    type Named = fn(&Program) -> Result<(), Failed>;
    for (name, named) in
        [("a_hang_of_l1_is_named", hang_of_l1 as Named), ("a_hang_of_l3_is_named", hang_of_l3)]
    {
        let program = Arc::clone(&program);
        trials.push(trial(name.to_owned(), false, move || named(&program)));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Others hold it while they run; those that leave names hold it alone, because each test finds all new names.
static NAMES: RwLock<()> = RwLock::new(());

fn trial(
    name: String,
    leaves_names: bool,
    run: impl FnOnce() -> Result<(), Failed> + Send + 'static,
) -> Trial {
    Trial::test(name, move || {
        let _held = (leaves_names.then(|| NAMES.write()), (!leaves_names).then(|| NAMES.read()));
        run()
    })
}

/// A transport whose puts are buffered and whose gets are one-sided passes the rest of L0 as well.
fn buffered_passes(program: &Program) -> Result<(), Failed> {
    let table = format!("use = \"{}\"", BufferedPuts::NAME);
    let settings = Settings::new(Config::parse(&config(&table), "lost_peers").unwrap()).unwrap();
    let tests = suite::tests(settings.capabilities(), 1).into_iter();
    let is_other =
        |test: &suite::Test| test.level == Level::L0 && !test.in_processes && test.lacks.is_none();
    let names: Vec<_> = tests.filter(is_other).map(|test| test.name).collect();
    let verdicts = verdicts_of(program, &config(&table), &names);
    let passed = verdicts.iter().filter(|(_, verdict)| *verdict == Verdict::Pass).count();
    if passed == names.len() && passed > MOST_OF_L0 {
        return Ok(());
    }
    Err(Failed::from(format!("{passed} of {} cases passed: {verdicts:?}", names.len())))
}

/// The rows of the table whose ranks are lost.
fn rows() -> Vec<(&'static str, &'static str, &'static str)> {
    let all = CLAIMS.iter().flat_map(|claim| claim.proofs);
    let cases = all.filter_map(|proof| match proof {
        Proof::Case { case, mutant, says } => Some((*case, *mutant, *says)),
        Proof::Cannot(_) => None,
    });
    cases.filter(|(case, ..)| case.contains("_peer_")).collect()
}

fn config(table: &str) -> String {
    format!(
        "[world]\ndeadline_ms = 10000\nlate_ms = 20000\n[kernels]\nuse = \"cpu\"\n\
         [transport.scale_up]\n{table}\n"
    )
}

/// The tests of L0 in which a rank is lost, of those that the capabilities of the transport allow.
fn losing(table: &str) -> Vec<String> {
    let settings = Settings::new(Config::parse(&config(table), "lost_peers").unwrap()).unwrap();
    let tests = suite::tests(settings.capabilities(), 1);
    let is_losing = |test: &suite::Test| test.in_processes && test.lacks.is_none();
    tests.into_iter().filter(is_losing).map(|test| test.name).collect()
}

/// Checks that a rank hangs in `poll` by this verdict.
fn hangs_in_poll(verdict: &Verdict) -> Result<(), Failed> {
    let hangs = "hangs in slot `poll` of the transport (INV-6)";
    match verdict {
        Verdict::Fail(why) if why.contains(hangs) => Ok(()),
        other => Err(Failed::from(format!("expected a failure that says {hangs:?}: {other:?}"))),
    }
}

fn hang_of_l1(program: &Program) -> Result<(), Failed> {
    let table = format!("use = \"{}\"", HangsInPoll::NAME);
    let settings = Settings::new(Config::parse(&config(&table), "lost_peers").unwrap()).unwrap();
    let tests = suite::tests(settings.capabilities(), 1);
    let test = tests.iter().find(|test| test.level == Level::L1 && test.ranks == 2).unwrap();
    let program = Program { limit: HANGS, ..program.clone() };
    hangs_in_poll(&verdict(&program, &table, &test.name))
}

fn hang_of_l3(program: &Program) -> Result<(), Failed> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.toml");
    std::fs::write(&path, config(&format!("use = \"{}\"", HangsInPoll::NAME))).unwrap();
    let fault = Fault::find("l3/killed/combine_send").unwrap().within(2);
    hangs_in_poll(&run_fault(program, &path, &fault)?.verdict)
}

fn verdict(program: &Program, table: &str, name: &str) -> Verdict {
    let verdicts = verdicts_of(program, &config(table), &[name.to_owned()]);
    let missing = || Verdict::Fail(format!("{name} did not run"));
    verdicts.into_iter().next().map_or_else(missing, |(_, verdict)| verdict)
}

/// The verdicts of tests on a config of this text, by their names.
fn verdicts_of(program: &Program, text: &str, names: &[String]) -> Vec<(String, Verdict)> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.toml");
    std::fs::write(&path, text).unwrap();
    let settings = Settings::new(Config::parse(text, "lost_peers").unwrap()).unwrap();
    let mut tests = suite::tests(settings.capabilities(), 1);
    tests.retain(|test| names.contains(&test.name));
    let mut verdicts = Vec::new();
    let mut each = |event: RunEvent<'_>| {
        if let RunEvent::Ended(finished) = event {
            verdicts.push((finished.name, finished.verdict));
        }
    };
    run_in_processes(program, &path, &tests, &mut each).unwrap();
    verdicts
}

/// Checks that the case fails on the mutant, with these words.
fn caught(program: &Program, case: &str, mutant: &str, says: &str) -> Result<(), Failed> {
    let table = format!("use = \"{mutant}\"");
    let names = losing(&table);
    let name = names.iter().find(|name| name.split('/').nth(1) == Some(case)).unwrap();
    // The test waits for a mutant that hangs.
    let limit = if says.starts_with("hangs") { HANGS } else { program.limit };
    let program = Program { limit, ..program.clone() };
    match verdict(&program, &table, name) {
        Verdict::Fail(why) if why.contains(says) => Ok(()),
        other => Err(Failed::from(format!("expected a failure that says {says:?}: {other:?}"))),
    }
}
