//! The events of ranks that a launcher receives.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Something a rank did. All lines of a rank come before its exit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The rank wrote a line to stdout.
    Line {
        /// The rank.
        rank: u32,
        /// The line without its newline. Bytes that are not UTF-8 are replaced. The text after a
        /// rank's last newline is delivered as a line when the rank exits, so the last line of a
        /// killed rank may be cut short.
        line: String,
    },
    /// The rank's process ended and was reaped.
    Exited {
        /// The rank.
        rank: u32,
        /// The way it ended.
        status: Exit,
    },
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It exited with this code; 0 is success.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
}

impl Exit {
    /// Whether the process exited with code 0.
    pub fn success(self) -> bool {
        self == Self::Code(0)
    }
}

impl From<ExitStatus> for Exit {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            // A wait without WUNTRACED reports nothing but exits and fatal signals.
            (None, signal) => Self::Signal(signal.unwrap_or_default()),
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "killed by signal {signal}"),
        }
    }
}

/// How one rank ended, with the rest of its output.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The rank.
    pub rank: u32,
    /// How the process ended. `None` if it did not die of SIGKILL within 5 seconds, which happens
    /// to a process that is stuck inside the kernel (in a device driver, for example).
    pub exit: Option<Exit>,
    /// The rank was still running at the deadline and was terminated by the launcher.
    pub timed_out: bool,
    /// Lines of stdout that [`Running::next_event`](crate::Running::next_event) has not returned
    /// yet.
    pub lines: Vec<String>,
    /// The last 64 KiB of stderr. Notes of the launcher itself start with `[launcher]`.
    pub stderr_tail: String,
}

impl Outcome {
    /// Whether the rank exited with code 0 before the deadline.
    pub fn success(&self) -> bool {
        !self.timed_out && self.exit.is_some_and(Exit::success)
    }
}
