//! `tokenyard` without a command: what this node has, and what to try first.

use std::collections::BTreeMap;
use std::path::PathBuf;

use tokenyard_machine::{GpuVendor, Machine, NicFamily, Tree};

use crate::output::{People, Table};

/// The parts of a node that decide about the config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Has {
    gpus: Option<GpuVendor>,
    nics: Option<NicFamily>,
}

/// The configs of a node, by file name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct First {
    /// The first choice for one node.
    one: &'static str,
    /// The first choice for several nodes; the same where there is no better one.
    several: &'static str,
}

/// Prints the node, and the commands for it.
pub(crate) fn print() {
    let machine = Machine::read(&Tree::system());
    let people = People::new(false);
    people.say(format_args!(
        "tokenyard {}: expert-parallel dispatch and combine\n\nthis node  {}\n",
        env!("CARGO_PKG_VERSION"),
        node(&machine)
    ));
    let First { one, several } = first(has(&machine));
    let folder = configs();
    let config = |file: &str| folder.join(file).display().to_string();
    let mut table = Table::folded(&["try", "for"]);
    let mut row = |command: &str, why: &str| table.row([command.into(), why.into()]);
    // Its kernel sets for GPUs are left out.
    let one = if cfg!(feature = "full") { one } else { "cpu.toml" };
    row(&format!("tokenyard run {}", config(one)), "an exchange, every element checked");
    if cfg!(feature = "full") {
        row(&format!("tokenyard doctor {}", config(one)), "what is slow or broken here");
        // Kernels of GPUs take no memory of the host, which the exchange of `bench` passes.
        let bench = if one == "cpu.toml" { "bench" } else { "bench dispatch" };
        row(&format!("tokenyard {bench} {}", config(one)), "how fast it is");
        if several != one {
            row(&format!("tokenyard doctor {}", config(several)), "several such nodes");
        }
    } else {
        row("cargo xtask install PREFIX", "the other commands, and GPUs");
    }
    row("tokenyard --help", "all commands");
    people.say(table.render(people));
}

fn has(machine: &Machine) -> Has {
    let rdma = [NicFamily::Efa, NicFamily::Mlx5];
    let nic = |family: &NicFamily| machine.nics.iter().any(|nic| nic.family == *family);
    Has {
        gpus: machine.given_gpus().first().map(|gpu| gpu.vendor),
        nics: rdma.into_iter().find(nic).or(machine.nics.first().map(|nic| nic.family)),
    }
}

/// As the table of docs/which-config.md has it.
fn first(Has { gpus, nics }: Has) -> First {
    let one = match gpus {
        Some(GpuVendor::Nvidia) => "nvlink.toml",
        Some(GpuVendor::Amd) => "rocm.toml",
        None => "cpu.toml",
    };
    let several = match (gpus, nics) {
        (Some(GpuVendor::Nvidia), Some(NicFamily::Efa)) => "nvlink-efa.toml",
        (Some(GpuVendor::Nvidia), Some(_)) => "nvlink-verbs.toml",
        (Some(GpuVendor::Amd), Some(_)) => "rocm-verbs.toml",
        (None, Some(NicFamily::Efa)) => "efa.toml",
        (None, Some(_)) => "verbs.toml",
        (_, None) => one,
    };
    First { one, several }
}

/// The folder of the configs: of the installation, or of the source tree.
fn configs() -> PathBuf {
    let program = std::env::current_exe().ok();
    let prefix = program.as_deref().and_then(|file| file.parent()?.parent());
    let installed = prefix.map(|prefix| prefix.join("share/tokenyard/configs"));
    installed.filter(|folder| folder.is_dir()).unwrap_or_else(|| "configs".into())
}

fn node(machine: &Machine) -> String {
    let mut parts = Vec::new();
    let mut gpus: BTreeMap<String, usize> = BTreeMap::new();
    for gpu in machine.given_gpus() {
        let vendor = match gpu.vendor {
            GpuVendor::Nvidia => "NVIDIA GPU",
            GpuVendor::Amd => "AMD GPU",
        };
        let model = gpu
            .model
            .known()
            .map_or_else(|| vendor.to_owned(), |model| format!("{vendor} ({model})"));
        *gpus.entry(model).or_default() += 1;
    }
    parts.extend(gpus.iter().map(|(model, count)| format!("{count} x {model}")));
    if gpus.is_empty() {
        parts.push("no GPU".to_owned());
    }
    parts.push(match machine.nics.len() {
        0 => "no RDMA NIC".to_owned(),
        1 => "1 RDMA NIC".to_owned(),
        nics => format!("{nics} RDMA NICs"),
    });
    let processors = machine.numa.iter().filter_map(|node| Some(node.processors.known()?.len()));
    parts.push(format!("{} cores", processors.sum::<usize>()));
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn each_node_gets_the_config_that_the_operators_table_has() {
        let trees = Path::new(env!("CARGO_MANIFEST_DIR")).join("../node/machine/trees");
        for (tree, one, several, says) in [
            ("hgx-cx7", "nvlink.toml", "nvlink-verbs.toml", "8 x NVIDIA GPU"),
            ("p5en-efa", "nvlink.toml", "nvlink-efa.toml", "8 x NVIDIA GPU"),
            ("gb200-nvl72", "nvlink.toml", "nvlink-verbs.toml", "4 x NVIDIA GPU"),
            ("mi300x-pollara", "rocm.toml", "rocm-verbs.toml", "8 x AMD GPU"),
            ("roce-bond", "cpu.toml", "verbs.toml", "no GPU, "),
            ("cpu-virtual", "cpu.toml", "cpu.toml", "no GPU, no RDMA NIC, "),
        ] {
            let tree = Tree::open(&trees.join(tree).with_extension("tree")).unwrap();
            let machine = Machine::read(&tree);
            assert_eq!(first(has(&machine)), First { one, several }, "{tree:?}");
            assert!(node(&machine).contains(says), "{}", node(&machine));
            for file in [one, several] {
                let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs").join(file);
                assert!(path.is_file(), "{}", path.display());
            }
        }
    }
}
