//! Combine alone: weights that it passes itself (`late_weights`), and rows that travel in fewer bits (`compression`).
//! Its arguments and its two halves are in `communicator`, with those of the other operations.
//! Watched by the tests in these files, and in the suite by the cases `l1/forms` and `l1/logfmt`.

pub(crate) mod compression;
pub(crate) mod late_weights;
