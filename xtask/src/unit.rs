//! `cargo xtask unit`: builds the tests of every crate at once, and runs several of their programs at a time.
//!
//! Many tests wait for deadlines or for processes that end, so one program at a time, as `cargo test` runs them,
//! leaves the processors idle.

use std::collections::VecDeque;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{env, thread};

use anyhow::{Context, Result, ensure};

use crate::exec::{self, HangLimits, Line, Output};
use crate::programs::{self, Program, WORKSPACE};
use crate::report;

/// Programs in the list of the costliest.
const COSTLIEST: usize = 12;

/// The limits after which one program counts as hanging.
const LIMITS: HangLimits =
    HangLimits { idle: Duration::from_secs(10 * 60), processor: Duration::from_secs(3600) };

/// How a program ended.
struct Ended {
    name: String,
    time: Duration,
    processor: Duration,
    failure: Option<String>,
}

/// Builds and runs all tests, or those of the targets that `filter` chooses in cargo's words. Documentation tests
/// run where there is no filter.
pub(crate) fn run(root: &Path, filter: &[&str]) -> Result<()> {
    let mut programs = programs::build(root, filter)?;
    // Integration tests take the longest.
    programs.sort_by_key(|program| program.is_unit);
    let mut ended = run_all(&programs, &library_path(root)?);
    if filter.is_empty() {
        ended.push(documentation(root));
    }
    ended.sort_by_key(|one| std::cmp::Reverse(one.processor));
    print!("{}", costliest(&ended));
    let failures = failures(&ended);
    // The step that runs this repeats such lines below its table. A program can fail after its last test, so the
    // lines of its tests do not show it.
    print!("{}", failures.concat());
    ensure!(failures.is_empty(), "failed programs: {}", failures.len());
    Ok(())
}

/// A line for each program that failed.
fn failures(ended: &[Ended]) -> Vec<String> {
    let line = |one: &Ended| Some(format!("FAIL: {}: {}\n", one.name, one.failure.as_ref()?));
    ended.iter().filter_map(line).collect()
}

/// The search path of shared libraries that cargo gives to tests.
fn library_path(root: &Path) -> Result<String> {
    let output = Command::new("rustc").args(["--print", "target-libdir"]).output();
    let output = output.context("find rustc's libraries: start rustc")?;
    let rust = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let built = report::target_folder(root).join("debug").display().to_string();
    let earlier = env::var("LD_LIBRARY_PATH").ok();
    let all = [format!("{built}/deps"), built, rust].into_iter().chain(earlier);
    Ok(all.collect::<Vec<_>>().join(":"))
}

/// Runs the programs, several at a time. The output of each is printed when it ends.
fn run_all(programs: &[Program], libraries: &str) -> Vec<Ended> {
    let waiting: Mutex<VecDeque<&Program>> = Mutex::new(programs.iter().collect());
    let ended = Mutex::new(Vec::new());
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    // Each has threads and ranks of its own; more at once would keep ranks from sending in time.
    let at_once = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..at_once.min(programs.len()) {
            scope.spawn(|| {
                while let Some(program) = next() {
                    let one = run_one(program, libraries);
                    ended.lock().unwrap_or_else(PoisonError::into_inner).push(one);
                }
            });
        }
    });
    ended.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn run_one(program: &Program, libraries: &str) -> Ended {
    let start = Instant::now();
    let line = Line {
        words: vec![program.file.display().to_string()],
        env: &[("LD_LIBRARY_PATH", libraries)],
        folder: &program.folder,
    };
    let mut text = String::new();
    let ran = exec::run(&line, LIMITS, &mut Output::Kept(&mut text));
    let (time, processor) = (start.elapsed(), ran.processor);
    println!("{}\n{text}", exec::program_line(&program.name, time, processor));
    Ended { name: program.name.clone(), time, processor, failure: ran.failure }
}

fn documentation(root: &Path) -> Ended {
    let start = Instant::now();
    let words = ["cargo", "test"].iter().chain(&WORKSPACE).chain(&["--doc", "--no-fail-fast"]);
    let words = words.map(|word| (*word).to_owned()).collect();
    let line = Line { words, env: &[], folder: root };
    let ran = exec::run(&line, LIMITS, &mut Output::Shown);
    let (time, processor) = (start.elapsed(), ran.processor);
    println!("{}", exec::program_line("documentation tests", time, processor));
    Ended { name: "documentation tests".to_owned(), time, processor, failure: ran.failure }
}

fn costliest(ended: &[Ended]) -> String {
    let mut text =
        format!("\nthe costliest of {} programs of tests:\nprocessor      time\n", ended.len());
    for Ended { name, time, processor, .. } in ended.iter().take(COSTLIEST) {
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{:7.1} s {:7.1} s  {name}",
            processor.as_secs_f32(),
            time.as_secs_f32()
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn programs(files: &[&str]) -> Vec<Program> {
        let program = |file: &&str| Program {
            name: (*file).to_owned(),
            file: file.into(),
            folder: "/".into(),
            is_unit: false,
        };
        files.iter().map(program).collect()
    }

    #[test]
    fn every_program_runs_and_the_failure_of_one_is_reported_with_its_file() {
        let programs = programs(&["/bin/true", "/bin/false", "/no/such/program", "/bin/true"]);
        let mut ended = run_all(&programs, "");
        ended.sort_by(|a, b| a.name.cmp(&b.name));
        let failures: Vec<_> = ended.iter().map(|one| one.failure.as_deref()).collect();
        assert_eq!(failures[0], Some("`/bin/false` ended with exit status: 1"));
        assert_eq!(failures[1..3], [None, None]);
        assert!(failures[3].unwrap().starts_with("`/no/such/program` could not be started"));
        let lines = super::failures(&ended);
        assert_eq!(lines[0], "FAIL: /bin/false: `/bin/false` ended with exit status: 1\n");
        assert_eq!(lines.len(), 2);
    }

    #[test]
    fn the_list_of_the_costliest_has_their_times() {
        let one = |name: &str, seconds| Ended {
            name: name.to_owned(),
            time: Duration::from_secs(2 * seconds),
            processor: Duration::from_secs(seconds),
            failure: None,
        };
        let expected = "\nthe costliest of 2 programs of tests:\nprocessor      time\n  \
            120.0 s   240.0 s  a/b\n    1.0 s     2.0 s  c\n";
        assert_eq!(costliest(&[one("a/b", 120), one("c", 1)]), expected);
    }
}
