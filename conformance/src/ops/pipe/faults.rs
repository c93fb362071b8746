//! L3: a rank is lost while others wait for its message or for its credit, and a length that ranks do not share.

use std::sync::Arc;

use anyhow::Result;
use tokenyard_core::ErrorKind;
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::Config;
use tokenyard_core::ops::pipe::PipeOptions;

use super::end::PipeEnd;
use crate::faults::{Fault, Kind, Lie, Phase};
use crate::pace::Pace;

/// The length of each message, and the one that a misled rank sends.
pub(crate) const LENGTH: usize = 64;
pub(crate) const OTHER_LENGTH: usize = 65;

/// The faults of pipes on one machine, in a world of `domains` domains.
pub(crate) fn list(domains: u32) -> Vec<Fault> {
    let suffix = if domains > 1 { format!("/d{domains}") } else { String::new() };
    let fault = |name: String, about: &str, phase, kind| Fault {
        name: format!("l3/pipe/{name}{suffix}"),
        about: about.to_owned(),
        ranks: if domains > 1 { 2 * domains } else { 3 },
        victim: 1,
        phase,
        kind,
        hosts: None,
        domains,
        pace: Pace::USUAL,
    };
    let mut list = Vec::new();
    for (word, kind, about) in [
        (
            "killed",
            Kind::Killed,
            "a rank is killed: those that wait for it end in time and name it",
        ),
        (
            "stopped",
            Kind::Stopped,
            "a rank is stopped: those that wait for it end in time and name it",
        ),
    ] {
        for phase in [Phase::Message, Phase::Credit] {
            list.push(fault(format!("{word}/{}", phase.name()), about, phase, kind));
        }
    }
    // Among domains no message goes from the victim to each rank.
    if domains == 1 {
        let about = "a rank sends another length: it and the receivers say which";
        let lie = Kind::Lies(Lie::Length);
        list.push(fault("misled/length".to_owned(), about, Phase::Message, lie));
    }
    list
}

/// A pipe, or the reason why the components have none.
type Opened = std::result::Result<PipeEnd, String>;

/// Opens the pipe of the script. With one message in flight, each send waits for the credit of the one before.
///
/// # Errors
/// As [`PipeEnd::open`].
pub(crate) fn open(world: &Arc<World>, config: &Config) -> Result<Opened> {
    let options = PipeOptions { max_bytes: 2 * LENGTH as u64, in_flight: 1 };
    PipeEnd::open(world, config, options, &[LENGTH])
}

/// One message to each peer, and one of each. `at` may end this rank. A rank with a `lie` sends another length.
///
/// # Errors
/// Those of the pipe. Where a length differs, the first one, once the messages of all peers are taken.
pub(crate) fn round(
    end: &mut PipeEnd,
    at: &dyn Fn(Phase) -> Result<()>,
    lie: Option<Lie>,
) -> Result<()> {
    at(Phase::Message)?;
    for number in 0..end.peers.len() {
        match lie {
            Some(Lie::Length) => end.send_bytes(&[0; OTHER_LENGTH], end.peers[number])?,
            _ => end.send(end.peers[number])?,
        }
    }
    at(Phase::Credit)?;
    let mut taken = Ok(());
    for number in 0..end.peers.len() {
        match end.recv(end.peers[number]) {
            Err(error) if is_mismatch(&error) => taken = taken.and(Err(error)),
            received => received?,
        }
    }
    taken
}

fn is_mismatch(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<tokenyard_core::Error>();
    error.is_some_and(|error| error.kind() == ErrorKind::Mismatch)
}

/// Ends a pipe that an error has left open, together with the other ranks: none of them waits for messages in vain.
///
/// # Errors
/// Those of [`close`](PipeEnd::close).
pub(crate) fn settle(mut end: PipeEnd) -> Result<()> {
    if end.is_closed() {
        return Ok(());
    }
    while let Err(error) = end.flush() {
        if error.kind() != ErrorKind::Mismatch {
            return Err(error.into());
        }
    }
    end.close()
}
