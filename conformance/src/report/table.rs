use std::fmt::Write;

use super::{Status, SuiteReport};

/// The words of [`Status::word`], in the order of the columns.
const WORDS: [&str; 5] = ["pass", "not supported", "expected fail", "FAIL", "UNEXPECTED PASS"];

/// The whole table.
pub(super) fn write(report: &SuiteReport) -> String {
    let mut out = String::new();
    for line in &report.tests {
        let detail = match &line.status {
            Status::Pass => continue,
            Status::NotSupported { why } => why.clone(),
            Status::Fail { message } => message.clone(),
            Status::ExpectedFail { reason, link, .. } => format!("{reason} ({link})"),
            Status::UnexpectedPass { reason } => format!("expected to fail: {reason}"),
        };
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{}: {} ({} ranks)", line.status.word(), line.name, line.ranks);
        detail.lines().for_each(|detail| {
            let _ = writeln!(out, "    {detail}");
        });
    }
    if !out.is_empty() {
        out.push('\n');
    }
    let _ = write!(out, "{:<6}", "level");
    WORDS.iter().for_each(|word| {
        let _ = write!(out, "  {word:>15}");
    });
    out.push('\n');
    for (level, counts) in &report.levels {
        let _ = write!(out, "{level:<6}");
        for word in WORDS {
            let _ = write!(out, "  {:>15}", counts.get(word).copied().unwrap_or_default());
        }
        out.push('\n');
    }
    let seconds: f64 = report.tests.iter().map(|line| line.seconds).sum();
    let verdict = if report.ok { "all as expected" } else { "NOT as expected" };
    // Whoever reads that faults ended in time must know in which.
    let slow = match report.environment.pace().slow() {
        1 => String::new(),
        slow => format!(", with {slow} times the usual deadlines and limits"),
    };
    let _ = writeln!(out, "\n{} tests in {seconds:.1} s{slow}: {verdict}", report.tests.len());
    out
}
