//! The needs of a step on the machine. A missing need fails the step; nothing is ever skipped.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;
use std::{env, fmt, fs};

use anyhow::{Result, ensure};

use crate::exec::{self, HangLimits, Line, Output};
use crate::step::Step;

/// The limits after which a call of apt-get counts as hanging.
const APT_LIMITS: HangLimits =
    HangLimits { idle: Duration::from_secs(300), processor: Duration::from_secs(1800) };

/// Something a step cannot run without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// A program of a Debian package. It is installed where that is allowed.
    Package { program: &'static str, package: &'static str },
    /// A file of a Debian package that is not a program. It is installed where that is allowed.
    PackageFile { path: &'static str, package: &'static str },
    /// Any other program in `PATH`.
    Program { program: &'static str, fix: &'static str },
    /// A file of the repository or the result of an earlier step.
    File { path: &'static str, fix: &'static str },
}

impl Need {
    pub(crate) fn met(self, root: &Path) -> bool {
        match self {
            Self::Package { program, .. } | Self::Program { program, .. } => in_path(program),
            Self::PackageFile { path, .. } | Self::File { path, .. } => root.join(path).is_file(),
        }
    }
}

/// The missing need, and the fix.
impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Package { program, package } => {
                write!(f, "{program} not found: apt-get install {package}")
            }
            Self::PackageFile { path, package } => {
                write!(f, "{path} not found: apt-get install {package}")
            }
            Self::Program { program, fix } => write!(f, "{program} not found: {fix}"),
            Self::File { path, fix } => write!(f, "{path} not found: {fix}"),
        }
    }
}

/// An error that names all needs that are not met.
pub(crate) fn require(needs: &[Need], root: &Path) -> Result<()> {
    let missing: Vec<String> =
        needs.iter().filter(|need| !need.met(root)).map(ToString::to_string).collect();
    ensure!(missing.is_empty(), "{}", missing.join("; "));
    Ok(())
}

/// Installs the Debian packages that the steps miss, on Debian and as root. Elsewhere it does
/// nothing; the steps then fail with the fix, as they do when the installation fails.
pub(crate) fn install_missing(steps: &[&Step]) {
    let packages = missing_packages(steps, |need| need.met(Path::new("/")));
    let debian = Path::new("/etc/debian_version").exists() && in_path("apt-get");
    if packages.is_empty() || !debian || !rustix::process::geteuid().is_root() {
        return;
    }
    println!("installing missing packages: {}", packages.join(" "));
    let update = vec!["apt-get".into(), "-q".into(), "update".into()];
    let mut install: Vec<String> =
        ["apt-get", "-qy", "--no-install-recommends", "install"].map(String::from).to_vec();
    install.extend(packages.iter().map(|&package| package.to_string()));
    for words in [update, install] {
        let env = &[("DEBIAN_FRONTEND", "noninteractive")];
        let line = Line { words, env, folder: Path::new("/") };
        if let Some(failure) = exec::run(&line, APT_LIMITS, &mut Output::Shown).failure {
            println!("could not install: {failure}");
            return;
        }
    }
}

fn missing_packages(steps: &[&Step], met: impl Fn(Need) -> bool) -> Vec<&'static str> {
    let mut missing = Vec::new();
    for need in steps.iter().flat_map(|step| step.needs) {
        if let Need::Package { package, .. } | Need::PackageFile { package, .. } = *need
            && !met(*need)
            && !missing.contains(&package)
        {
            missing.push(package);
        }
    }
    missing
}

fn in_path(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|folder| {
        fs::metadata(folder.join(program))
            .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::select;
    use crate::steps::STEPS;

    #[test]
    fn a_missing_need_names_the_thing_and_the_fix() {
        let need = Need::Package { program: "g++", package: "g++" };
        assert_eq!(need.to_string(), "g++ not found: apt-get install g++");
        let need = Need::File { path: "a/b.c", fix: "write it" };
        assert_eq!(need.to_string(), "a/b.c not found: write it");
        assert!(!need.met(Path::new("/")));
        let error =
            require(&[need, Need::PackageFile { path: "/no/file", package: "p" }], Path::new("/"));
        let expected = "a/b.c not found: write it; /no/file not found: apt-get install p";
        assert_eq!(error.unwrap_err().to_string(), expected);
    }

    #[test]
    fn programs_are_found_in_path_only_if_they_can_run() {
        assert!(in_path("sh"));
        assert!(!in_path("no-such-program-here"));
        assert!(Need::Program { program: "sh", fix: "" }.met(Path::new("/")));
    }

    #[test]
    fn only_packages_that_the_chosen_steps_miss_are_installed_and_each_once() {
        let plugins = select(STEPS, &["c-plugin"]).unwrap();
        assert_eq!(missing_packages(&plugins, |_| false), ["gcc", "g++"]);
        let gcc = Need::Package { program: "gcc", package: "gcc" };
        assert_eq!(missing_packages(&plugins, |need| need == gcc), ["g++"]);
        assert!(missing_packages(&plugins, |_| true).is_empty());
        let fmt = select(STEPS, &["fmt"]).unwrap();
        assert!(missing_packages(&fmt, |_| false).is_empty());
    }
}
