//! Reads below a root: the system's, a folder, or a recorded tree.

mod recorded;

use std::cell::RefCell;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::{Access, Fact};
use recorded::Recorded;

/// Most bytes that are read of one file.
const MOST_BYTES: u64 = 1 << 20;
/// Most entries that are read of one folder.
const MOST_ENTRIES: usize = 1 << 14;
/// Most symbolic links on one path.
const MOST_LINKS: usize = 40;

/// Most recorded trees in a chain of bases.
const MOST_BASES: usize = 4;

/// A root to read below: `/`, a folder of the same form, or a recorded tree.
///
/// Links are followed within the root, as after `chroot`: a recorded tree never shows the machine
/// that reads it. Paths are written without a leading slash.
#[derive(Debug)]
pub struct Tree {
    source: Source,
    folders: RefCell<HashMap<String, Option<String>>>,
}

#[derive(Debug)]
enum Source {
    /// `/`: the system follows links itself.
    System,
    Folder(PathBuf),
    Recorded(Recorded),
}

/// The entry at a path; links are not followed.
enum Lookup {
    Link(String),
    Other,
    Missing,
    Denied,
}

impl Tree {
    /// The running system.
    pub fn system() -> Self {
        Self::of(Source::System)
    }

    /// The folder at `root`, or the recorded tree in the file at `root`.
    ///
    /// # Errors
    /// There is neither, or the file is not a recorded tree; the text names the line.
    pub fn open(root: &Path) -> io::Result<Self> {
        // Not made canonical: `/proc/1/root` is a link to `/` that leads elsewhere.
        if root == Path::new("/") {
            return Ok(Self::system());
        }
        if fs::metadata(root)?.is_dir() {
            return Ok(Self::of(Source::Folder(root.to_owned())));
        }
        let (mut path, mut texts) = (root.to_owned(), Vec::new());
        loop {
            let text = text_of(&path)?;
            let base = Recorded::base(&text).map(str::to_owned);
            texts.push(text);
            let Some(base) = base else { break };
            if texts.len() > MOST_BASES {
                return Err(invalid(format!("more than {MOST_BASES} trees on top of each other")));
            }
            path = path.parent().unwrap_or(Path::new("")).join(base);
        }
        let mut recorded = Recorded::parse(&texts.pop().unwrap_or_default()).map_err(invalid)?;
        for changes in texts.iter().rev() {
            recorded.change(changes).map_err(invalid)?;
        }
        Ok(Self::of(Source::Recorded(recorded)))
    }

    /// A recorded tree from its text, with changes in the same format on top: a path that occurs
    /// again is replaced, and `path !gone` removes a file, a link or a whole folder. The line
    /// `@base FILE` in a file names the tree on top of which [`Tree::open`] reads it, relative to
    /// the folder of the file.
    ///
    /// # Errors
    /// One of the texts is no recorded tree, or a path to remove is not there.
    pub fn changed(base: &str, changes: &str) -> io::Result<Self> {
        let mut recorded = Recorded::parse(base).map_err(invalid)?;
        recorded.change(changes).map_err(invalid)?;
        Ok(Self::of(Source::Recorded(recorded)))
    }

    /// A recorded tree from its text.
    ///
    /// # Errors
    /// The text is not a recorded tree; the error names the line.
    pub fn recorded(text: &str) -> io::Result<Self> {
        let recorded = Recorded::parse(text).map_err(invalid)?;
        Ok(Self::of(Source::Recorded(recorded)))
    }

    /// Whether this is the running system.
    pub fn is_system(&self) -> bool {
        matches!(self.source, Source::System)
    }

    fn of(source: Source) -> Self {
        Self { source, folders: RefCell::default() }
    }

    /// The file's text without white space at its ends.
    pub(crate) fn text(&self, path: &str) -> Fact<String> {
        self.bytes(path).and_then(|bytes| {
            Some(String::from_utf8_lossy(&bytes).trim_matches(['\0', ' ', '\n', '\t']).to_owned())
        })
    }

    /// The file's text as a value; empty text is a missing value.
    pub(crate) fn value<T: FromStr>(&self, path: &str) -> Fact<T> {
        self.word(path, |text| text.parse().ok())
    }

    /// The file's text, converted by `make`; empty text is a missing value.
    pub(crate) fn word<T>(&self, path: &str, make: impl FnOnce(&str) -> Option<T>) -> Fact<T> {
        match self.text(path) {
            Fact::Known(text) if text.is_empty() => Fact::Missing,
            fact => fact.and_then(|text| make(&text)),
        }
    }

    /// The file's bytes, at most [`MOST_BYTES`].
    pub(crate) fn bytes(&self, path: &str) -> Fact<Vec<u8>> {
        self.part(path, 0, MOST_BYTES)
    }

    /// At most `most` bytes of the file from `offset` on; fewer where it ends. Only regular files are
    /// read: opening another could wait.
    pub(crate) fn part(&self, path: &str, offset: u64, most: u64) -> Fact<Vec<u8>> {
        let full = match &self.source {
            Source::System => Path::new("/").join(path),
            Source::Folder(root) => match self.resolve(path) {
                Fact::Known(resolved) => root.join(resolved),
                Fact::Denied => return Fact::Denied,
                _ => return Fact::Missing,
            },
            Source::Recorded(recorded) => {
                let bytes =
                    self.resolve(path).get().map_or(Fact::Missing, |path| recorded.bytes(&path));
                return bytes.and_then(|bytes| {
                    let behind = bytes.get(offset as usize..).unwrap_or_default();
                    Some(behind.iter().take(most as usize).copied().collect())
                });
            }
        };
        let mut bytes = Vec::new();
        let read = match tokenyard_files::open(&full) {
            Ok((mut file, _)) => file
                .seek(SeekFrom::Start(offset))
                .and_then(|_| file.take(most).read_to_end(&mut bytes)),
            Err(error) => Err(error.io().map_or(io::ErrorKind::NotFound, io::Error::kind).into()),
        };
        // With other errors the kernel reports that there is no value, such as EINVAL for the speed
        // of a link that is down.
        match read {
            Ok(_) => Fact::Known(bytes),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Fact::Denied,
            Err(_) => Fact::Missing,
        }
    }

    /// Names in a folder, sorted with numbers by value (`mlx5_9` before `mlx5_10`).
    pub(crate) fn list(&self, path: &str) -> Vec<String> {
        let mut names = match &self.source {
            Source::System => names_of(&Path::new("/").join(path)),
            Source::Folder(root) => {
                self.resolve(path).get().map_or(Vec::new(), |path| names_of(&root.join(path)))
            }
            Source::Recorded(recorded) => {
                self.resolve(path).get().map_or(Vec::new(), |path| recorded.names(&path))
            }
        };
        names.sort_by(|a, b| natural(a, b));
        names
    }

    /// Whether something is at the path.
    pub(crate) fn has(&self, path: &str) -> bool {
        match &self.source {
            Source::System => Path::new("/").join(path).exists(),
            _ => self.resolve(path).known().is_some(),
        }
    }

    /// The path with all links followed, from the root and without a leading slash.
    pub(crate) fn resolve(&self, path: &str) -> Fact<String> {
        if self.is_system() {
            return match fs::canonicalize(Path::new("/").join(path)) {
                Ok(path) => Fact::Known(path.to_string_lossy().trim_start_matches('/').to_owned()),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Fact::Denied,
                Err(_) => Fact::Missing,
            };
        }
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let known = self.folders.borrow().get(folder).cloned();
        let folder = match known {
            Some(resolved) => resolved,
            None => {
                let resolved = self.walk(folder).get();
                self.folders.borrow_mut().insert(folder.to_owned(), resolved.clone());
                resolved
            }
        };
        folder.map_or(Fact::Missing, |folder| self.walk(&format!("{folder}/{name}")))
    }

    /// Name of the target of the link at `path`, whether or not the target exists.
    pub(crate) fn target_name(&self, path: &str) -> Fact<String> {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let at = match self.resolve(folder) {
            Fact::Known(folder) => format!("{folder}/{name}"),
            other => return other,
        };
        match self.look(&at) {
            Lookup::Link(target) => Fact::Known(last_name(&target).to_owned()),
            Lookup::Denied => Fact::Denied,
            Lookup::Other | Lookup::Missing => Fact::Missing,
        }
    }

    fn walk(&self, path: &str) -> Fact<String> {
        follow(path, |path| self.look(path))
    }

    fn look(&self, path: &str) -> Lookup {
        let full = match &self.source {
            Source::System => Path::new("/").join(path),
            Source::Folder(root) => root.join(path),
            Source::Recorded(recorded) => return recorded.look(path),
        };
        let about = match fs::symlink_metadata(&full) {
            Ok(about) => about,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Lookup::Denied,
            Err(_) => return Lookup::Missing,
        };
        if !about.is_symlink() {
            return Lookup::Other;
        }
        fs::read_link(&full)
            .map_or(Lookup::Denied, |target| Lookup::Link(target.to_string_lossy().into_owned()))
    }

    /// Whether this process may read and write the file, by its mode.
    pub(crate) fn access(&self, path: &str) -> Access {
        let full = match &self.source {
            Source::System => Path::new("/").join(path),
            Source::Folder(root) => match self.resolve(path) {
                Fact::Known(path) => root.join(path),
                _ => return Access::Refused,
            },
            Source::Recorded(_) => {
                let granted = matches!(self.bytes(path), Fact::Known(_));
                return if granted { Access::Granted } else { Access::Refused };
            }
        };
        let both = rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK;
        rustix::fs::access(&full, both).map_or(Access::Refused, |()| Access::Granted)
    }
}

fn invalid(error: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// The text of a recorded tree's file.
fn text_of(path: &Path) -> io::Result<String> {
    let text = tokenyard_files::read_text(path, recorded::MOST_TOTAL as u64);
    text.map_err(|error| match error.io() {
        Some(system) => system.kind().into(),
        None => invalid(error.to_string()),
    })
}

/// Follows links within the root, component by component. `..` stops at the root.
fn follow(path: &str, look: impl Fn(&str) -> Lookup) -> Fact<String> {
    let mut ahead: Vec<String> = path.split('/').rev().map(str::to_owned).collect();
    let mut here: Vec<String> = Vec::new();
    let mut links = 0;
    while let Some(step) = ahead.pop() {
        match step.as_str() {
            "" | "." => continue,
            ".." => {
                here.pop();
                continue;
            }
            _ => here.push(step),
        }
        match look(&here.join("/")) {
            Lookup::Other => {}
            Lookup::Missing => return Fact::Missing,
            Lookup::Denied => return Fact::Denied,
            Lookup::Link(target) => {
                links += 1;
                if links > MOST_LINKS {
                    return Fact::Missing;
                }
                here.pop();
                if target.starts_with('/') {
                    here.clear();
                }
                ahead.extend(target.split('/').rev().map(str::to_owned));
            }
        }
    }
    Fact::Known(here.join("/"))
}

/// The rest of a path after its last slash.
pub(crate) fn last_name(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(_, name)| name)
}

fn names_of(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries
        .take(MOST_ENTRIES)
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}

/// Order of names in which runs of digits count by value.
pub(crate) fn natural(a: &str, b: &str) -> Ordering {
    let (mut a_rest, mut b_rest) = (a, b);
    while !a_rest.is_empty() && !b_rest.is_empty() {
        let (a_run, a_next) = first_run(a_rest);
        let (b_run, b_next) = first_run(b_rest);
        let order = match (a_run.parse::<u64>(), b_run.parse::<u64>()) {
            (Ok(a), Ok(b)) => a.cmp(&b),
            _ => a_run.cmp(b_run),
        };
        if order != Ordering::Equal {
            return order;
        }
        (a_rest, b_rest) = (a_next, b_next);
    }
    a_rest.len().cmp(&b_rest.len()).then_with(|| a.cmp(b))
}

/// Splits off the leading run of digits, or of other characters.
fn first_run(text: &str) -> (&str, &str) {
    let digits = text.starts_with(|c: char| c.is_ascii_digit());
    let end = text.find(|c: char| c.is_ascii_digit() != digits).unwrap_or(text.len());
    text.split_at(end)
}

#[cfg(test)]
mod tests;
