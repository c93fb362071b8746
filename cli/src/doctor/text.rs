//! Findings for people.

use tokenyard_doctor::{Finding, Verdict};

use super::columns::{WIDTH, Wrapped, wrap, wrapped_row};
use crate::output::{Cell, People, Style, Table};

/// The word for what no part of the config uses, the longest of the verdicts' column.
const NOT_NEEDED: &str = "not needed";

/// Most characters of what was found that the table shows.
const WIDEST: usize = 140;
/// Characters of a line for the things that were looked at, and for what was found: with the other two
/// columns they fill a terminal.
const OF: usize = 21;
/// The most things of one kind whose finding is printed.
const MOST_FOUND: usize = 8;

/// Prints what to do about findings that are not well, the worst first; then a table of all, what `more` prints,
/// and the verdict. If `quiet` only what is slow or broken.
pub(super) fn print(findings: &[Finding], quiet: bool, people: People, more: impl FnOnce()) {
    let least = if quiet { Verdict::Slow } else { Verdict::Unknown };
    let mut shown: Vec<&Finding> = findings.iter().filter(|f| f.verdict >= least).collect();
    shown.sort_by_key(|finding| std::cmp::Reverse(finding.verdict));
    for group in group_by(&shown, has_one_fix) {
        explain(&group, people);
    }
    if quiet {
        return;
    }
    print_all(findings, people);
    more();
    conclude(findings, people);
}

fn print_all(findings: &[Finding], people: People) {
    let mut table = Table::new(&["verdict", "finding", "of", "found"]);
    let longest = findings.iter().map(|finding| finding.id.len()).max().unwrap_or(0);
    let found = WIDTH.saturating_sub(longest + OF + NOT_NEEDED.len() + 3 * 2).max(OF);
    for group in alike(findings) {
        let first = group[0];
        let word = if first.needed { first.verdict.name() } else { NOT_NEEDED };
        let style = if first.needed { style(first.verdict) } else { Style::Plain };
        let heads = vec![Cell::styled(style, word), first.id.into()];
        wrapped_row(
            &mut table,
            heads,
            [Wrapped(&subjects(&group), OF), Wrapped(&short(&first.found), found)],
        );
    }
    people.say(table.render(people));
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
    let all = if bad.is_empty() { words.to_owned() } else { format!("{words} ({bad})") };
    people.say("");
    for line in wrap(&all, WIDTH) {
        people.prose(people.paint(style(verdict), line));
    }
}

fn explain(group: &[&Finding], people: People) {
    let first = group[0];
    let head = format!("{} {}: {}", first.verdict.name(), first.id, subjects(group));
    people.prose(people.paint(style(first.verdict), head));
    let line = |name: &str, text: &str| people.prose(format_args!("  {name:8} {text}"));
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
    line("expected", &first.expected);
    for (name, text) in [("impact", &first.impact), ("fix", &first.fix)] {
        if let Some(text) = text {
            line(name, text);
        }
    }
    if let Some(source) = first.source {
        line("source", source);
    }
    line("page", &first.page);
    people.say("");
}

/// Whether one fix is for both findings.
fn has_one_fix(a: &Finding, b: &Finding) -> bool {
    (a.id, a.verdict, a.needed) == (b.id, b.verdict, b.needed)
        && (&a.expected, &a.impact, &a.fix) == (&b.expected, &b.impact, &b.fix)
}

/// Groups of findings that differ only in the thing that they are about, in order of their rules.
fn alike(findings: &[Finding]) -> Vec<Vec<&Finding>> {
    let all: Vec<&Finding> = findings.iter().collect();
    let mut groups = group_by(&all, |a, b| has_one_fix(a, b) && a.found == b.found);
    // Findings of one rule stand together.
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

/// All names: `mlx5_0 to mlx5_3, mlx5_5`. A range stands for every number between its ends.
fn subjects(group: &[&Finding]) -> String {
    let mut runs: Vec<(Vec<&str>, Option<usize>)> = Vec::new();
    for name in group.iter().map(|finding| finding.subject.as_str()) {
        let (run, place) = match runs.last_mut() {
            Some((run, place)) => (run, place),
            None => {
                runs.push((vec![name], None));
                continue;
            }
        };
        let step = run.last().and_then(|last| step(last, name));
        if step.is_some() && (place.is_none() || *place == step) {
            run.push(name);
            *place = step;
        } else {
            runs.push((vec![name], None));
        }
    }
    let text = |(run, _): &(Vec<&str>, Option<usize>)| match run.as_slice() {
        [first, .., last] if run.len() > 2 => format!("{first} to {last}"),
        run => run.join(", "),
    };
    runs.iter().map(text).collect::<Vec<_>>().join(", ")
}

/// The index of the part in which `b` is one more than `a`, if all other parts are equal.
fn step(a: &str, b: &str) -> Option<usize> {
    let (a, b) = (parts(a), parts(b));
    let differ: Vec<usize> = (0..a.len().max(b.len())).filter(|i| a.get(*i) != b.get(*i)).collect();
    let [place] = differ[..] else { return None };
    let number =
        |text: &&str| text.parse::<u64>().ok().filter(|number| number.to_string() == **text);
    let (a, b) = (a.get(place).and_then(number)?, b.get(place).and_then(number)?);
    (a.checked_add(1) == Some(b)).then_some(place)
}

/// Splits a name into runs of digits and runs of other characters.
fn parts(name: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = name;
    while let Some(first) = rest.chars().next() {
        let is_other = |c: char| c.is_ascii_digit() != first.is_ascii_digit();
        let (part, after) = rest.split_at(rest.find(is_other).unwrap_or(rest.len()));
        parts.push(part);
        rest = after;
    }
    parts
}

/// A text that fits the table. A longer text is shown whole above the table, or in the document.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn named(names: &[&str]) -> String {
        let mut of_one = tokenyard_doctor::unanswered(1);
        let finding = of_one.remove(0);
        let all: Vec<Finding> = names
            .iter()
            .map(|name| Finding { subject: (*name).to_owned(), ..finding.clone() })
            .collect();
        subjects(&all.iter().collect::<Vec<_>>())
    }

    #[test]
    fn a_range_of_names_stands_for_all_between_its_ends_and_nothing_else() {
        assert_eq!(named(&["mlx5_0", "mlx5_1", "mlx5_2"]), "mlx5_0 to mlx5_2");
        assert_eq!(
            named(&["mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5"]),
            "mlx5_0, mlx5_1, mlx5_4, mlx5_5"
        );
        assert_eq!(named(&["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_5"]), "mlx5_0 to mlx5_2, mlx5_5");
        assert_eq!(
            named(&["mlx5_7", "mlx5_8", "mlx5_9", "GPU 0", "GPU 1", "GPU 2"]),
            "mlx5_7 to mlx5_9, GPU 0 to GPU 2"
        );
        assert_eq!(named(&["rdmap85s0", "rdmap86s0", "rdmap87s0"]), "rdmap85s0 to rdmap87s0");
        // A range counts in one place of the name only.
        assert_eq!(named(&["a1b1", "a1b2", "a2b2"]), "a1b1, a1b2, a2b2");
        assert_eq!(named(&["x08", "x09", "x10"]), "x08, x09, x10");
        assert_eq!(named(&["one", "two"]), "one, two");
    }
}
