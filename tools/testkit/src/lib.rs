//! What the tests of several crates share. It depends on nothing, so that it is built at once.

mod allocations;
mod plugin;
mod transport;

pub use allocations::{Counting, of_all_threads, of_this_thread};
pub use plugin::built_plugin;
