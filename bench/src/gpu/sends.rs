//! Times of the sending halves of operations that no call waits for.
//!
//! Marks of the device's clock stand before and behind each send, and its receive follows the second one. So
//! the time is that of a launch and of the kernel that sends; the kernel that receives is not in it.

use anyhow::Result;
use tokenyard_core::communicator::{
    Buffer, Combine, Communicator, Dispatch, Handle, Stream, TensorRef,
};
use tokenyard_core::moe::DType;
use tokenyard_gpu::probe::Timer;

use super::exchange::{GpuBench, WARM_UP};

impl GpuBench {
    /// The time of each send of a dispatch, in microseconds. Collective.
    pub(super) fn time_dispatch_sends(&mut self, call: &Dispatch<'_>) -> Result<Vec<f64>> {
        self.time_sends(&mut |comm, stream, timer| {
            let sent = comm.on(stream).without_sync().dispatch_send(call)?;
            // SAFETY: a live stream of the communicator's device.
            unsafe { timer.mark(stream.raw())? };
            Ok(comm.dispatch_recv(sent).map(drop)?)
        })
    }

    /// The time of each send of a combine, in microseconds. Collective.
    pub(super) fn time_combine_sends(
        &mut self,
        handle: &Handle,
        x: TensorRef<'_>,
        out: &mut Buffer,
        shape: [usize; 2],
    ) -> Result<Vec<f64>> {
        self.time_sends(&mut |comm, stream, timer| {
            let call = Combine::new(x, out.tensor_mut(DType::Bf16, shape)?);
            let sent = comm.on(stream).without_sync().combine_send(handle, call)?;
            // SAFETY: a live stream of the communicator's device.
            unsafe { timer.mark(stream.raw())? };
            Ok(comm.combine_recv(sent)?)
        })
    }

    /// `run` sends, marks the stream and receives.
    fn time_sends(
        &mut self,
        run: &mut dyn FnMut(&mut Communicator, Stream, &mut Timer) -> Result<()>,
    ) -> Result<Vec<f64>> {
        let tool = self.comm.tool_stream()?;
        // SAFETY: it is destroyed at the end of this function, after the communicator was flushed; the
        // tensors of `run` outlive that, and the outputs that `run` gets are dropped before.
        let stream = unsafe { tool.stream() };
        self.world.barrier("time sends")?;
        let before = self.lateness();
        let ran = (0..WARM_UP + self.samples).try_for_each(|_| {
            // SAFETY: a live stream of the communicator's device.
            unsafe { self.timer.mark(stream.raw())? };
            run(&mut self.comm, stream, &mut self.timer)
        });
        self.comm.flush()?;
        ran?;
        // Copies wait for the streams of tools.
        let _waited = self.comm.buffer(&[0])?;
        self.note_lateness(before);
        // Sends and receives take turns; the last receive has no mark behind it.
        let us = self.timer.take()?;
        Ok(us.into_iter().step_by(2).skip(WARM_UP as usize).collect())
    }
}
