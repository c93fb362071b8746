//! Findings for people.

use tokenyard_doctor::{Finding, Verdict};

use crate::output::{Cell, People, Style, Table};

/// Words that a line of the table has room for.
const WIDEST: usize = 64;
/// Things of one kind of which it is told what was found.
const MOST_FOUND: usize = 8;

/// Prints a table of all findings, then what to do about those that are not well.
pub(super) fn print(findings: &[Finding], people: People) {
    let mut table = Table::new(&["verdict", "finding", "of", "found", "wanted"]);
    let groups = alike(findings);
    for group in &groups {
        let first = group[0];
        let word = if first.needed { first.verdict.name() } else { "not needed" };
        let style = if first.needed { style(first.verdict) } else { Style::Plain };
        let texts = [first.id, &subjects(group), &short(&first.found), &short(&first.wanted)]
            .map(|text| text.into());
        table.row(std::iter::once(Cell::styled(style, word)).chain(texts));
    }
    people.say(table.render(people));
    let mut told: Vec<&Finding> = findings.iter().filter(|f| f.verdict != Verdict::Ok).collect();
    told.sort_by_key(|finding| std::cmp::Reverse(finding.verdict));
    for group in group_by(&told, has_one_fix) {
        explain(&group, people);
    }
}

/// Prints the verdict on all, with what it comes from.
pub(super) fn conclude(findings: &[Finding], people: People) {
    let verdict = super::worst(findings);
    let words = match verdict {
        Verdict::Ok => "all is well",
        Verdict::Unknown => "nothing is wrong that this node can tell; see what is unknown",
        Verdict::Slow => "it works, slower than it could",
        Verdict::Broken => "it cannot work like this",
    };
    let of = |verdict: Verdict| {
        let mut ids: Vec<&str> = Vec::new();
        for finding in findings.iter().filter(|finding| finding.verdict == verdict) {
            if !ids.contains(&finding.id) {
                ids.push(finding.id);
            }
        }
        (!ids.is_empty()).then(|| format!("{}: {}", verdict.name(), ids.join(", ")))
    };
    let bad = [Verdict::Broken, Verdict::Slow, Verdict::Unknown].into_iter().filter_map(of);
    let bad = bad.collect::<Vec<_>>().join("; ");
    let bad = if bad.is_empty() { bad } else { format!(" ({bad})") };
    people.say(format_args!("\n{}{bad}", people.paint(style(verdict), words)));
}

fn explain(group: &[&Finding], people: People) {
    let first = group[0];
    let head = format!("{} {}: {}", first.verdict.name(), first.id, subjects(group));
    people.say(format_args!("\n{}", people.paint(style(first.verdict), head)));
    let line = |name: &str, text: &str| people.say(format_args!("  {name:7} {text}"));
    let differ = group.iter().any(|finding| finding.found != first.found);
    for finding in group.iter().take(if differ { MOST_FOUND } else { 1 }) {
        match differ {
            true => line("found", &format!("{}: {}", finding.subject, finding.found)),
            false => line("found", &finding.found),
        }
    }
    if differ && group.len() > MOST_FOUND {
        line("", &format!("and {} more", group.len() - MOST_FOUND));
    }
    line("wanted", &first.wanted);
    for (name, text) in [("cost", &first.cost), ("fix", &first.fix)] {
        if let Some(text) = text {
            line(name, text);
        }
    }
    if let Some(source) = first.source {
        line("source", source);
    }
    line("page", &first.page);
}

/// They are mended in one way.
fn has_one_fix(a: &Finding, b: &Finding) -> bool {
    (a.id, a.verdict, a.needed) == (b.id, b.verdict, b.needed)
        && (&a.wanted, &a.cost, &a.fix) == (&b.wanted, &b.cost, &b.fix)
}

/// Findings that say the same of several things, in order of their rules.
fn alike(findings: &[Finding]) -> Vec<Vec<&Finding>> {
    let all: Vec<&Finding> = findings.iter().collect();
    let mut groups = group_by(&all, |a, b| has_one_fix(a, b) && a.found == b.found);
    // What one rule says stands together.
    groups.sort_by_key(|group| findings.iter().position(|finding| finding.id == group[0].id));
    groups
}

fn group_by<'a>(
    findings: &[&'a Finding],
    belong: impl Fn(&Finding, &Finding) -> bool,
) -> Vec<Vec<&'a Finding>> {
    let mut groups: Vec<Vec<&Finding>> = Vec::new();
    for finding in findings {
        match groups.iter_mut().find(|group| belong(group[0], finding)) {
            Some(group) => group.push(finding),
            None => groups.push(vec![finding]),
        }
    }
    groups
}

/// `mlx5_0`, or `mlx5_0 to mlx5_7 (8)`.
fn subjects(group: &[&Finding]) -> String {
    match group {
        [] => String::new(),
        [one] => one.subject.clone(),
        [one, two] => format!("{}, {}", one.subject, two.subject),
        [first, .., last] => format!("{} … {} ({})", first.subject, last.subject, group.len()),
    }
}

/// The table has one line for each; what is longer is said below it, or in the document.
fn short(text: &str) -> String {
    if text.chars().count() <= WIDEST {
        return text.to_owned();
    }
    let cut: String = text.chars().take(WIDEST - 1).collect();
    format!("{}…", cut.trim_end())
}

fn style(verdict: Verdict) -> Style {
    match verdict {
        Verdict::Ok => Style::Good,
        Verdict::Unknown => Style::Plain,
        Verdict::Slow => Style::Warn,
        Verdict::Broken => Style::Bad,
    }
}
