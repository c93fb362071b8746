//! What the tests of several crates share. It depends on little, so that it is built at once.

mod plugin;
mod transport;

pub use plugin::built_plugin;
pub use tokenyard_allocations::{Counting, of_all_threads, of_this_thread};
