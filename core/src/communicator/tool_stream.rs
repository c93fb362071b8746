//! A stream for callers without a stream of their own.

use std::sync::Arc;

use super::components::Components;
use super::stream::Stream;
use super::tensor::{TensorMut, TensorRef};
use crate::{Error, ErrorKind, Result};

/// A stream for callers without a stream of their own: tools and tests. It waits for no other stream;
/// [`TensorRef::to_vec`] and [`Communicator::buffer`](super::Communicator::buffer) wait for it. It holds the
/// communicator's components alive, and is destroyed after all work queued on it.
#[derive(Debug)]
pub struct ToolStream {
    pub(super) components: Arc<Components>,
    pub(super) stream: Stream,
}

impl ToolStream {
    pub(super) fn new(components: &Arc<Components>) -> Result<Self> {
        let raw = components.kernels().stream_create()?;
        Ok(Self { components: Arc::clone(components), stream: Stream { raw } })
    }

    /// The name of the stream, for calls.
    ///
    /// # Safety
    /// As [`Stream::new`]; `self` outlives the calls that take the name, and their outputs.
    pub unsafe fn stream(&self) -> Stream {
        self.stream
    }

    /// Queues a copy of a contiguous tensor over the front of another, both on the device.
    ///
    /// # Errors
    /// Host memory, gaps, or more bytes than the room; errors of the device.
    ///
    /// # Safety
    /// The memory of both stays allocated until the stream has passed the copy; all other uses of it
    /// are in the order of this stream.
    pub unsafe fn copy(&self, to: &TensorMut<'_>, from: &TensorRef<'_>) -> Result<()> {
        let bytes = |tensor: &TensorRef<'_>| {
            let whole = tensor.is_on_device() && tensor.is_contiguous();
            whole
                .then_some(tensor.rows() * tensor.cols())
                .zip(tensor.dtype())
                .map(|(n, d)| n * d.bytes())
        };
        let (room, wanted) = (bytes(&to.as_ref()), bytes(from));
        let (Some(bytes), true) = (wanted, wanted.is_some() && wanted <= room) else {
            let text = format!(
                "found {wanted:?} contiguous bytes on the device for room of {room:?}; expected no more \
                 than fit"
            );
            return Err(Error::new(ErrorKind::InvalidInput, "queue copy", text));
        };
        let (to, from) = (to.raw().data, from.raw().data);
        // SAFETY: a stream of this kernel set, and ranges of this length; the rest by this function's
        // contract.
        unsafe { self.components.kernels().copy_on(self.stream.raw(), to, from, bytes as u64) }
    }
}

impl Drop for ToolStream {
    fn drop(&mut self) {
        // SAFETY: made by `tool_stream`; a caller that took its name promised that no call holds it any
        // more.
        unsafe { self.components.kernels().stream_destroy(self.stream.raw()) }
    }
}
