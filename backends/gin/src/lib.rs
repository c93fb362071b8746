//! The `gin` transport: GPU kernels put rows through NCCL's GPU-Initiated Networking (GIN).
//!
//! It is loaded as a plugin (`plugins/gin`). NCCL is opened at run time, and its headers are found beside it:
//! kernels are compiled with them by nvcc. NCCL chooses the hardware that carries the bytes: GDAKI on
//! ConnectX, GPI, EFA-GDA, or a thread of NCCL's own for any other. `docs.md` in this folder is the page for
//! operators.
//!
//! Watched by the tests in these files, `tests/kernels.rs` (compiled with NCCL's headers), `tests/probe.rs`, and
//! `standins/softgin`.

mod config;
mod headers;
mod rules;
mod transport;

pub use config::{GinConfig, GinType};
pub use transport::{DeviceSide, Gin};
