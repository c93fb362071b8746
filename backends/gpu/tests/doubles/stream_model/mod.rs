//! A model of a driver, for tests without a GPU: streams, events, and captures of graphs, by CUDA's rules. Work is a
//! node that knows all work that comes before it. Nothing runs: a query that finds pending work lets it pass, so the
//! next one finds that it has ended.
//!
//! The model belongs to a thread, as tests do. [`reset`] empties it.

mod calls;
mod past;
mod state;
mod tests;

use std::cell::RefCell;
use std::sync::Arc;

use tokenyard_core::Result;

pub(crate) use past::Past;
use state::ModelState;
pub(crate) use state::Order;

use super::{Context, Device, RawStream};
use crate::platform::Platform;
use crate::platform::tests::platform_of;

/// The driver: its state is the thread's.
#[derive(Debug)]
pub(crate) struct StreamModel;

thread_local! {
    static STATE: RefCell<ModelState> = RefCell::new(ModelState::default());
}

/// Uses the state of this thread.
fn with<T>(f: impl FnOnce(&mut ModelState) -> T) -> T {
    STATE.with_borrow_mut(f)
}

static PLATFORM: Platform = platform_of(&StreamModel);

/// An empty model, and the context of its device.
pub(crate) fn reset() -> Arc<Context> {
    with(|state| *state = ModelState::default());
    let device = Device::choose(&PLATFORM, Some(0)).expect("the model has a device");
    Context::retain(device).expect("the model has a context")
}

/// Queues a node on a stream.
pub(crate) fn work(stream: RawStream) -> usize {
    with(|state| state.work(stream))
}

/// The capture that a node belongs to, and the work before it.
pub(crate) fn node(node: usize) -> (Option<u64>, Past) {
    with(|state| (state.nodes[node].capture, state.nodes[node].past.clone()))
}

/// Whether a node has run, and its result is there for all work that is queued from now on.
pub(crate) fn is_done(node: usize) -> bool {
    with(|state| state.nodes[node].is_done)
}

/// The work that was queued on a stream, and all before it: what runs, or what its capture records.
pub(crate) fn end_of(stream: RawStream, order: Order) -> Past {
    with(|state| state.end_of(stream, order))
}

/// The number of the capture of a stream.
pub(crate) fn capture_of(stream: RawStream) -> Option<u64> {
    with(|state| state.capture_of(stream))
}

/// Starts a capture in global mode.
pub(crate) fn begin(stream: RawStream) {
    with(|state| state.begin(stream));
}

/// Ends the capture that was started on a stream.
pub(crate) fn end(stream: RawStream) -> Result<()> {
    with(|state| state.end(stream))
}

/// Lets the present work of a stream run, unless a graph records it.
pub(crate) fn pass(stream: RawStream) {
    with(|state| state.pass(stream));
}

/// The errors that calls have got so far, also those that the caller ignored.
pub(crate) fn errors() -> Vec<String> {
    with(|state| state.errors.clone())
}
