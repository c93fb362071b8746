//! Whether a user of a session may go on, and the error that ended it.

use std::sync::Arc;

use super::reporter::OpenRecorder;
use super::watched_kernels::WatchedKernels;
use crate::bootstrap::World;
use crate::{Error, ErrorKind, Result};

/// See the [module](self).
pub(crate) struct Standing {
    /// The name of such users in messages.
    name: &'static str,
    /// Reports on this user.
    pub(crate) recorder: OpenRecorder,
    pub(crate) world: Arc<World>,
    kernels: Arc<WatchedKernels>,
    closed: Option<(ErrorKind, Option<u32>, String)>,
}

impl Standing {
    pub(super) fn new(
        name: &'static str,
        recorder: OpenRecorder,
        world: &Arc<World>,
        kernels: Arc<WatchedKernels>,
    ) -> Self {
        Self { name, recorder, world: Arc::clone(world), kernels, closed: None }
    }

    pub(crate) fn rank(&self) -> u32 {
        self.world.rank()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.is_some()
    }

    /// Ends the user for this rank after an error that leaves ranks out of step. The watchdog that ended a wait has
    /// the reason: a lost rank is the cause, and the wait only its effect.
    #[cold]
    pub(crate) fn fail(&mut self, error: Error) -> Error {
        let error = match error.kind() {
            ErrorKind::Deadline => self.kernels.watchdog.verdict().unwrap_or(error),
            ErrorKind::Transport => self.kernels.watchdog.report_to_link(error),
            _ => error,
        };
        self.end(error)
    }

    /// As [`fail`](Self::fail), where the error is the reason itself.
    #[cold]
    pub(crate) fn end(&mut self, error: Error) -> Error {
        let error = self.world.liveness().locate(error);
        if self.closed.is_none() {
            self.closed = Some((error.kind(), error.rank(), error.detail()));
            self.recorder.0.report_error(&error);
            self.recorder.0.track.close();
            // All ranks know of a loss. They do not know that this rank waited in vain for a rank that left.
            // So this rank must not look like a rank that leaves without an error: others wait for it in
            // turn.
            let is_known =
                error.kind() == ErrorKind::PeerLost && self.world.liveness().first_loss().is_some();
            if !is_known {
                self.world.report_failure(&error.to_string());
            }
            return self.recorder.0.point_to_report(error);
        }
        error
    }

    /// Checks that nothing has ended the user.
    ///
    /// # Errors
    /// The error that did.
    pub(crate) fn check_open(&mut self) -> Result<()> {
        if let Some((kind, rank, why)) = &self.closed {
            let error = Error::new(
                *kind,
                "use session",
                format!("the {name} was closed: {why}", name = self.name),
            )
            .with_fix(format!("open a new {} once all ranks are back", self.name));
            return Err(match rank {
                Some(rank) => error.with_rank(*rank),
                None => error,
            });
        }
        if let Some(error) = self.kernels.watchdog.verdict() {
            return Err(self.end(error));
        }
        Ok(())
    }
}
