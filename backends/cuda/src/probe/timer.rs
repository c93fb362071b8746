//! Times of calls on a stream.

use std::ffi::c_void;
use std::sync::Arc;

use tokenyard_core::Result;

use crate::config::CudaConfig;
use crate::driver::{Context, Device, Event, RawStream};

/// Marks in a stream, and the times between them by the device's clock.
#[derive(Debug)]
pub struct Timer {
    context: Arc<Context>,
    marks: Vec<Event>,
}

impl Timer {
    /// For the device that the kernel set of this config drives.
    ///
    /// # Errors
    /// No driver, or no such GPU.
    pub fn new(config: &CudaConfig) -> Result<Self> {
        Ok(Self { context: Context::retain(Device::choose(config.device)?)?, marks: Vec::new() })
    }

    /// Puts a mark behind everything that is queued on the stream by now.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// `stream` is a stream of this device that lives.
    pub unsafe fn mark(&mut self, stream: *mut c_void) -> Result<()> {
        let mark = Event::timed(&self.context)?;
        mark.record(RawStream::of(stream))?;
        self.marks.push(mark);
        Ok(())
    }

    /// Microseconds between each mark and the one before it, and forgets them. The stream has passed all.
    ///
    /// # Errors
    /// A mark that was not passed, or what ended the stream's work.
    pub fn take(&mut self) -> Result<Vec<f64>> {
        let marks = std::mem::take(&mut self.marks);
        marks.windows(2).map(|pair| pair[1].us_since(&pair[0])).collect()
    }
}
