//! The suite over the product's `ibgda` transport, **on a software HCA**: unmodified libibverbs and libmlx5 over the
//! stand-in of the kernel, kernels on the CPU, windows in memory of the host. And its refusals there.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;

use tempfile::TempDir;
use tokenyard_testkit::built_plugin;

/// The stand-in and the plugin.
static FILES: LazyLock<[PathBuf; 2]> =
    LazyLock::new(|| ["tokenyard-hca-preload", "tokenyard-plugin-ibgda"].map(built_plugin));

/// A folder for devices that reach each other, and a config there.
struct World {
    folder: TempDir,
}

impl World {
    fn new(table: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let plugin = &FILES[1];
        let text = format!(
            "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"none\"\n[transport.scale_out]\nuse = \"ibgda\"\n\
             [transport.scale_out.ibgda]\n{table}\n[plugins]\npaths = [{plugin:?}]\n"
        );
        std::fs::write(folder.path().join("config.toml"), text).unwrap();
        Self { folder }
    }

    /// `tokenyard` under the stand-in.
    fn command(&self, arguments: &[&str]) -> Command {
        let [library, _] = &*FILES;
        let world = self.folder.path().join("world");
        std::fs::create_dir(&world).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_tokenyard"));
        command.env("LD_PRELOAD", library).env("TOKENYARD_HCA_WORLD", world);
        command.arg(arguments[0]).arg(self.folder.path().join("config.toml"));
        command.args(&arguments[1..]);
        command
    }
}

/// Runs a command; returns whether it ended well, and its output.
fn run(command: &mut Command) -> (bool, String) {
    let output = command.output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&printed).into_owned())
}

fn passes(level: &str, ranks: &str, order: &str, table: &str) {
    let world = World::new(table);
    let mut command = world.command(&["conformance", "--ranks", ranks, "--level", level]);
    let (success, printed) = run(command.env("TOKENYARD_HCA_ORDER", order));
    assert!(success && printed.contains("all as expected"), "{printed}");
    let counts = printed.lines().find(|line| line.contains(" tests in ")).unwrap_or_default();
    println!("{level}, {ranks} ranks, {order}, on a software HCA: {counts}");
}

/// The step `hca` of `cargo xtask test` runs the transport alone, and routing, in order.
#[test]
fn the_exchange_passes_l1_on_a_software_hca_whose_writes_land_in_any_order() {
    passes("L1", "2", "adaptive", "fence = true\nqueue_pairs = 8\ndepth = 64");
    if std::env::var_os("TOKENYARD_TEST_ALL").is_some() {
        passes("L0", "3", "in-order", "");
        passes("L1", "2", "in-order", "");
    }
}

fn refused(table: &str, change: impl Fn(&mut Command) -> &mut Command, expected: &[&str]) {
    let world = World::new(table);
    let (_, printed) = run(change(&mut world.command(&["plugins"])));
    for expected in expected {
        assert!(printed.contains(expected), "expected {expected}; found {printed}");
    }
}

#[test]
fn without_a_device_the_probe_says_what_is_missing() {
    let expected = ["ibgda", "list RDMA devices"];
    refused("", |command| command.env_remove("TOKENYARD_HCA_WORLD"), &expected);
}

#[test]
fn a_device_without_devx_is_refused_with_what_it_takes() {
    let expected = ["ibgda", "(DEVX)", "UCTX_EN=1", "standin0"];
    refused("", |command| command.env("TOKENYARD_HCA_LACKS", "devx"), &expected);
}

#[test]
fn a_device_that_is_not_there_is_named_with_those_that_are() {
    let expected = ["found no device `mlx5_7`", "standin0"];
    refused("device = \"mlx5_7\"", |command| command, &expected);
}

#[test]
fn keys_and_signals_that_make_no_sense_are_refused_with_their_line() {
    refused("signals = \"write\"", |command| command, &["config.toml:8", "INV-1"]);
    refused("lanes = 2", |command| command, &["config.toml:8", "queue_pairs"]);
}
