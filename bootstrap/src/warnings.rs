//! Warnings that ranks pass to rank 0, so that a world shows each once.

use std::fmt::{self, Debug, Write as _};
use std::sync::{Arc, Mutex, PoisonError};

use tracing::Event;
use tracing::field::{Field, Visit};

use super::liveness::Liveness;
use super::message::MAX_WARNING;
use super::text::clean;

/// The target of warnings that another rank has passed on: the field `rank` names that rank.
const OF_RANK: &str = "tokenyard_bootstrap::of_rank";

/// The most warnings that wait for the next look of the control thread.
const MOST: usize = 64;

/// The warnings that wait to be sent.
#[derive(Debug, Default)]
pub(super) struct Waiting(Mutex<Vec<String>>);

impl Waiting {
    fn push(&self, text: &str) -> bool {
        let mut texts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let has_room = texts.len() < MOST;
        if has_room {
            texts.push(clean(text, MAX_WARNING));
        }
        has_room
    }

    pub(super) fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Shows a warning of `rank` in this process.
pub(super) fn show(rank: u32, text: &str) {
    tracing::warn!(target: OF_RANK, rank, "{text}");
}

/// The way of one rank's warnings to rank 0. It does not hold the world.
#[derive(Clone)]
pub struct ToRankZero {
    rank: u32,
    waiting: Arc<Waiting>,
    liveness: Arc<Liveness>,
}

impl ToRankZero {
    pub(super) fn new(rank: u32, waiting: &Arc<Waiting>, liveness: Arc<Liveness>) -> Self {
        Self { rank, waiting: Arc::clone(waiting), liveness }
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Whether this rank can still pass warnings on, or is rank 0.
    pub fn is_open(&self) -> bool {
        self.liveness.gone("pass warning").is_none()
    }

    /// Whether this is rank 0, which gets the warnings of the others.
    pub fn is_rank_zero(&self) -> bool {
        self.rank == 0
    }

    /// Passes a warning on to rank 0. False where it cannot: the caller shows it.
    pub fn pass(&self, text: &str) -> bool {
        !self.is_rank_zero() && self.is_open() && self.waiting.push(text)
    }
}

impl Debug for ToRankZero {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToRankZero").field("rank", &self.rank).finish_non_exhaustive()
    }
}

/// An event of the log, for people.
#[derive(Debug, Default)]
pub struct EventText {
    /// The message, and the other fields behind it.
    pub text: String,
    /// The rank that passed it on to this one.
    pub passed_by: Option<u32>,
    is_passed_on: bool,
}

impl EventText {
    /// Reads an event.
    pub fn of(event: &Event<'_>) -> Self {
        let is_passed_on = event.metadata().target() == OF_RANK;
        let mut text = Self { is_passed_on, ..Self::default() };
        event.record(&mut text);
        text
    }

    /// The text as one of `rank`. Some texts name the rank themselves.
    pub fn of_rank(rank: u32, text: &str) -> String {
        let rank = format!("rank {rank}: ");
        if text.starts_with(&rank) { text.to_owned() } else { rank + text }
    }
}

impl Visit for EventText {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if self.is_passed_on && field.name() == "rank" {
            self.passed_by = Some(value as u32);
        } else {
            self.record_debug(field, &value);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // A write to memory does not fail.
        let _ = match field.name() {
            "message" => write!(self.text, "{value:?}"),
            name if self.text.is_empty() => write!(self.text, "{name}={value:?}"),
            name => write!(self.text, " {name}={value:?}"),
        };
    }
}
