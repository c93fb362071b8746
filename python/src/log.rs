//! Warnings of core and of its components, for the logger `tokenyard` of Python's `logging`.
//!
//! They come from any thread, which may hold a lock that a thread with the GIL wants. So they go through a queue to a
//! thread of its own, which starts with the first one.

use std::collections::HashSet;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use pyo3::prelude::*;
use tokenyard_core::bootstrap::{EventText, ToRankZero, World};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata};

use crate::{exit, owned};

/// Texts that are remembered, so that each is logged once.
const KNOWN: usize = 1024;
/// The method of a logger for warnings.
const WARNING: &str = "warning";
/// How long the end of the interpreter waits for what is in the queue.
const PATIENCE: Duration = Duration::from_millis(500);

enum Item {
    Text(Warned),
    /// Answered once everything before it is logged.
    Flush(SyncSender<()>),
}

struct Warned {
    /// The method of a logger.
    method: &'static str,
    text: String,
    /// The rank that passed it on to this one.
    of: Option<u32>,
}

/// The ways to rank 0 of the worlds of a process.
static WORLDS: Mutex<Vec<(u32, ToRankZero)>> = Mutex::new(Vec::new());

/// Has rank 0 of this world show the warnings of this process, too, as long as it has not ended.
pub(crate) fn add_world(world: &World) {
    if let Some(mut worlds) = lock(&WORLDS) {
        worlds.retain(|(_, known)| known.is_open());
        worlds.push((owned::process(), world.warnings()));
    }
}

/// Passes a warning on to rank 0. False where this process is to show it.
fn pass(text: &str) -> bool {
    let Some(worlds) = lock(&WORLDS) else { return false };
    let is_open = |(of, world): &&(u32, ToRankZero)| *of == owned::process() && world.is_open();
    let mut open = worlds.iter().filter(is_open).map(|(_, world)| world).peekable();
    !open.clone().any(ToRankZero::is_rank_zero) && open.any(|world| world.pass(text))
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

/// The value behind a lock; none in a forked child where a thread of the parent held it, which is for a moment only.
fn lock<T>(lock: &'static Mutex<T>) -> Option<MutexGuard<'static, T>> {
    for _ in 0..10_000 {
        match lock.try_lock() {
            Ok(value) => return Some(value),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
    None
}

/// Queues an item; starts the thread if it `may_start`. False where no thread reads it.
fn send(item: Item, may_start: bool) -> bool {
    let Some(mut queue) = lock(&QUEUE) else { return false };
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
    let (mut known, mut shown) = (Texts::default(), Texts::default());
    for item in items {
        match item {
            Item::Flush(done) => drop(done.send(())),
            Item::Text(Warned { method, text, of }) => {
                let is_warning = method == WARNING;
                let is_new = of.is_some() || known.insert(&text);
                let is_mine = of.is_some() || !is_warning;
                if is_new && (is_mine || !pass(&text)) && shown.insert(&text) && !exit::is_near() {
                    let text = of.map_or(text.clone(), |rank| EventText::of_rank(rank, &text));
                    // A handler's error has no caller that it could reach.
                    let _ = Python::try_attach(|py| log(py, method, &text));
                }
            }
        }
    }
}

/// The last texts.
#[derive(Default)]
struct Texts(HashSet<String>);

impl Texts {
    /// False for one that it has.
    fn insert(&mut self, text: &str) -> bool {
        if self.0.len() >= KNOWN {
            self.0.clear();
        }
        self.0.insert(text.to_owned())
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
        let method = if *event.metadata().level() == Level::ERROR { "error" } else { WARNING };
        let EventText { text, passed_by: of, .. } = EventText::of(event);
        send(Item::Text(Warned { method, text, of }), true);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
