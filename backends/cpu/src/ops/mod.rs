//! Operations beside MoE. They use the [`engine`](crate::engine), and no expert is known here.
//! Watched by `conformance/tests/pipes`.

pub(crate) mod pipe;
