//! Finds the rank at fault, and selects which messages of the others to show.

use std::collections::BTreeMap;

use serde::Serialize;
use tokenyard_core::bootstrap::with_call;
use tokenyard_launch::Exit;

use super::Verdict;
use super::message::{Cause, Failure, RankResult};
use crate::output;

/// Lines of standard error that are shown of a rank that died without a message.
const TAIL_LINES: usize = 20;

/// How one rank ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct RankEnd {
    /// It reported its result after all steps.
    pub(crate) has_result: bool,
    /// The failure that it reported.
    pub(crate) failure: Option<Failure>,
    /// How its process ended; `None` if it does not die.
    pub(crate) exit: Option<Exit>,
    /// The launcher ended it.
    pub(crate) timed_out: bool,
    /// The rank that it waited for in vain, until it was ended.
    pub(crate) waited_for: Option<u32>,
    /// The last call of a component that it announced, unless it left it.
    pub(crate) call: String,
    /// The end of its standard error.
    pub(crate) tail: String,
    /// The others went on without it, because the config masks losses.
    pub(crate) is_masked: bool,
}

/// One failure, listed once for all ranks that report the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) ranks: Vec<u32>,
    pub(crate) cause: Cause,
    pub(crate) text: String,
}

/// A rank without which the others went on to the end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Lost {
    pub(crate) rank: u32,
    /// The first step, from 1, that some rank did without it.
    pub(crate) from_step: u32,
    /// How it ended, where that is known.
    pub(crate) how: Option<String>,
}

impl Lost {
    /// The line for people.
    pub(crate) fn line(&self) -> String {
        let how = self.how.as_ref().map_or(String::new(), |how| format!(": {how}"));
        format!("rank {} from step {} on{how}", self.rank, self.from_step)
    }
}

/// The ranks that were lost to the ranks with `results`, and that have no result themselves.
pub(crate) fn lost(results: &[RankResult], how: impl Fn(u32) -> Option<String>) -> Vec<Lost> {
    let mut from = BTreeMap::new();
    for loss in results.iter().flat_map(|result| &result.lost) {
        let step = from.entry(loss.rank).or_insert(loss.from_step);
        *step = loss.from_step.min(*step);
    }
    from.retain(|rank, _| !results.iter().any(|result| result.rank == *rank));
    from.into_iter().map(|(rank, from_step)| Lost { rank, from_step, how: how(rank) }).collect()
}

/// The lost ranks, among ranks that ended like this. Their ends count as no failure, except for the
/// findings of a check.
pub(crate) fn mask(ends: &mut [RankEnd], results: &[RankResult]) -> Vec<Lost> {
    let lost = lost(results, |rank| Some(failure_of(ends.get(rank as usize)?)?.text));
    for lost in &lost {
        if let Some(end) = ends.get_mut(lost.rank as usize) {
            end.is_masked = true;
        }
    }
    lost
}

/// The failures, the root cause first: ranks that merely lost a peer come after the rank that
/// failed. Empty if no rank failed.
pub(crate) fn findings(ends: &[RankEnd]) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    for (rank, end) in (0..).zip(ends) {
        let Some(failure) = failure_of(end) else { continue };
        if end.is_masked && failure.cause != Cause::Check {
            continue;
        }
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

/// The verdict on failures of these causes.
pub(crate) fn verdict(causes: impl IntoIterator<Item = Cause>) -> Verdict {
    let mut verdict = Verdict::Right;
    for cause in causes {
        match cause {
            Cause::Check => return Verdict::CheckFailed,
            Cause::Died | Cause::Own | Cause::Peer => verdict = Verdict::DidNotRun,
        }
    }
    verdict
}

impl Finding {
    /// The line for people.
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
    let died = |how: String| {
        let text = with_call(how, &end.call) + &tail(&end.tail);
        Failure { cause: Cause::Died, about: None, text }
    };
    match end.exit {
        // Its last lines may be lost: only a result is success.
        Some(exit) if exit.success() && !end.timed_out && end.has_result => None,
        Some(exit) if exit.success() && !end.timed_out => Some(died(format!(
            "it ended with {exit} and gave no result: something ended its process, a library for example"
        ))),
        _ if end.timed_out => Some(died(
            "it did not end with the others (stopped, or stuck in a call), and was killed".into(),
        )),
        Some(exit) => Some(died(format!("it died: {exit}"))),
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
    use super::super::message::Loss;
    use super::*;

    fn reported(cause: Cause, text: &str) -> RankEnd {
        let failure = Failure { cause, about: None, text: text.to_owned() };
        RankEnd { failure: Some(failure), exit: Some(Exit::Code(2)), ..RankEnd::default() }
    }

    /// The end of a rank that did all steps.
    fn right() -> RankEnd {
        RankEnd { has_result: true, exit: Some(Exit::Code(0)), ..RankEnd::default() }
    }

    #[test]
    fn a_rank_that_ends_well_without_a_result_is_the_cause() {
        let silent = RankEnd { has_result: false, ..right() };
        let findings = findings(&[reported(Cause::Peer, "rank 1 was lost"), silent, right()]);
        assert_eq!((findings[0].ranks.as_slice(), findings[0].cause), (&[1][..], Cause::Died));
        assert!(findings[0].text.contains("exit code 0 and gave no result"), "{findings:?}");
    }

    #[test]
    fn the_root_cause_comes_first_and_equal_words_are_shown_once() {
        let killed = RankEnd { exit: Some(Exit::Signal(9)), ..RankEnd::default() };
        let lost = reported(Cause::Peer, "rank 2 was lost");
        let right = right();
        let ends = [lost.clone(), lost.clone(), killed, lost, right];
        let lines: Vec<String> = findings(&ends).iter().map(Finding::line).collect();
        assert_eq!(lines, ["rank 2: it died: killed by signal 9", "ranks 0-1, 3: rank 2 was lost"]);
    }

    #[test]
    fn a_failed_check_comes_before_the_ranks_that_lost_the_failing_one() {
        let ends =
            [reported(Cause::Peer, "rank 1 failed"), reported(Cause::Check, "row 3 differs")];
        let findings = findings(&ends);
        assert_eq!(findings[0].ranks, [1]);
        assert_eq!(verdict([Cause::Peer, Cause::Check]), Verdict::CheckFailed);
        assert_eq!(verdict([Cause::Died, Cause::Peer]), Verdict::DidNotRun);
        assert_eq!(verdict([]), Verdict::Right);
    }

    /// The result of a rank that did all steps, and that went on without these ranks from these
    /// steps on.
    fn through(rank: u32, without: &[(u32, u32)]) -> RankResult {
        let lost =
            without.iter().map(|(rank, from_step)| Loss { rank: *rank, from_step: *from_step });
        RankResult { rank, lost: lost.collect(), ..RankResult::default() }
    }

    #[test]
    fn a_rank_that_the_others_went_on_without_is_shown_with_its_step_and_is_no_failure() {
        let right = right();
        let killed = RankEnd { exit: Some(Exit::Signal(9)), ..RankEnd::default() };
        let mut ends = [right.clone(), killed.clone(), right, killed];
        let results = [through(0, &[(1, 8)]), through(2, &[(1, 7)])];
        let lines: Vec<String> = mask(&mut ends, &results).iter().map(Lost::line).collect();
        assert_eq!(lines, ["rank 1 from step 7 on: it died: killed by signal 9"]);
        let findings = findings(&ends);
        assert_eq!(findings.len(), 1, "no rank reports that rank 3 was masked");
        assert_eq!(findings[0].ranks, [3]);
    }

    #[test]
    fn a_failed_check_of_a_lost_rank_stays_a_failure() {
        let mut ends = [RankEnd::default(), reported(Cause::Check, "row 3 differs")];
        ends[0] = right();
        assert_eq!(mask(&mut ends, &[through(0, &[(1, 2)])]).len(), 1);
        assert_eq!(findings(&ends)[0].cause, Cause::Check);
    }

    #[test]
    fn a_rank_that_was_through_is_not_lost() {
        let mut ends = vec![right(); 2];
        assert_eq!(mask(&mut ends, &[through(0, &[(1, 9)]), through(1, &[])]), []);
    }

    #[test]
    fn a_rank_that_died_without_a_word_shows_its_last_call_and_the_end_of_its_log() {
        let tail = (0..30).map(|i| format!("line {i}\n\n")).collect::<String>();
        let call = "`open` of kernel set `cpu`".to_owned();
        let end = RankEnd { exit: Some(Exit::Code(101)), call, tail, ..RankEnd::default() };
        let text = &findings(&[end])[0].text;
        let says = "it died: exit code 101; the last call of a component that it announced is \
                    `open` of kernel set `cpu`\n    line 10\n";
        assert!(text.starts_with(says), "{text}");
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
        let findings = findings(&[waited, reported(Cause::Own, "no such interface")]);
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
        let findings = findings(&[reported(Cause::Peer, "rank 1 is silent"), stopped]);
        assert_eq!(findings[0].ranks, [1]);
        assert!(findings[0].text.contains("stopped"), "{}", findings[0].text);
    }
}
