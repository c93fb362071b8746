//! A running communicator answers: what it does and waits for, read from another thread while it works or
//! waits.
//!
//! Nobody stops for a report. The thread of the communicator stores atomics (`track`), so do its waits (the wait
//! board) and the kernel set's counters; `capture` reads them. `folder` keeps the files. A report is
//! written when somebody asks ([`Reporter::write`], [`write_reports`]), when the communicator goes on without a
//! rank, and once when an error closes it. Files are written by a thread of their own, and transports are
//! asked by others (`checkup`): a file system or a component may block for ever, and neither the job nor the
//! error is to wait for it (INV-6).

mod capture;
mod checkup;
mod folder;
mod track;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak, mpsc};
use std::time::Duration;

use tokenyard_reports::{ConfigName, Reason, Report};

pub(super) use capture::{Counters, Live, Meeting, RingCounts};
use checkup::Checkup;
use folder::Folder;
pub use folder::REPORTS_VARIABLE;
pub(super) use track::Sort;
use track::Track;

use crate::bootstrap::{CallUnderWay, Liveness, Witness, World};
use crate::config::{Config, OnFailure};
use crate::{Error, ErrorKind, Result};

/// How long an error waits for its report to be written: for transports that do not answer, and a file.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long who asks for a report waits for its file.
const WRITTEN_WITHIN: Duration = Duration::from_secs(10);
/// Reports of one communicator that may be under way to files at once.
const MOST_WRITERS: u32 = 16;

/// Every communicator of this process that is open, or being opened.
static DESKS: Mutex<Vec<Weak<FlightRecorder>>> = Mutex::new(Vec::new());

/// Asks a communicator what it does. Any thread may use it, for as long as it likes; it keeps no part of the communicator
/// alive.
#[derive(Clone)]
pub struct Reporter(Arc<FlightRecorder>);

impl Reporter {
    pub(super) fn new(recorder: &Arc<FlightRecorder>) -> Self {
        Self(Arc::clone(recorder))
    }

    /// What the communicator does now. `why` is told in the report, for example the name of a signal. Takes a
    /// second where a transport does not answer.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] once the communicator is dropped.
    pub fn capture(&self, why: &str) -> Result<Report> {
        self.0.check_open()?;
        Ok(self.0.finish(self.0.capture(asked(why))))
    }

    /// Writes that to a file, and returns its path. At most 8 reports of a rank are kept.
    ///
    /// # Errors
    /// As [`capture`](Self::capture). No reports are wanted; what the file system refuses, or that it
    /// has not taken the report after 10 seconds.
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

/// As [`Reporter::write`], for each communicator of this process that is open or being opened.
pub fn write_reports(why: &str) -> Vec<Result<PathBuf>> {
    let desks = DESKS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let desks = desks.iter().filter_map(Weak::upgrade).filter(|recorder| !recorder.is_retired());
    desks.map(|recorder| recorder.write(asked(why))).collect()
}

fn asked(why: &str) -> Reason {
    Reason { kind: "asked".to_owned(), text: why.to_owned(), rank: None }
}

/// A report that transports have not answered for yet.
struct Draft(Report);

/// Where the report of an error is.
#[derive(Debug, Default)]
enum Written {
    /// No error has closed the communicator.
    #[default]
    Nothing,
    /// A thread writes it.
    Soon,
    Here,
    Failed(String),
}

/// What writes the reports of one communicator.
pub(super) struct FlightRecorder {
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
    pub(super) track: Track,
    /// Set once the ranks have met.
    pub(super) meeting: OnceLock<Meeting>,
    /// The parts of the communicator, while they may be looked at.
    live: Mutex<Option<Live>>,
    /// Scale-up, scale-out.
    checkups: [Arc<Checkup>; 2],
    /// Threads that write files.
    writers: AtomicU32,
    is_retired: AtomicBool,
    /// Whether an error has been told; the first one counts.
    is_claimed: AtomicBool,
    told: Mutex<Written>,
    written: Condvar,
}

impl FlightRecorder {
    /// For a communicator that is about to be opened.
    ///
    /// # Errors
    /// What the environment says of reports is wrong.
    pub(super) fn new(world: &World, config: &Config, in_flight: u32) -> Result<Arc<Self>> {
        let variable = std::env::var(REPORTS_VARIABLE).ok();
        let folder = Folder::resolve(&config.world.reports, variable.as_deref())?;
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
            track: Track::new(in_flight),
            meeting: OnceLock::new(),
            live: Mutex::new(None),
            checkups: Default::default(),
            writers: AtomicU32::new(0),
            is_retired: AtomicBool::new(false),
            is_claimed: AtomicBool::new(false),
            told: Mutex::default(),
            written: Condvar::new(),
        });
        let witness: Arc<dyn Witness> = Arc::clone(&recorder) as _;
        recorder.collective.tell(Arc::downgrade(&witness));
        let mut desks = DESKS.lock().unwrap_or_else(PoisonError::into_inner);
        desks.retain(|recorder| recorder.strong_count() > 0);
        desks.push(Arc::downgrade(&recorder));
        Ok(recorder)
    }

    /// Lets reports look at the parts of a communicator until [`Looking::end`].
    pub(super) fn look_at(self: &Arc<Self>, live: Live) -> Looking {
        *self.live() = Some(live);
        Looking(Arc::clone(self))
    }

    fn live(&self) -> std::sync::MutexGuard<'_, Option<Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn told(&self) -> std::sync::MutexGuard<'_, Written> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_retired(&self) -> bool {
        self.is_retired.load(Ordering::Acquire)
    }

    /// A communicator that is dropped does nothing any more, and that would read as if all were well.
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
        let (tell, told) = mpsc::channel();
        let file = folder.clone();
        // Who asked may have gone.
        self.beside(move |recorder| drop(tell.send(file.write(&recorder.finish(draft)))))?;
        told.recv_timeout(WRITTEN_WITHIN).unwrap_or_else(|_| {
            let seconds = WRITTEN_WITHIN.as_secs();
            let text = format!("{} has not taken it after {seconds} s", folder.path().display());
            Err(Error::new(ErrorKind::System, "write report", text).with_fix(format!(
                "look at the file system that it is on, or name another folder in {REPORTS_VARIABLE}"
            )))
        })
    }

    /// Runs `write` on a thread of its own.
    fn beside(&self, write: impl FnOnce(&Self) + Send + 'static) -> Result<()> {
        // The last owner of a desk has nothing to report any more.
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

    /// An error closes the communicator: the first one is reported. Returns at once.
    #[cold]
    pub(super) fn report_error(&self, error: &Error) {
        if self.folder.is_none() || self.is_retired() {
            return;
        }
        if self.is_claimed.swap(true, Ordering::AcqRel) {
            return;
        }
        // Before anything else: another thread may end the same communicator, and wait for the report.
        *self.told() = Written::Soon;
        let draft = self.capture(Reason {
            kind: error.kind().name().to_owned(),
            text: error.to_string(),
            rank: error.rank(),
        });
        if let Err(error) = self.beside(move |recorder| recorder.tell(recorder.keep(draft))) {
            self.tell(Written::Failed(error.to_string()));
        }
    }

    /// The communicator goes on without ranks that were lost; that an error may be told later stays as it is.
    /// Returns at once.
    #[cold]
    pub(super) fn report_masked(&self, lost: &[u32]) {
        if self.folder.is_none() || self.is_retired() {
            return;
        }
        let text = format!("goes on without {}", tokenyard_reports::explain::words::ranks(lost));
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

    fn tell(&self, told: Written) {
        *self.told() = told;
        self.written.notify_all();
    }

    /// Adds to an error that closed the communicator where its report is, and how to read it. The words are the
    /// same on all ranks that write to the same folder.
    #[cold]
    pub(super) fn point_to_report(&self, error: Error) -> Error {
        let Some(folder) = &self.folder else { return error };
        let writes = |told: &mut Written| matches!(told, Written::Soon);
        let told = self.written.wait_timeout_while(self.told(), PATIENCE, writes);
        let (told, _) = told.unwrap_or_else(PoisonError::into_inner);
        if let Written::Failed(why) = &*told {
            return error.with_context("report", format!("none, {why}"));
        }
        if matches!(&*told, Written::Nothing) {
            return error;
        }
        let error = match &*told {
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
        let fix =
            format!("read the ranks' reports: tokenyard explain {path}/tokenyard-{job}-*.json");
        let fix = match error.fix() {
            Some(first) => format!("{first}; {fix}"),
            None => fix,
        };
        error.with_fix(fix)
    }
}

/// A collective that fails is the end of the communicators of its world, whoever called it. While a communicator is
/// brought up around losses that are masked, it may be the reason to begin anew.
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

/// Reports may look at the parts of a communicator.
pub(super) struct Looking(Arc<FlightRecorder>);

impl Looking {
    /// Ends it. False where a component has not answered a question that it was asked: a thread is still in it,
    /// and it cannot be dropped.
    pub(super) fn end(&self) -> bool {
        // Waits for a report that is being captured.
        *self.0.live() = None;
        self.0.checkups.iter().all(|checkup| checkup.has_ended())
    }
}

/// While it lives, the communicator's thread is inside a call of an operation.
pub(super) struct InCall(Arc<FlightRecorder>);

impl InCall {
    /// After [`Track::send`] or [`Track::receive`].
    pub(super) fn new(recorder: &OpenDesk) -> Self {
        Self(Arc::clone(&recorder.0))
    }
}

impl Drop for InCall {
    fn drop(&mut self) {
        self.0.track.leave();
    }
}

/// The desk of a communicator; nothing is reported once it is dropped.
pub(super) struct OpenDesk(pub(super) Arc<FlightRecorder>);

impl Drop for OpenDesk {
    fn drop(&mut self) {
        self.0.is_retired.store(true, Ordering::Release);
    }
}
