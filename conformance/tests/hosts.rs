//! L3 on several hosts, which are network namespaces. This program is also the ranks.

mod players;

use std::path::PathBuf;
use std::process::ExitCode;

use tokenyard_conformance::faults;

fn main() -> ExitCode {
    let plugin = plugin();
    if !plugin.exists() {
        let fix = "cargo build --package tokenyard-plugin-libfabric";
        eprintln!("{} is not there. Fix: {fix}", plugin.display());
        return ExitCode::FAILURE;
    }
    let config = format!(
        "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"none\"\n\
         [transport.scale_out]\nuse = \"libfabric\"\n\
         [transport.scale_out.libfabric]\nprovider = \"tcp\"\nrails = [\"eth0\"]\n\
         [plugins]\npaths = [\"{}\"]\n",
        plugin.display()
    );
    players::main(&config, faults::on_hosts(), 4)
}

/// Beside the folder of the tests, where cargo puts it.
fn plugin() -> PathBuf {
    let mut path = std::env::current_exe().unwrap_or_default();
    path.pop();
    path.pop();
    path.join("libtokenyard_plugin_libfabric.so")
}
