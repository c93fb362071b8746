//! The backend for AMD GPUs: the `xgmi` transport between the GPUs of one machine, and the `rocm` kernel
//! set.
//!
//! **Nothing here has run on an AMD GPU.** `docs.md` in this folder lists the evidence so far.
//!
//! The kernels and the host code are those of `tokenyard-gpu`. This crate adds the driver over HIP, the
//! compilers hiprtc and clang, and the names. Nothing of ROCm is linked: its libraries are loaded at run
//! time, and `probe` reports where they are missing.
//!
//! Watched by the tests in these files and `tests`, over a library of HIP's names; `standins/hip_on_cuda` runs it on
//! GPUs of NVIDIA.

mod built_in;
mod clang;
mod driver;
mod hiprtc;

pub use built_in::link;
pub use clang::Clang;
pub use driver::HipDriver;
pub use hiprtc::HipCompiler;

use tokenyard_core::abi;
use tokenyard_gpu::{BlockLimits, Components, Dialect, GpuKernels, Names, Peers, Platform};

/// AMD's GPUs.
pub static PLATFORM: Platform = Platform {
    driver: &HipDriver,
    compiler: &HipCompiler,
    program_compiler: |named| Ok(Box::new(Clang::find(named)?)),
    // hiprtc is not on every machine that has clang.
    named_compiles_all: true,
    names: Names {
        kernels: "rocm",
        link: "xgmi",
        interface: "HIP",
        see_devices: "what rocm-smi says, and HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES",
        see_access: "rocm-smi --showtopo; use GPUs that xGMI connects",
    },
    memory: abi::TY_MEMORY_HIP,
    dialect: Dialect {
        code: abi::TY_DIALECT_HIP,
        name: "HIP",
        compilers: [(abi::TY_COMPILER_HIPRTC, "hiprtc"), (abi::TY_COMPILER_HIPCC, "clang")],
    },
};

/// The components of this backend.
#[derive(Debug)]
pub struct Rocm;

impl Components for Rocm {
    const PLATFORM: &'static Platform = &PLATFORM;
    const KERNELS: &'static str = "rocm";
    const KERNELS_ABOUT: &'static str =
        "AMD GPUs: device memory, all types and layouts; rank-major in one domain";
    const LINK: &'static str = "xgmi";
    const LINK_ABOUT: &'static str = "xGMI between the AMD GPUs of one machine";
}

/// The limits of a block of the kernels on an MI300X.
pub const GFX942: BlockLimits = BlockLimits { shared: 65_536, wave: 64 };

/// The `rocm` kernel set.
pub type RocmKernels = GpuKernels<Rocm>;
/// The `xgmi` transport.
pub type Xgmi = Peers<Rocm>;
