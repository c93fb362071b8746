//! One maker's GPUs: driver, compiler, and the names that users know them by.

use std::fmt::Debug;
use std::path::Path;

use tokenyard_core::Result;

use crate::compile::Compiler;
use crate::driver::Driver;

/// All differences between one maker's GPUs and another's, outside the kernels.
#[derive(Debug)]
pub struct Platform {
    /// Its driver.
    pub driver: &'static dyn Driver,
    /// The compiler of its kernels: a library.
    pub compiler: &'static dyn Compiler,
    /// The compiler of kernels over a device API that includes headers from disk: a program, at the path
    /// that the config names, or at the place where it is found.
    pub program_compiler: fn(Option<&Path>) -> Result<Box<dyn Compiler>>,
    /// Whether a compiler that the config names compiles all kernels.
    pub named_compiles_all: bool,
    /// Names for people.
    pub names: Names,
    /// The kind of its device memory, one of `TY_MEMORY_*`.
    pub memory: u32,
    /// The language of its kernels.
    pub dialect: Dialect,
}

/// A language of kernels, as a transport's device API names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialect {
    /// One of `TY_DIALECT_*`.
    pub code: u32,
    /// Its name, such as `CUDA`.
    pub name: &'static str,
    /// Its compilers, the library before the program: one of `TY_COMPILER_*`, and the name.
    pub compilers: [(u32, &'static str); 2],
}

/// The words that errors and paths use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// The kernel set, such as `cuda`: `[kernels.cuda]`, and the cache's folder.
    pub kernels: &'static str,
    /// The transport between devices, such as `nvlink`: `[transport.scale_up.nvlink]`.
    pub link: &'static str,
    /// The interface, such as `CUDA`.
    pub interface: &'static str,
    /// The command that shows devices, and the variable that hides them.
    pub see_devices: &'static str,
    /// The commands that show the access between devices.
    pub see_access: &'static str,
}

impl Names {
    /// The kernel set's table in a config.
    pub(crate) fn table(&self) -> String {
        format!("[kernels.{}]", self.kernels)
    }
}

/// The components of a platform, as types: [`GpuKernels`](crate::GpuKernels) and
/// [`Peers`](crate::Peers) are written once and named by this.
pub trait Components: Debug + Send + Sync + 'static {
    /// The platform.
    const PLATFORM: &'static Platform;
    /// The name of the kernel set, as in `PLATFORM`.
    const KERNELS: &'static str;
    /// The kernel set in one line.
    const KERNELS_ABOUT: &'static str;
    /// The name of the transport, as in `PLATFORM`.
    const LINK: &'static str;
    /// The transport in one line.
    const LINK_ABOUT: &'static str;
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    use tokenyard_core::{Error, ErrorKind, Result, abi};

    use super::{Dialect, Names, Platform};
    use crate::compile::{Architecture, Compiled, Compiler, Source};
    use crate::driver::Driver;

    pub(crate) const DIALECT: Dialect = Dialect {
        code: abi::TY_DIALECT_CUDA,
        name: "CUDA",
        compilers: [(abi::TY_COMPILER_NVRTC, "NVRTC"), (abi::TY_COMPILER_NVCC, "nvcc")],
    };

    /// The names of a platform that does not exist.
    pub(crate) const NAMES: Names = Names {
        kernels: "kernels",
        link: "link",
        interface: "GPU",
        see_devices: "the devices",
        see_access: "their access",
    };

    /// The compiler of a platform that has none.
    #[derive(Debug)]
    struct NoCompiler;

    fn no_compiler<T>() -> Result<T> {
        Err(Error::new(ErrorKind::Unsupported, "compile kernels", "this platform has no compiler"))
    }

    impl Compiler for NoCompiler {
        fn load(&self, _: Option<&Path>) -> Result<()> {
            no_compiler()
        }

        fn identity(&self) -> Result<String> {
            no_compiler()
        }

        fn options(&self, _: Architecture) -> Vec<String> {
            Vec::new()
        }

        fn compile(&self, _: &Source) -> Result<Compiled> {
            no_compiler()
        }
    }

    /// A platform that has a driver, and no compiler.
    pub(crate) const fn platform_of(driver: &'static dyn Driver) -> Platform {
        Platform {
            driver,
            compiler: &NoCompiler,
            program_compiler: |_| no_compiler(),
            named_compiles_all: false,
            names: NAMES,
            memory: abi::TY_MEMORY_CUDA,
            dialect: DIALECT,
        }
    }
}
