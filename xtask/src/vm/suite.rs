//! The list of the step `vm`, which runs in the machine. All of it runs in one boot, because a boot and the
//! first reading of every program take much of the time.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::Job;
use crate::{programs, report};

/// Runs the parts that its arguments name one after the other, whatever their results, and reports how many
/// failed.
const SCRIPT: &str = "xtask/src/vm/suite.sh";
/// The tests that run in the machine: the target, and the program. Other packages have tests of these names.
const TESTS: [(&str, &str); 2] =
    [("masking", "conformance/masking"), ("links", "conformance/links")];
/// The limit after which the machine counts as hanging. Its programs have limits of their own, which are
/// far below; this one must hold on a busy host.
const LIMIT: Duration = Duration::from_secs(3 * 3600);

/// Builds the test programs, and runs the list in the machine; returns its exit code.
pub(crate) fn run(root: &Path) -> Result<u8> {
    let target = report::target_folder(root);
    let mut words = vec!["sh".to_owned(), SCRIPT.to_owned(), text(&target)?.to_owned()];
    let filter: Vec<&str> = TESTS.iter().flat_map(|(target, _)| ["--test", target]).collect();
    let programs = programs::build(root, &filter)?;
    for (_, name) in TESTS {
        let program = programs.iter().find(|program| program.name == name);
        let program =
            program.with_context(|| format!("find the test {name}: cargo names no such"))?;
        words.push(text(&program.file)?.to_owned());
    }
    if std::env::var_os(report::ALL_VARIABLE).is_some() {
        words.push("all".to_owned());
    }
    let command: Vec<&str> = words.iter().map(String::as_str).collect();
    super::run(root, &Job { limit: LIMIT, command: &command })
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("run the test machine: {} is not UTF-8", path.display()))
}
