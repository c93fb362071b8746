//! The open files of rank 0: it holds a connection to every other rank.

use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::rendezvous::OPERATION;
use tokenyard_errors::{Error, ErrorKind, Result};

/// Files beside the connections of ranks: the listener, its runtime, and connections that prove nothing yet.
const SPARE: u64 = 32;
const OPEN_FILES: &str = "/proc/self/fd";

/// Makes room for the connections of a world of this size: raises the soft limit of open files to the hard one
/// where it is too low.
///
/// # Errors
/// [`ErrorKind::System`]: the hard limit is too low, too. Later, rank 0 could not accept all ranks, and all would wait.
pub(super) fn make_room(ranks: u32) -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    // A process that cannot see its files counts those of its connections alone.
    let open = std::fs::read_dir(Path::new(OPEN_FILES)).map_or(0, |files| files.count() as u64);
    let needed = open + u64::from(ranks) + SPARE;
    let holds = |limit: Option<u64>| limit.is_none_or(|files| files >= needed);
    if holds(limit.current) {
        return Ok(());
    }
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let shown =
        |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |files| files.to_string());
    let message = format!(
        "found a limit of {} open files (hard limit {}), {open} of them open; expected room for {needed}, because \
         rank 0 holds a connection to each of {ranks} ranks",
        shown(limit.current),
        shown(limit.maximum)
    );
    let fix = format!(
        "raise the limit where rank 0 starts: `ulimit -n {needed}`, LimitNOFILE of its service, or the option \
         `--ulimit nofile={needed}` of its container"
    );
    if !holds(limit.maximum) {
        return Err(Error::new(ErrorKind::System, OPERATION, message).with_fix(fix));
    }
    setrlimit(Resource::Nofile, raised)
        .map_err(|error| Error::system(OPERATION, message, error).with_fix(fix))?;
    tracing::debug!(needed, "raised the limit of open files to {}", shown(limit.maximum));
    Ok(())
}
