//! The words of reports.

use tokenyard_errors::words::seconds;

use super::format::{Call, Report, ReportedHealth, State, Wait};

/// A job by its name: `job 1f2e3d4c`.
pub fn job(name: &str) -> String {
    if name.is_empty() { "an opening".to_owned() } else { format!("job {name}") }
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
pub fn transport(health: &ReportedHealth) -> String {
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
