//! A job: the program and the number of ranks to start.

use std::ffi::OsString;
use std::fmt::Write;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::adopt::LAUNCHER;
use crate::interrupt;
use crate::keeper::{self, Start};
use crate::running::Running;

/// The destination of the ranks' stderr. The launcher holds the last 64 KiB of each in both cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stderr {
    /// Every line goes to the launcher's stderr, with the prefix `[rank 2] `.
    Inherit,
    /// Nothing is shown; [`Outcome::stderr_tail`](crate::Outcome::stderr_tail) has the last part.
    Capture,
}

/// Ranks to start as processes on this machine. Every rank runs the same program.
#[derive(Clone)]
pub struct Job {
    /// The program; a name without a slash is looked up in `PATH`.
    pub program: PathBuf,
    /// Its arguments, the same for every rank. Other users can read them: no secrets here.
    pub args: Vec<OsString>,
    /// The number of ranks, at least 1.
    pub ranks: u32,
    /// Variables in addition to the launcher's own. Variables that `start` sets replace them.
    pub env: Vec<(OsString, OsString)>,
    /// The destination of stderr.
    pub stderr: Stderr,
}

impl Job {
    /// Starts all ranks, with stdin closed and these variables set: `TOKENYARD_BOOTSTRAP` (a file
    /// rendezvous in a new folder of mode 0700), `TOKENYARD_RANK`, `TOKENYARD_RANKS`,
    /// `TOKENYARD_LOCAL_RANK`, `TOKENYARD_SECRET` (64 hex digits, fresh for this job) and
    /// `TOKENYARD_LAUNCHER` (for [`adopt`](crate::adopt)).
    ///
    /// # Errors
    /// The number of ranks is 0, there is no temporary folder, or a process could not be started.
    /// No rank runs then.
    pub fn start(&self) -> Result<Running> {
        ensure!(self.ranks > 0, "start job: found 0 ranks, expected at least 1");
        let folder = private_folder()?;
        let secret = fresh_secret()?;
        let commands = (0..self.ranks).map(|rank| self.command(rank, folder.path(), &secret));
        let starts = commands.map(|command| Start { command, spaces: None }).collect();
        let kept = keeper::start(starts, self.stderr)
            .with_context(|| format!("start job: program {}", self.program.display()))?;
        Ok(Running::new(kept, Some(folder)))
    }

    fn command(&self, rank: u32, folder: &Path, secret: &str) -> Command {
        let mut bootstrap = OsString::from("file://");
        bootstrap.push(folder.join("rendezvous"));
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .env("TOKENYARD_BOOTSTRAP", bootstrap)
            .env("TOKENYARD_RANK", rank.to_string())
            .env("TOKENYARD_RANKS", self.ranks.to_string())
            .env("TOKENYARD_LOCAL_RANK", rank.to_string())
            .env("TOKENYARD_SECRET", secret)
            // A secret file of the surrounding shell belongs to another job.
            .env_remove("TOKENYARD_SECRET_FILE")
            .env(LAUNCHER, process::id().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        interrupt::restore_in(&mut command);
        command
    }
}

fn private_folder() -> Result<TempDir> {
    // The path is absolute, because a rank may change its working directory before it reads the
    // variable.
    let parent = std::path::absolute(std::env::temp_dir())
        .context("start job: the temporary directory has no absolute path; set TMPDIR")?;
    tempfile::Builder::new()
        .prefix("tokenyard-")
        .permissions(Permissions::from_mode(0o700))
        .tempdir_in(&parent)
        .with_context(|| {
            format!(
                "start job: no folder could be made in {}; set TMPDIR to a writable directory",
                parent.display()
            )
        })
}

pub(crate) fn fresh_secret() -> Result<String> {
    let mut bytes = [0u8; 32];
    getrandom::fill(&mut bytes).context("start job: the system gave no random bytes")?;
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        write!(text, "{byte:02x}")?;
    }
    Ok(text)
}
