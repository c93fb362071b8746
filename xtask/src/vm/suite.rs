//! The list of the step `vm`, which runs in the machine. All of it runs in one boot, because a boot and the
//! first reading of every program take much of the time.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Job;
use crate::report;

/// Runs the parts that its arguments name one after the other, whatever their results, and reports how many
/// failed.
const SCRIPT: &str = "xtask/src/vm/suite.sh";
/// Test programs that run in the machine, and the manifest of their package: others have tests of these names.
const TESTS: [&str; 2] = ["masking", "links"];
const MANIFEST: &str = "conformance/Cargo.toml";
/// The limit after which the machine counts as hanging. Its programs have limits of their own, which are
/// far below; this one must hold on a busy host.
const LIMIT: Duration = Duration::from_secs(3 * 3600);

/// Builds the test programs, and runs the list in the machine; returns its exit code.
pub(crate) fn run(root: &Path) -> Result<u8> {
    let target = report::target_folder(root);
    let mut words = vec!["sh".to_owned(), SCRIPT.to_owned(), text(&target)?.to_owned()];
    for program in test_programs(root, &target)? {
        words.push(text(&program)?.to_owned());
    }
    let command: Vec<&str> = words.iter().map(String::as_str).collect();
    super::run(root, &Job { limit: LIMIT, command: &command })
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("run the test machine: {} is not UTF-8", path.display()))
}

/// Builds [`TESTS`] and returns their files, in that order.
fn test_programs(root: &Path, target: &Path) -> Result<Vec<PathBuf>> {
    let mut build = Command::new("cargo");
    // The same command as that of the step `build`, so that cargo unites the same features and builds
    // nothing twice.
    build.args(["test", "--workspace", "--exclude", "xtask", "--no-run"]);
    build.arg("--message-format=json-render-diagnostics");
    build.args(TESTS.iter().flat_map(|test| ["--test", test]));
    build.arg("--target-dir").arg(target).current_dir(root).stderr(Stdio::inherit());
    let built = build.output().context("build the tests for the machine: start cargo")?;
    ensure!(built.status.success(), "build the tests for the machine: {}", built.status);
    let messages = String::from_utf8_lossy(&built.stdout);
    TESTS.iter().map(|test| find(&messages, test)).collect()
}

/// The file of a test program in cargo's messages, one JSON object a line.
fn find(messages: &str, test: &str) -> Result<PathBuf> {
    let file = |message: Value| {
        let target = &message["target"];
        let manifest = message["manifest_path"].as_str().unwrap_or_default();
        let is_it = target["name"] == test
            && target["kind"][0] == "test"
            && Path::new(manifest).ends_with(MANIFEST);
        is_it.then(|| message["executable"].as_str().map(PathBuf::from)).flatten()
    };
    messages
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .find_map(file)
        .with_context(|| format!("find the test program {test}: cargo names no such file"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_a_test_is_what_cargo_says_of_it_and_of_nothing_else() {
        let message = |package: &str, kind: &str, executable: &str| {
            format!(
                "{{\"manifest_path\":\"/r/{package}/Cargo.toml\",\"target\":{{\"name\":\"links\",\
                 \"kind\":[\"{kind}\"]}},\"executable\":{executable}}}\n"
            )
        };
        let messages = &[
            "not a message\n".to_owned(),
            message("conformance", "bin", "\"/bin\""),
            message("conformance", "test", "null"),
            message("backends/verbs", "test", "\"/t/links-0\""),
            message("conformance", "test", "\"/t/links-1\""),
        ]
        .concat();
        assert_eq!(find(messages, "links").unwrap(), Path::new("/t/links-1"));
        let error = find(messages, "masking").unwrap_err().to_string();
        assert_eq!(error, "find the test program masking: cargo names no such file");
    }
}
