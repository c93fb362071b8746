//! The base of every operation, whatever it moves: links and their signals, slots and their order, waits, losses,
//! records, places of windows, loops on the worker pool. It knows ranks, and no experts; `lints/src/arrows.rs` holds
//! that it names no operation. A change here touches all operations.
//! Watched by the tests in these files, the suite of `conformance` (L1 to L3), and its `tests/masking` for losses.

pub(crate) mod areas;
pub(crate) mod channel;
pub(crate) mod commands;
pub(crate) mod control;
pub(crate) mod counters;
pub(crate) mod ends;
pub(crate) mod launch;
pub(crate) mod losses;
pub(crate) mod order;
pub(crate) mod outstanding;
pub(crate) mod places;
pub(crate) mod record;
pub(crate) mod sending;
pub(crate) mod slots;
pub(crate) mod window;
