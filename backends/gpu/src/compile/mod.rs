//! Kernels are compiled at run time for the device that is there.
//!
//! The sources are embedded; the device API comes from the transport, the compiler from the platform.

mod cache;
mod program;

pub(crate) use program::DeviceApiSource;
pub use program::{Architecture, Compiled, Role, Rows, Source, Target, Up, compile, compile_probe};

use std::fmt::Debug;
use std::path::PathBuf;

use tokenyard_core::{Error, ErrorKind, Result};

use crate::config::{GpuConfig, RowCopy};
use crate::driver::Device;
use crate::platform::Platform;
use cache::Cache;
use program::Program;

/// A compiler of kernels. Any thread may call.
pub trait Compiler: Debug + Send + Sync {
    /// Loads it. Succeeds before any other call.
    ///
    /// # Errors
    /// `Unavailable` with the fix.
    fn load(&self) -> Result<()>;

    /// A text that differs between compilers that make different code of the same source: a part of
    /// the cache's keys.
    ///
    /// # Errors
    /// The compiler does not say it.
    fn identity(&self) -> Result<String>;

    /// The options that every program takes on an architecture.
    fn options(&self, architecture: Architecture) -> Vec<String>;

    /// Compiles for as long as it takes, seconds as a rule.
    ///
    /// # Errors
    /// What the compiler says, with its log.
    fn compile(&self, source: &Source) -> Result<Compiled>;
}

/// The oldest architecture that the kernels are written for.
const OLDEST: u32 = 80;

/// How rows move on an architecture.
pub(crate) fn rows_of(config: &GpuConfig, architecture: Architecture, puts: bool) -> Result<Rows> {
    let has_bulk_copies = architecture.capability >= 90;
    let refuse = |message: String, fix: &'static str| {
        Err(Error::new(ErrorKind::Unsupported, "load kernels", message).with_fix(fix))
    };
    let name = architecture.name();
    if architecture.capability < OLDEST {
        return refuse(format!("found {name}; expected sm_{OLDEST} or later"), "use another GPU");
    }
    match config.rows {
        RowCopy::Tma if !has_bulk_copies => refuse(
            format!("rows = \"tma\": found {name}; expected sm_90 or later"),
            "set rows = \"auto\"",
        ),
        RowCopy::Vector => Ok(Rows::Vector),
        // Where kernels put, windows are host memory, and speed is no matter.
        RowCopy::Auto if !has_bulk_copies || puts => Ok(Rows::Vector),
        RowCopy::Tma | RowCopy::Auto => Ok(Rows::Tma),
    }
}

/// The machine code of the kernels over a device API: from the cache, or compiled into it. Says whether it
/// was compiled now.
pub(crate) fn kernels(
    platform: &Platform,
    config: &GpuConfig,
    architecture: Architecture,
    (device_api, role): (DeviceApiSource<'_>, Role),
) -> Result<(Vec<u8>, bool)> {
    let rows = rows_of(config, architecture, device_api.puts)?;
    let target = Target { compiler: platform.compiler, architecture, rows };
    image_of(platform, config, &Program::new(target, device_api, role))
}

/// The same of the kernels that measure a link, and how the best of them move rows.
pub(crate) fn probe(
    platform: &Platform,
    config: &GpuConfig,
    architecture: Architecture,
    device_api: DeviceApiSource<'_>,
) -> Result<(Vec<u8>, Rows)> {
    // Not as the config says it: what the link can carry does not depend on it.
    let rows = rows_of(&GpuConfig::default(), architecture, false)?;
    let target = Target { compiler: platform.compiler, architecture, rows };
    let (image, _) = image_of(platform, config, &Program::probe(target, device_api))?;
    Ok((image, rows))
}

fn image_of(platform: &Platform, config: &GpuConfig, program: &Program) -> Result<(Vec<u8>, bool)> {
    let cache = Cache::open(&platform.names, config.cache.as_deref())?;
    let mut compiled = false;
    let image = cache.get(&program.key(platform.compiler)?, || {
        compiled = true;
        program.compile(platform.compiler).map(|made| made.image)
    })?;
    Ok((image, compiled))
}

/// Kernels that a later start finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warmed {
    /// As the compiler calls it, such as `sm_90a`.
    pub architecture: String,
    /// What they are compiled over.
    pub device_api: Up,
    /// Whose rows they move.
    pub role: Role,
    /// How rows move.
    pub rows: Rows,
    /// They were not there yet.
    pub compiled: bool,
    /// Where they are.
    pub folder: PathBuf,
}

/// The programs that a communicator of these transports may run: inside a domain, and between domains, in the
/// order of choice. `domains` where the config sets how many there are.
pub fn programs(up: Option<&str>, out: &[&str], domains: Option<u32>) -> Vec<(Up, Role)> {
    let device_api = |name: &str| if name == "nvlink" { Up::Nvlink } else { Up::Proxy };
    let mut all = Vec::new();
    if let Some(up) = up {
        // A world that turns out to be one domain, and one that does not.
        if domains.is_none_or(|domains| domains == 1) || out.is_empty() {
            all.push((device_api(up), Role::Direct));
        }
        if domains != Some(1) && !out.is_empty() {
            all.push((device_api(up), Role::IntraDomain));
        }
    }
    if up.is_none() || domains != Some(1) {
        all.extend(out.iter().map(|name| (device_api(name), Role::Direct)));
    }
    let mut once = Vec::new();
    all.into_iter().for_each(|program| {
        if !once.contains(&program) {
            once.push(program)
        }
    });
    once
}

/// Compiles programs into the cache, unless they are there: for the GPU that this process would drive,
/// or for a compute capability (major * 10 + minor), which needs no GPU.
///
/// # Errors
/// No compiler, no GPU, what the compiler says, a cache that cannot be used.
pub fn warm(
    platform: &'static Platform,
    config: &GpuConfig,
    capability: Option<u32>,
    programs: &[(Up, Role)],
) -> Result<Vec<Warmed>> {
    config.check(&platform.names)?;
    let capability = match capability {
        Some(capability) => capability,
        None => Device::choose(platform, config.device)?.facts()?.capability,
    };
    let architecture = Architecture { capability };
    let folder = Cache::open(&platform.names, config.cache.as_deref())?.folder().to_owned();
    let warm = |(device_api, role): &(Up, Role)| {
        let (_, compiled) = kernels(platform, config, architecture, (device_api.source(), *role))?;
        Ok(Warmed {
            architecture: architecture.name(),
            device_api: *device_api,
            role: *role,
            rows: rows_of(config, architecture, device_api.source().puts)?,
            compiled,
            folder: folder.clone(),
        })
    };
    programs.iter().map(warm).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_move_by_bulk_copies_where_there_are_any_and_nothing_else_is_asked_for() {
        let rows = |rows, capability| {
            let config = GpuConfig { rows, ..GpuConfig::default() };
            rows_of(&config, Architecture { capability }, false)
        };
        assert_eq!(rows(RowCopy::Auto, 80).unwrap(), Rows::Vector);
        assert_eq!(rows(RowCopy::Auto, 90).unwrap(), Rows::Tma);
        assert_eq!(rows(RowCopy::Vector, 100).unwrap(), Rows::Vector);
        assert_eq!(rows(RowCopy::Tma, 90).unwrap(), Rows::Tma);
        let text = rows(RowCopy::Tma, 89).unwrap_err().to_string();
        assert!(text.contains("found sm_89; expected sm_90"), "{text}");
        let text = rows(RowCopy::Auto, 75).unwrap_err().to_string();
        assert!(text.contains("found sm_75; expected sm_80"), "{text}");
    }

    #[test]
    fn a_config_names_every_program_that_its_communicators_may_run() {
        use {Role::*, Up::*};
        let flat = programs(Some("nvlink"), &[], None);
        assert_eq!(flat, [(Nvlink, Direct)]);
        assert_eq!(programs(None, &["shm"], None), [(Proxy, Direct)]);
        let both = programs(Some("nvlink"), &["shm"], Some(2));
        assert_eq!(both, [(Nvlink, IntraDomain), (Proxy, Direct)]);
        let any = programs(Some("nvlink"), &["verbs", "libfabric"], None);
        assert_eq!(any, [(Nvlink, Direct), (Nvlink, IntraDomain), (Proxy, Direct)]);
        assert_eq!(programs(Some("nvlink"), &["shm"], Some(1)), [(Nvlink, Direct)]);
        let same = programs(Some("nvlink"), &["nvlink"], Some(2));
        assert_eq!(same, [(Nvlink, IntraDomain), (Nvlink, Direct)]);
    }
}
