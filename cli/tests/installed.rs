//! The program finds the plugins that are installed with it, and no others.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

mod common;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{Library, expect_code, json, program, stderr, stdout};

/// A constructor that ends the process, so that a test notices which process opens the library.
const DEADLY: &str = "late();";

/// The program in its own prefix, and a config beside it.
struct Prefix {
    folder: tempfile::TempDir,
    root: PathBuf,
}

impl Prefix {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        // The path as the kernel reports it.
        let root = folder.path().canonicalize().unwrap();
        for below in ["bin", "lib/tokenyard"] {
            fs::create_dir_all(root.join(below)).unwrap();
        }
        // Another process copies it. Otherwise a child that this process forks meanwhile would have
        // the copy open for writing, and it could not be executed then.
        let mut copy = Command::new("cp");
        copy.arg(env!("CARGO_BIN_EXE_tokenyard")).arg(root.join("bin/tokenyard"));
        assert!(copy.status().unwrap().success());
        Self { folder, root }
    }

    fn put(&self, library: &Library, to: &str) -> PathBuf {
        let to = self.root.join(to);
        fs::copy(library.file(), &to).unwrap();
        to
    }

    fn config(&self, transport: &str) -> PathBuf {
        let file = self.folder.path().join("fabric.toml");
        let text = format!(
            "[world]\ndeadline_ms = 5000\nlate_ms = 20000\n[kernels]\nuse = \"cpu\"\n\
             [transport.scale_up]\nuse = \"{transport}\"\n"
        );
        fs::write(&file, text).unwrap();
        file
    }

    fn command(&self, words: &str, config: &Path) -> Command {
        let mut command = program(&self.root.join("bin/tokenyard"));
        command.args(words.split_whitespace()).arg(config);
        command
    }

    fn call(&self, words: &str, config: &Path) -> Output {
        self.command(words, config).output().unwrap()
    }
}

/// The file of a component, by `tokenyard plugins --json`.
fn file_of(output: &Output, name: &str) -> PathBuf {
    let document = json(output);
    let components = document["components"].as_array().unwrap();
    let component = components.iter().find(|component| component["name"] == name).unwrap();
    component["file"].as_str().unwrap().into()
}

#[test]
fn a_plugin_runs_from_lib_of_the_prefix_and_one_beside_the_program_goes_first() {
    let prefix = Prefix::new();
    let example = Library::new("");
    let config = prefix.config("example_c");
    let name = "libtokenyard_plugin_example_c.so";
    let lib = prefix.put(&example, &format!("lib/tokenyard/{name}"));
    let output = prefix.call("plugins --json", &config);
    expect_code(&output, 0);
    assert_eq!(file_of(&output, "example_c"), lib);
    // The ranks find it, too.
    let output = prefix.call("run --ranks 2 --steps 1 --tokens 8 --hidden 64", &config);
    expect_code(&output, 0);
    assert!(stdout(&output).contains("check: passed"), "{}", stdout(&output));
    expect_code(&prefix.call("config check", &config), 0);

    let bin = prefix.put(&example, &format!("bin/{name}"));
    assert_eq!(file_of(&prefix.call("plugins --json", &config), "example_c"), bin);
}

#[test]
fn a_link_to_the_program_finds_what_is_installed_with_it() {
    let (prefix, elsewhere) = (Prefix::new(), tempfile::tempdir().unwrap());
    let config = prefix.config("example_c");
    prefix.put(&Library::new(""), "lib/tokenyard/libtokenyard_plugin_example_c.so");
    let link = elsewhere.path().join("tokenyard");
    std::os::unix::fs::symlink(prefix.root.join("bin/tokenyard"), &link).unwrap();
    let output = program(&link).args(["config", "check"]).arg(&config).output().unwrap();
    expect_code(&output, 0);
}

#[test]
fn neither_the_current_folder_nor_a_variable_decides_which_code_runs() {
    let (prefix, here) = (Prefix::new(), tempfile::tempdir().unwrap());
    let config = prefix.config("example_c");
    let deadly = Library::new(DEADLY);
    let below = here.path().join("lib/tokenyard");
    fs::create_dir_all(&below).unwrap();
    for folder in [here.path(), &below] {
        fs::copy(deadly.file(), folder.join("libtokenyard_plugin_example_c.so")).unwrap();
    }
    let mut command = prefix.command("config check", &config);
    for name in ["LD_LIBRARY_PATH", "PATH", "PWD", "HOME", "TOKENYARD_PLUGINS"] {
        command.env(name, here.path());
    }
    let output = command.current_dir(here.path()).output().unwrap();
    expect_code(&output, 1);
    assert!(stdout(&output).contains("no transport is called `example_c`"), "{}", stdout(&output));
}

#[test]
fn only_the_plugin_of_a_component_that_the_config_names_and_that_is_missing_is_opened() {
    let prefix = Prefix::new();
    let deadly = Library::new(DEADLY);
    for name in ["verbs.so", "shm.so", "example_c.so.bak", "example.so"] {
        prefix.put(&deadly, &format!("lib/tokenyard/libtokenyard_plugin_{name}"));
    }
    prefix.put(&deadly, "lib/tokenyard/example_c.so");
    expect_code(&prefix.call("config check", &prefix.config("shm")), 0);
    prefix.put(&Library::new(""), "lib/tokenyard/libtokenyard_plugin_example_c.so");
    expect_code(&prefix.call("config check", &prefix.config("example_c")), 0);
    // The check itself: the constructor does end a process that opens the library.
    let output = prefix.call("plugins", &prefix.config("verbs"));
    expect_code(&output, 2);
    assert!(stderr(&output).contains("ended the process that opened it"), "{}", stderr(&output));
}

#[test]
fn a_component_without_its_plugin_is_refused_with_file_folders_and_the_command_that_builds_it() {
    let prefix = Prefix::new();
    let folders = format!("looked for in {0}/bin and {0}/lib/tokenyard", prefix.root.display());
    for (component, plugin) in [("verbs", "verbs"), ("efa", "libfabric"), ("faulty", "faulty")] {
        let config = prefix.config(component);
        let output = prefix.call("run --ranks 2 --steps 1", &config);
        expect_code(&output, 2);
        let text = stderr(&output);
        for words in [
            "fabric.toml:7: ",
            &folders,
            &format!("libtokenyard_plugin_{plugin}.so"),
            &format!("cargo build --release -p tokenyard-plugin-{plugin}"),
            "cargo xtask install PREFIX",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        let listed = prefix.call("plugins --json", &config);
        expect_code(&listed, 1);
        assert_eq!(json(&listed)["missing"][0]["name"], component);
    }
}

#[test]
fn an_installed_plugin_in_a_folder_that_others_may_write_is_warned_about() {
    let prefix = Prefix::new();
    prefix.put(&Library::new(""), "lib/tokenyard/libtokenyard_plugin_example_c.so");
    let folder = prefix.root.join("lib/tokenyard");
    let words = format!("other users may write the folder {}, mode 0777", folder.display());
    let config = prefix.config("example_c");
    let warned = |mode| {
        fs::set_permissions(&folder, Permissions::from_mode(mode)).unwrap();
        let output = prefix.call("config check", &config);
        expect_code(&output, 0);
        stderr(&output).contains(&words)
    };
    assert!(!warned(0o755));
    assert!(warned(0o777));
}

#[test]
fn a_damaged_installed_plugin_is_refused_by_name() {
    let prefix = Prefix::new();
    let file = prefix.root.join("lib/tokenyard/libtokenyard_plugin_verbs.so");
    fs::write(&file, "no library").unwrap();
    let config = prefix.config("verbs");
    let output = prefix.call("run --ranks 2 --steps 1", &config);
    expect_code(&output, 2);
    let text = stderr(&output);
    assert!(text.contains("fabric.toml:7: ") && text.contains(file.to_str().unwrap()), "{text}");
    let checked = prefix.call("config check", &config);
    expect_code(&checked, 1);
    assert!(stdout(&checked).contains("fabric.toml:7: load plugin"), "{}", stdout(&checked));
}
