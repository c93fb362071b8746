//! Starts a job, lets it go wrong, and compares the verdict on its reports.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokenyard_launch::{Event, Job, Running, Stderr};

use crate::RANK;
use crate::plays::{Act, Asked, Play, Then};

/// The longest time that a busy machine may take for one step of a test.
const PATIENCE: Duration = Duration::from_secs(90);
/// The time between the act of rank 1 and the request for reports: longer than every tolerated
/// delay.
const PAUSE: Duration = Duration::from_millis(3500);

impl Play {
    fn ranks(&self) -> u32 {
        if self.among_domains { 4 } else { 3 }
    }
}

/// Plays the job, and compares the verdict.
pub(crate) fn check(play: &Play) {
    let folder = tempfile::tempdir().unwrap();
    let reports = folder.path().join("reports");
    let config = folder.path().join("config.toml");
    std::fs::write(&config, config_text(play, &reports)).unwrap();
    let job = Job {
        program: std::env::current_exe().unwrap(),
        args: vec![RANK.into(), play.name.into(), config.into()],
        ranks: play.ranks(),
        env: vec![("TOKENYARD_REPORTS".into(), "".into())],
        stderr: Stderr::Capture,
    };
    let mut lines = Vec::new();
    let mut running = job.start().unwrap();
    match play.asked {
        Asked::Never => {
            await_reports(&mut running, &mut lines, &reports, play);
            await_line(&mut running, &mut lines, "rank 0: error: ");
            if play.masks != Some(Then::Sleeps) {
                await_line(&mut running, &mut lines, "rank 2: error: ");
            }
        }
        Asked::Loss => {
            await_reports(&mut running, &mut lines, &reports, play);
            goes_on(&mut running, &mut lines, &[0, 2]);
            for rank in play.reports {
                assert_eq!(reports_of(&reports, *rank).len(), 1, "{:?}", files(&reports));
            }
        }
        Asked::Once => {
            await_line(&mut running, &mut lines, start_line(play));
            std::thread::sleep(PAUSE);
            for rank in play.reports {
                running.ask(*rank).unwrap();
            }
            await_reports(&mut running, &mut lines, &reports, play);
            if play.act == Act::Nothing && play.faulty.is_none() {
                goes_on(&mut running, &mut lines, &[0, 1, 2]);
            }
        }
    }
    drop(running);
    record(play, &reports);
    let found = explain(&reports, play);
    let verdict = &found["verdict"];
    let (kind, ranks, words) = play.verdict;
    assert_eq!(verdict["kind"], kind, "{found:#}\n{lines:#?}");
    let named: Vec<u64> =
        verdict["ranks"].as_array().unwrap().iter().map(|rank| rank.as_u64().unwrap()).collect();
    let expected: Vec<u64> = ranks.iter().map(|rank| u64::from(*rank)).collect();
    // The rank that makes the other call, or that waits on the link, depends on which one was
    // first.
    if kind == "different_calls" || play.faulty.is_some() {
        assert!(expected.iter().all(|rank| named.contains(rank)), "{found:#}");
    } else {
        assert_eq!(named, expected, "{found:#}");
    }
    assert!(verdict["sentence"].as_str().unwrap().contains(words), "{found:#}");
    errors_say_where_reports_are(play, &lines, &reports);
}

fn config_text(play: &Play, reports: &Path) -> String {
    // A rank that is asked must not have ended before.
    let (deadline, late) = match play.asked {
        Asked::Never => (3000, 5000),
        _ if play.masks.is_some() => (2000, 120_000),
        _ => (60_000, 120_000),
    };
    let on_failure = if play.masks.is_some() { "mask" } else { "stop" };
    let transport = |level: &str| match play.faulty {
        Some(fault) if !play.among_domains || level == "scale_out" => format!(
            "[transport.{level}]\nuse = \"faulty\"\n[transport.{level}.faulty]\ninner = \"shm\"\n\
             reorder = 0\nquiet = 0\nback_pressure = 0\n[transport.{level}.faulty.fault]\n{fault}"
        ),
        _ => format!("[transport.{level}]\nuse = \"shm\"\n"),
    };
    let transports = if play.among_domains {
        format!("{}{}[topology]\ndomains = 2\n", transport("scale_up"), transport("scale_out"))
    } else {
        transport("scale_up")
    };
    format!(
        "[world]\ndeadline_ms = {deadline}\nlate_ms = {late}\non_failure = \"{on_failure}\"\nreports = \
         \"{}\"\n[kernels]\nuse = \"cpu\"\n{transports}",
        reports.display()
    )
}

/// The line after which the job is in its final state.
fn start_line(play: &Play) -> &'static str {
    match (play.act, play.faulty) {
        (Act::Nothing, None) => "step 2",
        // The link goes silent after the first exchanges.
        (Act::Nothing, Some(_)) => "step 1",
        _ => "now",
    }
}

fn next(running: &mut Running, lines: &mut Vec<String>, start: Instant) {
    assert!(start.elapsed() < PATIENCE, "nothing came of it: {lines:#?}");
    if let Some(Event::Line { rank, line }) = running.next_event(Duration::from_millis(50)) {
        lines.push(format!("rank {rank}: {line}"));
    }
}

fn await_line(running: &mut Running, lines: &mut Vec<String>, expected: &str) {
    let start = Instant::now();
    while !lines.iter().any(|line| line.contains(expected)) {
        next(running, lines, start);
    }
}

fn await_reports(running: &mut Running, lines: &mut Vec<String>, folder: &Path, play: &Play) {
    let start = Instant::now();
    // A rank that masked a loss may write more reports.
    let is_last = |path: &PathBuf| {
        play.asked == Asked::Loss || !path.to_string_lossy().ends_with("-masked.json")
    };
    let is_there = |rank: &u32| reports_of(folder, *rank).iter().any(is_last);
    while !play.reports.iter().all(is_there) {
        next(running, lines, start);
    }
}

/// A report changes nothing: every rank makes more steps after it.
fn goes_on(running: &mut Running, lines: &mut Vec<String>, ranks: &[u32]) {
    let start = Instant::now();
    let steps = |lines: &[String], rank: u32| {
        lines.iter().filter(|line| line.starts_with(&format!("rank {rank}: step"))).count()
    };
    let before: Vec<usize> = ranks.iter().map(|rank| steps(lines, *rank)).collect();
    while ranks.iter().zip(&before).any(|(rank, before)| steps(lines, *rank) <= before + 2) {
        next(running, lines, start);
    }
}

/// The reports in a folder. A rank writes each under a hidden name first: a file of such a name is
/// not whole, and is lost if the job ends then.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_whole = |name: &str| name.starts_with("tokenyard-") && name.ends_with(".json");
    let whole = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_whole));
    whole.map(|entry| entry.path()).collect()
}

fn reports_of(folder: &Path, rank: u32) -> Vec<PathBuf> {
    let name = format!("-rank{rank:05}-");
    let mut files = files(folder);
    files.retain(|path| path.to_string_lossy().contains(&name));
    files
}

fn explain(reports: &Path, play: &Play) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_tokenyard"))
        .args(["explain", "--json"])
        .arg(reports)
        .output()
        .unwrap();
    let code = if play.verdict.0 == "healthy" { 0 } else { 1 };
    let text = String::from_utf8(output.stdout).unwrap();
    let people = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}\n{people}");
    let found: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    // The text for people begins with the same sentence.
    let sentence = found["verdict"]["sentence"].as_str().unwrap();
    assert!(people.lines().next().unwrap().ends_with(sentence), "{people}");
    found
}

/// Ranks that ended because of an error printed how to read the reports.
fn errors_say_where_reports_are(play: &Play, lines: &[String], reports: &Path) {
    if play.asked != Asked::Never || play.act == Act::Fails {
        return;
    }
    let hint = format!("tokenyard explain {}/tokenyard-", reports.display());
    for line in lines.iter().filter(|line| line.contains(": error: ")) {
        assert!(line.contains(&hint) && line.ends_with("-*.json"), "{line}");
    }
}

fn record(play: &Play, reports: &Path) {
    let Some(folder) = std::env::var_os("TOKENYARD_RECORD_REPORTS") else { return };
    let folder = Path::new(&folder).join(play.name);
    std::fs::create_dir_all(&folder).unwrap();
    for file in files(reports) {
        std::fs::copy(&file, folder.join(file.file_name().unwrap())).unwrap();
    }
}
