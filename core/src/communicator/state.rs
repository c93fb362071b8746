//! The communicator itself: its state, its queries, and its end.

use std::sync::Arc;
use std::time::Duration;

use super::abandoned::Abandoned;
use super::bring_up::{BringUpReport, CommunicatorOptions};
use super::components::Components;
use crate::bootstrap::World;
use crate::config::Config;
use crate::moe::{Shape, TopkScratch};
use crate::session::reporter::{OpenRecorder, Reporter};
use crate::{Error, ErrorKind, Result};

/// A communicator. See the [module](super) for its rules.
pub struct Communicator {
    /// Reports on this communicator.
    pub(super) recorder: OpenRecorder,
    pub(super) components: Arc<Components>,
    pub(super) world: Arc<World>,
    /// The config for the next communicator, by [`renew`](Self::renew).
    pub(super) config: Config,
    pub(super) shape: Shape,
    pub(super) options: CommunicatorOptions,
    pub(super) report: BringUpReport,
    pub(super) scratch: TopkScratch,
    /// Rows for the weights that a combine passes itself.
    pub(super) late_weights: Vec<f32>,
    pub(super) next_operation: u64,
    /// Slots (operation number modulo `in_flight`, at most 16) whose operation was sent and not yet
    /// received: one bit each.
    pub(super) open_slots: u32,
    /// Whether regions were taken back whose readers no [`release_after`](Self::release_after) has named since.
    pub(super) took_back: bool,
    pub(super) abandoned: Arc<Abandoned>,
    pub(super) closed: Option<(ErrorKind, Option<u32>, String)>,
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank())
            .field("shape", &self.shape)
            .field("report", &self.report)
            .finish_non_exhaustive()
    }
}

impl Communicator {
    /// This rank.
    pub fn rank(&self) -> u32 {
        self.world.rank()
    }

    /// The shape that all ranks agreed on.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The chosen components and the reasons, for display and for JSON.
    pub fn report(&self) -> &BringUpReport {
        &self.report
    }

    /// Gives a reporter of this communicator's state, for any thread, also while the communicator waits: for
    /// a framework with a signal handler, or a watchdog, of its own. See `docs/reports.md`.
    pub fn reporter(&self) -> Reporter {
        Reporter::new(&self.recorder.0)
    }

    /// Closes the communicator on all ranks together. Collective. No transport is closed before every rank
    /// has nothing left to send: on a network, dropping a communicator without this call may end in an error
    /// on a slower rank. Outputs and handles stay usable; they hold the windows. The drop of the last of them
    /// waits at most 10 s for a transport that is inside a call. After that it leaks the memory that the
    /// transport uses, and the log reports this.
    ///
    /// # Errors
    /// An operation that was sent and not received; the error that closed the communicator before, or
    /// that ended an operation after it was received in the order of a stream; a lost rank.
    pub fn close(mut self) -> Result<()> {
        self.check_open()?;
        if self.open_slots != 0 {
            // The other ranks may not wait for a rank that leaves.
            return Err(self.end(
                Error::new(
                    ErrorKind::InvalidInput,
                    "close communicator",
                    "an operation was sent and not received; expected none",
                )
                .with_fix("receive every operation before the communicator is closed"),
            ));
        }
        // Where this fails, the other ranks are in the barrier, or will be: they receive the reason why
        // it never completes.
        self.flush()?;
        self.world.barrier("close communicator")
    }

    /// Closes this communicator and opens another with the same config and options. Collective. Where losses
    /// are masked, ranks that wait to come back are in the new one, and this is the only time that they come
    /// back. Outputs and handles of this communicator stay readable; the new communicator does not accept
    /// them.
    ///
    /// A process that comes back joins the world and opens a communicator, as at the start, while the others
    /// renew theirs.
    ///
    /// # Errors
    /// As [`close`](Self::close) and [`open`](Self::open).
    pub fn renew(self) -> Result<Self> {
        let (world, config, options) = (Arc::clone(&self.world), self.config.clone(), self.options);
        self.close()?;
        Self::open(&world, &config, options)
    }

    /// Whether an error has closed this communicator. Every call of it then returns that error, and the other
    /// ranks learn of it. A loss that no call has met yet does not count.
    pub fn is_closed(&self) -> bool {
        self.closed.is_some()
    }

    /// Ranks that this communicator continues without, in order: lost since it was opened, or absent then.
    /// Each stays lost for the life of the communicator. Empty where a loss stops the communicator.
    pub fn lost_ranks(&self) -> Vec<u32> {
        self.components.watchdog().lost_ranks()
    }

    /// The total time, by rank, that calls of this communicator have waited for each rank. It holds the waits of the
    /// host: kernels of a device wait by themselves.
    pub fn waited(&self) -> Vec<Duration> {
        let watched = self.components.watchdog().watched();
        (0..self.shape.ranks).map(|rank| watched.waited(rank)).collect()
    }

    /// Lost ranks whose processes wait to come back: [`renew`](Self::renew) lets them in. A hint: ranks
    /// may see a change at different times.
    pub fn returning_ranks(&self) -> Vec<u32> {
        let liveness = self.world.liveness();
        (0..self.shape.ranks).filter(|rank| liveness.waits_to_return(*rank)).collect()
    }

    /// Ends the communicator for this rank after an error that leaves ranks out of step.
    pub(super) fn end(&mut self, error: Error) -> Error {
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

    pub(super) fn check_open(&mut self) -> Result<()> {
        if let Some((kind, rank, why)) = &self.closed {
            let error = Error::new(
                *kind,
                "use communicator",
                format!("the communicator was closed: {why}"),
            )
            .with_fix("open a new communicator once all ranks are back");
            return Err(match rank {
                Some(rank) => error.with_rank(*rank),
                None => error,
            });
        }
        if let Some(error) = self.components.watchdog().verdict() {
            return Err(self.end(error));
        }
        Ok(())
    }
}
