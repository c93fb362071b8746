//! The ranks that were started.

use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context, Result, bail};
use rustix::process::{Signal, pidfd_send_signal};
use tempfile::TempDir;

use crate::event::{Event, Exit, Outcome};
use crate::interrupt::{self, Expected, Interrupted, LOOK};
use crate::keeper::{Handle, Kept, lock};

/// How long a rank may take to die of SIGTERM, before SIGKILL.
const TERM_GRACE: Duration = Duration::from_secs(2);
/// How long a rank may take to die of SIGKILL, before the launcher stops waiting for it.
const KILL_GRACE: Duration = Duration::from_secs(5);

/// Ranks that run. Dropping it kills and reaps them all and removes the rendezvous folder. If a
/// signal ends this process ([`interrupt::note`]), the ranks get SIGTERM first, and two seconds to
/// end.
#[must_use = "dropping it kills the ranks"]
pub struct Running {
    ranks: Vec<Handle>,
    exits: Vec<Option<Exit>>,
    events: Receiver<Event>,
    signal: Expected,
    /// Removed after `drop` below has ended the ranks that could write to it.
    _folder: Option<TempDir>,
}

impl Running {
    pub(crate) fn new(kept: Kept, folder: Option<TempDir>) -> Self {
        let exits = vec![None; kept.handles.len()];
        Self {
            ranks: kept.handles,
            exits,
            events: kept.events,
            signal: Expected::default(),
            _folder: folder,
        }
    }

    /// The next event of any rank. `None` if none came within `timeout`, or at once if all ranks
    /// have exited and every event was returned. Events stay in memory until they are returned.
    pub fn next_event(&mut self, timeout: Duration) -> Option<Event> {
        let event = self.events.recv_timeout(timeout).ok()?;
        if let Event::Exited { rank, status } = event {
            self.exits[rank as usize] = Some(status);
        }
        Some(event)
    }

    /// As [`next_event`](Self::next_event), unless a signal is to end this process. Ranks get the signals of a
    /// terminal, too, so after the end of a rank by such a signal it waits a moment for that of this process.
    ///
    /// # Errors
    /// The signal came, before the call or during it.
    pub fn wait_event(&mut self, timeout: Duration) -> Result<Option<Event>, Interrupted> {
        let start = Instant::now();
        loop {
            interrupt::check()?;
            let left = timeout.saturating_sub(start.elapsed());
            let event = self.next_event(left.min(LOOK));
            if let Some(Event::Exited { status, .. }) = &event {
                self.signal.after(*status)?;
            }
            if event.is_some() || self.all_exited() || left <= LOOK {
                return Ok(event);
            }
        }
    }

    /// Whether the exit of every rank was delivered.
    pub fn all_exited(&self) -> bool {
        self.exits.iter().all(Option::is_some)
    }

    /// The process id of a rank, also after it has exited. `None` if there is no such rank.
    pub fn pid(&self, rank: u32) -> Option<u32> {
        self.ranks.get(rank as usize).map(|handle| handle.pid)
    }

    /// The last 64 KiB that a rank wrote to stderr so far. Empty if there is no such rank.
    pub fn stderr_tail(&self, rank: u32) -> String {
        self.ranks.get(rank as usize).map(|handle| lock(&handle.tail).text()).unwrap_or_default()
    }

    /// The warnings in what the ranks wrote to stderr so far, each text once, with the first rank that has it.
    pub fn warnings(&self) -> Vec<(u32, String)> {
        let mut found: Vec<(u32, String)> = Vec::new();
        for rank in 0..self.ranks.len() as u32 {
            for line in self.stderr_tail(rank).lines() {
                if let Some((_, text)) = line.split_once(" WARN ")
                    && found.iter().all(|(_, known)| known != text)
                {
                    found.push((rank, text.to_owned()));
                }
            }
        }
        found
    }

    /// Kills a rank with SIGKILL; its `Exited` event follows.
    ///
    /// # Errors
    /// There is no such rank, or it has exited.
    pub fn kill(&self, rank: u32) -> Result<()> {
        self.signal(rank, Signal::KILL)
    }

    /// Freezes a rank with SIGSTOP.
    ///
    /// # Errors
    /// As [`kill`](Self::kill).
    pub fn stop(&self, rank: u32) -> Result<()> {
        self.signal(rank, Signal::STOP)
    }

    /// Asks a rank for a report, with SIGUSR1. The signal ends a program that does not handle it.
    ///
    /// # Errors
    /// As [`kill`](Self::kill).
    pub fn ask(&self, rank: u32) -> Result<()> {
        self.signal(rank, Signal::USR1)
    }

    /// Waits until a rank that stops itself is stopped, for `limit` at most.
    ///
    /// # Errors
    /// There is no such rank, it has exited, or it still runs after `limit`.
    pub fn await_stop(&self, rank: u32, limit: Duration) -> Result<()> {
        let pid = self.pid(rank).with_context(|| format!("await stop: there is no rank {rank}"))?;
        let start = Instant::now();
        loop {
            // The name in this line may contain any character, so the state is searched from the
            // end of the line.
            let stat = fs::read_to_string(format!("/proc/{pid}/stat"))
                .with_context(|| format!("await stop: rank {rank} has exited"))?;
            match stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()) {
                Some('T') => return Ok(()),
                Some('Z' | 'X') => bail!("await stop: rank {rank} has exited"),
                _ if start.elapsed() > limit => {
                    bail!("await stop: rank {rank} still runs after {limit:?}")
                }
                _ => thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Lets a stopped rank go on, with SIGCONT.
    ///
    /// # Errors
    /// As [`kill`](Self::kill).
    pub fn resume(&self, rank: u32) -> Result<()> {
        self.signal(rank, Signal::CONT)
    }

    /// Waits until every rank has exited, at most `deadline` from now. Ranks that still run then get
    /// SIGTERM, and SIGKILL two seconds later. Returns one outcome per rank, in order.
    pub fn wait_all(mut self, deadline: Duration) -> Vec<Outcome> {
        let mut lines = vec![Vec::new(); self.ranks.len()];
        let mut timed_out = vec![false; self.ranks.len()];
        self.collect(deadline, &mut lines);
        if !self.all_exited() {
            timed_out = self.terminate_all();
            self.collect(TERM_GRACE, &mut lines);
            self.signal_all(Signal::KILL);
            // No rank writes from here on, so this loop ends once the pipes are empty.
            while let Some(event) = self.next_event(KILL_GRACE) {
                keep_line(event, &mut lines);
            }
        }
        let outcome = |((rank, lines), timed_out): ((u32, _), _)| Outcome {
            rank,
            exit: self.exits[rank as usize],
            timed_out,
            lines,
            stderr_tail: self.stderr_tail(rank),
        };
        (0u32..).zip(lines).zip(timed_out).map(outcome).collect()
    }

    /// Takes events until all ranks have exited or `limit` has passed.
    fn collect(&mut self, limit: Duration, lines: &mut [Vec<String>]) {
        let start = Instant::now();
        while !self.all_exited() && start.elapsed() < limit {
            if let Some(event) = self.next_event(limit.saturating_sub(start.elapsed())) {
                keep_line(event, lines);
            }
        }
    }

    fn signal(&self, rank: u32, signal: Signal) -> Result<()> {
        let handle = self.ranks.get(rank as usize).with_context(|| {
            format!("signal rank: found rank {rank}, expected one below {}", self.ranks.len())
        })?;
        pidfd_send_signal(&handle.pidfd, signal).with_context(|| {
            format!("signal rank: rank {rank} (process {}) has exited", handle.pid)
        })
    }

    /// Asks all ranks to end. Returns for each whether it was still running.
    fn terminate_all(&self) -> Vec<bool> {
        self.freeze_all();
        let were_there = self.signal_all(Signal::TERM);
        // A stopped process acts on SIGTERM only after SIGCONT.
        self.signal_all(Signal::CONT);
        were_there
    }

    /// Stops all ranks before the first one ends. Otherwise another rank could take that end for a
    /// loss and write a report of it.
    fn freeze_all(&self) {
        self.signal_all(Signal::STOP);
    }

    /// Returns for each rank whether it still ran and got the signal.
    fn signal_all(&self, signal: Signal) -> Vec<bool> {
        self.ranks.iter().map(|handle| pidfd_send_signal(&handle.pidfd, signal).is_ok()).collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if interrupt::check().is_err() && !self.all_exited() {
            self.terminate_all();
            self.collect(TERM_GRACE, &mut vec![Vec::new(); self.ranks.len()]);
        }
        self.freeze_all();
        self.signal_all(Signal::KILL);
        // The channel disconnects when the last rank is reaped. The time limit is for a process
        // that is stuck inside the kernel: the keeper reaps it once the kernel releases it.
        while self.events.recv_timeout(KILL_GRACE).is_ok() {}
    }
}

fn keep_line(event: Event, lines: &mut [Vec<String>]) {
    if let Event::Line { rank, line } = event {
        lines[rank as usize].push(line);
    }
}
