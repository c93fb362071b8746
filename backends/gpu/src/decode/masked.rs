//! Masks that a caller reads, or changes by hand.

use tokenyard_core::{Error, ErrorKind, Result};

use crate::engine::Engine;
use crate::engine::masking::Masks;

impl Engine {
    fn masks_or_none(&self) -> Result<&Masks> {
        self.launcher.waits.masks.as_ref().ok_or_else(|| {
            let text = "found a call about masks; expected none, because a lost rank ends this communicator";
            Error::new(ErrorKind::Unsupported, "mask ranks", text)
                .with_fix("set on_failure = \"mask\", and decode = \"low_latency\" for the kernels")
        })
    }

    /// By rank: whether operations leave it out, once all work has ended that was launched.
    pub(crate) fn masks(&mut self) -> Result<Vec<bool>> {
        self.masks_or_none()?;
        self.flush()?;
        self.masks_or_none()?.read(self.order.context())
    }

    /// Masks or unmasks a rank between operations.
    pub(crate) fn set_mask(&mut self, rank: u32, is_masked: bool) -> Result<()> {
        self.masks_or_none()?.check(rank, is_masked)?;
        self.flush()?;
        if let Some(decode) = self.sizes.decode.filter(|_| !is_masked) {
            // It may have sent rows that nothing took.
            for (at, bytes) in decode.rows_of(&self.exchange, rank) {
                self.order.stream.zero(self.control + at, bytes)?;
            }
            self.order.stream.synchronize()?;
        }
        self.masks_or_none()?.write(self.order.context(), rank, is_masked)
    }
}
