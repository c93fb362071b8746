//! How the exchanges of one operation follow each other.
//!
//! The host queues all of them, each behind the one before. The device passes on how that one has ended: a refusal is
//! the next one's, too. The host learns the outcome of each once all are queued. Then it waits for them in their order,
//! so that a wait that lasts names the level and the rank.

use std::mem::offset_of;

use tokenyard_core::Result;

use crate::driver::RawStream;
use crate::engine::Engine;
use crate::engine::args::{Common, State};
use crate::engine::outcome::ticket;

/// An exchange that another one follows, as its kernels leave it: device addresses; zeros where there is none.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Former {
    cell: u64,
    outcome: u64,
    stopped: u64,
    /// It runs beside the other one, and kernels know it by this number; else 0.
    ticket: u32,
}

impl Former {
    /// An operation of an engine, for the exchange behind it.
    pub(crate) fn of(engine: &Engine, operation: u64) -> Self {
        let slot = engine.slot(operation);
        Self {
            cell: engine.launcher.cell(slot),
            outcome: engine.launcher.outcomes.at(slot) as u64,
            stopped: engine.launcher.memory.state.address() + offset_of!(State, stopped) as u64,
            ticket: 0,
        }
    }

    /// The same where it runs beside the other exchange, which waits until it has decided.
    pub(crate) fn beside(engine: &Engine, operation: u64) -> Self {
        Self { ticket: ticket(operation), ..Self::of(engine, operation) }
    }
}

/// The place of an exchange in its operation. The default is an exchange by itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Step {
    pub(crate) former: Former,
    /// The host waits for its outcome later.
    pub(crate) deferred: bool,
    /// A stream beside the engine's own, for an exchange without data that need not wait for those before it.
    pub(crate) aside: Option<RawStream>,
}

impl Step {
    /// An exchange that the host waits for later.
    pub(crate) const DEFERRED: Self = Self {
        former: Former { cell: 0, outcome: 0, stopped: 0, ticket: 0 },
        deferred: true,
        aside: None,
    };

    /// Writes into the arguments of an exchange which one it follows.
    pub(crate) fn follow(&self, common: &mut Common) {
        common.former = self.former.cell;
        common.former_outcome = self.former.outcome;
        common.former_stopped = self.former.stopped;
        common.former_ticket = self.former.ticket;
    }
}

/// The next kernels of `engine` run behind the last kernel that `former` has queued for an operation.
pub(crate) fn queue_behind(engine: &Engine, former: &Engine, operation: u64) -> Result<()> {
    former.order.events[former.slot(operation)].hold(engine.order.stream.name())
}
