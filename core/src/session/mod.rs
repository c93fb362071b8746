//! A session: what lies below operations. Places, levels and their transports, waits and their end, reports, and the
//! threads that drive transports. It knows no operation, and none of their words.
//!
//! A session has users, which run operations: kernel sets. It sums their needs, because fabrics fix their resources
//! before ranks connect. Windows, queues and signals of a user have numbers of their own.
//!
//! `lints/src/arrows.rs` holds that it names no operation. A change here touches every user. Watched by the tests in
//! these files, `conformance/tests/{exchange,hanging,mute,nics}.rs`, and L3 of the suite for its waits.

pub(crate) mod attended;
pub(crate) mod bring_up;
mod choices;
pub(crate) mod levels;
pub(crate) mod meeting;
pub(crate) mod needs;
mod open;
pub(crate) mod opening;
pub(crate) mod places;
pub(crate) mod progress;
pub(crate) mod reporter;
pub(crate) mod shared_link;
pub(crate) mod standing;
pub(crate) mod stuck;
pub(crate) mod transports;
pub(crate) mod user;
mod variables;
pub(crate) mod watchdog;
pub(crate) mod watched_kernels;

pub use choices::Choices;
pub use levels::LevelReport;
pub(crate) use open::{Owned, Session};
pub use opening::BringUpReport;
pub use reporter::{REPORTS_VARIABLE, Reporter, write_reports};
