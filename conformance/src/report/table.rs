use std::fmt::Write;

use super::{Status, SuiteReport};

/// The words of [`Status::word`] and the widths of their columns, in order.
const WORDS: [(&str, usize); 6] = [
    ("pass", 6),
    ("not supported", 13),
    ("expected fail", 13),
    ("may fail", 8),
    ("FAIL", 6),
    ("UNEXPECTED PASS", 15),
];

/// The whole table.
pub(super) fn write(report: &SuiteReport) -> String {
    let mut out = String::new();
    for line in &report.tests {
        let detail = match &line.status {
            Status::Pass => continue,
            Status::NotSupported { why } => why.clone(),
            Status::Fail { message } => message.clone(),
            Status::ExpectedFail { reason, link, .. } => format!("{reason} ({link})"),
            Status::MayFail { message, reason, link } => {
                let ended = if message.is_some() { "failed" } else { "passed" };
                format!("{ended} this time; {reason} ({link})")
            }
            Status::UnexpectedPass { reason } => format!("expected to fail: {reason}"),
        };
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{}: {} ({} ranks)", line.status.word(), line.name, line.ranks);
        detail.lines().for_each(|detail| {
            let _ = writeln!(out, "    {detail}");
        });
        if line.status.is_bad() && !line.invariants.is_empty() {
            let _ = writeln!(out, "    breaks: {}", line.invariants);
        }
    }
    if !out.is_empty() {
        out.push('\n');
    }
    let _ = write!(out, "{:<6}", "level");
    WORDS.iter().for_each(|(word, width)| {
        let _ = write!(out, "  {word:>width$}");
    });
    out.push('\n');
    for (level, counts) in &report.levels {
        let _ = write!(out, "{level:<6}");
        for (word, width) in WORDS {
            let _ = write!(out, "  {:>width$}", counts.get(word).copied().unwrap_or_default());
        }
        out.push('\n');
    }
    if report.levels.contains_key("L0") {
        out.push_str("\nwhat the transport declares:\n");
        report.claims.iter().for_each(|claim| {
            let _ = writeln!(out, "  {}", claim.line());
        });
    }
    // A reader who sees that faults ended in time must know the pace.
    let slow = match report.environment.pace().slow() {
        1 => String::new(),
        slow => format!(", with {slow} times the usual deadlines and limits"),
    };
    let (tests, seconds, not_run) = (report.tests.len(), report.seconds, report.not_run());
    let _ = writeln!(
        out,
        "\n{tests} tests in {seconds:.1} s, {not_run} not run{slow}: {}",
        verdict(report)
    );
    out
}

fn verdict(report: &SuiteReport) -> String {
    let nothing = report.nothing_ran.join(", ");
    match (report.ok, nothing.is_empty()) {
        (true, true) => "all as expected".to_owned(),
        (true, false) => {
            format!("nothing failed, but nothing ran of {nothing}, so nothing is known of it")
        }
        (false, _) => "NOT as expected".to_owned(),
    }
}
