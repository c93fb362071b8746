//! Compilers that are programs: how one is run, and how a source is laid out on disk for it.

use std::ffi::OsStr;
use std::fs;
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use tempfile::TempDir;
use tokenyard_core::{Error, ErrorKind, Result};

use super::Source;

/// A compilation takes up to a minute, and beside ten programs on two processors more than five.
const LONGEST: Duration = Duration::from_secs(900);
const LOOK: Duration = Duration::from_millis(10);
/// The most bytes of its output that are stored.
const MOST_LOG: u64 = 1 << 20;

/// A program at a path.
#[derive(Clone, Debug)]
pub struct Tool {
    name: &'static str,
    path: PathBuf,
    first: Vec<String>,
    longest: Duration,
}

/// The output of a run that succeeded.
#[derive(Debug)]
pub struct Ran {
    /// Its standard output.
    pub out: String,
    /// Its standard error.
    pub log: String,
}

impl Tool {
    /// The program that is known as `name`.
    pub fn new(name: &'static str, path: PathBuf) -> Self {
        Self { name, path, first: Vec::new(), longest: LONGEST }
    }

    /// This program, with arguments before all others: some programs combine several tools.
    #[must_use]
    pub fn with_first(mut self, first: &[&str]) -> Self {
        self.first.extend(first.iter().map(|&argument| argument.to_owned()));
        self
    }

    /// Runs it until it ends, or until its time is over.
    ///
    /// # Errors
    /// The program cannot be run, fails, or does not end; with its log.
    pub fn run(&self, operation: &'static str, arguments: &[&OsStr]) -> Result<Ran> {
        let system = |e| {
            Error::system(operation, "the compiler cannot be run", e)
                .with_context("program", self.path.display())
        };
        let mut running = Command::new(&self.path)
            .args(&self.first)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // It starts other programs, which end together with it.
            .process_group(0)
            .spawn()
            .map_err(system)?;
        // Read in parallel, because the program blocks on a full pipe.
        let out = running.stdout.take().map(|pipe| std::thread::spawn(move || text_of(pipe)));
        let log = running.stderr.take().map(|pipe| std::thread::spawn(move || text_of(pipe)));
        let start = Instant::now();
        let status = loop {
            if let Some(status) = running.try_wait().map_err(system)? {
                break status;
            }
            if start.elapsed() > self.longest {
                // The other programs have ended meanwhile, or end now.
                let _ = kill_process_group(Pid::from_child(&running), Signal::KILL);
                let _ = running.wait();
                let message =
                    format!("{} has not ended in {} s", self.name, self.longest.as_secs());
                return Err(Error::new(ErrorKind::Deadline, operation, message)
                    .with_context("program", self.path.display()));
            }
            std::thread::sleep(LOOK);
        };
        let end = |thread: Option<std::thread::JoinHandle<String>>| {
            thread.and_then(|thread| thread.join().ok()).unwrap_or_default()
        };
        let (out, log) = (end(out), end(log));
        if !status.success() {
            let message = format!("{} ended with {status}", self.name);
            return Err(Error::new(ErrorKind::System, operation, message)
                .with_context("program", self.path.display())
                .with_context("log", &log));
        }
        Ok(Ran { out, log })
    }
}

fn text_of(mut pipe: impl std::io::Read) -> String {
    let mut bytes = Vec::new();
    // Bytes beyond the limit are read and dropped, so that the program ends.
    let _ = pipe.by_ref().take(MOST_LOG).read_to_end(&mut bytes);
    let _ = std::io::copy(&mut pipe, &mut std::io::sink());
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The files of a source in a private folder.
#[derive(Debug)]
pub struct Written {
    folder: TempDir,
    main: PathBuf,
    defines: PathBuf,
}

/// The file of the macros that options define: nvcc splits an option at its commas.
const DEFINES: &str = "defines.h";

/// The line that defines the macro of an option; none for another kind of option.
fn define(option: &str) -> Option<String> {
    let (name, value) = option.strip_prefix("-D")?.split_once('=')?;
    Some(format!("#define {name} {value}\n"))
}

impl Written {
    /// Writes the files.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn new(source: &Source) -> Result<Self> {
        let system = |e| Error::system("write kernels", "a source cannot be written", e);
        let folder = tempfile::Builder::new().prefix("tokenyard-").tempdir().map_err(system)?;
        let headers = source.headers.iter().map(|(name, text)| (name.as_str(), text.as_str()));
        let defines: String = source.options.iter().filter_map(|option| define(option)).collect();
        for (name, text) in
            headers.chain([(source.main.name, source.main.text), (DEFINES, &defines)])
        {
            fs::write(folder.path().join(name), text).map_err(system)?;
        }
        let at = |name| folder.path().join(name);
        Ok(Self { main: at(source.main.name), defines: at(DEFINES), folder })
    }

    /// The folder; it is removed with this value.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Options and include folders, then the name of the main file.
    pub fn arguments<'a>(&'a self, source: &'a Source, own: &'a [&'a OsStr]) -> Vec<&'a OsStr> {
        let others = source.options.iter().filter(|option| define(option).is_none());
        let mut all: Vec<&OsStr> = others.map(OsStr::new).collect();
        all.extend([OsStr::new("-include"), self.defines.as_os_str()]);
        for folder in [self.folder.path()]
            .into_iter()
            .chain(source.include_folders.iter().map(PathBuf::as_path))
        {
            all.extend([OsStr::new("-I"), folder.as_os_str()]);
        }
        all.extend(own);
        all.push(self.main.as_os_str());
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compiler_that_does_not_end_is_ended_with_what_it_has_started() {
        let folder = tempfile::tempdir().unwrap();
        let (script, child) = (folder.path().join("nvcc"), folder.path().join("child"));
        let text = format!("sleep 600 &\necho $! > {}\nwait\n", child.display());
        fs::write(&script, text).unwrap();
        // The shell reads the file and does not execute it: a child of another thread may still hold the
        // freshly written file open.
        let tool = Tool { longest: Duration::from_secs(1), ..Tool::new("nvcc", "/bin/sh".into()) };
        let error = tool.run("ask compiler", &[script.as_os_str()]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Deadline, "{error}");
        let child = fs::read_to_string(child).unwrap();
        let stat = format!("/proc/{}/stat", child.trim());
        // A process whose parent has not yet waited for it counts as dead.
        let is_dead = || fs::read_to_string(&stat).map_or(true, |state| state.contains(") Z "));
        let start = Instant::now();
        // The signal ends it when it next runs, which takes a while on a busy machine.
        while !is_dead() {
            assert!(start.elapsed() < Duration::from_secs(60), "process {child} lives");
            std::thread::sleep(LOOK);
        }
    }

    #[test]
    fn macros_go_into_a_file_whatever_is_in_them() {
        assert_eq!(define("-DSIZES=1,2").as_deref(), Some("#define SIZES 1,2\n"));
        assert_eq!(define("-DHEADER=<n.h>").as_deref(), Some("#define HEADER <n.h>\n"));
        assert_eq!(define("-std=c++20"), None);
    }
}
