//! Tests in a separate process whether loading a config's plugins succeeds.
//!
//! A library runs code while it is opened. If that code ends the process, the program ends with an
//! exit code of the library's choice, and 0 would look like success. The launcher notices a rank
//! that ends like this; this module does the same for commands that load plugins themselves.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};
use tokenyard_core::config::Config;
use tokenyard_core::host::Registry;
use tokenyard_launch::interrupt;

use crate::components;
use crate::output::print_json;

/// How long all plugins of a config may take to load. A library that contains the complete software
/// of a GPU takes seconds.
const LONGEST: Duration = Duration::from_secs(60);
/// The interval at which the process is polled.
const LOOK: Duration = Duration::from_millis(2);

/// Arguments of `tokenyard load-plugins`.
#[derive(Debug, clap::Args)]
pub(crate) struct PreloadArgs {
    config: PathBuf,
}

/// A line of the process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LoadMessage {
    /// The process now opens this file.
    Opens(PathBuf),
    /// All files are open, or refused.
    Done,
}

/// The process: opens the plugins and reports each.
pub(crate) fn main(args: &PreloadArgs) -> Result<ExitCode> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("follow the parent's death")?;
    let config = Config::load(&args.config)?;
    let mut printed = Ok(());
    let tell = |file: &Path| {
        if printed.is_ok() {
            printed = print_json(&LoadMessage::Opens(file.to_owned()));
        }
    };
    components::load(Some(&config), tell)?;
    printed?;
    print_json(&LoadMessage::Done)?;
    Ok(ExitCode::SUCCESS)
}

/// Loads the plugins of `config` in a separate process, if there are any. A refused file is no
/// error here: the next load of it gives the reason.
///
/// # Errors
/// The process ended before all were loaded, or hangs.
pub(crate) fn try_plugins(config: Option<&Config>) -> Result<()> {
    config.map_or(Ok(()), |config| try_within(config, LONGEST))
}

/// [`try_plugins`] of a config, which take at most `limit`.
///
/// # Errors
/// As [`try_plugins`].
pub(crate) fn try_within(config: &Config, limit: Duration) -> Result<()> {
    // With no path, only the plugins of missing components can be loaded.
    if config.plugins.is_empty() && Registry::built_in()?.installed(config).is_empty() {
        return Ok(());
    }
    let mut child = Command::new(std::env::current_exe().context("find this program")?)
        .args(["load-plugins", "--"])
        .arg(&config.name)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // A library prints its messages again when this process loads it.
        .stderr(Stdio::null())
        .spawn()
        .context("start a process that tries the plugins")?;
    let ended = watch(&mut child, limit);
    if !matches!(ended, Ok((Some(_), _))) {
        // Both fail only for a process that has ended.
        let _ = child.kill();
        let _ = child.wait();
    }
    let (status, text) = ended?;
    judge(status, &text, limit)
}

/// The exit status of the process, if it ended in time, and its output.
fn watch(child: &mut Child, limit: Duration) -> Result<(Option<ExitStatus>, String)> {
    let mut stdout = child.stdout.take().context("the process has no standard output")?;
    let (send, text) = std::sync::mpsc::channel();
    // The thread ends with the process. A process that the library has started may hold the pipe
    // open for longer.
    std::thread::Builder::new().name("tokenyard-plugins".into()).spawn(move || {
        let mut chunk = [0; 4096];
        while let Ok(count @ 1..) = stdout.read(&mut chunk) {
            if send.send(chunk[..count].to_vec()).is_err() {
                return;
            }
        }
    })?;
    let start = Instant::now();
    let mut status = None;
    while status.is_none() && start.elapsed() < limit {
        interrupt::check()?;
        std::thread::sleep(LOOK);
        status = child.try_wait().context("wait for the process that tries the plugins")?;
    }
    if let Some(status) = status {
        interrupt::Expected::default().after(status.into())?;
    }
    // Bytes in the pipe arrive at once.
    let chunks = std::iter::from_fn(|| text.recv_timeout(Duration::from_millis(200)).ok());
    let bytes: Vec<u8> = chunks.flatten().collect();
    Ok((status, String::from_utf8_lossy(&bytes).into_owned()))
}

fn judge(status: Option<ExitStatus>, text: &str, limit: Duration) -> Result<()> {
    let mut last = None;
    for line in text.lines() {
        match serde_json::from_str(line) {
            Ok(LoadMessage::Opens(file)) => last = Some(file),
            Ok(LoadMessage::Done) => return Ok(()),
            // A library may print.
            Err(_) => {}
        }
    }
    let Some(file) = last else {
        // The process opened no plugin; the next load of them gives the reason.
        return if status.is_some_and(|status| status.code() == Some(2)) {
            Ok(())
        } else {
            Err(anyhow!("the process that tries the plugins ended without a message ({status:?})"))
        };
    };
    let file = file.display();
    match status {
        Some(status) => bail!(
            "load plugin: {file} ended the process that opened it ({status}); expected a library that can be \
             opened. Fix: remove the library from plugins.paths, or the call that ends the process from its \
             constructors"
        ),
        None => bail!(
            "load plugin: {file} is not open after {limit:?}. Fix: remove the library from plugins.paths, or the \
             wait from its constructors"
        ),
    }
}
