//! Dispatch and combine: [`oracle`] states their rules once more, independently of the product; [`exchange`] runs one
//! case on a communicator and compares every element; [`cases`] (L1) and [`concurrency`] (L2) are the tests.
//! A new operation gets its folder beside this one. A rule changes in `oracle` only where `docs/semantics.md` does.
//! Watched by the tests of `oracle`, and by `tests/mutants`: each mutant breaks a rule that a case must find.

pub mod cases;
pub mod concurrency;
mod copied_out;
pub mod exchange;
pub mod input;
pub mod oracle;
pub mod round;
