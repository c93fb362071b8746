//! A tool for tests: the transport `faulty` wraps any other transport and injects faults.
//!
//! It holds commands back and passes them on in another order. It reports events late and in pieces, and
//! accepts less than it could. On request it fails, stops, loses a link or writes late. All random choices
//! come from a seed. `docs.md` in this folder is the page for users.

mod built_in;
mod config;
mod fault;
mod queue;
mod rng;
mod transport;

pub use built_in::link;
pub use config::{Fault, FaultyConfig, Kind};
pub use rng::Rng;
pub use transport::Faulty;
