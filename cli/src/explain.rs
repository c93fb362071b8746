//! `tokenyard explain`: finds the cause of a failure in the reports of a job's ranks.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::Serialize;
use tokenyard_core::error::words::seconds;
use tokenyard_core::files;
use tokenyard_core::report::words;
use tokenyard_core::report::{MAX_BYTES, Report, read, utc};
use tokenyard_reports::{Explanation, Kind, explain};

use crate::output::{Cell, People, Style, Table, print_document, ranks};

const EXAMPLES: &str = "\
A rank writes a report when its process gets SIGUSR1, when it goes on without a rank that was lost,
and when an error closes its communicator. Copy the reports of all ranks to one place, and name them, or
their folder.

Examples:
  tokenyard explain /tmp/tokenyard-reports-0/tokenyard-1f2e3d4c-*.json
  tokenyard explain /tmp/tokenyard-reports-0 --json

Output:
  late: Rank 1 is late: it is in the caller's code, after a call of combine 41, 12.3 s, and ranks
  0, 2-3 wait for it.
    rank 1 has begun 42 operations, combine 41 last; the next is number 43
    rank 0 waits for rank 1: entry of operation 42, for 12.2 s
    ...
  Fix: look at what the program does on that rank between its calls ...

Exit codes: 0 nothing is wrong, 1 a culprit is named, 3 the reports do not say who it is, 2 there is
no report.
The words are explained in docs/reports.md";

/// The most files that one call reads.
const MOST_FILES: usize = 1 << 20;
/// The most bytes that one call reads: reports of a whole job of thousands of ranks are smaller.
const MOST_BYTES: u64 = 4 << 30;

/// Arguments of `tokenyard explain`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ExplainArgs {
    /// Reports, or folders of reports. Of several jobs the latest is explained.
    #[arg(required = true, value_name = "FILES")]
    files: Vec<PathBuf>,
    /// Print one JSON document as the last line of standard output; the rest goes to standard error.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct ExplainDocument<'a> {
    #[serde(flatten)]
    explanation: &'a Explanation,
    /// Files that are no reports, with the reason.
    refused: &'a [String],
}

pub(crate) fn main(args: &ExplainArgs) -> Result<ExitCode> {
    let (reports, refused) = read_all(&args.files)?;
    let Some(explanation) = explain(reports) else {
        bail!(
            "read reports: found none: {}; expected a report of a rank, or a folder with some. Fix: correct the path",
            refused.join("; ")
        );
    };
    print(&explanation, &refused, People::new(args.json));
    if args.json {
        let document = ExplainDocument { explanation: &explanation, refused: &refused };
        print_document("explain", &document)?;
    }
    Ok(ExitCode::from(match explanation.verdict.kind {
        Kind::Healthy => 0,
        Kind::NoReport | Kind::Unclear => 3,
        _ => 1,
    }))
}

/// The reports, and the reasons why other files are no reports.
fn read_all(names: &[PathBuf]) -> Result<(Vec<Report>, Vec<String>)> {
    let mut files = Vec::new();
    for name in names {
        if name.is_dir() {
            files.extend(reports_in(name)?);
        } else if !is_text_of_report(name) {
            files.push(name.clone());
        }
        ensure!(files.len() <= MOST_FILES, "found more than {MOST_FILES} files");
    }
    ensure!(!files.is_empty(), "found no file called tokenyard-*.json in the folders named");
    Ok(read_files(&files, MOST_BYTES))
}

/// Whether the file is the text form of a report that lies beside it. A pattern of the shell may
/// match both.
fn is_text_of_report(file: &Path) -> bool {
    file.extension().is_some_and(|found| found == "txt") && file.with_extension("json").is_file()
}

/// The reports of `files`, of `most` bytes together, and the reasons why other files are no
/// reports.
fn read_files(files: &[PathBuf], most: u64) -> (Vec<Report>, Vec<String>) {
    let (mut reports, mut refused) = (Vec::new(), Vec::new());
    let mut left = most;
    for file in files {
        let found = read_bytes(file, left).and_then(|bytes| {
            left -= bytes.len() as u64;
            Ok(read(&bytes)?)
        });
        match found {
            Ok(report) => reports.push(report),
            Err(error) => refused.push(format!("{}: {error:#}", file.display())),
        }
    }
    (reports, refused)
}

fn reports_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder);
    let entries = entries.with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("tokenyard-") && name.ends_with(".json")
    });
    files.sort();
    Ok(files)
}

/// The bytes of a file, at most one more than a report may have. A file that is larger than `left`
/// is refused.
fn read_bytes(path: &Path, left: u64) -> Result<Vec<u8>> {
    let (file, _) = files::open(path).map_err(|error| anyhow!(error.problem()))?;
    let mut bytes = Vec::new();
    file.take(left.min(MAX_BYTES as u64) + 1).read_to_end(&mut bytes)?;
    ensure!(
        bytes.len() as u64 <= left,
        "the files before it and this one hold too much: one call reads {MOST_BYTES} bytes; name fewer"
    );
    Ok(bytes)
}

fn print(explanation: &Explanation, refused: &[String], people: People) {
    let verdict = &explanation.verdict;
    let style = match verdict.kind {
        Kind::Healthy => Style::Good,
        Kind::NoReport | Kind::Unclear => Style::Warn,
        _ => Style::Bad,
    };
    people.prose(format_args!(
        "{}: {}",
        people.paint(style, verdict.kind.name()),
        verdict.sentence
    ));
    for line in &verdict.evidence {
        people.say(format_args!("  {line}"));
    }
    if !verdict.fix.is_empty() {
        people.prose(format_args!("Fix: {}", verdict.fix));
    }
    let table = table(explanation).render(people);
    people.say(format_args!("\n{}\n\n{table}", of_what(explanation)));
    let slowest = explanation.slowest.iter();
    let slowest = slowest.map(|s| format!("rank {} {}", s.rank, seconds(s.waited_ms)));
    let slowest = slowest.collect::<Vec<_>>().join(", ");
    if !slowest.is_empty() {
        people.prose(format_args!("\nall ranks together have waited longest for: {slowest}"));
    }
    if !explanation.missing.is_empty() {
        let missing = ranks(&explanation.missing);
        people.prose(format_args!("\nno report of: {missing}"));
    }
    for note in explanation.notes.iter().chain(refused.iter().take(MOST_REFUSED)) {
        people.prose(format_args!("note: {note}"));
    }
    let more = refused.len().saturating_sub(MOST_REFUSED);
    if more > 0 {
        people.prose(format_args!("note: {more} more files are no reports (--json names them)"));
    }
}

/// The most files that are named as no reports.
const MOST_REFUSED: usize = 8;

/// The most ranks for which each report has its own line.
const MOST_LINES: usize = 16;

/// The reports that share one line: a single report, or in a large world all reports with the same
/// content. The culprits come first.
fn lines(explanation: &Explanation) -> Vec<Vec<&Report>> {
    let mut lines: Vec<Vec<&Report>> = Vec::new();
    let is_culprit = |report: &Report| explanation.verdict.ranks.contains(&report.rank);
    let is_large = explanation.reports.len() > MOST_LINES;
    let mut places = HashMap::new();
    for report in &explanation.reports {
        let now = &report.activity;
        let collective = now.collective.as_ref().map(|c| (&c.name, &c.topic));
        let call = now.call.as_ref().map(|call| (call.operation, &call.kind));
        let does = (now.state, now.begun, call, collective);
        let one = (!is_large).then_some(report.rank);
        let key =
            (one, is_culprit(report), &report.reason.kind, does, waits_for(explanation, report));
        let place = *places.entry(key).or_insert(lines.len());
        match lines.get_mut(place) {
            Some(line) => line.push(report),
            None => lines.push(vec![report]),
        }
    }
    if is_large {
        lines.sort_by_key(|line| !line.iter().any(|report| is_culprit(report)));
    }
    lines
}

/// The ranks for which a rank waits so long that it means something, in order.
fn waits_for(explanation: &Explanation, report: &Report) -> Vec<u32> {
    let of_rank = explanation.graph.partition_point(|edge| edge.from < report.rank);
    let edges = explanation.graph[of_rank..].iter().take_while(|edge| edge.from == report.rank);
    let mut waits: Vec<u32> = edges.filter(|edge| edge.counts).map(|edge| edge.to).collect();
    waits.sort_unstable();
    waits
}

fn table(explanation: &Explanation) -> Table {
    let mut table =
        Table::folded(&["rank", "host", "at (UTC)", "why", "begun", "waits for", "now"]);
    for line in lines(explanation) {
        let stay = |report: &&Report| (report.activity.since_ms, Reverse(report.rank));
        let Some(longest) = line.iter().copied().max_by_key(stay) else { continue };
        let list: Vec<u32> = line.iter().map(|report| report.rank).collect();
        let hosts: BTreeSet<&str> = line.iter().map(|report| report.host.as_str()).collect();
        let host = match hosts.len() {
            1 => longest.host.clone(),
            count => format!("{count} hosts"),
        };
        let why = Cell::styled(
            if longest.is_error() { Style::Bad } else { Style::Plain },
            &longest.reason.kind,
        );
        let time = longest.time.as_str();
        table.row([
            if let [one] = list[..] { one.into() } else { ranks(&list).into() },
            host.into(),
            time.split_once('T').map_or(time, |(_, time)| time).into(),
            why,
            longest.activity.begun.into(),
            ranks(&waits_for(explanation, longest)).into(),
            words::activity(longest).into(),
        ]);
    }
    table
}

/// `job 1f2e3d4c: reports of 3 of 4 ranks, the last of 2026-11-22T10:03:02.680Z, 14 s ago`.
fn of_what(explanation: &Explanation) -> String {
    let name = words::job(&explanation.job);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let age = now.checked_sub(u128::from(explanation.unix_ms)).map_or_else(String::new, |ms| {
        let seconds = ms / 1000;
        match seconds {
            0..120 => format!(", {seconds} s ago"),
            120..7200 => format!(", {} min ago", seconds / 60),
            7200..172_800 => format!(", {} h ago", seconds / 3600),
            _ => format!(", {} days ago", seconds / 86_400),
        }
    });
    format!(
        "{name}: reports of {} of {} ranks, the last of {}{age}",
        explanation.reports.len(),
        explanation.ranks,
        utc(explanation.unix_ms)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_beyond_the_bytes_of_one_call_are_refused_and_named() {
        let folder = tempfile::tempdir().unwrap();
        let text = r#"{"tokenyard_report": 1, "rank": 0, "ranks": 1}"#;
        let files = ["a", "b", "c"].map(|name| folder.path().join(name));
        files.iter().for_each(|file| std::fs::write(file, text).unwrap());
        let size = text.len() as u64;
        assert_eq!(read_files(&files, 3 * size).0.len(), 3);
        let (reports, refused) = read_files(&files, 3 * size - 1);
        assert_eq!((reports.len(), refused.len()), (2, 1));
        assert!(refused[0].contains("/c: the files before it"), "{refused:?}");
    }
}
