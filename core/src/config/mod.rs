//! The TOML file that chooses the components.
//!
//! The file names one kernel set, a transport for each level and a topology. This module checks
//! everything that can be checked without knowing which components exist: keys, types, ranges, names.
//! The loader decides whether a component of that name exists. The component itself checks its own
//! table, which it receives as text, in a [`ComponentTable`].
//!
//! Nothing is guessed and nothing is skipped: a key that has no meaning is an error. Every error has
//! kind [`ErrorKind::Config`] and reads `read config: FILE:LINE: value found; value expected`.
//!
//! All types are plain data: they may be read from any thread.
//!
//! Watched by `tests`, with the exact message of each fault, and `fuzz/fuzz_targets/config.rs`.

mod component_table;
mod schema;
mod source;
pub(crate) mod wording;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use crate::{Error, ErrorKind, Result, files};

pub use component_table::ComponentTable;
pub use tokenyard_bootstrap::{OnFailure, WorldConfig};

/// The operation that every config error names.
const READ: &str = "read config";

/// The largest accepted config file, in bytes. A larger file is not a config.
pub const MAX_BYTES: usize = 1 << 20;

/// The most names that `transport.scale_out.use` may list.
pub(crate) const MAX_CHOICES: usize = 16;

/// A config file that has been read and checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The file's name in messages.
    pub name: String,
    /// The first 16 digits of the SHA-256 of its text.
    pub digest: String,
    /// The rendezvous of the ranks, and the bounds of waits for them.
    pub world: WorldConfig,
    /// The folder of the ranks' reports: `world.reports`.
    pub reports: Reports,
    /// The kernel set.
    pub kernels: ComponentChoice,
    /// The transport inside a scale-up domain; `None` where the file has `"none"` or no entry.
    pub scale_up: Option<ComponentChoice>,
    /// The transports between domains, in order of preference: the first that probes on all ranks is
    /// used. Empty where the file has `"none"` or no entry; at most 16.
    pub scale_out: Vec<ComponentChoice>,
    /// The topology; `auto` where the file has no entry.
    pub topology: ComponentChoice,
    /// Splits the world into this number of domains, in place of the topology's: 1 to 65,536, and a
    /// divisor of the ranks. For tests, and for machines that are more than one domain.
    pub domains: Option<u32>,
    /// Files and folders to load plugins from: absolute, each one once, in the order of the file.
    pub plugins: Vec<PathBuf>,
    /// Tables of components that the file does not choose. They are allowed for a later choice; a tool
    /// that knows all components can distinguish such a table from a misspelt name.
    pub unused_tables: Vec<UnusedTable>,
    /// The lines of values that can be checked only later.
    pub lines: Lines,
}

/// Lines of a config file, counted from 1.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lines {
    /// The line of `topology.domains`; 0 where the file has none.
    pub domains: usize,
    /// The line of each of [`Config::plugins`].
    pub plugins: Vec<usize>,
}

/// The folder of the ranks' reports, which they write on request or when an error closes their
/// communicator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Reports {
    /// A private folder in the system's temporary one.
    #[default]
    Temporary,
    /// This folder, an absolute path. It is created if it does not exist.
    Folder(PathBuf),
    /// Nowhere.
    Nowhere,
}

/// One component that the file chooses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComponentChoice {
    /// The component's name: 1 to 64 characters of `a-z`, `0-9`, `_` and `-`.
    pub name: String,
    /// The line that names the component, counted from 1; 0 where the choice is a default.
    pub line: usize,
    /// The component's own table; empty where the file has none.
    pub table: ComponentTable,
}

/// A table of a component that the file does not choose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusedTable {
    /// The section that holds the table: `kernels`, `transport.scale_up`, `transport.scale_out`
    /// or `topology`.
    pub section: String,
    /// The component's name, from the table.
    pub component: String,
    /// The line of the table, counted from 1.
    pub line: usize,
}

impl Config {
    /// Reads the file at `path`, which must be a regular file of at most [`MAX_BYTES`].
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the file cannot be read or is wrong.
    pub fn load(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        Self::parse_bytes(&Self::read(path)?, &name)
    }

    /// Reads the file at `path` and returns all errors in it, in the order of the file's sections;
    /// [`Config::load`] ends at the first error. The config is there if its components are known, even with errors:
    /// a wrong value is replaced by its default. Use it only to judge the components.
    pub fn judge(path: &Path) -> (Option<Self>, Vec<Error>) {
        let name = path.display().to_string();
        let bytes = match Self::read(path) {
            Ok(bytes) => bytes,
            Err(error) => return (None, vec![error]),
        };
        match text_of(&bytes, &name) {
            Ok(text) => schema::read(&source::Source::new(text, &name)),
            Err(error) => (None, vec![error]),
        }
    }

    fn read(path: &Path) -> Result<Vec<u8>> {
        files::read(path, MAX_BYTES as u64).map_err(|error| {
            let message = format!("{}: {}", path.display(), error.problem());
            Error::new(ErrorKind::Config, READ, message).with_fix(error.fix())
        })
    }

    /// As [`Config::parse`], for bytes that may not be UTF-8.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the bytes are not UTF-8 or not a valid config.
    pub fn parse_bytes(bytes: &[u8], name: &str) -> Result<Self> {
        check_size(bytes, name)?;
        Self::parse(text_of(bytes, name)?, name)
    }

    /// Reads a config from `text`; `name` stands for the file in messages.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the text is larger than [`MAX_BYTES`] or not a valid config.
    pub fn parse(text: &str, name: &str) -> Result<Self> {
        check_size(text.as_bytes(), name)?;
        let (config, errors) = schema::read(&source::Source::new(text, name));
        let none = || Error::new(ErrorKind::Internal, READ, "found no config and no error");
        match errors.into_iter().next() {
            Some(first) => Err(first),
            None => config.ok_or_else(none),
        }
    }

    /// Refuses a number of domains that does not fit `ranks`, before any rank is started.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] with file and line.
    pub fn check_ranks(&self, ranks: u32) -> Result<()> {
        match self.domains {
            Some(domains) if !ranks.is_multiple_of(domains) => {
                let expected = format!("a divisor of {ranks} ranks");
                Err(self.at_domains(wrong_domains(domains, &expected)))
            }
            _ => Ok(()),
        }
    }

    /// Adds the line of `topology.domains` to an error about it.
    pub(crate) fn at_domains(&self, error: Error) -> Error {
        match self.lines.domains {
            0 => error,
            line => error.at(&format!("{}:{line}", self.name)),
        }
    }

    /// The values that all ranks must have in common, as (key, value), in a fixed order: the names of the
    /// components, the deadlines and the reaction to a loss. Paths and the components' own tables are not
    /// included, because nodes may differ in them; the rendezvous is not either, because ranks may reach it
    /// by different names.
    pub fn agreement(&self) -> Vec<(String, String)> {
        let names = |choices: &[ComponentChoice]| match choices {
            [] => "none".to_owned(),
            choices => choices.iter().map(|c| c.name.as_str()).collect::<Vec<_>>().join(", "),
        };
        [
            ("world.deadline_ms", self.world.deadline.as_millis().to_string()),
            ("world.late_ms", self.world.late.as_millis().to_string()),
            ("world.on_failure", self.world.on_failure.name().to_owned()),
            ("kernels.use", self.kernels.name.clone()),
            ("transport.scale_up.use", names(self.scale_up.as_slice())),
            ("transport.scale_out.use", names(&self.scale_out)),
            ("topology.use", self.topology.name.clone()),
            ("topology.domains", self.domains.map_or("auto".to_owned(), |n| n.to_string())),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into()
    }
}

/// The error for an impossible number of domains.
pub(crate) fn wrong_domains(domains: u32, expected: &str) -> Error {
    let message = format!("found topology.domains = {domains}; expected {expected}");
    Error::new(ErrorKind::Config, "split domains", message)
        .with_fix("leave topology.domains out: there is a domain for each machine then")
}

impl ComponentChoice {
    /// Adds the file and line that chose the component to an error about it.
    pub(crate) fn locate(&self, error: Error) -> Error {
        match self.line {
            0 => error,
            line => error.at(&format!("{}:{line}", self.table.file())),
        }
    }
}

fn text_of<'a>(bytes: &'a [u8], name: &str) -> Result<&'a str> {
    std::str::from_utf8(bytes).map_err(|error| {
        let before = bytes.get(..error.valid_up_to()).unwrap_or_default();
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        let found = bytes.get(error.valid_up_to()).copied().unwrap_or_default();
        let message =
            format!("{name}:{line}: found byte 0x{found:02x}, not UTF-8; expected UTF-8 text");
        Error::new(ErrorKind::Config, READ, message)
    })
}

fn check_size(bytes: &[u8], name: &str) -> Result<()> {
    if bytes.len() <= MAX_BYTES {
        return Ok(());
    }
    let message = format!("{name} is too large; expected at most {MAX_BYTES} bytes");
    Err(Error::new(ErrorKind::Config, READ, message))
}
