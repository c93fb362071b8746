//! Graphs for tools and tests: frameworks capture their own.

use std::ffi::c_void;
use std::sync::Arc;

use super::components::Components;
use super::tool_stream::ToolStream;
use crate::{Error, ErrorKind, Result};

/// A graph: the work that was queued on a [`ToolStream`] during a capture, to be launched any number of
/// times.
#[derive(Debug)]
pub struct ToolGraph {
    components: Arc<Components>,
    raw: *mut c_void,
}

// SAFETY: a name for a graph, which any thread may use; calls go through the lock of the components.
unsafe impl Send for ToolGraph {}

impl ToolStream {
    /// Starts a capture: work queued on this stream from now on is recorded, and does not run, until
    /// [`end_capture`](Self::end_capture). Until then no call may wait for the stream: no buffer may be
    /// made, read or dropped.
    ///
    /// # Errors
    /// `Unsupported` where the kernel set has no graphs; errors of the device.
    pub fn begin_capture(&self) -> Result<()> {
        // SAFETY: a stream of this kernel set.
        unsafe { self.components.kernels().graph_begin(self.stream.raw()) }
    }

    /// Ends the capture.
    ///
    /// # Errors
    /// No capture was started; errors of the device for the graph.
    pub fn end_capture(&self) -> Result<ToolGraph> {
        // SAFETY: a stream of this kernel set.
        let raw = unsafe { self.components.kernels().graph_end(self.stream.raw())? };
        Ok(ToolGraph { components: Arc::clone(&self.components), raw })
    }

    /// Launches a graph on this stream.
    ///
    /// # Errors
    /// A graph of another communicator; errors of the device.
    ///
    /// # Safety
    /// The contracts of [`OnStream::without_sync`](super::OnStream::without_sync) and [`ToolStream::copy`]
    /// for the recorded calls hold for this launch.
    pub unsafe fn launch(&self, graph: &ToolGraph) -> Result<()> {
        if !Arc::ptr_eq(&self.components, &graph.components) {
            let text = "the graph belongs to another communicator";
            return Err(Error::new(ErrorKind::InvalidInput, "launch graph", text));
        }
        // SAFETY: stream and graph of this kernel set; the rest by this function's contract.
        unsafe { self.components.kernels().graph_launch(self.stream.raw(), graph.raw) }
    }
}

impl Drop for ToolGraph {
    fn drop(&mut self) {
        // SAFETY: made by `end_capture`; no owner is left that could launch it.
        unsafe { self.components.kernels().graph_destroy(self.raw) }
    }
}
