//! Whether the ranks said the right thing in time.

use std::time::Duration;

use super::{DEADLINE, Fault, GRACE, Kind, Phase};

/// What the launcher saw of one rank.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Which rank.
    pub rank: u32,
    /// Its error, if it ended with one.
    pub error: Option<String>,
    /// The rank that the error is about.
    pub about: Option<u32>,
    /// From the fault to its end.
    pub took: Option<Duration>,
    /// How its process ended, and the end of its standard error.
    pub ending: String,
}

/// What is wrong with how the ranks of a fault ended; nothing if all is right.
pub fn judge(fault: &Fault, seen: &[Seen]) -> Vec<String> {
    seen.iter().filter_map(|one| wrong(fault, one, seen)).collect()
}

/// Whether a rank's error is about the victim. Among domains not every rank waits for the victim
/// itself: an error may be about a rank whose own error is.
fn says_who(fault: &Fault, seen: &Seen, error: &str, all: &[Seen]) -> bool {
    let victim = format!("rank {}", fault.victim);
    let names =
        |error: &str, about: Option<u32>| error.contains(&victim) || about == Some(fault.victim);
    let waits_for = all.iter().find(|other| Some(other.rank) == seen.about);
    let through = waits_for.filter(|_| fault.name.ends_with("/domains"));
    names(error, seen.about)
        || through.is_some_and(|other| {
            other.error.as_ref().is_some_and(|error| names(error, other.about))
        })
}

fn wrong(fault: &Fault, seen: &Seen, all: &[Seen]) -> Option<String> {
    let Seen { rank, error, .. } = seen;
    let victim = *rank == fault.victim;
    if victim && !matches!(fault.kind, Kind::Lies(_)) {
        return None;
    }
    let Some(error) = error else {
        return Some(format!("rank {rank}: no error; expected one. It ended: {}", seen.ending));
    };
    if let Some(missing) = missing(fault, (seen, error), all) {
        return Some(format!("rank {rank}: the error `{error}` does not say {missing}"));
    }
    let limit = DEADLINE + GRACE;
    match seen.took {
        Some(took) if took <= limit => None,
        Some(took) => Some(format!(
            "rank {rank}: ended {:.2} s after the fault; expected at most {:.2} s; it said `{error}`",
            took.as_secs_f64(),
            limit.as_secs_f64()
        )),
        None => Some(format!("rank {rank}: it ended before the fault: {error}")),
    }
}

/// What the error must say and does not.
fn missing(fault: &Fault, (seen, error): (&Seen, &str), all: &[Seen]) -> Option<String> {
    let lie = match fault.kind {
        Kind::Lies(lie) => Some(lie),
        _ => None,
    };
    let is_victim = seen.rank == fault.victim;
    if let Some(lie) = lie.filter(|lie| is_victim || !lie.never_joins()) {
        return lie.says().iter().find(|word| !error.contains(**word)).map(|w| format!("`{w}`"));
    }
    // Nobody can meet without rank 0, so its absence is known as that of the meeting place.
    if !says_who(fault, seen, error, all) {
        return Some(format!("`rank {}`", fault.victim));
    }
    let in_operation = !matches!(fault.phase, Phase::Bootstrap | Phase::Connect);
    // A rank that is not waiting when another is lost has no wait to tell of.
    let tells_wait = error.contains("phase `") && error.contains("expected");
    let no_wait = error.contains("no wait was in progress");
    (in_operation && !tells_wait && !no_wait).then(|| "the phase, found and expected".to_owned())
}
