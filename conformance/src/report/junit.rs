use std::collections::BTreeMap;
use std::fmt::Write;

use super::{Line, Status, SuiteReport};

/// The whole document.
pub(super) fn write(report: &SuiteReport) -> String {
    let mut levels: BTreeMap<String, Vec<&Line>> = BTreeMap::new();
    for line in &report.tests {
        levels.entry(format!("{:?}", line.level)).or_default().push(line);
    }
    let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n");
    for (level, lines) in levels {
        let count = |is: fn(&Status) -> bool| lines.iter().filter(|l| is(&l.status)).count();
        let skipped = |s: &Status| matches!(s, Status::NotSupported { .. });
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "  <testsuite name=\"{level}\" tests=\"{}\" failures=\"{}\" skipped=\"{}\" time=\"{:.3}\">",
            lines.len(),
            count(Status::is_bad),
            count(skipped),
            lines.iter().map(|line| line.seconds).sum::<f64>()
        );
        lines.iter().for_each(|line| write_case(&mut out, &level, line));
        out.push_str("  </testsuite>\n");
    }
    out.push_str("</testsuites>\n");
    out
}

fn write_case(out: &mut String, level: &str, line: &Line) {
    let name = escape(&line.name);
    let _ = write!(
        out,
        "    <testcase classname=\"{level}\" name=\"{name}\" time=\"{:.3}\"",
        line.seconds
    );
    // As in the text table.
    let breaks = match line.invariants {
        "" => String::new(),
        invariants => format!("\nbreaks: {}", escape(invariants)),
    };
    let inside = match &line.status {
        Status::Pass => return out.push_str("/>\n"),
        Status::NotSupported { why } => format!("<skipped message=\"{}\"/>", escape(why)),
        Status::Fail { message } => {
            format!("<failure message=\"failed\">{}{breaks}</failure>", escape(message))
        }
        Status::ExpectedFail { message, reason, link } => format!(
            "<system-out>{}</system-out>",
            escape(&format!("expected failure: {reason} ({link})\n{message}"))
        ),
        Status::MayFail { message, reason, link } => {
            let ended = message.as_deref().unwrap_or("passed this time");
            let why = format!("may fail: {reason} ({link})\n{ended}");
            format!("<system-out>{}</system-out>", escape(&why))
        }
        Status::UnexpectedPass { reason } => {
            let why = format!("passed, but a failure was expected: {reason}");
            format!("<failure message=\"unexpected pass\">{}{breaks}</failure>", escape(&why))
        }
    };
    let _ = writeln!(out, ">{inside}</testcase>");
}

/// Text for XML: characters with a meaning are escaped, forbidden ones are replaced.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            '\n' | '\t' => out.push(c),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
