//! `tokenyard warm`: compiles a config's kernels before the first communicator needs them.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use serde::Serialize;
use tokenyard_core::config::ComponentChoice;
use tokenyard_core::config::{Config, OnFailure};
use tokenyard_core::host::Registry;
use tokenyard_gpu::Platform;
use tokenyard_gpu::compile::{Architecture, Role, Rows};
use tokenyard_gpu::warm::{Over, Warmed, World, programs, warm};

use crate::output::{People, print_document};
use crate::preload;

const EXAMPLES: &str = "\
Examples:
  tokenyard warm configs/nvlink.toml
  tokenyard warm configs/nvlink.toml --capability 90   # while an image is built, without a GPU
  tokenyard warm configs/rocm.toml --architecture gfx942   # the same for AMD's GPUs

Exit codes: 0 the kernels are there, 2 they cannot be compiled, or the config is wrong.";

/// Arguments of `tokenyard warm`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct WarmArgs {
    /// The config, whose kernels are compiled.
    config: PathBuf,
    /// For this compute capability, written without its dot: 90 for 9.0. Without it, for the GPU of
    /// this node.
    #[arg(long, value_parser = clap::value_parser!(u32).range(10..=999))]
    capability: Option<u32>,
    /// For this architecture of AMD's: gfx942 or gfx950. Without it, for the GPU of this node.
    #[arg(long, conflicts_with = "capability")]
    architecture: Option<String>,
    /// Print one JSON document as the last line of standard output; the rest goes to standard error.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct WarmDocument {
    kernels: String,
    /// The programs that the config's communicators may run. Absent where the kernel set compiles nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    compiled: Option<Vec<Compiled>>,
}

#[derive(Serialize)]
struct Compiled {
    architecture: String,
    /// The device API that they are compiled with: the name of its transport, or `gpu ring`,
    /// through the host.
    device_api: String,
    /// `direct`; `masked`, the same where operations go on without lost ranks; `inside` for rows of several domains
    /// inside one of them.
    role: &'static str,
    rows: &'static str,
    /// They were compiled now, because they were not in the folder yet.
    now: bool,
    folder: PathBuf,
}

impl From<Warmed> for Compiled {
    fn from(warmed: Warmed) -> Self {
        let rows = match warmed.rows {
            Rows::Tma => "tma",
            Rows::Vector => "vector",
        };
        let role = match warmed.role {
            Role::Direct => "direct",
            Role::Masked => "masked",
            Role::IntraDomain => "inside",
            Role::InterDomain => "between",
        };
        let Warmed { architecture, over: device_api, compiled: now, folder, .. } = warmed;
        Self { architecture, device_api, role, rows, now, folder }
    }
}

pub(crate) fn main(args: &WarmArgs) -> Result<ExitCode> {
    let config = Config::load(&args.config)?;
    let platforms = [&tokenyard_cuda::PLATFORM, &tokenyard_rocm::PLATFORM];
    let platform =
        platforms.into_iter().find(|platform| platform.names.kernels == config.kernels.name);
    let compiled = match platform {
        Some(platform) => Some(compile(&config, platform, args.architecture(platform)?)?),
        None => None,
    };
    let people = People::new(args.json);
    match &compiled {
        None => people.prose(format_args!("kernel set {} compiles nothing", config.kernels.name)),
        Some(programs) => {
            for Compiled { architecture, device_api, role, rows, now, folder } in programs {
                people.say(format_args!(
                    "{role} kernels over {device_api} for {architecture}, rows by {rows}: {} {}",
                    if *now { "compiled into" } else { "were in" },
                    folder.display()
                ));
            }
        }
    }
    if args.json {
        print_document("warm", &WarmDocument { kernels: config.kernels.name, compiled })?;
    }
    Ok(ExitCode::SUCCESS)
}

impl WarmArgs {
    /// The architecture that the arguments name, one of the platform's.
    fn architecture(&self, platform: &Platform) -> Result<Option<Architecture>> {
        let is_amd = platform.names.kernels == tokenyard_rocm::PLATFORM.names.kernels;
        let refuse = |found: &str, expected: &str| {
            bail!("found {found} for kernels {:?}; expected {expected}", platform.names.kernels)
        };
        match (self.capability, self.architecture.as_deref()) {
            (Some(capability), _) if is_amd => {
                refuse(&format!("--capability {capability}"), "--architecture, such as gfx942")
            }
            (_, Some(name)) if !is_amd => {
                refuse(&format!("--architecture {name}"), "--capability, such as 90")
            }
            (_, Some(name)) => match Architecture::gfx(name) {
                Some(architecture) => Ok(Some(architecture)),
                None => refuse(&format!("--architecture {name}"), "a name such as gfx942"),
            },
            (capability, None) => Ok(capability.map(Architecture::Sm)),
        }
    }
}

fn compile(
    config: &Config,
    platform: &'static Platform,
    architecture: Option<Architecture>,
) -> Result<Vec<Compiled>> {
    preload::try_plugins(Some(config))?;
    let registry = Registry::for_config(config)?;
    let over = |choice: &ComponentChoice| {
        let given = registry.choose_transport(choice)?.device_source()?;
        // SAFETY: the data that a checked table points to is static.
        unsafe { Over::transport(&platform.dialect, &choice.name, given.as_ref()) }
    };
    let up = config.scale_up.as_ref().map(over).transpose()?;
    let out = config.scale_out.iter().map(over).collect::<tokenyard_core::Result<Vec<_>>>()?;
    let masks = config.world.on_failure == OnFailure::Mask;
    let world = World { domains: config.domains, masks };
    let warmed = warm(
        platform,
        &config.kernels.table.parse(platform.names.kernels)?,
        architecture,
        &programs(up.as_ref(), &out, world),
    )?;
    Ok(warmed.into_iter().map(Compiled::from).collect())
}
