//! Dispatch and combine of few tokens, whose rows leave before anything is counted.
//!
//! Its kernels are in `device/decode`. Watched by the tests in these files and `tests/exchange.rs`, and on GPUs by
//! `python/tests/gpu_low_latency.py` and `gpu_masks.py`.

pub(crate) mod loaded;
pub(crate) mod masked;
pub(crate) mod sizes;
pub(crate) mod steps;
