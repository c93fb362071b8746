//! Graphs of tools. Frameworks capture their own.

use std::ffi::c_void;
use std::sync::Arc;

use tokenyard_core::Result;

use super::{Context, Stream, check, sys};

/// What a stream recorded, ready to be launched.
#[derive(Debug)]
pub(crate) struct Graph {
    context: Arc<Context>,
    raw: sys::CUgraphExec,
}

// SAFETY: a graph may be used by one thread after another; calls come one at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// What is queued on the stream from now on is recorded. Other threads may do as they like.
    pub(crate) fn begin(stream: &Stream) -> Result<()> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let _entered = stream.context().enter()?;
        // SAFETY: a stream that lives.
        check("begin capture", unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) })
    }

    /// Ends the recording.
    pub(crate) fn end(stream: &Stream) -> Result<Self> {
        let context = Arc::clone(stream.context());
        let _entered = stream.context().enter()?;
        let (mut graph, mut raw) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a stream that lives; what it gives is destroyed below.
        check("end capture", unsafe { sys::cuStreamEndCapture(stream.raw(), &mut graph) })?;
        // SAFETY: the graph of just now; what it is made into is destroyed on drop.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut raw, graph, 0) };
        // SAFETY: as above.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
        check("make graph", made)?;
        Ok(Self { context, raw })
    }

    /// Launches it behind everything in the stream.
    ///
    /// # Safety
    /// What was recorded may run again.
    pub(crate) unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: graph and stream live; the rest by this function's contract.
        check("launch graph", unsafe { sys::cuGraphLaunch(self.raw, stream.raw()) })
    }

    /// As the ABI passes it.
    pub(crate) fn pointer(&self) -> *mut c_void {
        self.raw.cast()
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: made by `end`; the driver lets a launch that runs finish.
        let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
    }
}
