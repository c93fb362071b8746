//! The only way to open a file that a user names.
//!
//! A path in a config, on a command line or in the environment may lead anywhere: to a FIFO, whose opening
//! waits for a writer; to a device that never ends; or to a file that is larger than memory. So every such
//! path is opened by [`open`], or read whole by [`read`] or [`read_text`]:
//! - only regular files are accepted, and the error names the kind that was found;
//! - nothing blocks (INV-6): a FIFO is refused before and after it is opened, without waiting;
//! - a file is read whole only up to a size that the caller states.
//!
//! Pipes are refused wherever a file is expected, also as `/dev/stdin` and as `/dev/fd/N` of a shell's
//! process substitution. Every rank reads a config once, and a pipe can be read only once in all.
//!
//! All functions may be called from any thread.
//!
//! Watched by `tests/opening.rs`; `lints/src/sources.rs` holds that no other code opens such a path.

use std::fmt;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

/// Opens a regular file for reading. Symbolic links are followed.
///
/// # Errors
/// [`FileError`]: the file cannot be opened, or is of another kind.
pub fn open(path: &Path) -> Result<(File, Metadata), FileError> {
    let system = |error: io::Error| FileError::new(path, Problem::System(error));
    // Checked first, because opening a device can have side effects.
    check_kind(path, &std::fs::metadata(path).map_err(system)?)?;
    // The opened file is checked again: another file may have the path by now. NONBLOCK, so that
    // opening a FIFO in the file's place does not wait for a writer; the flag has no effect on a
    // regular file.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| system(e.into()))?;
    let file = File::from(file);
    let about = file.metadata().map_err(system)?;
    check_kind(path, &about)?;
    Ok((file, about))
}

/// Reads the whole of a regular file of at most `most` bytes.
///
/// # Errors
/// The errors of [`open`], a failing read, or a larger file.
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>, FileError> {
    let (file, about) = open(path)?;
    let too_large = |found| Err(FileError::new(path, Problem::TooLarge { found, most }));
    // Files of /proc and /sys report a size of 0, so the bytes that are read count too.
    if about.len() > most {
        return too_large(about.len());
    }
    let mut bytes = Vec::new();
    let read = file.take(most.saturating_add(1)).read_to_end(&mut bytes);
    read.map_err(|error| FileError::new(path, Problem::System(error)))?;
    if bytes.len() as u64 > most {
        return too_large(bytes.len() as u64);
    }
    Ok(bytes)
}

/// Reads the whole of a regular UTF-8 file of at most `most` bytes.
///
/// # Errors
/// The errors of [`read`], or bytes that are not UTF-8.
pub fn read_text(path: &Path, most: u64) -> Result<String, FileError> {
    String::from_utf8(read(path, most)?).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        FileError::new(path, Problem::NotText { at })
    })
}

/// The kind of file that `about` describes, with its article: `a FIFO`, `a folder`.
pub fn kind_name(about: &Metadata) -> &'static str {
    let kind = about.file_type();
    if kind.is_file() {
        "a regular file"
    } else if kind.is_dir() {
        "a folder"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_socket() {
        "a socket"
    } else if kind.is_char_device() {
        "a character device"
    } else if kind.is_block_device() {
        "a block device"
    } else {
        "something of an unknown kind"
    }
}

fn check_kind(path: &Path, about: &Metadata) -> Result<(), FileError> {
    if about.is_file() {
        return Ok(());
    }
    Err(FileError::new(path, Problem::Kind(kind_name(about))))
}

/// The reason why a file that a user names was not read. Its text is `PATH: problem. Fix: ...`.
#[derive(Debug)]
pub struct FileError {
    path: PathBuf,
    problem: Problem,
}

#[derive(Debug)]
enum Problem {
    System(io::Error),
    Kind(&'static str),
    TooLarge { found: u64, most: u64 },
    NotText { at: usize },
}

impl FileError {
    fn new(path: &Path, problem: Problem) -> Self {
        Self { path: path.to_owned(), problem }
    }

    /// The file's path, as the user wrote it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The operating system's error, where it refused.
    pub fn io(&self) -> Option<&io::Error> {
        match &self.problem {
            Problem::System(error) => Some(error),
            _ => None,
        }
    }

    /// The state found and the state expected, without the path.
    pub fn problem(&self) -> String {
        match &self.problem {
            Problem::System(error) => format!("the file cannot be read: {error}"),
            Problem::Kind(found) => format!("found {found}, expected a regular file"),
            Problem::TooLarge { found, most } => {
                format!("found {found} bytes or more, expected at most {most}")
            }
            Problem::NotText { at } => format!("found no UTF-8 at byte {at}, expected UTF-8 text"),
        }
    }

    /// The fix.
    pub fn fix(&self) -> &'static str {
        match &self.problem {
            Problem::System(error) if error.kind() == io::ErrorKind::NotFound => "correct the path",
            Problem::System(_) => "make the file readable for this user",
            Problem::Kind("a FIFO") => "save the output of the pipe to a file, and name that file",
            Problem::Kind(_) => "name a regular file",
            Problem::TooLarge { .. } => "name the right file; this one is too large",
            Problem::NotText { .. } => "name a text file, or save it as UTF-8",
        }
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}. Fix: {}", self.path.display(), self.problem(), self.fix())
    }
}

/// The text includes the operating system's error, so no source repeats it.
impl std::error::Error for FileError {}
