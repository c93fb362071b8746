//! The secret of a job reaches the ranks, and no process that they or the tool start.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use common::{Config, Library, expect_code, names, tokenyard};

const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// The files of a folder that hold an environment; none has the secret.
fn expect_no_secret_in(folder: &Path, at_least: usize) {
    let found = names(folder);
    assert!(found.len() >= at_least, "found {found:?}; expected {at_least} environments");
    for name in found {
        let text = std::fs::read_to_string(folder.join(&name)).unwrap();
        assert!(text.contains("PATH="), "{name} holds no environment: {text}");
        assert!(!text.contains("TOKENYARD_SECRET=") && !text.contains(SECRET), "{name}: {text}");
    }
}

#[test]
fn what_a_plugin_of_a_rank_starts_does_not_inherit_the_secret() {
    let library = Library::new("system(\"env > $DUMP/rank-$TOKENYARD_RANK.$$\");");
    let config = library.config();
    let dump = tempfile::tempdir().unwrap();
    let output = tokenyard()
        .arg("run")
        .arg(config.path())
        .args("--tokens 12 --hidden 128 --experts 8 --topk 3 --steps 1 --ranks 2".split(' '))
        .env("DUMP", dump.path())
        .output()
        .unwrap();
    expect_code(&output, 0);
    // At least the two ranks; other processes may have loaded the library too.
    expect_no_secret_in(dump.path(), 2);
}

#[test]
fn the_tools_that_a_doctor_asks_do_not_inherit_the_secret() {
    let config = Config::new();
    let (tools, dump) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for tool in ["nvidia-smi", "fi_info", "ibv_devinfo"] {
        let path = tools.path().join(tool);
        std::fs::write(&path, "#!/bin/sh\nenv > \"$DUMP/${0##*/}.$$\"\n").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", tools.path().display(), std::env::var("PATH").unwrap());
    let output = tokenyard()
        .arg("doctor")
        .arg(config.path())
        .envs([("PATH", path.as_str()), ("TOKENYARD_SECRET", SECRET)])
        .env("DUMP", dump.path())
        .output()
        .unwrap();
    assert!(output.status.code().is_some_and(|code| code <= 2), "{output:?}");
    expect_no_secret_in(dump.path(), 1);
}
