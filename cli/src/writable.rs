//! The files that a command writes. Before any work starts, the command checks that they can be
//! written, so that nothing is computed in vain, and that none of them is a file that it reads.

use std::fs::{self, OpenOptions};
use std::io::{Error as IoError, ErrorKind, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{Resource, getrlimit};
use tokenyard_core::Error;
use tokenyard_core::communicator::REPORTS_VARIABLE;
use tokenyard_core::config::{Config, Reports};
use tokenyard_core::files;

/// The most links that lead to links; the kernel follows as many.
const MOST_LINKS: usize = 40;

/// The files of one command, by the option that names them (`--output`).
#[derive(Debug, Default)]
pub(crate) struct Files {
    known: Vec<(&'static str, Id)>,
}

/// The identity of a file: equal for two paths of the same file.
#[derive(Debug, PartialEq, Eq)]
enum Id {
    /// Device and inode.
    There(u64, u64),
    /// The folder, without links, and the name in it.
    Not(PathBuf),
}

impl Files {
    /// Notes a file that the command reads. A missing file is no error here.
    pub(crate) fn reads(mut self, name: &'static str, path: &Path) -> Self {
        if let Ok(found) = fs::metadata(path) {
            self.known.push((name, Id::There(found.dev(), found.ino())));
        }
        self
    }

    /// Checks a file that the command is to write, in a folder that exists.
    ///
    /// # Errors
    /// It cannot be written, or is one of the files so far.
    pub(crate) fn writes(&mut self, name: &'static str, path: &Path) -> Result<()> {
        self.check(name, path, false)
    }

    /// Checks a file that the command is to write, in a folder that is made if necessary.
    ///
    /// # Errors
    /// As [`writes`](Self::writes); no such folder can be made.
    pub(crate) fn writes_deep(&mut self, name: &'static str, path: &Path) -> Result<()> {
        self.check(name, path, true)
    }

    fn check(&mut self, name: &'static str, path: &Path, is_deep: bool) -> Result<()> {
        let id = can_write(path, is_deep).with_context(|| format!("{name} {}", path.display()))?;
        let Some(id) = id else { return Ok(()) };
        if let Some((other, _)) = self.known.iter().find(|(_, known)| *known == id) {
            bail!(
                "{name} {}: found the file of {other}, which would be overwritten; expected another file. \
                 Fix: name another file for {name}",
                path.display()
            );
        }
        self.known.push((name, id));
        Ok(())
    }
}

/// Checks that a file can be written, and returns its identity; nothing for a character device
/// (`/dev/null`), which any number of outputs may share. A FIFO or a socket is refused, because the
/// write would wait for a reader after all work is done (INV-6). A block device is refused, because
/// its data would be lost.
fn can_write(path: &Path, is_deep: bool) -> Result<Option<Id>> {
    let path = end_of_links(path)?;
    match fs::metadata(&path) {
        Ok(found) if found.is_dir() => {
            bail!("found a folder; expected a file. Fix: name a file in it")
        }
        Ok(found) if found.file_type().is_char_device() => Ok(None),
        Ok(found) if !found.is_file() => bail!(
            "found {}; expected a regular file. Fix: name a regular file, and read it afterwards",
            files::kind_name(&found)
        ),
        Ok(found) => {
            let mut options = OpenOptions::new();
            options.write(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed());
            options.open(&path).context("it cannot be written")?;
            check_limit()?;
            Ok(Some(Id::There(found.dev(), found.ino())))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let name = path.file_name().context("found no name of a file; expected one")?;
            let parent = parent(&path);
            let folder = if is_deep { existing(parent) } else { parent };
            can_write_in(folder)?;
            check_limit()?;
            let folder = if folder == parent { fs::canonicalize(parent)? } else { parent.into() };
            Ok(Some(Id::Not(folder.join(name))))
        }
        Err(error) => Err(anyhow!(error).context("it cannot be reached")),
    }
}

/// The path at the end of links. The file there may not exist.
fn end_of_links(path: &Path) -> Result<PathBuf> {
    let is_folder = path.as_os_str().as_encoded_bytes().ends_with(b"/")
        || matches!(path.components().next_back(), Some(Component::CurDir | Component::ParentDir));
    ensure!(!path.as_os_str().is_empty(), "found an empty name; expected a file");
    ensure!(!is_folder, "found the name of a folder; expected a file. Fix: name a file in it");
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        match fs::read_link(&path) {
            Ok(target) => path = parent(&path).join(target),
            Err(_) => return Ok(path),
        }
    }
    Err(anyhow!("found more than {MOST_LINKS} links that lead to each other; expected a file"))
}

/// The folder of a file.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// The first existing folder among a folder and its parents.
fn existing(folder: &Path) -> &Path {
    let exists = |folder: &&Path| folder.as_os_str().is_empty() || folder.exists();
    match folder.ancestors().find(exists) {
        Some(found) if !found.as_os_str().is_empty() => found,
        _ => Path::new("."),
    }
}

/// Checks with a file without a name that files can be made in a folder.
fn can_write_in(folder: &Path) -> Result<()> {
    let named = folder.display();
    match fs::metadata(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("found no folder {named}; expected one. Fix: mkdir -p {named}")
        }
        Err(error) => return Err(anyhow!(error).context(format!("cannot write in {named}"))),
        Ok(found) => ensure!(found.is_dir(), "{named} is no folder; expected one"),
    }
    tempfile::tempfile_in(folder).map(drop).with_context(|| {
        format!("cannot write in {named}. Fix: name a file in a folder that this user can write to")
    })
}

/// With a limit of 0 every write fails, so the command fails before its work.
fn check_limit() -> Result<()> {
    ensure!(
        getrlimit(Resource::Fsize).current != Some(0),
        "the file size limit of this process is 0 (ulimit -f), so no file can be written. \
         Fix: ulimit -f unlimited"
    );
    Ok(())
}

/// Checks the folder of reports that a config names, or the environment in its place. Reports are
/// written at failures; an unwritable folder would be noticed only then.
///
/// # Errors
/// It is no folder, or cannot be written or made.
pub(crate) fn check_reports(config: &Config) -> Result<()> {
    let variable = std::env::var_os(REPORTS_VARIABLE).filter(|value| !value.is_empty());
    let (name, folder) = match (&variable, &config.reports) {
        // `none`, or a value that opening a communicator refuses.
        (Some(value), _) if !Path::new(value).is_absolute() => return Ok(()),
        (Some(value), _) => (REPORTS_VARIABLE, Path::new(value)),
        (None, Reports::Folder(folder)) => ("world.reports", folder.as_path()),
        (None, Reports::Nowhere | Reports::Temporary) => return Ok(()),
    };
    can_write_in(existing(folder)).with_context(|| format!("{name} {}", folder.display()))
}

/// Writes a file. A new file is written as a whole or not at all.
///
/// # Errors
/// The system's error, with the limit for a file that is too long.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let was_there = path.exists();
    let named = |error: IoError| {
        if !was_there {
            // An incomplete file would look complete.
            let _ = fs::remove_file(path);
        }
        Error::system("write", path.display().to_string(), error)
    };
    // NONBLOCK has no effect on a regular file. If a FIFO has replaced it since the check, the open
    // does not wait for a reader.
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    options.custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    let written = options.open(path).and_then(|mut file| {
        fcntl_setfl(&file, OFlags::empty())?;
        file.write_all(bytes)
    });
    Ok(written.map_err(named)?)
}

/// As [`write()`], in a folder that is made if necessary.
///
/// # Errors
/// As [`write()`]; the folder cannot be made.
pub(crate) fn write_deep(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = parent(path);
    fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    write(path, bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    fn refusal(files: &mut Files, path: &Path) -> String {
        format!("{:#}", files.writes("--out", path).unwrap_err())
    }

    #[test]
    fn an_output_that_is_the_input_is_refused_by_whatever_name_it_comes() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("in"), "mine").unwrap();
        symlink("in", at("link")).unwrap();
        symlink("link", at("far")).unwrap();
        fs::hard_link(at("in"), at("hard")).unwrap();
        fs::create_dir(at("sub")).unwrap();
        for name in ["in", "link", "far", "hard", "sub/../in"] {
            let text = refusal(&mut Files::default().reads("--input", &at(name)), &at("in"));
            assert!(text.contains("found the file of --input"), "{name}: {text}");
            let text = refusal(&mut Files::default().reads("--input", &at("in")), &at(name));
            assert!(text.contains("found the file of --input"), "{name}: {text}");
        }
        assert_eq!(fs::read(at("in")).unwrap(), b"mine");
    }

    #[test]
    fn what_would_wait_for_a_reader_is_refused_by_its_kind() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        symlink("fifo", at("link")).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        for (name, kind) in [("fifo", "a FIFO"), ("link", "a FIFO"), ("socket", "a socket")] {
            let text = refusal(&mut Files::default(), &at(name));
            assert!(text.contains(&format!("found {kind}; expected a regular file")), "{text}");
        }
        // A FIFO that replaced a checked file does not block either.
        assert!(write(&at("fifo"), b"lost").is_err());
        assert!(at("fifo").exists(), "what was there stays");
    }

    #[test]
    fn two_outputs_may_not_be_one_file_that_is_not_there_yet() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        symlink("out", at("link")).unwrap();
        fs::create_dir(at("sub")).unwrap();
        for name in ["out", "link", "sub/../out"] {
            let mut files = Files::default();
            files.writes("--plot", &at("out")).unwrap();
            let text = refusal(&mut files, &at(name));
            assert!(text.contains("found the file of --plot"), "{name}: {text}");
        }
        let mut files = Files::default();
        for name in ["--a", "--b"] {
            files.writes(name, Path::new("/dev/null")).unwrap();
        }
        assert!(!at("out").exists(), "asking leaves nothing");
    }

    #[test]
    fn what_cannot_be_written_is_named_with_the_fix() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), "").unwrap();
        symlink("round", at("round")).unwrap();
        for (name, expected) in [
            ("", "name of a folder"),
            ("no/out", "Fix: mkdir -p"),
            ("file/out", "cannot be reached"),
            ("new/", "name of a folder"),
            ("round", "more than 40 links"),
        ] {
            let text = refusal(&mut Files::default(), &at(name));
            assert!(text.contains(expected), "{name}: {text}");
        }
        let text = refusal(&mut Files::default(), folder.path());
        assert!(text.contains("found a folder"), "{text}");
        // No user can make a file there, not even root.
        let text = refusal(&mut Files::default(), Path::new("/proc/out"));
        assert!(text.contains("cannot write in /proc"), "{text}");
        let mut files = Files::default();
        files.writes_deep("--save", &at("no/such/out")).unwrap();
        let deep = files.writes_deep("--save", &at("file/such/out")).unwrap_err();
        assert!(format!("{deep:#}").contains("cannot be reached"), "{deep:#}");
        assert!(!at("no").exists(), "asking leaves nothing");
    }
}
