//! The thread that starts the processes, reads their pipes and reaps them.
//!
//! One thread does it all, because a parent death signal is tied to the *thread* that started the child. A
//! child of a short-lived thread would die with that thread. The keeper lives exactly as long as its
//! children.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::event::{Event, Exit};
use crate::hosts::Spaces;
use crate::job::Stderr;
use crate::lines::{Lines, Tail};

/// Longest line of stdout in bytes. A rank that writes a longer one is killed.
const LINE_BYTES: usize = 64 << 20;
/// A longer line of stderr is forwarded in pieces.
const FORWARD_BYTES: usize = 64 << 10;
/// Bytes per read. Also the fair share of a rank before the next one is served.
const CHUNK: usize = 64 << 10;
/// Reads per pipe of a dead rank: what a pipe can hold at most. A bound is needed because a
/// process that the rank started may still be writing.
const LAST_READS: usize = (1 << 20) / CHUNK;

/// The launcher's handle of one rank.
pub(crate) struct Handle {
    pub(crate) pid: u32,
    /// Signals use this descriptor, never the process id, which the system may reuse.
    pub(crate) pidfd: Arc<OwnedFd>,
    pub(crate) tail: Arc<Mutex<Tail>>,
}

/// The started ranks, by rank. `events` disconnects once all of them are reaped.
pub(crate) struct Kept {
    pub(crate) handles: Vec<Handle>,
    pub(crate) events: Receiver<Event>,
}

/// One process to start.
pub(crate) struct Start {
    pub(crate) command: Command,
    /// The host it runs on; `None` for the machine itself. Either all processes of a start have a
    /// host or none has.
    pub(crate) spaces: Option<Arc<Spaces>>,
}

/// Starts the processes, all or none.
pub(crate) fn start(starts: Vec<Start>, stderr: Stderr) -> Result<Kept> {
    let (events_in, events) = mpsc::channel();
    let (started_in, started) = mpsc::channel();
    thread::Builder::new()
        .name("tokenyard-launch".into())
        .spawn(move || match start_all(starts, stderr) {
            Ok(ranks) => {
                // This send and those below fail if the receiver is gone. The ranks are reaped then
                // too.
                let _ = started_in.send(Ok(ranks.iter().map(RankProcess::handle).collect()));
                keep(ranks, &events_in);
            }
            Err(error) => {
                let _ = started_in.send(Err(error));
            }
        })
        .context("the thread that watches the ranks could not be started")?;
    let handles = started.recv().context("the thread that watches the ranks is gone")??;
    Ok(Kept { handles, events })
}

fn start_all(starts: Vec<Start>, stderr: Stderr) -> Result<Vec<RankProcess>> {
    let mut ranks = Vec::with_capacity(starts.len());
    for (rank, Start { mut command, spaces }) in (0u32..).zip(starts) {
        if let Some(spaces) = spaces {
            // A child starts in the namespaces of the thread that starts it.
            spaces.enter()?;
        }
        let process = RankProcess::start(rank, &mut command, stderr)
            .with_context(|| format!("rank {rank} could not be started"))?;
        ranks.push(process);
    }
    Ok(ranks)
}

/// Serves the ranks until the last one is reaped. It has no deadline of its own: `Running` has a
/// deadline, and ends the wait by killing the ranks.
fn keep(mut ranks: Vec<RankProcess>, events: &Sender<Event>) {
    let mut buffer = vec![0u8; CHUNK];
    while !ranks.is_empty() {
        wait_for_any(&ranks);
        ranks.retain_mut(|rank| !rank.serve(&mut buffer, events));
    }
}

/// Returns when a pipe has bytes, a pipe ended or a process died; sometimes for no reason.
fn wait_for_any(ranks: &[RankProcess]) {
    let mut waits = Vec::with_capacity(3 * ranks.len());
    for rank in ranks {
        let pipes = [rank.stdout.as_ref().map(AsFd::as_fd), rank.stderr.as_ref().map(AsFd::as_fd)];
        for fd in pipes.into_iter().flatten().chain([rank.pidfd.as_fd()]) {
            waits.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        }
    }
    match poll(&mut waits, None) {
        Ok(_) | Err(Errno::INTR) => {}
        // Out of memory or over a limit. Everything below is non-blocking, so polling at intervals
        // is correct too.
        Err(_) => thread::sleep(Duration::from_millis(10)),
    }
}

struct RankProcess {
    rank: u32,
    child: Child,
    pidfd: Arc<OwnedFd>,
    /// `None` once the pipe has ended; an ended pipe would wake every poll.
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    lines: Lines,
    forward: Option<Lines>,
    tail: Arc<Mutex<Tail>>,
}

impl RankProcess {
    fn start(rank: u32, command: &mut Command, stderr: Stderr) -> Result<Self> {
        let mut child = command.spawn()?;
        let pidfd = match open_child(&child) {
            Ok(pidfd) => Arc::new(pidfd),
            Err(error) => {
                // Both fail only for a child that has already ended.
                let _ = child.kill();
                let _ = child.wait();
                return Err(error);
            }
        };
        Ok(Self {
            rank,
            stdout: child.stdout.take(),
            stderr: child.stderr.take(),
            child,
            pidfd,
            lines: Lines::default(),
            forward: (stderr == Stderr::Inherit).then(Lines::default),
            tail: Arc::default(),
        })
    }

    fn handle(&self) -> Handle {
        Handle { pid: self.child.id(), pidfd: self.pidfd.clone(), tail: self.tail.clone() }
    }

    /// Reads the bytes that are there. True once the process is dead, its last bytes are read, and
    /// its exit is sent as an event.
    fn serve(&mut self, buffer: &mut [u8], events: &Sender<Event>) -> bool {
        // The exit is checked before reading, so that all bytes of an exited process are in the
        // pipes by now.
        let exited = self.child.try_wait().transpose();
        let reads = if exited.is_some() { LAST_READS } else { 1 };
        self.read_stdout(reads, buffer, events);
        self.read_stderr(reads, buffer);
        let Some(exited) = exited else { return false };
        let rank = self.rank;
        self.lines.flush(|line| send_line(events, rank, line));
        if let Some(forward) = &mut self.forward {
            forward.flush(|line| print_line(rank, line));
        }
        let status = self.exit(exited);
        let _ = events.send(Event::Exited { rank, status });
        true
    }

    fn read_stdout(&mut self, reads: usize, buffer: &mut [u8], events: &Sender<Event>) {
        let (rank, lines) = (self.rank, &mut self.lines);
        read_pipe(&mut self.stdout, reads, buffer, |bytes| {
            lines.push(bytes, |line| send_line(events, rank, line));
            lines.pending() <= LINE_BYTES
        });
        if self.lines.pending() > LINE_BYTES {
            // Fails only if the process is already dead. The kill comes before the pipe is closed:
            // otherwise SIGPIPE might end the process first and give the wrong reason.
            let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
            self.stdout = None;
            self.lines = Lines::default();
            self.note(&format!("killed: a line of stdout is longer than {LINE_BYTES} bytes"));
        }
    }

    fn read_stderr(&mut self, reads: usize, buffer: &mut [u8]) {
        let (rank, forward, tail) = (self.rank, &mut self.forward, &self.tail);
        read_pipe(&mut self.stderr, reads, buffer, |bytes| {
            lock(tail).push(bytes);
            if let Some(forward) = forward {
                forward.push(bytes, |line| print_line(rank, line));
                if forward.pending() > FORWARD_BYTES {
                    forward.flush(|line| print_line(rank, line));
                }
            }
            true
        });
    }

    fn exit(&mut self, exited: std::io::Result<ExitStatus>) -> Exit {
        match exited {
            Ok(status) => status.into(),
            // The launcher inherited from its parent that SIGCHLD is ignored, so the kernel
            // discarded the status.
            Err(error) => {
                self.note(&format!("the exit status is lost ({error}); counted as a failure"));
                Exit::Code(255)
            }
        }
    }

    fn note(&self, text: &str) {
        lock(&self.tail).push(format!("\n[launcher] {text}\n").as_bytes());
        if self.forward.is_some() {
            print_line(self.rank, format!("[launcher] {text}").as_bytes());
        }
    }
}

impl Drop for RankProcess {
    /// Reached with a living process only when another rank could not be started.
    fn drop(&mut self) {
        if pidfd_send_signal(&self.pidfd, Signal::KILL).is_ok() {
            let _ = self.child.wait();
        }
    }
}

/// Makes the pipes of a fresh child non-blocking and opens a descriptor of its process.
fn open_child(child: &Child) -> Result<OwnedFd> {
    let pipes = [child.stdout.as_ref().map(AsFd::as_fd), child.stderr.as_ref().map(AsFd::as_fd)];
    for pipe in pipes.into_iter().flatten() {
        fcntl_setfl(pipe, fcntl_getfl(pipe)? | OFlags::NONBLOCK)
            .context("a pipe could not be made non-blocking")?;
    }
    pidfd_open(Pid::from_child(child), PidfdFlags::empty())
        .context("pidfd_open was refused; it needs Linux 5.3 or later")
}

/// Reads at most `reads` chunks. Stops early when nothing is there or `each` returns false, and
/// closes the pipe at its end.
fn read_pipe<P: AsFd>(
    pipe: &mut Option<P>,
    reads: usize,
    buffer: &mut [u8],
    mut each: impl FnMut(&[u8]) -> bool,
) {
    for _ in 0..reads {
        let Some(open) = pipe else { return };
        match rustix::io::read(open, &mut *buffer) {
            Ok(0) => *pipe = None,
            Ok(count) => {
                if !each(&buffer[..count]) {
                    return;
                }
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return,
            Err(_) => *pipe = None,
        }
    }
}

fn send_line(events: &Sender<Event>, rank: u32, line: &[u8]) {
    let line = String::from_utf8_lossy(line).into_owned();
    let _ = events.send(Event::Line { rank, line });
}

/// One write per line, so that lines of different ranks never mix. A closed stderr is not an error
/// of the job.
fn print_line(rank: u32, line: &[u8]) {
    let mut text = format!("[rank {rank}] ").into_bytes();
    text.extend_from_slice(line);
    text.push(b'\n');
    let _ = std::io::stderr().lock().write_all(&text);
}

/// A tail is plain bytes, so its contents can be shown after a thread panicked with the lock held.
pub(crate) fn lock(tail: &Mutex<Tail>) -> std::sync::MutexGuard<'_, Tail> {
    tail.lock().unwrap_or_else(PoisonError::into_inner)
}
