//! Times of calls on a stream.

use std::ffi::c_void;

use tokenyard_core::{Error, ErrorKind, Result};

use crate::config::GpuConfig;
use crate::driver::{Context, Device, Event, RawStream};
use crate::platform::Platform;

/// Marks in a stream, and the times between them by the device's clock.
#[derive(Debug)]
pub struct Timer {
    marks: Vec<Event>,
    /// Marks that were recorded.
    used: usize,
}

impl Timer {
    /// A timer for the device that the kernel set of this config drives, with at most this many
    /// marks.
    ///
    /// # Errors
    /// No driver, or no such GPU.
    pub fn new(platform: &'static Platform, config: &GpuConfig, most: usize) -> Result<Self> {
        let context = Context::retain(Device::choose(platform, config.ordinal())?)?;
        let marks = (0..most).map(|_| Event::timed(&context)).collect::<Result<_>>()?;
        Ok(Self { marks, used: 0 })
    }

    /// Records a mark behind all work that is queued on the stream by now.
    ///
    /// # Errors
    /// No mark is left; an error of the driver.
    ///
    /// # Safety
    /// `stream` is a stream of this device that lives.
    pub unsafe fn mark(&mut self, stream: *mut c_void) -> Result<()> {
        let Some(mark) = self.marks.get(self.used) else {
            let text = format!("found {} marks already; expected fewer", self.used);
            return Err(Error::new(ErrorKind::InvalidInput, "mark stream", text));
        };
        self.used += 1;
        mark.record(RawStream::of(stream))
    }

    /// Microseconds between each mark and the one before it, and clears them. The stream has passed all.
    ///
    /// # Errors
    /// A mark that was not passed, or the error that ended the stream's work.
    pub fn take(&mut self) -> Result<Vec<f64>> {
        let marks = &self.marks[..std::mem::take(&mut self.used)];
        marks.windows(2).map(|pair| pair[1].us_since(&pair[0])).collect()
    }
}
