//! Words that reports and explanations share.

use std::fmt::Display;

use crate::format::{Call, Health, Report, State, Wait};

/// Most bytes of a list of names: 12 of `mlx5_0`, 8 of `rdmap85s0`. Two lists and a fix have room in an error
/// that crosses the plugin ABI.
const MOST_OF_A_LIST: usize = 96;

/// As many of the names as a text has room for, at least one: `a, b and 3 more`; `none` where there
/// are none.
pub fn first_names<T: Display>(names: impl IntoIterator<Item = T>) -> String {
    let names: Vec<String> = names.into_iter().map(|name| name.to_string()).collect();
    let mut bytes = 0;
    let fits = |name: &&String| {
        bytes += name.len() + ", ".len();
        bytes <= MOST_OF_A_LIST + ", ".len()
    };
    let shown = names.iter().take_while(fits).count().max(1);
    match names.len().saturating_sub(shown) {
        0 if names.is_empty() => "none".to_owned(),
        0 => names.join(", "),
        more => format!("{} and {more} more", names[..shown].join(", ")),
    }
}

/// Milliseconds as seconds: `12.3 s`.
pub fn seconds(ms: u64) -> String {
    format!("{}.{} s", ms / 1000, ms % 1000 / 100)
}

/// A list of ranks as people write it: `rank 3`, `ranks 0-2, 5`.
pub fn ranks(list: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for rank in list {
        match runs.last_mut() {
            Some((_, end)) if end.checked_add(1) == Some(*rank) => *end = *rank,
            _ => runs.push((*rank, *rank)),
        }
    }
    let one = |(start, end): &(u32, u32)| match start == end {
        true => start.to_string(),
        false => format!("{start}-{end}"),
    };
    let text = runs.iter().map(one).collect::<Vec<_>>().join(", ");
    if list.len() == 1 { format!("rank {text}") } else { format!("ranks {text}") }
}

/// A job by its name: `job 1f2e3d4c`.
pub fn job(name: &str) -> String {
    if name.is_empty() { "an opening".to_owned() } else { format!("job {name}") }
}

/// The verb in singular or plural, for this number of ranks.
pub(crate) fn verb<'a>(list: &[u32], one: &'a str, more: &'a str) -> &'a str {
    if list.len() == 1 { one } else { more }
}

/// The text with a capital first letter.
pub(crate) fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

/// An operation: `dispatch 7`.
pub fn call(call: &Call) -> String {
    format!("{} {}", call.kind, call.operation)
}

/// The thing that a wait is for: `entry of operation 7`.
pub fn awaited(wait: &Wait) -> String {
    match wait.operation {
        Some(number) => format!("{} of operation {number}", wait.phase),
        None => format!("{} of an operation of a graph", wait.phase),
    }
}

/// The health of a transport: `scale-up transport shm: healthy`.
pub fn transport(health: &Health) -> String {
    let says = match (&health.error, health.unanswered_ms) {
        (Some(error), _) => error.clone(),
        (None, Some(ms)) => {
            format!("asked for its health, it has not answered for {}", seconds(ms))
        }
        (None, None) => "healthy".to_owned(),
    };
    format!("{} transport {}: {says}", health.level, health.transport)
}

/// The state of a rank, in a few words.
pub fn activity(report: &Report) -> String {
    let now = &report.activity;
    let last = now.call.as_ref().map(call);
    let place = match (now.state, &last) {
        (State::Opening, _) => "opens the communicator".to_owned(),
        (State::Caller, None) => "in the caller's code, before operation 0".to_owned(),
        (State::Caller, Some(call)) => format!("in the caller's code, after a call of {call}"),
        (State::Send, Some(call)) => format!("sends {call}"),
        (State::Receive, Some(call)) => format!("receives {call}"),
        (State::Closed, _) => "closed the communicator".to_owned(),
        _ => "unknown".to_owned(),
    };
    let since = seconds(now.since_ms);
    match &now.collective {
        Some(c) => format!(
            "{place}, {since}; in {} \"{}\" of the world, {}",
            c.name,
            c.topic,
            seconds(c.since_ms)
        ),
        None => format!("{place}, {since}"),
    }
}
