//! A bring-up on a thread of its own: a component that does not come back from a call holds that thread, and not the
//! caller.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::bootstrap::World;
use crate::config::Config;
use crate::host::{Attended, ColdCall, ThreadContext};
use crate::{Error, ErrorKind, Result};

/// The interval at which the calls of the bring-up are checked.
const LOOK: Duration = Duration::from_millis(20);

/// Runs a bring-up of `world`. It ends with its own result, or with an error once a component has been inside of one
/// call for [`patience`]: then the thread is left behind with all that it uses, which it owns, and this rank leaves the
/// world, because the thread may go on at any time.
///
/// # Errors
/// Those of `work`; [`ErrorKind::Transport`] with the component and the call that does not return.
pub(crate) fn run<T: Send + 'static>(
    world: &World,
    config: &Config,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let deadline = config.world.deadline;
    let patience = patience(deadline, config.world.late);
    let calls = Arc::new(Attended::announced_by(world.announcer()));
    let (done, result) = sync_channel(1);
    let context = ThreadContext::of_this_thread(&config.kernels.name);
    let thread = start(&calls, context, move || drop(done.send(work())))
        .inspect_err(|error| world.report_failure(&error.to_string()))?;
    let mut warn_after = deadline;
    loop {
        match result.recv_timeout(LOOK) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => return Err(broken(thread)),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let Some(call) = calls.now() else {
            warn_after = deadline;
            continue;
        };
        let lasted = call.since.elapsed();
        if lasted >= patience {
            let error = stuck(&call, patience);
            world.report_failure(&error.to_string());
            return Err(error);
        }
        if lasted >= warn_after {
            tracing::warn!("rank {}: {call} for {:.0} s", world.rank(), lasted.as_secs_f64());
            warn_after = 2 * lasted;
        }
    }
}

/// The time that a call may take: `late`, and never as little as the deadline that the call itself has (INV-6). The
/// error of a call that ends by its own deadline names the peer, which this module cannot.
fn patience(deadline: Duration, late: Duration) -> Duration {
    late.max(deadline + deadline / 2)
}

/// Starts the thread, which stands in for this one.
fn start(
    calls: &Arc<Attended>,
    context: ThreadContext,
    work: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    let calls = Arc::clone(calls);
    let log = tracing::dispatcher::get_default(Clone::clone);
    std::thread::Builder::new()
        .name("tokenyard-open".into())
        .spawn(move || {
            let _log = tracing::dispatcher::set_default(&log);
            context.adopt();
            calls.attend(work);
        })
        .map_err(|error| Error::system("open communicator", "a thread cannot be made", error))
}

#[cold]
fn stuck(call: &ColdCall, patience: Duration) -> Error {
    let text =
        format!("{call}, and has not come back from there within {patience:?} (world.late_ms)");
    tracing::error!("{text}: a thread is left behind there, with all that it may use");
    Error::new(ErrorKind::Transport, "open communicator", text)
        .with_fix("start this process again, without that component if the fault repeats")
}

/// A panic of the bring-up goes on in its caller.
#[cold]
fn broken(thread: JoinHandle<()>) -> Error {
    match thread.join() {
        Err(panic) => std::panic::resume_unwind(panic),
        Ok(()) => Error::new(
            ErrorKind::Internal,
            "open communicator",
            "the thread of the bring-up ended without a result",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_ends_by_its_own_deadline_is_waited_for() {
        let second = Duration::from_secs(1);
        assert_eq!(patience(2 * second, 2 * second), 3 * second);
        assert_eq!(patience(2 * second, 60 * second), 60 * second);
    }
}
