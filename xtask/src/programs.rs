//! The programs of tests: built by cargo, and found in its messages.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::report;

/// The packages that every build of the tests names, so that cargo unites the same features each time and builds
/// nothing twice. The Python package's own step builds it; its macros would change the features of others.
pub(crate) const WORKSPACE: [&str; 11] = [
    "--workspace",
    "--exclude",
    "xtask",
    "--exclude",
    "tokenyard-abi-header",
    "--exclude",
    "tokenyard-bench-abi",
    "--exclude",
    "tokenyard-python",
    "--features",
    "tokenyard-cli/full",
];

const OPERATION: &str = "build the tests";

/// A program of tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// Its package's folder in the repository, and the target: `conformance/masking`.
    pub(crate) name: String,
    pub(crate) file: PathBuf,
    /// The folder of its package, where cargo runs it.
    pub(crate) folder: PathBuf,
    /// Whether it has the unit tests of a crate.
    pub(crate) is_unit: bool,
}

/// Builds the tests, and lists their programs. `filter` chooses targets in cargo's words.
pub(crate) fn build(root: &Path, filter: &[&str]) -> Result<Vec<Program>> {
    let output = Command::new("cargo")
        .arg("test")
        .args(WORKSPACE)
        .args(filter)
        .args(["--no-run", "--message-format", "json-render-diagnostics", "--target-dir"])
        .arg(report::target_folder(root))
        .current_dir(root)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("{OPERATION}: start cargo"))?;
    ensure!(output.status.success(), "{OPERATION}: cargo ended with {}", output.status);
    let programs = list(root, &String::from_utf8_lossy(&output.stdout));
    ensure!(!programs.is_empty(), "{OPERATION}: cargo named no program of tests");
    Ok(programs)
}

/// The programs in cargo's messages, which are one JSON object a line.
fn list(root: &Path, messages: &str) -> Vec<Program> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str(line).ok());
    messages.filter_map(|message| program(root, &message)).collect()
}

fn program(root: &Path, message: &Value) -> Option<Program> {
    let file = message["executable"].as_str()?;
    if message["profile"]["test"] != true {
        return None;
    }
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    let target = message["target"]["name"].as_str()?;
    let package = folder.strip_prefix(root).unwrap_or(folder).display();
    Some(Program {
        name: format!("{package}/{target}"),
        file: file.into(),
        folder: folder.into(),
        is_unit: message["target"]["kind"][0] != "test",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_tests_are_what_cargo_says_of_them_and_nothing_else() {
        let message = |package: &str, kind: &str, is_test: bool, executable: &str| {
            format!(
                "{{\"manifest_path\":\"/r/{package}/Cargo.toml\",\"target\":{{\"name\":\"links\",\
                 \"kind\":[\"{kind}\"]}},\"profile\":{{\"test\":{is_test}}},\"executable\":{executable}}}\n"
            )
        };
        let messages = &[
            "not a message\n".to_owned(),
            "{\"reason\":\"build-finished\",\"success\":true}\n".to_owned(),
            message("conformance", "bin", false, "\"/bin\""),
            message("conformance", "test", true, "null"),
            message("backends/verbs", "test", true, "\"/t/links-0\""),
            message("conformance", "lib", true, "\"/t/links-1\""),
        ]
        .concat();
        let found = list(Path::new("/r"), messages);
        let found: Vec<_> =
            found.iter().map(|it| (&*it.name, it.file.to_str().unwrap(), it.is_unit)).collect();
        let expected = [
            ("backends/verbs/links", "/t/links-0", false),
            ("conformance/links", "/t/links-1", true),
        ];
        assert_eq!(found, expected);
    }
}
