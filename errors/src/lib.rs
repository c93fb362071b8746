//! One error type for all of tokenyard, and the words of its messages.
//!
//! An error answers four questions in one line: the operation that failed, the value found, the value
//! expected, and the fix. Callers branch on [`ErrorKind`]; people read the `Display` form.
//!
//! A text here is read by people and by tests of many crates. Watched by the tests in these files, and `cli/tests`.

pub mod words;

use std::fmt;

use rustix::process::{Resource, getrlimit};

/// The kind of a failure. Callers branch on it, so every kind calls for a different reaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The config file is wrong. Fix the file.
    Config,
    /// An argument of a call is wrong on this rank. Nothing was moved; the communicator is usable.
    InvalidInput,
    /// Another rank refused its input, so this rank's call was cancelled too. The communicator is usable.
    Refused,
    /// Ranks disagree on a value that must be equal (world, shape, component names, ABI versions).
    Mismatch,
    /// A plugin file failed the handshake.
    Plugin,
    /// A component is known but cannot run here (missing library, device, right or capability).
    Unavailable,
    /// The operation is not supported by the component that was chosen.
    Unsupported,
    /// The arena or another fixed resource is full. Nothing was moved; the communicator is usable.
    Full,
    /// A wait ran out of time (INV-6). The communicator is closed for further work.
    Deadline,
    /// A rank was lost: killed, silent for too long, or it left. The communicator is closed.
    PeerLost,
    /// A transport reported an error completion or became unhealthy (INV-7). The communicator is closed.
    Transport,
    /// A frame or message from a peer failed a check (length, version, authentication).
    Protocol,
    /// The operating system refused a call.
    System,
    /// A component panicked or broke its contract. This is a bug in that component.
    Internal,
}

impl ErrorKind {
    /// A short stable name, as used in JSON output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::InvalidInput => "invalid_input",
            Self::Refused => "refused",
            Self::Mismatch => "mismatch",
            Self::Plugin => "plugin",
            Self::Unavailable => "unavailable",
            Self::Unsupported => "unsupported",
            Self::Full => "full",
            Self::Deadline => "deadline",
            Self::PeerLost => "peer_lost",
            Self::Transport => "transport",
            Self::Protocol => "protocol",
            Self::System => "system",
            Self::Internal => "internal",
        }
    }
}

/// An error with its operation, its context and, where it is known, the fix.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    operation: &'static str,
    message: String,
    rank: Option<u32>,
    context: Vec<(&'static str, String)>,
    fix: Option<String>,
    /// The fix holds beside one that the message or the source has.
    adds_fix: bool,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// The result of every fallible call in core.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind`, raised by `operation` (for example `"open shm"`).
    pub fn new(kind: ErrorKind, operation: &'static str, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            operation,
            message: message.into(),
            rank: None,
            context: Vec::new(),
            fix: None,
            adds_fix: false,
            source: None,
        }))
    }

    /// An [`ErrorKind::System`] error with the operating system's error. For a file that is too long it
    /// adds the size limit of this process's files.
    pub fn system(
        operation: &'static str,
        message: impl Into<String>,
        source: impl Into<std::io::Error>,
    ) -> Self {
        let source = source.into();
        let limit = match source.kind() {
            std::io::ErrorKind::FileTooLarge => getrlimit(Resource::Fsize).current,
            _ => None,
        };
        let error = Self::new(ErrorKind::System, operation, message).with_source(source);
        match limit {
            Some(bytes) => error.with_context("file size limit (ulimit -f) in bytes", bytes),
            None => error,
        }
    }

    /// An error of `kind` about a file that a user names and that was not read.
    pub fn file(
        kind: ErrorKind,
        operation: &'static str,
        error: &tokenyard_files::FileError,
    ) -> Self {
        Self::new(kind, operation, error.problem())
            .with_context("file", error.path().display())
            .with_fix(error.fix())
    }

    /// Adds a named value, shown in brackets after the message.
    pub fn with_context(mut self, name: &'static str, value: impl fmt::Display) -> Self {
        self.0.context.push((name, value.to_string()));
        self
    }

    /// Names the wrong key of a component's own table. Core adds the file and line of that key, even
    /// after the error has crossed the plugin ABI as text.
    pub fn with_key(self, key: &str) -> Self {
        self.with_context("key", key)
    }

    /// The key that [`Error::with_key`] named, on either side of the plugin ABI.
    pub fn key(&self) -> Option<&str> {
        let own = self.0.context.iter().find(|(name, _)| *name == "key");
        let crossed = || {
            let (_, context) = self.0.message.rsplit_once('[')?;
            context.split([',', ']']).find_map(|item| item.trim_start().strip_prefix("key: "))
        };
        own.map(|(_, key)| key.as_str()).or_else(crossed)
    }

    /// Puts the error's place in a file in front of the message.
    pub fn at(mut self, place: &str) -> Self {
        self.0.message = format!("{place}: {}", self.0.message);
        self
    }

    /// Adds the fix. It is shown unless the message or the source has one already.
    pub fn with_fix(mut self, fix: impl Into<String>) -> Self {
        self.0.fix = Some(fix.into());
        self
    }

    /// Adds a thing to do that helps whatever the cause is. It is shown behind any other fix.
    pub fn with_more_to_do(mut self, more: &str) -> Self {
        let first = self.0.fix.take().filter(|_| !self.0.has_inner_fix());
        self.0.fix =
            Some(first.map_or_else(|| more.to_owned(), |first| format!("{first}; {more}")));
        self.0.adds_fix = true;
        self
    }

    /// Adds the error that caused this one.
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Names the world rank that the error is about: the lost, late or refusing rank.
    pub fn with_rank(mut self, rank: u32) -> Self {
        self.0.rank = Some(rank);
        self
    }

    /// The kind of the failure, for callers to branch on.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The operation that failed.
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// The message alone: the values found and expected.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The world rank that the error is about, if any.
    pub fn rank(&self) -> Option<u32> {
        self.0.rank
    }

    /// Everything but the operation: message, context, source and fix in one line.
    pub fn detail(&self) -> String {
        Detail(&self.0).to_string()
    }

    /// The fix, if it is known.
    pub fn fix(&self) -> Option<&str> {
        self.0.fix.as_deref()
    }
}

impl Inner {
    /// Whether the message or the source has a fix.
    fn has_inner_fix(&self) -> bool {
        let has_fix = |text: &str| text.contains(". Fix: ");
        has_fix(&self.message)
            || self.source.as_ref().is_some_and(|source| has_fix(&source.to_string()))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0.operation, Detail(&self.0))
    }
}

struct Detail<'a>(&'a Inner);

impl fmt::Display for Detail<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = self.0;
        f.write_str(&inner.message)?;
        for (i, (name, value)) in inner.context.iter().enumerate() {
            write!(f, "{}{name}: {value}", if i == 0 { " [" } else { ", " })?;
        }
        if !inner.context.is_empty() {
            f.write_str("]")?;
        }
        if let Some(source) = &inner.source {
            write!(f, ": {source}")?;
        }
        // The innermost fix alone: it is about the cause, and an outer one about what follows from it.
        match (&inner.fix, inner.has_inner_fix()) {
            (Some(fix), false) => write!(f, ". Fix: {fix}"),
            (Some(more), true) if inner.adds_fix => write!(f, "; {more}"),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} error: {self}", self.0.kind.name())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|s| &**s as &(dyn std::error::Error + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_names_operation_values_and_fix_in_one_line() {
        let error = Error::new(ErrorKind::Config, "read config", "found 3 ranks, expected 4")
            .with_context("file", "a.toml")
            .with_context("line", 7)
            .with_fix("set ranks = 4");
        assert_eq!(
            error.to_string(),
            "read config: found 3 ranks, expected 4 [file: a.toml, line: 7]. Fix: set ranks = 4"
        );
        assert_eq!(error.kind().name(), "config");
    }

    #[test]
    fn of_several_fixes_only_the_innermost_is_shown() {
        let inner = Error::new(ErrorKind::Unavailable, "open", "no device").with_fix("plug it in");
        let text = "try: open: no device. Fix: plug it in";
        let outer =
            Error::new(ErrorKind::Transport, "try", inner.to_string()).with_fix("ask again");
        assert_eq!(outer.to_string(), text);
        let outer = Error::new(ErrorKind::Transport, "try", "failed").with_source(inner);
        let outer = outer.with_fix("ask again").to_string();
        assert_eq!(outer, "try: failed: open: no device. Fix: plug it in");
        // Help for any case comes behind it.
        let outer = Error::new(ErrorKind::Transport, "try", text).with_fix("ask again");
        let outer = outer.with_more_to_do("read the reports").to_string();
        assert!(outer.ends_with("no device. Fix: plug it in; read the reports"), "{outer}");
        let alone = Error::new(ErrorKind::Transport, "try", "failed").with_fix("ask again");
        let alone = alone.with_more_to_do("read the reports").to_string();
        assert_eq!(alone, "try: failed. Fix: ask again; read the reports");
    }
}
