//! Developer tasks. `cargo xtask` prints a list of them.
//!
//! `steps` is the table of `cargo xtask test`; `lanes`, `exec` and `unit` run it, `report` and `results` print.
//! Watched by the tests in these files, which the step `xtask` runs.

mod configs;
mod exec;
mod install;
mod lanes;
mod lines;
mod needs;
mod programs;
mod report;
mod results;
mod shares;
mod step;
mod steps;
mod unit;
mod vm;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::install::Profile;
use crate::report::StepResult;
use crate::steps::STEPS;

const HELP: &str = "\
Developer tasks of tokenyard.

  cargo xtask test                 run every step; exit code 1 if one fails
  cargo xtask test --all           the same with what a default run leaves out, for a change of kernels and before a
                                   release: every program compiled for every architecture, and the GPU's model
                                   with every shape over every device API, every turn of low-latency
                                   operations in every way, four masked ranks, all pairs of casts, every
                                   routing over soft-RoCE, and 500 jobs with a rank that is killed
  cargo xtask test --quick         run what finds most mistakes in a few minutes
  cargo xtask test --only NAME     run this step and those it builds on (may be repeated)
  cargo xtask test --list          list the steps
  cargo xtask install PREFIX       build for use, and install below PREFIX: the program (bin), plugins
                                   (lib/tokenyard), configs (share/tokenyard/configs), the C header
                                   (include). Example: cargo xtask install ~/.local
  cargo xtask install --dev PREFIX the same with the build that the tests use
  cargo xtask unit                 run the tests of every crate, several programs at a time;
                                   arguments choose targets as in cargo: --lib --bins --test NAME
  cargo xtask header               write the C header of the plugin ABI
  cargo xtask header --check       say whether the checked-in header is up to date
  cargo xtask configs              write configs of the plugins that were built here
  cargo xtask results              write docs/conformance.md from the reports of the last test run
  cargo xtask shares               write xtask/shares.txt from the last whole run of the tests: the share of
                                   the processor time that each step may have, half of the limit
  cargo xtask results --check      say whether docs/conformance.md agrees with the reports
  cargo xtask lines                count the product's lines of Rust code, without tests and comments
  cargo xtask vm -- COMMAND...     run a command in an emulated machine with RDMA devices (rxe0 to
                                   rxe3); its exit code is the command's. See docs/testing-rdma.md
  cargo xtask vm --limit SECONDS -- COMMAND...
  cargo xtask vm --suite           run there, in one boot, what the step `vm` runs
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match run(&args) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[&str]) -> Result<ExitCode> {
    let root = root()?;
    match args {
        ["test", "--list"] => print!("{}", step::list(STEPS)),
        ["test", rest @ ..] => return test(&root, rest),
        ["header", rest @ ..] => return header(&root, rest),
        ["results"] => results::write(&root, &report::target_folder(&root))?,
        ["results", "--check"] => results::check(&root, &report::target_folder(&root))?,
        ["install", "--dev", prefix] => install(&root, Profile::Dev, prefix)?,
        ["install", prefix] => install(&root, Profile::Release, prefix)?,
        ["unit", filter @ ..] => unit::run(&root, filter)?,
        ["lines"] => lines::print(&root)?,
        ["shares"] => shares::take_over(&root, &report::target_folder(&root))?,
        ["configs"] => configs::write(&report::target_folder(&root))?,
        ["vm", "--suite"] => return vm::suite::run(&root).map(ExitCode::from),
        ["vm", rest @ ..] => {
            return vm::Job::read(rest)
                .map_or_else(|| Ok(usage(args)), |job| vm::run(&root, &job).map(ExitCode::from));
        }
        [] | ["help" | "--help" | "-h"] => print!("{HELP}"),
        unknown => return Ok(usage(unknown)),
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the generator of the header, which is a program of its own: it takes longer to build than this one.
fn header(root: &Path, arguments: &[&str]) -> Result<ExitCode> {
    let words = ["cargo", "run", "--quiet", "--package", "tokenyard-abi-header", "--"];
    let words = words.iter().chain(arguments).map(|word| (*word).to_owned()).collect();
    let line = exec::Line { words, env: &[], folder: root };
    let failure = exec::run(&line, report::LIMITS, &mut exec::Output::Shown).failure;
    Ok(if failure.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn install(root: &Path, profile: Profile, prefix: &str) -> Result<()> {
    install::run(root, &report::target_folder(root), profile, prefix)
}

fn usage(found: &[&str]) -> ExitCode {
    eprintln!("error: found arguments `{}`, expected one of these:\n\n{HELP}", found.join(" "));
    ExitCode::from(2)
}

fn test(root: &Path, args: &[&str]) -> Result<ExitCode> {
    let selected = match (args, only(args)) {
        (["--quick"], _) => step::quick(STEPS),
        ([report::ALL], _) => step::select(STEPS, &[])?,
        (_, Some(only)) => step::select(STEPS, &only)?,
        _ => return Ok(usage(&[&["test"], args].concat())),
    };
    needs::install_missing(&selected);
    let start = Instant::now();
    let reports = lanes::run(&selected, root);
    let grown = match args {
        [] => grown(root, &reports)?,
        _ => Vec::new(),
    };
    let table = report::table(&reports, start.elapsed(), &grown);
    print!("{}\n{table}", report::failed(&reports));
    let passed = grown.is_empty() && reports.iter().all(StepResult::passed);
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The steps and programs of a whole run whose share has grown. Steps that failed did not do all their work, so
/// shares say nothing then.
fn grown(root: &Path, reports: &[StepResult]) -> Result<Vec<String>> {
    if !reports.iter().all(StepResult::passed) {
        return Ok(Vec::new());
    }
    let (used, total) = report::used(reports);
    shares::check(root, &report::target_folder(root), &used, total)
}

/// The names behind `--only`; `None` if the arguments hold anything else.
fn only<'a>(args: &[&'a str]) -> Option<Vec<&'a str>> {
    args.chunks(2)
        .map(|pair| match *pair {
            ["--only", name] => Some(name),
            _ => None,
        })
        .collect()
}

fn root() -> Result<PathBuf> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().map(Path::to_path_buf).context("find the repository: xtask has no parent")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_takes_names_in_pairs_and_refuses_the_rest() {
        assert_eq!(only(&[]), Some(vec![]));
        assert_eq!(only(&["--only", "a", "--only", "b"]), Some(vec!["a", "b"]));
        assert_eq!(only(&["--only"]), None);
        assert_eq!(only(&["a", "--only"]), None);
        assert_eq!(only(&["--list", "--only"]), None);
    }

    #[test]
    fn no_arguments_are_help_and_unknown_ones_an_error() {
        assert_eq!(run(&[]).unwrap(), ExitCode::SUCCESS);
        assert_eq!(run(&["fly"]).unwrap(), ExitCode::from(2));
        assert_eq!(run(&["test", "fly"]).unwrap(), ExitCode::from(2));
        assert_eq!(run(&["test", "--quick", "fmt"]).unwrap(), ExitCode::from(2));
        assert!(run(&["test", "--only", "fly"]).is_err());
    }
}
