//! The host's time in calls of the driver, by kind, for tools that look for the cost of an operation. Each thread
//! measures its own calls, and only where it was asked to.

use std::cell::Cell;
use std::time::Instant;

/// A kind of calls that operations make.
#[derive(Clone, Copy, Debug)]
pub(super) enum CallKind {
    Launch,
    Record,
    Wait,
    Write,
    AskCapture,
    AskEnd,
    Move,
    Allocate,
}

/// The kinds in words, in the order of [`CallKind`].
const NAMES: [&str; 8] = [
    "launch kernel",
    "record event",
    "wait for event",
    "write value",
    "ask for capture",
    "ask for end",
    "copy or zero",
    "allocate and zero",
];

/// The calls of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallTimes {
    /// The kind, in words.
    pub name: &'static str,
    /// The number of calls.
    pub calls: u64,
    /// Their time, including that of making the context current.
    pub ns: u64,
}

thread_local! {
    static IS_MEASURED: Cell<bool> = const { Cell::new(false) };
    static TIMES: Cell<[(u64, u64); NAMES.len()]> = const { Cell::new([(0, 0); NAMES.len()]) };
}

/// Runs a call of the driver, and adds its time if this thread measures.
pub(super) fn timed<T>(kind: CallKind, call: impl FnOnce() -> T) -> T {
    if !IS_MEASURED.get() {
        return call();
    }
    let start = Instant::now();
    let result = call();
    let ns = start.elapsed().as_nanos() as u64;
    let mut times = TIMES.get();
    let (calls, total) = &mut times[kind as usize];
    (*calls, *total) = (*calls + 1, *total + ns);
    TIMES.set(times);
    result
}

/// Whether this thread measures its calls of the driver from now on; returns those that it has measured since the
/// last time, by kind.
pub fn measure(is_measured: bool) -> Vec<CallTimes> {
    IS_MEASURED.set(is_measured);
    let times = TIMES.replace([(0, 0); NAMES.len()]);
    let named = NAMES.into_iter().zip(times);
    let made = named.map(|(name, (calls, ns))| CallTimes { name, calls, ns });
    made.filter(|times| times.calls > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_measures_its_own_calls_while_it_was_asked_to() {
        let call = || timed(CallKind::Record, || 7);
        assert_eq!(call(), 7);
        assert_eq!(measure(true), []);
        assert_eq!((call(), call()), (7, 7));
        std::thread::spawn(call).join().expect("a call");
        let found = measure(false);
        assert_eq!((found.len(), found[0].name, found[0].calls), (1, "record event", 2));
        call();
        assert_eq!(measure(false), []);
    }
}
