//! Dispatch and combine over an [engine](crate::engine): handles and their routing, entries and verdicts, rows on
//! their way. `dispatch` and `combine` have what one of them needs alone; `rows` moves the rows of both.
//! Watched by the tests in these files, and in `conformance` by L1 to L3 and `tests/{same_bits,mutants,masking}`.

pub(crate) mod agree;
pub(crate) mod combine;
pub(crate) mod config;
pub(crate) mod dispatch;
pub(crate) mod entry;
pub(crate) mod exchange;
pub(crate) mod handle;
pub(crate) mod launcher;
pub(crate) mod operation;
pub(crate) mod routing;
pub(crate) mod rows;
pub(crate) mod runner;
pub(crate) mod sizes;
pub(crate) mod verdicts;
