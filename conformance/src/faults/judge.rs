//! Checks that the ranks ended with the right errors in time.

use std::time::Duration;

use super::{Fault, Kind, Phase};

/// The words of a rank's device that its own link is down.
const LINK_IS_DOWN: &str = "the port of this rank is down";

/// The launcher's observations of one rank.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Its number.
    pub rank: u32,
    /// Its error, if it ended with one.
    pub error: Option<String>,
    /// The rank that the error is about.
    pub about: Option<u32>,
    /// The time from the fault to its error.
    pub took: Option<Duration>,
    /// Whether its process ended as well, in the much longer time that it has for that.
    pub exited: bool,
    /// How its process ended, and the end of its standard error.
    pub ending: String,
}

/// Lists the violations in how the ranks of a fault ended; an empty list if there are none. `limit` is the
/// time that an error may take, given how busy the machine was.
pub fn judge(fault: &Fault, seen: &[Seen], limit: Duration) -> Vec<String> {
    seen.iter().filter_map(|one| wrong(fault, one, seen, limit)).collect()
}

fn wrong(fault: &Fault, seen: &Seen, all: &[Seen], limit: Duration) -> Option<String> {
    let Seen { rank, error, ending, .. } = seen;
    if fault.kind == Kind::AllKilled {
        let early = error.as_ref().map(|error| format!("its error is `{error}`"));
        let late = (!seen.exited).then(|| format!("it ended: {ending}"));
        return early.or(late).map(|how| format!("rank {rank}: it was not killed: {how}"));
    }
    let victim = fault.victims().contains(rank);
    let lives = matches!(fault.kind, Kind::Lies(_) | Kind::Cut | Kind::DataCut | Kind::LinkDown);
    if victim && !lives {
        return None;
    }
    let Some(error) = error else {
        return Some(format!(
            "rank {rank}: no error; expected one (INV-6). It ended: {}",
            seen.ending
        ));
    };
    if let Some(missing) = missing(fault, seen, error, all) {
        return Some(format!("rank {rank}: the error `{error}` does not say {missing} (INV-6)"));
    }
    match seen.took {
        Some(took) if took <= limit => (!seen.exited).then(|| {
            format!(
                "rank {rank}: its process did not end after the error `{error}` (INV-6). It ended: {}",
                seen.ending
            )
        }),
        Some(took) => Some(format!(
            "rank {rank}: its error came {:.2} s after the fault; expected at most {:.2} s (INV-6); its error \
             is `{error}`",
            took.as_secs_f64(),
            limit.as_secs_f64()
        )),
        None => Some(format!("rank {rank}: it ended before the fault: {error}")),
    }
}

/// Whether a text names a rank: as `rank 2`, or in a list like `ranks 1-2, 4`.
fn names(text: &str, rank: u32) -> bool {
    text.split("rank").skip(1).any(|rest| {
        let list = rest.strip_prefix('s').unwrap_or(rest).trim_start();
        let end = list.find(|c: char| !c.is_ascii_digit() && !"-, ".contains(c));
        list[..end.unwrap_or(list.len())].split(',').any(|part| {
            let (first, last) = part.trim().split_once('-').unwrap_or((part.trim(), part.trim()));
            let (first, last) = (first.trim().parse(), last.trim().parse());
            matches!((first, last), (Ok(first), Ok(last)) if (first..=last).contains(&rank))
        })
    })
}

/// Whether an error is about a rank whose own error names the lost rank. Not every rank waits for the
/// victim itself; a rank may learn of the loss from another one that did.
fn names_through(seen: &Seen, all: &[Seen], named: &dyn Fn(&str, Option<u32>) -> bool) -> bool {
    let waits_for = all.iter().find(|other| Some(other.rank) == seen.about);
    let error = waits_for.and_then(|other| Some((other.error.as_ref()?, other.about)));
    error.is_some_and(|(error, about)| named(error, about))
}

/// The first thing that the error must contain and does not.
fn missing(fault: &Fault, seen: &Seen, error: &str, all: &[Seen]) -> Option<String> {
    let lie = match fault.kind {
        Kind::Lies(lie) => Some(lie),
        _ => None,
    };
    let is_victim = fault.victims().contains(&seen.rank);
    if let Some(lie) = lie.filter(|lie| is_victim || !lie.never_joins()) {
        let missing = lie.says(fault.ranks).into_iter().find(|word| !error.contains(word));
        return missing.map(|word| format!("`{word}`"));
    }
    let in_operation = !matches!(fault.phase, Phase::Bootstrap | Phase::Connect);
    // Ranks of one machine search in vain for a device whose link is down, or each one's own device reports
    // it. Then no rank is gone.
    let own_link = fault.kind == Kind::LinkDown && error.contains(LINK_IS_DOWN);
    if own_link && is_victim || fault.kind == Kind::LinkDown && !in_operation {
        let device = format!("rxe{}", fault.victim);
        return (!error.contains(&device)).then(|| format!("`{device}`"));
    }
    // No rank can join without rank 0, so its absence shows as that of the meeting place. For a host that
    // is cut off, the other hosts are gone.
    let gone = |rank: &u32| fault.victims().contains(rank) != is_victim;
    let named = |error: &str, about: Option<u32>| {
        (0..fault.ranks).filter(gone).any(|rank| match about {
            Some(about) => about == rank,
            None => names(error, rank),
        })
    };
    if !named(error, seen.about) && !names_through(seen, all, &named) {
        return Some(format!("which rank is gone (it is about {:?})", seen.about));
    }
    // A rank that is not waiting when another is lost has no wait to report.
    let tells_wait = error.contains("phase `") && error.contains("expected");
    let no_wait = error.contains("no wait was in progress");
    // On a network, the failing command may be seen first. Its error contains the operation, the command
    // and the link.
    let tells_command = error.contains("a command to rank ");
    // Ranks that write a table meet in the world, whose error has the collective.
    let tells_collective = matches!(fault.phase, Phase::Write | Phase::Fetch)
        && error.starts_with("write ")
        && ["all_gather: ", "barrier: "].iter().any(|word| error.contains(word));
    if in_operation && !tells_wait && !no_wait && !tells_command && !tells_collective {
        return Some("the phase, found and expected, or the command".to_owned());
    }
    // Between hosts, the reader needs to know which link failed.
    let tells_link = error.contains(" link to rank ") || error.contains("link: ");
    let has_link = fault.hosts.is_some() || fault.kind == Kind::LinkDown;
    (in_operation && has_link && !tells_link).then(|| "the link".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::{list, on_hosts, on_links};

    #[test]
    fn ranks_are_found_alone_and_in_lists() {
        for text in ["rank 2 was lost", "ranks 1-2, 4 did not join", "found ranks 0, 2", "x rank 2"]
        {
            assert!(names(text, 2), "{text}");
        }
        for text in ["rank 12 was lost", "ranks 3-9", "the ranks differ, 2", "rank", "2 ranks"] {
            assert!(!names(text, 2), "{text}");
        }
    }

    fn cut(rank: u32, says: &str) -> Vec<String> {
        let all = on_hosts();
        let fault = all.iter().find(|fault| fault.name == "l3/hosts/cut/connect").unwrap();
        let seen = Seen {
            rank,
            error: Some(says.to_owned()),
            about: None,
            took: Some(Duration::from_secs(3)),
            exited: true,
            ending: String::new(),
        };
        judge(fault, &[seen], limit(fault))
    }

    fn limit(fault: &Fault) -> Duration {
        fault.deadline() + fault.grace()
    }

    #[test]
    fn a_cut_is_reported_from_both_sides() {
        assert!(cut(0, "rank 1 was silent").is_empty());
        assert!(cut(1, "rank 0 was silent").is_empty());
        assert!(cut(2, "rank 0 was silent")[0].contains("does not say which rank is gone"));
        assert!(cut(1, "rank 1 was silent")[0].contains("does not say which rank is gone"));
    }

    #[test]
    fn a_link_that_is_down_is_named_by_its_device_or_as_that_of_its_rank() {
        let all = on_links();
        let fault = all.iter().find(|fault| fault.name == "l3/link_down/combine_send").unwrap();
        let judged = |rank, says: &str, about| {
            let (error, took) = (Some(says.to_owned()), Some(Duration::from_secs(1)));
            let ending = String::new();
            judge(fault, &[Seen { rank, error, about, took, exited: true, ending }], limit(fault))
        };
        let own = "the port of this rank is down: no answer [link: rxe1 port 1]";
        assert_eq!(judged(1, own, None), [""; 0]);
        assert!(judged(1, "the port of this rank is down", None)[0].contains("`rxe1`"));
        assert!(judged(0, own, None)[0].contains("which rank is gone"), "it is not rank 0's");
        let other = "a command to rank 1 failed: no answer [link: rxe0 port 1]";
        assert_eq!(judged(0, other, Some(1)), [""; 0]);
        assert!(judged(0, "a command to rank 1 failed", Some(1))[0].contains("the link"));
        assert!(judged(1, "no error of its own", None)[0].contains("which rank is gone"));
    }

    #[test]
    fn an_error_says_what_was_waited_for_or_which_command_failed() {
        let all = list(1);
        let fault = all.iter().find(|fault| fault.name == "l3/killed/combine_send").unwrap();
        let seen = |says: &str| Seen {
            rank: 0,
            error: Some(says.to_owned()),
            about: Some(1),
            took: Some(Duration::from_secs(1)),
            exited: true,
            ending: String::new(),
        };
        let judged = |says: &str| judge(fault, &[seen(says)], limit(fault));
        let right = "rank 1 was lost; phase `rows`: found 1; expected 2";
        assert_eq!(judged(right), [""; 0]);
        let late = Some(fault.deadline() + fault.grace() + Duration::from_millis(50));
        let too_late = judge(fault, &[Seen { took: late, ..seen(right) }], limit(fault));
        assert!(too_late[0].contains("2.05 s after the fault; expected at most 2.00 s (INV-6)"));
        let late = Seen { took: late, ..seen(right) };
        assert_eq!(judge(fault, &[late], 2 * limit(fault)), [""; 0], "others took the time");
        let hangs = judge(fault, &[Seen { exited: false, ..seen(right) }], limit(fault));
        assert!(hangs[0].contains("did not end"), "{hangs:?}");
        assert_eq!(judged("combine_send: a command to rank 1 failed: no answer"), [""; 0]);
        assert!(judged("rank 1 was lost")[0].contains("or the command"));
    }

    #[test]
    fn a_rank_that_starts_late_may_blame_a_rank_0_that_has_given_up_the_missing_one() {
        let all = list(1);
        let fault = all.iter().find(|fault| fault.name == "l3/misled/relative_plugin_path");
        let fault = fault.unwrap();
        let seen = |rank, error: &str, about| Seen {
            rank,
            error: Some(error.to_owned()),
            about,
            took: Some(Duration::from_secs(1)),
            exited: true,
            ending: String::new(),
        };
        let victim = seen(1, "found a path that is relative; expected an absolute path", None);
        let first = seen(0, "ranks 1-2 did not join within 1.0 s", None);
        let late = |about| seen(2, "cannot reach rank 0 within 1.0 s", about);
        let judged =
            |about| judge(fault, &[first.clone(), victim.clone(), late(about)], limit(fault));
        assert_eq!(judged(Some(0)), [""; 0]);
        assert!(judged(None)[0].contains("which rank is gone"), "it names no rank");
    }

    #[test]
    fn ranks_that_are_all_killed_say_nothing_and_end() {
        let all = list(1);
        let fault = all.iter().find(|fault| fault.kind == Kind::AllKilled).unwrap();
        assert_eq!(fault.victims(), 0..fault.ranks);
        let judged = |error: Option<&str>, exited| {
            let (error, ending) = (error.map(str::to_owned), "not at all".to_owned());
            judge(
                fault,
                &[Seen { rank: 0, error, about: None, took: None, exited, ending }],
                limit(fault),
            )
        };
        assert_eq!(judged(None, true), [""; 0]);
        assert!(
            judged(Some("no room"), true)[0].contains("was not killed: its error is `no room`")
        );
        assert!(judged(None, false)[0].contains("was not killed: it ended: not at all"));
    }

    #[test]
    fn a_host_as_the_victim_takes_all_of_its_ranks() {
        let all = on_hosts();
        let fault =
            all.iter().find(|fault| fault.name.ends_with("cut/dispatch_receive/two_by_two"));
        assert_eq!(fault.unwrap().victims(), 2..4);
        let of_one = list(1).into_iter().filter(|fault| fault.kind != Kind::AllKilled);
        for fault in of_one {
            assert_eq!(fault.victims(), fault.victim..fault.victim + 1, "{}", fault.name);
        }
    }
}
