//! Graphs for tools. Frameworks capture their own.

use std::ffi::c_void;
use std::sync::Arc;

use tokenyard_core::Result;

use super::{Context, RawGraph, Stream};

/// The recorded work of a stream, ready to be launched.
#[derive(Debug)]
pub(crate) struct Graph {
    context: Arc<Context>,
    raw: RawGraph,
}

impl Graph {
    /// Starts to record the work that is queued on the stream. Other threads are not restricted.
    pub(crate) fn begin(stream: &Stream) -> Result<()> {
        let _entered = stream.context().enter()?;
        // SAFETY: a stream that lives.
        unsafe { stream.context().driver().graph_begin(stream.name()) }
    }

    /// Ends the recording.
    pub(crate) fn end(stream: &Stream) -> Result<Self> {
        let context = Arc::clone(stream.context());
        let _entered = stream.context().enter()?;
        // SAFETY: a stream that lives; the graph is destroyed on drop.
        let raw = unsafe { context.driver().graph_end(stream.name())? };
        Ok(Self { context, raw })
    }

    /// Launches the graph behind everything in the stream.
    ///
    /// # Safety
    /// The recorded work may run again.
    pub(crate) unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: graph and stream live; the rest by this function's contract.
        unsafe { self.context.driver().graph_launch(self.raw, stream.name()) }
    }

    /// As the ABI passes it.
    pub(crate) fn pointer(&self) -> *mut c_void {
        self.raw.0
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: made by `end`; the driver lets a launch that runs finish.
        unsafe { self.context.driver().graph_destroy(self.raw) };
    }
}
