//! A [`Report`] is the state of a rank, written on request, or when an error closes its communicator. The crate
//! `reports` finds the cause of a failure in the reports of all ranks.
//!
//! Reports can be read without any part of the job. Input is not trusted: [`read`] refuses bytes that are no report,
//! and every report that it accepts can be printed.
//!
//! A change of the format is a new version, and `docs/reports.md` follows. Watched by the tests in these files,
//! `reports/tests/any_bytes.rs`, and `cli/tests/reports`.

mod clean;
mod format;
mod read;
mod text;
mod time;
pub mod words;

pub use format::{
    Activity, Call, Collective, ConfigName, Peer, Reason, Report, ReportedComponents,
    ReportedCounts, ReportedHealth, ReportedQueue, SCHEMA_VERSION, Slow, State, Traffic, Wait,
};
pub use read::{MAX_BYTES, NotAReport, read};
pub use text::text;
pub use time::utc;
