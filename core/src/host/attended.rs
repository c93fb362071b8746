//! The cold calls of components, so that one that does not return can be named: who calls it waits on another thread.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::bootstrap::Announcer;

/// A call of a component that has not returned.
#[derive(Clone, Debug)]
pub(crate) struct ColdCall {
    kind: &'static str,
    component: Cow<'static, str>,
    slot: &'static str,
    pub(crate) since: Instant,
}

impl fmt::Display for ColdCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, component, slot, .. } = self;
        write!(f, "{kind} `{component}` is inside of `{slot}`")
    }
}

impl ColdCall {
    /// The call, for the other ranks.
    fn name(&self) -> String {
        let Self { kind, component, slot, .. } = self;
        format!("`{slot}` of {kind} `{component}`")
    }
}

/// The innermost call that a thread is in, for another thread, and for the other ranks.
#[derive(Debug, Default)]
pub(crate) struct Attended {
    call: Mutex<Option<ColdCall>>,
    announcer: Option<Announcer>,
    /// The call that the other ranks know of. It stays between calls of one slot, of which there are as many as peers.
    announced: Mutex<String>,
}

thread_local! {
    /// Set while this thread is attended.
    static MINE: RefCell<Option<Arc<Attended>>> = const { RefCell::new(None) };
}

impl Attended {
    /// Runs `work` on this thread, whose calls [`now`](Self::now) gives.
    pub(crate) fn attend(self: Arc<Self>, work: impl FnOnce()) {
        MINE.set(Some(Arc::clone(&self)));
        work();
        MINE.set(None);
        self.announce(String::new());
    }

    /// Calls that the other ranks learn of before they are made.
    pub(crate) fn announced_by(announcer: Announcer) -> Self {
        Self { announcer: Some(announcer), ..Self::default() }
    }

    fn announce(&self, call: String) {
        let Some(announcer) = &self.announcer else { return };
        let mut announced = self.announced.lock().unwrap_or_else(PoisonError::into_inner);
        if *announced != call {
            announcer.announce(&call);
            *announced = call;
        }
    }

    /// The call under way.
    pub(crate) fn now(&self) -> Option<ColdCall> {
        self.call.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn swap(&self, call: Option<ColdCall>) -> Option<ColdCall> {
        std::mem::replace(&mut *self.call.lock().unwrap_or_else(PoisonError::into_inner), call)
    }
}

/// Runs `call`, which calls a slot of a component, or loads its library.
pub(crate) fn attended<T>(
    kind: &'static str,
    component: impl Into<Cow<'static, str>>,
    slot: &'static str,
    call: impl FnOnce() -> T,
) -> T {
    let Some(mine) = MINE.with_borrow(Clone::clone) else { return call() };
    // A component may call another one.
    let component = component.into();
    let cold = ColdCall { kind, component, slot, since: Instant::now() };
    mine.announce(cold.name());
    let outer = mine.swap(Some(cold));
    let result = call();
    mine.swap(outer);
    result
}

/// The part of a calling thread that components of a kernel set read: the device that a framework chose there.
#[derive(Debug)]
pub struct ThreadPart {
    /// The kernel set.
    pub kernels: &'static str,
    /// The value on this thread.
    pub get: fn() -> usize,
    /// Has components find this value on this thread.
    pub set: fn(usize),
}

inventory::collect!(ThreadPart);

/// The parts of a thread that another one takes over, which goes on for it.
#[derive(Debug)]
pub(crate) struct ThreadContext(Vec<(&'static ThreadPart, usize)>);

impl ThreadContext {
    /// The parts of this thread, for a config with these kernels.
    pub(crate) fn of_this_thread(kernels: &str) -> Self {
        let parts = inventory::iter::<ThreadPart>.into_iter();
        let parts = parts.filter(|part| part.kernels == kernels);
        Self(parts.map(|part| (part, (part.get)())).collect())
    }

    pub(crate) fn adopt(&self) {
        self.0.iter().for_each(|(part, value)| (part.set)(*value));
    }
}

#[cfg(test)]
mod tests;
