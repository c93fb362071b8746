//! What a rank says of itself when it is asked, or when an error closes its communicator: a [`Report`]. And what
//! the reports of all ranks come to: [`explain`].
//!
//! No part of a job is needed to read reports. What is read is not trusted: [`read`] refuses what is no
//! report, and whatever it accepts can be explained and printed.

mod clean;
pub mod explain;
mod format;
mod read;
mod text;
mod time;

pub use format::{
    Activity, Call, Collective, Components, ConfigName, Counts, Health, Peer, Queue, Reason,
    Report, SCHEMA_VERSION, Slow, State, Traffic, Wait,
};
pub use read::{MAX_BYTES, NotAReport, read};
pub use text::text;
pub use time::utc;
