//! Kernels are compiled at run time for the present device.
//!
//! The sources are embedded; the device API comes from the transport, the compiler from the platform.
//!
//! A change of the key of the cache makes every node compile again. Watched by the tests in these files, and the
//! steps `cuda-compile` and `rocm-compile` of `cargo xtask test`.

mod cache;
mod library;
mod program;
mod tool;

pub use library::{mapped, mapped_identity};
pub use program::{Architecture, Compiled, Role, Rows, Source, SourceFile, Target};
pub(crate) use program::{DeviceApiSource, KernelSource, Needed, Program};
pub use tool::{Ran, Tool, Written};

use std::fmt::Debug;
use std::path::{Path, PathBuf};

use tokenyard_core::{Error, ErrorKind, Result};

use crate::config::{GpuConfig, RowCopy};
use crate::platform::Platform;
use cache::Cache;

/// A compiler of kernels. Any thread may call.
pub trait Compiler: Debug + Send + Sync {
    /// Loads the compiler: out of this folder, or where it is found. Succeeds before any other call; without a
    /// folder, a compiler that is loaded serves. A program needs no folder.
    ///
    /// # Errors
    /// `Unavailable` with the fix; `Config` where the compiler takes no folder.
    fn load(&self, folder: Option<&Path>) -> Result<()>;

    /// A text that differs between compilers that generate different code from the same source. The
    /// cache's keys include it.
    ///
    /// # Errors
    /// The compiler does not report its identity.
    fn identity(&self) -> Result<String>;

    /// A text that differs between contents of the files that the compiler reads from disk for a source.
    /// The cache's keys include it, too. Empty if the compiler reads no such files.
    ///
    /// # Errors
    /// The error of the compiler.
    fn files_read(&self, source: &Source) -> Result<String> {
        let _ = source;
        Ok(String::new())
    }

    /// The options that every program takes on an architecture.
    fn options(&self, architecture: Architecture) -> Vec<String>;

    /// Compiles for as long as it takes, seconds as a rule.
    ///
    /// # Errors
    /// The error of the compiler, with its log.
    fn compile(&self, source: &Source) -> Result<Compiled>;
}

/// The oldest architecture of NVIDIA's that the kernels are written for.
const OLDEST: u32 = 80;
/// The architectures of AMD's that the kernels are compiled for in tests, on which a wavefront has 64 lanes.
const GFX: [u32; 2] = [0x942, 0x950];

/// Whether there are kernels for an architecture.
///
/// # Errors
/// `Unsupported` with those that there are kernels for.
pub(crate) fn check_architecture(architecture: Architecture) -> Result<()> {
    let expected = match architecture {
        Architecture::Sm(..OLDEST) => format!("sm_{OLDEST} or later (A100)"),
        Architecture::Gfx(digits) if !GFX.contains(&digits) => {
            "gfx942 or gfx950 (MI300X, MI325X, MI350X, MI355X)".to_owned()
        }
        _ => return Ok(()),
    };
    let message = format!("found {}; expected {expected}", architecture.name());
    Err(Error::new(ErrorKind::Unsupported, "load kernels", message).with_fix("use another GPU"))
}

/// How rows move on an architecture.
pub(crate) fn rows_of(
    config: &GpuConfig,
    architecture: Architecture,
    by_host: bool,
) -> Result<Rows> {
    let has_bulk_copies = matches!(architecture, Architecture::Sm(90..));
    let refuse = |message: String, fix: &'static str| {
        Err(Error::new(ErrorKind::Unsupported, "load kernels", message).with_fix(fix))
    };
    let name = architecture.name();
    check_architecture(architecture)?;
    match config.rows {
        RowCopy::Tma if !has_bulk_copies => refuse(
            format!("rows = \"tma\": found {name}; expected sm_90 or later"),
            "set rows = \"auto\"",
        ),
        RowCopy::Vector => Ok(Rows::Vector),
        // Rows that the host posts are usually staged in host memory, where the speed of the copy
        // does not matter.
        RowCopy::Auto if !has_bulk_copies || by_host => Ok(Rows::Vector),
        RowCopy::Tma | RowCopy::Auto => Ok(Rows::Tma),
    }
}

/// Whether the config names the compiler of all kernels.
fn names_compiler(platform: &Platform, config: &GpuConfig) -> bool {
    platform.named_compiles_all && config.compiler.is_some()
}

/// Loads the compiler of most kernels.
///
/// # Errors
/// `Unavailable` with the fix.
pub(crate) fn load_compiler(platform: &Platform, config: &GpuConfig) -> Result<()> {
    match &config.compiler {
        Some(named) if names_compiler(platform, config) => {
            (platform.program_compiler)(Some(named))?.load(None)
        }
        _ => platform.compiler.load(config.libraries.as_deref()),
    }
}

/// The machine code of the kernels over a device API: from the cache, or compiled and stored there.
/// Reports whether it was compiled now.
pub(crate) fn kernels(
    platform: &Platform,
    config: &GpuConfig,
    architecture: Architecture,
    device_api: DeviceApiSource<'_>,
    role: Role,
) -> Result<(Vec<u8>, bool)> {
    let rows = rows_of(config, architecture, device_api.by_host)?;
    with_compiler(platform, config, device_api.compiler, |compiler| {
        let target = Target { compiler, architecture, rows };
        image_of(platform, config, compiler, &Program::new(target, device_api, role))
    })
}

/// Runs `body` with the compiler of a platform that kernels need.
fn with_compiler<T>(
    platform: &Platform,
    config: &GpuConfig,
    needed: Needed,
    body: impl FnOnce(&dyn Compiler) -> Result<T>,
) -> Result<T> {
    match needed {
        Needed::RunTime if !names_compiler(platform, config) => {
            load_compiler(platform, config)?;
            body(platform.compiler)
        }
        _ => body(&*(platform.program_compiler)(config.compiler.as_deref())?),
    }
}

/// The machine code of kernels that take no device API.
pub(crate) fn beside(
    platform: &Platform,
    config: &GpuConfig,
    architecture: Architecture,
    kernels: &KernelSource,
) -> Result<Vec<u8>> {
    check_architecture(architecture)?;
    with_compiler(platform, config, Needed::RunTime, |compiler| {
        // They move no rows.
        let target = Target { compiler, architecture, rows: Rows::Vector };
        let program = Program::beside(target, kernels);
        image_of(platform, config, compiler, &program).map(|(image, _)| image)
    })
}

/// The image of the kernels that measure, with the fastest way to move rows.
pub(crate) fn probe(
    platform: &Platform,
    config: &GpuConfig,
    architecture: Architecture,
    device_api: DeviceApiSource<'_>,
    kernels: &KernelSource,
) -> Result<(Vec<u8>, Rows)> {
    // The config has no say here: the capacity of the link does not depend on it.
    let rows = rows_of(&GpuConfig::default(), architecture, false)?;
    let target = Target { compiler: platform.compiler, architecture, rows };
    let program = Program::probe(target, device_api, kernels);
    let (image, _) = image_of(platform, config, platform.compiler, &program)?;
    Ok((image, rows))
}

fn image_of(
    platform: &Platform,
    config: &GpuConfig,
    compiler: &dyn Compiler,
    program: &Program,
) -> Result<(Vec<u8>, bool)> {
    let cache = Cache::open(&platform.names, config.cache.as_deref())?;
    let mut compiled = false;
    let image = cache.get(&program.key(compiler)?, || {
        compiled = true;
        program.compile(compiler).map(|made| made.image)
    })?;
    Ok((image, compiled))
}

/// The folder of the compiled kernels.
pub(crate) fn folder(platform: &Platform, config: &GpuConfig) -> Result<PathBuf> {
    Ok(Cache::open(&platform.names, config.cache.as_deref())?.folder().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_move_by_bulk_copies_where_there_are_any_and_nothing_else_is_asked_for() {
        let rows = |rows, capability| {
            let config = GpuConfig { rows, ..GpuConfig::default() };
            rows_of(&config, Architecture::Sm(capability), false)
        };
        assert_eq!(rows(RowCopy::Auto, 80).unwrap(), Rows::Vector);
        assert_eq!(rows(RowCopy::Auto, 90).unwrap(), Rows::Tma);
        assert_eq!(rows(RowCopy::Vector, 100).unwrap(), Rows::Vector);
        let ring = rows_of(&GpuConfig::default(), Architecture::Sm(90), true);
        assert_eq!(ring.unwrap(), Rows::Vector);
        assert_eq!(rows(RowCopy::Tma, 90).unwrap(), Rows::Tma);
        let text = rows(RowCopy::Tma, 89).unwrap_err().to_string();
        assert!(text.contains("found sm_89; expected sm_90"), "{text}");
        let text = rows(RowCopy::Auto, 75).unwrap_err().to_string();
        assert!(text.contains("found sm_75; expected sm_80"), "{text}");
    }

    #[test]
    fn rows_move_by_vectors_on_the_architectures_of_amd_that_there_are_kernels_for() {
        let rows = |digits| {
            let architecture = Architecture::Gfx(digits);
            rows_of(&GpuConfig::default(), architecture, false).map_err(|e| e.to_string())
        };
        assert_eq!([0x942, 0x950].map(rows), [Ok(Rows::Vector), Ok(Rows::Vector)]);
        for (digits, name) in [(0x90a, "gfx90a"), (0x1100, "gfx1100")] {
            let text = rows(digits).unwrap_err();
            assert!(text.contains(&format!("found {name}; expected gfx942 or gfx950")), "{text}");
        }
    }
}
