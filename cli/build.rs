//! Records commit, compiler and the like of the build, for `tokenyard version`.

use std::process::Command;

fn main() {
    let commit = git(&["describe", "--always", "--dirty", "--abbrev=12"]);
    set("COMMIT", &commit.unwrap_or_else(|| "not built from a repository".to_owned()));
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    set("RUSTC", &output(Command::new(rustc).arg("--version")).unwrap_or_default());
    for name in ["TARGET", "PROFILE"] {
        set(name, &std::env::var(name).unwrap_or_default());
    }
    println!("cargo:rerun-if-changed=build.rs");
    // A commit moves the branch, a checkout moves HEAD.
    for path in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--path-format=absolute", "--git-path", path]) {
            println!("cargo:rerun-if-changed={path}");
        }
    }
}

fn set(name: &str, value: &str) {
    println!("cargo:rustc-env=TOKENYARD_BUILD_{name}={value}");
}

fn git(arguments: &[&str]) -> Option<String> {
    output(Command::new("git").args(arguments))
}

/// The output of the command, if it succeeds.
fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned())
}
