//! Reports of a running user of a session, such as a communicator: its present state and wait, read from another
//! thread while it works or waits.
//!
//! No thread stops for a report. The thread of the user stores atomics (`track`), so do its waits
//! (the wait board) and the kernel set's counters; `capture` reads them. `folder` stores the files. A report
//! is written on request ([`Reporter::write`], [`write_reports`]), when the user continues without a
//! rank, and once when an error closes it. Threads of their own write the files and query the transports
//! (`checkup`). A file system or a component may block for ever, and neither the job nor the error may wait
//! for it (INV-6).
//!
//! Watched by the tests in these files, `conformance/tests/{reporting,mute}.rs`, and `cli/tests/reports`.

mod capture;
mod checkup;
mod folder;
mod track;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak, mpsc};
use std::time::Duration;

use crate::report::{ConfigName, Reason, Report};

pub(crate) use capture::{Counters, Live, Meeting, RingCounts};
use checkup::Checkup;
use folder::Folder;
pub use folder::REPORTS_VARIABLE;
use track::Track;

use crate::bootstrap::{CallUnderWay, Liveness, Witness, World};
use crate::config::{Config, OnFailure};
use crate::{Error, ErrorKind, Result};

/// Most time that an error waits for its report: for transports that do not answer, and for the file.
const PATIENCE: Duration = Duration::from_secs(2);
/// Most time that a request for a report waits for its file.
const WRITTEN_WITHIN: Duration = Duration::from_secs(10);
/// Most reports of one user that may be written to files at once.
const MOST_WRITERS: u32 = 16;

/// Every user of this process that is open, or being opened.
static RECORDERS: Mutex<Vec<Weak<FlightRecorder>>> = Mutex::new(Vec::new());

/// Reports the state of a user of a session. Any thread may use it, at any time; it holds no component of the
/// user alive.
#[derive(Clone)]
pub struct Reporter(Arc<FlightRecorder>);

impl Reporter {
    pub(crate) fn new(recorder: &Arc<FlightRecorder>) -> Self {
        Self(Arc::clone(recorder))
    }

    /// The present state of the user. The report includes `why`, for example the name of a signal.
    /// Takes a second where a transport does not answer.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] once the user is dropped.
    pub fn capture(&self, why: &str) -> Result<Report> {
        self.0.check_open()?;
        Ok(self.0.finish(self.0.capture(asked(why))))
    }

    /// Writes such a report to a file, and returns its path. At most 8 reports of a rank are stored.
    ///
    /// # Errors
    /// As [`capture`](Self::capture). No reports are wanted; an error of the file system; or the file
    /// was not written within 10 seconds.
    pub fn write(&self, why: &str) -> Result<PathBuf> {
        self.0.check_open()?;
        self.0.write(asked(why))
    }
}

impl std::fmt::Debug for Reporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reporter").field("rank", &self.0.rank).finish_non_exhaustive()
    }
}

/// As [`Reporter::write`], for each user of this process that is open or being opened.
pub fn write_reports(why: &str) -> Vec<Result<PathBuf>> {
    let recorders = RECORDERS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let recorders =
        recorders.iter().filter_map(Weak::upgrade).filter(|recorder| !recorder.is_retired());
    recorders.map(|recorder| recorder.write(asked(why))).collect()
}

fn asked(why: &str) -> Reason {
    Reason { kind: "asked".to_owned(), text: why.to_owned(), rank: None }
}

/// A report that still lacks the answers of the transports.
struct Draft(Report);

/// The state of an error's report.
#[derive(Debug, Default)]
enum Written {
    /// No error has closed the user.
    #[default]
    Nothing,
    /// A thread writes the report.
    Soon,
    Here,
    Failed(String),
}

/// Writes the reports of one user.
pub(crate) struct FlightRecorder {
    this: Weak<Self>,
    rank: u32,
    ranks: u32,
    config: ConfigName,
    on_failure: OnFailure,
    topology: String,
    kernels: String,
    folder: Option<Folder>,
    liveness: Arc<Liveness>,
    collective: Arc<CallUnderWay>,
    pub(crate) track: Track,
    /// Set once the ranks have met.
    pub(crate) meeting: OnceLock<Meeting>,
    /// The components of the user, while reports may read them.
    live: Mutex<Option<Live>>,
    /// Scale-up, scale-out.
    checkups: [Arc<Checkup>; 2],
    /// Threads that write files.
    writers: AtomicU32,
    is_retired: AtomicBool,
    /// True once an error was reported; only the first error counts.
    is_claimed: AtomicBool,
    outcome: Mutex<Written>,
    written: Condvar,
}

impl FlightRecorder {
    /// For a user that is about to be opened, whose operations are of these kinds.
    ///
    /// # Errors
    /// A wrong environment variable about reports.
    pub(crate) fn new(
        world: &World,
        config: &Config,
        in_flight: u32,
        kinds: &'static [&'static str],
    ) -> Result<Arc<Self>> {
        let variable = std::env::var(REPORTS_VARIABLE).ok();
        let folder = Folder::resolve(&config.reports, variable.as_deref())?;
        let recorder = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            rank: world.rank(),
            ranks: world.ranks(),
            config: ConfigName {
                file: config.name.clone(),
                digest: config.digest.clone(),
                deadline_ms: config.world.deadline.as_millis() as u64,
                late_ms: config.world.late.as_millis() as u64,
                on_failure: config.world.on_failure.name().to_owned(),
            },
            on_failure: config.world.on_failure,
            topology: config.topology.name.clone(),
            kernels: config.kernels.name.clone(),
            folder,
            liveness: world.liveness(),
            collective: world.call_under_way(),
            track: Track::new(in_flight, kinds),
            meeting: OnceLock::new(),
            live: Mutex::new(None),
            checkups: Default::default(),
            writers: AtomicU32::new(0),
            is_retired: AtomicBool::new(false),
            is_claimed: AtomicBool::new(false),
            outcome: Mutex::default(),
            written: Condvar::new(),
        });
        let witness: Arc<dyn Witness> = Arc::clone(&recorder) as _;
        recorder.collective.tell(Arc::downgrade(&witness));
        let mut recorders = RECORDERS.lock().unwrap_or_else(PoisonError::into_inner);
        recorders.retain(|recorder| recorder.strong_count() > 0);
        recorders.push(Arc::downgrade(&recorder));
        Ok(recorder)
    }

    /// Lets reports read the components of a user until [`Looking::end`].
    pub(crate) fn look_at(self: &Arc<Self>, live: Live) -> Looking {
        *self.live() = Some(live);
        Looking(Arc::clone(self))
    }

    fn live(&self) -> std::sync::MutexGuard<'_, Option<Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outcome(&self) -> std::sync::MutexGuard<'_, Written> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_retired(&self) -> bool {
        self.is_retired.load(Ordering::Acquire)
    }

    /// Refuses a dropped user: it does nothing any more, and its report would show no fault.
    fn check_open(&self) -> Result<()> {
        if !self.is_retired() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            "report",
            "found a communicator that is dropped; expected an open one",
        )
        .with_fix("the communicator is closed: take the reporter of a new one"))
    }

    fn write(&self, reason: Reason) -> Result<PathBuf> {
        let Some(folder) = &self.folder else {
            let text = "no reports are wanted: world.reports, or the environment, says none";
            return Err(Error::new(ErrorKind::Unavailable, "write report", text)
                .with_fix(format!("name a folder in {REPORTS_VARIABLE}")));
        };
        let draft = self.capture(reason);
        let (sender, receiver) = mpsc::channel();
        let file = folder.clone();
        // The requesting thread may have ended its wait.
        self.beside(move |recorder| drop(sender.send(file.write(&recorder.finish(draft)))))?;
        receiver.recv_timeout(WRITTEN_WITHIN).unwrap_or_else(|_| {
            let seconds = WRITTEN_WITHIN.as_secs();
            let text = format!("{} has not taken it after {seconds} s", folder.path().display());
            Err(Error::new(ErrorKind::System, "write report", text).with_fix(format!(
                "look at the file system that it is on, or name another folder in {REPORTS_VARIABLE}"
            )))
        })
    }

    /// Runs `write` on a thread of its own.
    fn beside(&self, write: impl FnOnce(&Self) + Send + 'static) -> Result<()> {
        // Once the last owner is dropped there is nothing to report.
        let Some(recorder) = self.this.upgrade() else { return Ok(()) };
        if self.writers.fetch_add(1, Ordering::AcqRel) >= MOST_WRITERS {
            self.writers.fetch_sub(1, Ordering::AcqRel);
            let text = format!("the {MOST_WRITERS} before it are still being written");
            return Err(Error::new(ErrorKind::System, "write report", text)
                .with_fix("look at the file system of the reports' folder"));
        }
        let run = move || {
            write(&recorder);
            recorder.writers.fetch_sub(1, Ordering::AcqRel);
        };
        let made = std::thread::Builder::new().name("tokenyard-report".into()).spawn(run);
        made.map(drop).map_err(|error| {
            self.writers.fetch_sub(1, Ordering::AcqRel);
            Error::system("write report", "a thread cannot be made", error)
        })
    }

    /// An error closes the user: the first one is reported. Returns at once.
    #[cold]
    pub(crate) fn report_error(&self, error: &Error) {
        if self.folder.is_none() || self.is_retired() {
            return;
        }
        if self.is_claimed.swap(true, Ordering::AcqRel) {
            return;
        }
        // Before anything else: another thread may end the same user, and wait for the report.
        *self.outcome() = Written::Soon;
        let draft = self.capture(Reason {
            kind: error.kind().name().to_owned(),
            text: error.to_string(),
            rank: error.rank(),
        });
        if let Err(error) = self.beside(move |recorder| recorder.tell(recorder.keep(draft))) {
            self.tell(Written::Failed(error.to_string()));
        }
    }

    /// The user continues without ranks that were lost: writes a report of it. An error may still be
    /// reported later. Returns at once.
    #[cold]
    pub(crate) fn report_masked(&self, lost: &[u32]) {
        if self.folder.is_none() || self.is_retired() {
            return;
        }
        let text = format!("goes on without {}", crate::error::words::ranks(lost));
        let kind = Report::MASKED.to_owned();
        let draft = self.capture(Reason { kind, text, rank: lost.first().copied() });
        if let Err(error) = self.beside(move |recorder| drop(recorder.keep(draft))) {
            tracing::error!(rank = self.rank, "no report: {error}");
        }
    }

    fn keep(&self, draft: Draft) -> Written {
        let Some(folder) = &self.folder else { return Written::Nothing };
        match folder.write(&self.finish(draft)) {
            Ok(path) => {
                tracing::warn!(rank = self.rank, "report: {}", path.display());
                Written::Here
            }
            Err(error) => {
                tracing::error!(rank = self.rank, "no report: {error}");
                Written::Failed(error.to_string())
            }
        }
    }

    fn tell(&self, outcome: Written) {
        *self.outcome() = outcome;
        self.written.notify_all();
    }

    /// Adds the path of the report, and how to read it, to an error that closed the user. The text is
    /// the same on all ranks that write to the same folder.
    #[cold]
    pub(crate) fn point_to_report(&self, error: Error) -> Error {
        let Some(folder) = &self.folder else { return error };
        let writes = |outcome: &mut Written| matches!(outcome, Written::Soon);
        let outcome = self.written.wait_timeout_while(self.outcome(), PATIENCE, writes);
        let (outcome, _) = outcome.unwrap_or_else(PoisonError::into_inner);
        if let Written::Failed(why) = &*outcome {
            return error.with_context("report", format!("none, {why}"));
        }
        if matches!(&*outcome, Written::Nothing) {
            return error;
        }
        let error = match &*outcome {
            Written::Soon => {
                let text = format!(
                    "not written within {} s: its folder is slow, or hangs",
                    PATIENCE.as_secs()
                );
                error.with_context("report", text)
            }
            _ => error,
        };
        let job = self.meeting.get().map_or("opening", |meeting| &meeting.job);
        let path = folder.path().display();
        let more =
            format!("read the ranks' reports: tokenyard explain {path}/tokenyard-{job}-*.json");
        error.with_more_to_do(&more)
    }
}

/// A failed collective ends the users of its world, whatever code called it. While a user is
/// opened around masked losses, the failure may be the reason to start again.
impl Witness for FlightRecorder {
    fn failed(&self, error: Error) -> Error {
        let ends = [ErrorKind::Deadline, ErrorKind::PeerLost];
        let is_opening = self.meeting.get().is_none() || self.live().is_none();
        let begins_anew = is_opening && self.on_failure == OnFailure::Mask;
        if !ends.contains(&error.kind()) || begins_anew {
            return error;
        }
        self.report_error(&error);
        self.point_to_report(error)
    }
}

/// While it lives, reports may read the components of a user.
pub(crate) struct Looking(Arc<FlightRecorder>);

impl Looking {
    /// Ends the access of reports. False where a component has not answered a query: a thread is still inside
    /// it, and it cannot be dropped.
    pub(crate) fn end(&self) -> bool {
        // Waits for a report that is being captured.
        *self.0.live() = None;
        self.0.checkups.iter().all(|checkup| checkup.has_ended())
    }
}

/// While it lives, the user's thread is inside a call of an operation.
pub(crate) struct InCall(Arc<FlightRecorder>);

impl InCall {
    /// After [`Track::send`] or [`Track::receive`].
    pub(crate) fn new(recorder: &OpenRecorder) -> Self {
        Self(Arc::clone(&recorder.0))
    }
}

impl Drop for InCall {
    fn drop(&mut self) {
        self.0.track.leave();
    }
}

/// The flight recorder of an open user; nothing is reported once it is dropped.
pub(crate) struct OpenRecorder(pub(crate) Arc<FlightRecorder>);

impl Drop for OpenRecorder {
    fn drop(&mut self) {
        self.0.is_retired.store(true, Ordering::Release);
    }
}
