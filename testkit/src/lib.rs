//! Code that the tests of several crates share. It has few dependencies, so that it builds fast.

mod plugin;
mod transport;

pub use plugin::built_plugin;
pub use tokenyard_allocations::{Counting, of_all_threads, of_this_thread};
