//! The part of a communicator below its operations: places, levels and their transports, waits and their end, reports,
//! and the threads that drive transports. It knows no experts.

pub(crate) mod attended;
pub(crate) mod levels;
pub(crate) mod places;
pub(crate) mod progress;
pub(crate) mod reporter;
pub(crate) mod stuck;
pub(crate) mod transports;
pub(crate) mod watchdog;

pub use levels::LevelReport;
pub use reporter::{REPORTS_VARIABLE, Reporter, write_reports};
