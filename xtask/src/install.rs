//! `cargo xtask install PREFIX`: builds the program and its plugins for use, and puts them where the
//! program looks for them.
//!
//! ```text
//! PREFIX/bin/tokenyard
//! PREFIX/lib/tokenyard/libtokenyard_plugin_*.so
//! PREFIX/share/tokenyard/configs/*.toml
//! PREFIX/include/tokenyard_plugin.h
//! ```
//!
//! Programs and plugins have no symbols. Those lie beside them, in `.debug/NAME.debug`, where debuggers and
//! backtraces look for them.

use std::ffi::{OsStr, OsString};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::exec::{self, HangLimits, Line, Output};
use crate::needs::{self, Need};

/// The build that is installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    /// The build for use: optimised.
    Release,
    /// The build of the tests, so that they build everything once.
    Dev,
}

impl Profile {
    /// The command that builds all installed files; none where the step `build` has built them. It is one command, so
    /// that cargo unites the features of shared crates and builds each of them once.
    fn build(self) -> Option<&'static str> {
        match self {
            Self::Release => Some(
                "cargo build --release --package tokenyard-cli --features tokenyard-cli/full --package tokenyard-plugin-libfabric \
                 --package tokenyard-plugin-verbs --package tokenyard-plugin-gin \
                 --package tokenyard-plugin-ibgda",
            ),
            Self::Dev => None,
        }
    }

    /// The folder of the built files, in cargo's target folder.
    fn folder(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Dev => "debug",
        }
    }
}

/// The plugins that no program has built in, except the one for tests.
const PLUGINS: [&str; 4] = [
    "libtokenyard_plugin_libfabric.so",
    "libtokenyard_plugin_verbs.so",
    "libtokenyard_plugin_gin.so",
    "libtokenyard_plugin_ibgda.so",
];

/// The limits after which a build counts as hanging.
const BUILD_LIMITS: HangLimits =
    HangLimits { idle: Duration::from_secs(15 * 60), processor: Duration::from_secs(2 * 3600) };

/// It belongs to the linker's package, which every build needs.
const OBJCOPY: Need = Need::Package { program: "objcopy", package: "binutils" };

const PROGRAM: u32 = 0o755;
const DATA: u32 = 0o644;

/// A file, and its place below the prefix.
#[derive(Debug)]
struct InstalledFile {
    from: PathBuf,
    to: PathBuf,
    mode: u32,
}

/// Builds, and installs below `prefix`. Existing files of the same names are replaced, others are left
/// alone.
pub(crate) fn run(root: &Path, target: &Path, profile: Profile, prefix: &str) -> Result<()> {
    ensure!(
        !prefix.is_empty() && !prefix.starts_with('-'),
        "found prefix `{prefix}`, expected a folder, such as /opt/tokenyard"
    );
    let prefix = std::path::absolute(prefix).with_context(|| format!("find {prefix}"))?;
    // Makes the folders before the build, which takes minutes.
    for folder in ["bin", "lib/tokenyard", "share/tokenyard/configs", "include"] {
        let folder = prefix.join(folder);
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    }
    needs::require(&[OBJCOPY], root)?;
    if let Some(command) = profile.build() {
        build(root, target, command)?;
    }
    let places = places(root, &target.join(profile.folder()))?;
    places.iter().try_for_each(|place| put(place, &prefix))?;
    let prefix = prefix.display();
    println!("installed {} files; try:", places.len());
    println!("  {prefix}/bin/tokenyard run {prefix}/share/tokenyard/configs/cpu.toml");
    Ok(())
}

fn build(root: &Path, target: &Path, command: &str) -> Result<()> {
    let mut words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
    words.extend(["--target-dir".to_owned(), target.display().to_string()]);
    let line = Line { words, env: &[], folder: root };
    match exec::run(&line, BUILD_LIMITS, &mut Output::Shown).failure {
        None => Ok(()),
        Some(failure) => bail!("build: {failure}"),
    }
}

fn places(root: &Path, built: &Path) -> Result<Vec<InstalledFile>> {
    let place = |from: PathBuf, folder: &str, mode| -> Result<InstalledFile> {
        let name = from.file_name().with_context(|| format!("{} has no name", from.display()))?;
        Ok(InstalledFile { to: Path::new(folder).join(name), from, mode })
    };
    let mut all = vec![
        place(built.join("tokenyard"), "bin", PROGRAM)?,
        place(root.join("abi/include/tokenyard_plugin.h"), "include", DATA)?,
    ];
    for plugin in PLUGINS {
        all.push(place(built.join(plugin), "lib/tokenyard", PROGRAM)?);
    }
    let configs = root.join("configs");
    let entries = fs::read_dir(&configs).with_context(|| format!("read {}", configs.display()))?;
    let mut configs: Vec<PathBuf> =
        entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    configs.sort();
    for config in configs {
        all.push(place(config, "share/tokenyard/configs", DATA)?);
    }
    Ok(all)
}

/// Puts a file in its place, its symbols apart.
fn put(place: &InstalledFile, prefix: &Path) -> Result<()> {
    let to = prefix.join(&place.to);
    let install = || -> Result<()> {
        if place.mode == PROGRAM {
            return put_program(&place.from, &to);
        }
        replace(&to, place.mode, |new| Ok(fs::copy(&place.from, new).map(drop)?))
    };
    install().with_context(|| format!("install {} as {}", place.from.display(), to.display()))?;
    println!("installed {}", to.display());
    Ok(())
}

/// The symbols come first: the program names their file and its sum.
fn put_program(from: &Path, to: &Path) -> Result<()> {
    let folder = to.parent().context("it is in no folder")?.join(".debug");
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    let mut name = to.file_name().context("it has no name")?.to_owned();
    name.push(".debug");
    let symbols = folder.join(name);
    replace(&symbols, DATA, |new| {
        objcopy(&[OsStr::new("--only-keep-debug"), from.as_ref(), new.as_ref()])
    })?;
    let mut link = OsString::from("--add-gnu-debuglink=");
    link.push(&symbols);
    replace(to, PROGRAM, |new| {
        objcopy(&[OsStr::new("--strip-unneeded"), &link, from.as_ref(), new.as_ref()])
    })
}

/// Writes next to the destination and renames: a running job still has the old file mapped.
fn replace(to: &Path, mode: u32, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let folder = to.parent().with_context(|| format!("{} is in no folder", to.display()))?;
    let new = tempfile::NamedTempFile::new_in(folder)?.into_temp_path();
    write(&new)?;
    fs::set_permissions(&new, Permissions::from_mode(mode))?;
    fs::File::open(&new)?.sync_all()?;
    new.persist(to)?;
    Ok(())
}

fn objcopy(args: &[&OsStr]) -> Result<()> {
    let out = Command::new("objcopy").args(args).output().context("start objcopy")?;
    let errors = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "objcopy {args:?} ended with {}: {errors}", out.status);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_config_is_installed_and_needs_no_path_of_a_plugin() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let places = places(root, Path::new("/built")).unwrap();
        let configs: Vec<_> = places.iter().filter(|p| p.to.starts_with("share")).collect();
        assert!(configs.len() >= 8, "{configs:?}");
        for config in configs {
            let text = fs::read_to_string(&config.from).unwrap();
            assert!(!text.contains("\n[plugins]"), "{}", config.from.display());
        }
        let plugin = places.iter().find(|p| p.from.ends_with(PLUGINS[1])).unwrap();
        assert_eq!(plugin.to, Path::new("lib/tokenyard/libtokenyard_plugin_verbs.so"));
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_and_whoever_has_it_open_keeps_the_old_one() {
        use std::io::Read;
        let folder = tempfile::tempdir().unwrap();
        let from = folder.path().join("from");
        fs::write(&from, "new").unwrap();
        fs::create_dir(folder.path().join("share")).unwrap();
        let to = folder.path().join("share/cpu.toml");
        fs::write(&to, "old").unwrap();
        let mut open = fs::File::open(&to).unwrap();
        put(&InstalledFile { from, to: "share/cpu.toml".into(), mode: DATA }, folder.path())
            .unwrap();
        assert_eq!(fs::read_to_string(&to).unwrap(), "new");
        assert_eq!(fs::metadata(&to).unwrap().permissions().mode() & 0o7777, 0o644);
        let mut old = String::new();
        open.read_to_string(&mut old).unwrap();
        assert_eq!(old, "old");
        assert_eq!(fs::read_dir(folder.path().join("share")).unwrap().count(), 1);
    }

    #[test]
    fn a_program_runs_without_its_symbols_and_names_the_file_that_has_them() {
        let folder = tempfile::tempdir().unwrap();
        let from = std::env::current_exe().unwrap();
        let place = InstalledFile { from: from.clone(), to: "tests".into(), mode: PROGRAM };
        put(&place, folder.path()).unwrap();
        let (to, symbols) = (folder.path().join("tests"), folder.path().join(".debug/tests.debug"));
        let size = |path: &Path| fs::metadata(path).unwrap().len();
        assert!(size(&to) < size(&from), "{} of {}", size(&to), size(&from));
        assert!(size(&symbols) > 0);
        assert!(Command::new(&to).arg("--list").output().unwrap().status.success());
        let names = |file: &Path| {
            let out = Command::new("nm").arg(file).output().unwrap().stdout;
            String::from_utf8_lossy(&out).contains("names_the_file_that_has_them")
        };
        assert!(names(&symbols) && !names(&to));
        let link = fs::read(&to).unwrap();
        assert!(link.windows(11).any(|bytes| bytes == b"tests.debug"));
    }

    #[test]
    fn a_prefix_that_is_a_file_or_an_option_is_refused_before_anything_is_built() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().display().to_string();
        let error =
            run(Path::new("/none"), Path::new("/none"), Profile::Release, &path).unwrap_err();
        assert!(format!("{error:#}").contains(&format!("make {path}/bin")), "{error:#}");
        for prefix in ["", "--help"] {
            let error =
                run(Path::new("/none"), Path::new("/none"), Profile::Release, prefix).unwrap_err();
            assert!(error.to_string().contains("expected a folder"), "{error}");
        }
    }
}
