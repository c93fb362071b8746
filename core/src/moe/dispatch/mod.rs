//! Dispatch alone: its output before it is received (`arriving`), and copied to memory of the caller (`copy_out`).
//! Its arguments and its two halves are in `communicator`, with those of the other operations.
//! Watched by the tests in these files, and in the suite by the cases `l1/copy`.

pub(crate) mod arriving;
pub(crate) mod copies;
pub(crate) mod copy_out;
