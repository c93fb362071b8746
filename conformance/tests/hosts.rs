//! L3 on several hosts, which are network namespaces. This program is also the ranks.

mod players;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use tokenyard_conformance::faults::{self, Fault};
use tokenyard_conformance::pace::Pace;

fn main() -> ExitCode {
    let plugin = plugin();
    if !plugin.exists() {
        let fix = "cargo build --package tokenyard-plugin-libfabric";
        eprintln!("{} is not there. Fix: {fix}", plugin.display());
        return ExitCode::FAILURE;
    }
    let [direct, domains] = ["none", "shm"].map(|scale_up| config(scale_up, &plugin));
    let with_config = |fault: Fault| {
        let config = if fault.domains > 1 { domains.as_str() } else { direct.as_str() };
        (fault, config)
    };
    players::main(Pace::USUAL, faults::on_hosts().into_iter().map(with_config).collect())
}

fn config(scale_up: &str, plugin: &Path) -> String {
    format!(
        "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"{scale_up}\"\n\
         [transport.scale_out]\nuse = \"libfabric\"\n\
         [transport.scale_out.libfabric]\nprovider = \"tcp\"\nrails = [\"eth0\"]\n\
         [plugins]\npaths = [\"{}\"]\n",
        plugin.display()
    )
}

/// The library lies next to the folder of the tests, where cargo puts it.
fn plugin() -> PathBuf {
    let mut path = std::env::current_exe().unwrap_or_default();
    path.pop();
    path.pop();
    path.join("libtokenyard_plugin_libfabric.so")
}
