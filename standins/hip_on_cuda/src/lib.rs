//! A stand-in for AMD's HIP, for tests only: the functions that `tokenyard-sys-hip` calls, over NVIDIA's
//! driver. With it the host code of the rocm backend, its sharing of memory between processes and its
//! vector kernels run on NVIDIA's GPUs. **It shows nothing of an AMD GPU**: neither waves of 64, nor AMD's
//! code, nor its memory model. `docs.md` in this folder says how it is used.
//!
//! Its devices call themselves gfx942 with warps of 32 threads and 65,536 bytes of shared memory for a block.

mod device;
mod exports;
mod knobs;
mod memory;
mod status;

pub use exports::SYMBOLS;
