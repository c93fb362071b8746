//! The backend for NVIDIA GPUs: the `nvlink` transport between the GPUs of one machine, and the
//! `cuda` kernel set.
//!
//! The kernels and the host code are those of `tokenyard-gpu`. This crate adds CUDA's driver and compiler,
//! and the names. Nothing of CUDA is linked: driver and compiler are loaded at run time, and `probe`
//! reports where they are missing. nvcc runs as a program, for a device API that includes headers.
//! `docs.md` in this folder is the page for operators.
//!
//! Watched by the tests in these files and `tests/nvcc.rs`, without a GPU; `docs/testing-gpus.md` has the commands
//! for one.

mod built_in;
mod driver;
mod nvcc;
mod nvrtc;

pub use built_in::link;
pub use driver::CudaDriver;
pub use nvcc::Nvcc;
pub use nvrtc::Nvrtc;

use tokenyard_core::abi;
use tokenyard_gpu::{BlockLimits, Components, Dialect, GpuKernels, Names, Peers, Platform};

/// NVIDIA's GPUs.
pub static PLATFORM: Platform = Platform {
    driver: &CudaDriver,
    compiler: &Nvrtc,
    program_compiler: |named| Ok(Box::new(Nvcc::find(named)?)),
    named_compiles_all: false,
    names: Names {
        kernels: "cuda",
        link: "nvlink",
        interface: "CUDA",
        see_devices: "what nvidia-smi says, and CUDA_VISIBLE_DEVICES",
        see_access: "nvidia-smi topo -p2p rw and -p2p a; use GPUs that NVLink connects",
    },
    memory: abi::TY_MEMORY_CUDA,
    dialect: Dialect {
        code: abi::TY_DIALECT_CUDA,
        name: "CUDA",
        compilers: [(abi::TY_COMPILER_NVRTC, "NVRTC"), (abi::TY_COMPILER_NVCC, "nvcc")],
    },
};

/// The ordinal of the device whose context is current on this thread; none without one, or without a driver.
pub fn current_device() -> Option<i32> {
    PLATFORM.driver.load(None).ok()?;
    // CUDA's handle of a device is its ordinal.
    PLATFORM.driver.current_device().map(|device| device.0)
}

/// The components of this backend.
#[derive(Debug)]
pub struct Cuda;

impl Components for Cuda {
    const PLATFORM: &'static Platform = &PLATFORM;
    const KERNELS: &'static str = "cuda";
    const KERNELS_ABOUT: &'static str =
        "NVIDIA GPUs: device memory, all types and layouts; rank-major in one domain";
    const LINK: &'static str = "nvlink";
    const LINK_ABOUT: &'static str = "NVLink between the NVIDIA GPUs of one machine";
}

/// The limits of a block of the kernels on an H100, an H200 or a B200.
pub const HOPPER: BlockLimits = BlockLimits { shared: 232_448, wave: 32 };

/// The `cuda` kernel set.
pub type CudaKernels = GpuKernels<Cuda>;
/// The `nvlink` transport.
pub type Nvlink = Peers<Cuda>;
