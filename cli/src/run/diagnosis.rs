//! Which rank is at fault, and what to show of what the others say.

use serde::Serialize;
use tokenyard_launch::Exit;

use super::Verdict;
use super::message::{Cause, Failure};
use crate::output;

/// Lines of standard error that are shown of a rank that died without a word.
const TAIL_LINES: usize = 20;

/// How one rank ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct RankEnd {
    /// What it said.
    pub(crate) failure: Option<Failure>,
    /// How its process ended; `None` if it does not die.
    pub(crate) exit: Option<Exit>,
    /// It did not end by itself.
    pub(crate) timed_out: bool,
    /// The rank that it waited for in vain, until it was ended.
    pub(crate) waited_for: Option<u32>,
    /// The end of its standard error.
    pub(crate) tail: String,
}

/// One failure, said once for all ranks that say the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) ranks: Vec<u32>,
    pub(crate) cause: Cause,
    pub(crate) text: String,
}

/// What went wrong, the root cause first: ranks that merely lost a peer come after the one that
/// failed. Empty if nothing did.
pub(crate) fn findings(ends: &[RankEnd]) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    for (rank, end) in (0..).zip(ends) {
        let Some(failure) = failure_of(end) else { continue };
        let same = |f: &&mut Finding| f.cause == failure.cause && f.text == failure.text;
        match findings.iter_mut().find(same) {
            Some(finding) => finding.ranks.push(rank),
            None => findings.push(Finding {
                ranks: vec![rank],
                cause: failure.cause,
                text: failure.text,
            }),
        }
    }
    findings.sort_by_key(|finding| finding.cause);
    findings
}

/// What `findings` come to.
pub(crate) fn verdict<'a>(failures: impl IntoIterator<Item = &'a Failure>) -> Verdict {
    let mut verdict = Verdict::Right;
    for failure in failures {
        match failure.cause {
            Cause::Check => return Verdict::CheckFailed,
            Cause::Died | Cause::Own | Cause::Peer => verdict = Verdict::DidNotRun,
        }
    }
    verdict
}

impl Finding {
    /// As people read it.
    pub(crate) fn line(&self) -> String {
        let who = if self.ranks.len() == 1 { "rank" } else { "ranks" };
        format!("{who} {}: {}", output::ranks(&self.ranks), self.text)
    }
}

fn failure_of(end: &RankEnd) -> Option<Failure> {
    if end.failure.is_some() {
        return end.failure.clone();
    }
    if let Some(rank) = end.waited_for {
        let text = format!("rank {rank} ended before it joined, so this one was ended too");
        return Some(Failure { cause: Cause::Peer, about: Some(rank), text });
    }
    let died = |text: String| Failure { cause: Cause::Died, about: None, text };
    match end.exit {
        Some(exit) if exit.success() && !end.timed_out => None,
        _ if end.timed_out => Some(died(
            "it did not end with the others (stopped, or stuck in a call), and was killed".into(),
        )),
        Some(exit) => Some(died(format!("it died: {exit}{}", tail(&end.tail)))),
        None => Some(died("it is stuck inside the kernel and cannot be killed".into())),
    }
}

/// The last lines, indented below the finding.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let skipped = lines.len().saturating_sub(TAIL_LINES);
    lines[skipped..].iter().map(|line| format!("\n    {line}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(cause: Cause, text: &str) -> RankEnd {
        let failure = Failure { cause, about: None, text: text.to_owned() };
        RankEnd { failure: Some(failure), exit: Some(Exit::Code(2)), ..RankEnd::default() }
    }

    #[test]
    fn the_root_cause_comes_first_and_equal_words_are_said_once() {
        let killed = RankEnd { exit: Some(Exit::Signal(9)), ..RankEnd::default() };
        let lost = said(Cause::Peer, "rank 2 was lost");
        let right = RankEnd { exit: Some(Exit::Code(0)), ..RankEnd::default() };
        let ends = [lost.clone(), lost.clone(), killed, lost, right];
        let lines: Vec<String> = findings(&ends).iter().map(Finding::line).collect();
        assert_eq!(lines, ["rank 2: it died: killed by signal 9", "ranks 0-1, 3: rank 2 was lost"]);
    }

    #[test]
    fn a_failed_check_comes_before_the_ranks_that_lost_the_failing_one() {
        let ends = [said(Cause::Peer, "rank 1 failed"), said(Cause::Check, "row 3 differs")];
        let findings = findings(&ends);
        assert_eq!(findings[0].ranks, [1]);
        let failures: Vec<Failure> = ends.iter().filter_map(|end| end.failure.clone()).collect();
        assert_eq!(verdict(&failures), Verdict::CheckFailed);
        assert_eq!(verdict(&failures[..1]), Verdict::DidNotRun);
        assert_eq!(verdict([]), Verdict::Right);
    }

    #[test]
    fn a_rank_that_died_without_a_word_shows_the_end_of_its_log() {
        let log = (0..30).map(|i| format!("line {i}\n\n")).collect::<String>();
        let end = RankEnd { exit: Some(Exit::Code(101)), tail: log, ..RankEnd::default() };
        let text = &findings(&[end])[0].text;
        assert!(text.starts_with("it died: exit code 101\n    line 10\n"), "{text}");
        assert!(text.ends_with("line 29"), "{text}");
    }

    #[test]
    fn a_rank_that_was_ended_because_another_never_joined_is_not_the_cause() {
        let waited = RankEnd {
            timed_out: true,
            exit: Some(Exit::Signal(15)),
            waited_for: Some(1),
            ..RankEnd::default()
        };
        let findings = findings(&[waited, said(Cause::Own, "no such interface")]);
        assert_eq!(findings[0].ranks, [1]);
        assert_eq!(
            findings[1].line(),
            "rank 0: rank 1 ended before it joined, so this one was ended too"
        );
    }

    #[test]
    fn a_rank_that_had_to_be_killed_is_named_before_those_that_lost_it() {
        let stopped =
            RankEnd { timed_out: true, exit: Some(Exit::Signal(9)), ..RankEnd::default() };
        let findings = findings(&[said(Cause::Peer, "rank 1 is silent"), stopped]);
        assert_eq!(findings[0].ranks, [1]);
        assert!(findings[0].text.contains("stopped"), "{}", findings[0].text);
    }
}
