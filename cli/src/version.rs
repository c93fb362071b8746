//! `tokenyard version`: the build of the program, and the versions of drivers and libraries on this
//! node.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;
use tokenyard_core::abi;
use tokenyard_machine::{Machine, Tree};

use crate::output::{People, SCHEMA_VERSION, Table, print_document};

const EXAMPLES: &str = "\
Examples:
  tokenyard version
  tokenyard version --json
  tokenyard --version --verbose

Drivers and libraries are those that are found on this node; no command is run and no library is
opened. Put the output into every report of a fault.";

/// Arguments of `tokenyard version`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct VersionArgs {
    /// Print one JSON document as the last line of standard output; the rest goes to standard error.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Versions {
    /// The version of the program.
    version: &'static str,
    build: Build,
    /// The versions of the plugin ABI, by kind of component, and of formats.
    formats: Formats,
    node: Node,
}

#[derive(Serialize)]
struct Build {
    /// The commit, and whether files differed from it.
    commit: &'static str,
    compiler: &'static str,
    target: &'static str,
    profile: &'static str,
}

#[derive(Serialize)]
struct Formats {
    transport_abi: String,
    topology_abi: String,
    kernels_abi: String,
    device_api: u32,
    report: u32,
    json: u32,
}

/// The version; nothing where it is not there, or has no readable version.
#[derive(Serialize)]
struct Node {
    kernel: Option<String>,
    nvidia_driver: Option<String>,
    /// Kernel modules with a version of their own.
    modules: BTreeMap<String, Option<String>>,
    libraries: Vec<Library>,
}

#[derive(Serialize)]
struct Library {
    name: String,
    version: Option<String>,
    path: String,
}

pub(crate) fn main(args: &VersionArgs) -> Result<ExitCode> {
    let versions = Versions::find();
    versions.print(People::new(args.json));
    if args.json {
        print_document("version", &versions)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// `tokenyard --version`, and with `--verbose`.
pub(crate) fn flag(verbose: bool) {
    let people = People::new(false);
    match verbose {
        true => Versions::find().print(people),
        false => people.say(format_args!("tokenyard {}", env!("CARGO_PKG_VERSION"))),
    }
}

impl Versions {
    fn find() -> Self {
        let machine = Machine::read(&Tree::system());
        let abi = |major: u32, minor: u32, layout: u64| format!("{major}.{minor} ({layout:016x})");
        Self {
            version: env!("CARGO_PKG_VERSION"),
            build: Build {
                commit: env!("TOKENYARD_BUILD_COMMIT"),
                compiler: env!("TOKENYARD_BUILD_RUSTC"),
                target: env!("TOKENYARD_BUILD_TARGET"),
                profile: env!("TOKENYARD_BUILD_PROFILE"),
            },
            formats: Formats {
                transport_abi: abi(
                    abi::TY_TRANSPORT_MAJOR,
                    abi::TY_TRANSPORT_MINOR,
                    abi::TY_TRANSPORT_LAYOUT,
                ),
                topology_abi: abi(
                    abi::TY_TOPOLOGY_MAJOR,
                    abi::TY_TOPOLOGY_MINOR,
                    abi::TY_TOPOLOGY_LAYOUT,
                ),
                kernels_abi: abi(
                    abi::TY_KERNELS_MAJOR,
                    abi::TY_KERNELS_MINOR,
                    abi::TY_KERNELS_LAYOUT,
                ),
                device_api: abi::TY_DEVICE_API_VERSION,
                report: tokenyard_core::report::SCHEMA_VERSION,
                json: SCHEMA_VERSION,
            },
            node: Node::new(machine),
        }
    }

    fn print(&self, people: People) {
        people.say(format_args!("tokenyard {}\n", self.version));
        let mut table = Table::folded(&["what", "version"]);
        let (build, formats) = (&self.build, &self.formats);
        let built = format!("{} for {}", build.profile, build.target);
        for (what, version) in [
            ("commit", build.commit),
            ("compiler", build.compiler),
            ("build", &built),
            ("transport ABI", &formats.transport_abi),
            ("topology ABI", &formats.topology_abi),
            ("kernel set ABI", &formats.kernels_abi),
        ] {
            table.row([what.into(), version.into()]);
        }
        for (what, version) in [
            ("device API", formats.device_api),
            ("reports", formats.report),
            ("JSON documents", formats.json),
        ] {
            table.row([what.into(), format!("v{version}").into()]);
        }
        self.node.add_to(&mut table);
        people.say(table.render(people));
    }
}

impl Node {
    fn new(machine: Machine) -> Self {
        let libraries = machine.libraries.found.into_iter();
        Self {
            kernel: machine.kernel.release.get(),
            nvidia_driver: machine.nvidia.and_then(|driver| driver.version.get()),
            modules: machine
                .modules
                .into_iter()
                .map(|(name, module)| (name, module.version.get()))
                .collect(),
            libraries: libraries
                .map(|library| Library {
                    name: library.name,
                    version: library.version,
                    path: format!("/{}", library.path),
                })
                .collect(),
        }
    }

    /// Adds a row for each, without the paths of libraries: `--json` has them.
    fn add_to(&self, table: &mut Table) {
        let known = |version: &Option<String>| version.as_deref().unwrap_or("not known").to_owned();
        let driver = self.nvidia_driver.as_deref().unwrap_or("not loaded");
        table.row(["Linux".into(), known(&self.kernel).into()]);
        table.row(["NVIDIA's driver".into(), driver.into()]);
        for (name, version) in &self.modules {
            table.row([format!("module {name}").into(), known(version).into()]);
        }
        let (providers, libraries): (Vec<_>, Vec<_>) =
            self.libraries.iter().partition(|library| library.name.contains("-rdmav"));
        for library in libraries {
            table.row([library.name.as_str().into(), known(&library.version).into()]);
        }
        let names = providers.iter().filter_map(|provider| provider.name.split("-rdmav").next());
        let names: Vec<_> = names.map(|name| name.trim_start_matches("lib")).collect();
        if !names.is_empty() {
            table.row(["providers of libibverbs".into(), names.join(", ").into()]);
        }
    }
}
