//! Warnings of core and of its components, for the logger `tokenyard` of Python's `logging`.
//!
//! They come from any thread, which may hold a lock that a thread with the GIL wants. So they go through a queue to a
//! thread of its own, which starts with the first one.

use std::collections::HashSet;
use std::fmt::{Debug, Write as _};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata};

use crate::{exit, owned};

/// Texts that are remembered, so that each is logged once.
const KNOWN: usize = 1024;
/// How long the end of the interpreter waits for what is in the queue.
const PATIENCE: Duration = Duration::from_millis(500);

enum Item {
    /// The method of a logger, and the text.
    Line(&'static str, String),
    /// Answered once everything before it is logged.
    Flush(SyncSender<()>),
}

/// The queue, and the process whose thread reads it: a forked child has none.
static QUEUE: Mutex<Queue> = Mutex::new(None);

/// Has warnings logged from now on.
pub(crate) fn register() {
    // It fails where this process has another subscriber: then that one gets them.
    let _ = tracing::subscriber::set_global_default(Forward);
}

/// Waits until what was warned of is logged.
pub(crate) fn flush(py: Python<'_>) {
    py.detach(|| {
        let (done, is_done) = sync_channel(1);
        if send(Item::Flush(done), false) {
            // A handler of the caller may hang.
            let _: Result<(), RecvTimeoutError> = is_done.recv_timeout(PATIENCE);
        }
    });
}

type Queue = Option<(u32, Sender<Item>)>;

/// The queue; none in a forked child where another thread of the parent held the lock, which is held for no time else.
fn lock() -> Option<MutexGuard<'static, Queue>> {
    for _ in 0..10_000 {
        match QUEUE.try_lock() {
            Ok(queue) => return Some(queue),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
    None
}

/// Queues an item; starts the thread if it `may_start`. False where no thread reads it.
fn send(item: Item, may_start: bool) -> bool {
    let Some(mut queue) = lock() else { return false };
    let process = owned::process();
    let is_mine = queue.as_ref().is_some_and(|(of, _)| *of == process);
    if !is_mine && may_start {
        let (sender, receiver) = channel();
        let thread = std::thread::Builder::new().name("tokenyard-log".into());
        if thread.spawn(move || write(&receiver)).is_err() {
            return false;
        }
        // The queue of a parent is not dropped: its lock may be held for ever, too.
        std::mem::forget(queue.replace((process, sender)));
    }
    match queue.as_ref() {
        Some((of, sender)) if *of == process => sender.send(item).is_ok(),
        _ => false,
    }
}

/// The thread.
fn write(items: &Receiver<Item>) {
    let mut known = HashSet::new();
    for item in items {
        match item {
            Item::Flush(done) => drop(done.send(())),
            Item::Line(method, text) => {
                if known.len() >= KNOWN {
                    known.clear();
                }
                if known.insert(text.clone()) && !exit::is_near() {
                    // A handler's error has no caller that it could reach.
                    let _ = Python::try_attach(|py| log(py, method, &text));
                }
            }
        }
    }
}

fn log(py: Python<'_>, method: &str, text: &str) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", ("tokenyard",))?;
    logger.call_method1(method, (text,)).map(drop)
}

/// The subscriber of this module's code.
struct Forward;

impl tracing::Subscriber for Forward {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::WARN)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let is_error = *event.metadata().level() == Level::ERROR;
        let mut text = Text(String::new());
        event.record(&mut text);
        send(Item::Line(if is_error { "error" } else { "warning" }, text.0), true);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The message of an event, and its other fields behind it.
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // A write to memory does not fail.
        let _ = match field.name() {
            "message" => write!(self.0, "{value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}
