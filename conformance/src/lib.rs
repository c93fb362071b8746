//! The conformance suite: the rules that every communicator must obey, whatever its components.
//!
//! [`oracle`] states the rules once more, independently of the product; [`exchange`] runs one case on a
//! communicator and compares every element; [`ranks`] makes a world of threads; [`transport`] has the cases
//! for a transport alone.

pub mod claims;
pub mod concurrency;
mod copied_out;
pub mod device;
pub mod ep;
pub mod exchange;
pub mod expected;
pub mod faults;
pub mod input;
mod names;
pub mod oracle;
pub mod pace;
pub mod ranks;
pub mod report;
pub mod round;
pub mod runner;
pub mod suite;
pub mod transport;
