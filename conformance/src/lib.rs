//! The conformance suite: what a yard must do, whatever it is made of.
//!
//! [`oracle`] states the rules once more, independently of the product; [`exchange`] runs one case on
//! a yard and compares every element; [`ranks`] makes a world of threads.

pub mod concurrency;
pub mod ep;
pub mod exchange;
pub mod expected;
pub mod faults;
pub mod oracle;
pub mod ranks;
pub mod report;
pub mod round;
pub mod runner;
pub mod suite;
