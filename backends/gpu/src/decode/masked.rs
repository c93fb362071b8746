//! Masks that a caller reads, or changes by hand.

use tokenyard_core::{Error, ErrorKind, Result};

use crate::engine::Engine;
use crate::engine::masking::Masks;
use crate::moe::state::MoeState;

/// Masks of one exchange.
#[derive(Debug)]
pub(crate) struct Masked<'a> {
    pub(crate) engine: &'a mut Engine,
    pub(crate) moe: &'a MoeState,
}

impl Masked<'_> {
    fn masks_or_none(&self) -> Result<&Masks> {
        self.engine.waits.masks.as_ref().ok_or_else(|| {
            let text = "found a call about masks; expected none, because a lost rank ends this communicator";
            Error::new(ErrorKind::Unsupported, "mask ranks", text)
                .with_fix("set on_failure = \"mask\", and decode = \"low_latency\" for the kernels")
        })
    }

    /// By rank: whether operations leave it out, once all work has ended that was launched.
    pub(crate) fn read(&mut self) -> Result<Vec<bool>> {
        self.masks_or_none()?;
        self.engine.flush()?;
        self.masks_or_none()?.read(self.engine.order.context())
    }

    /// Masks or unmasks a rank between operations.
    pub(crate) fn set(&mut self, rank: u32, is_masked: bool) -> Result<()> {
        self.masks_or_none()?.check(rank, is_masked)?;
        self.engine.flush()?;
        if let Some(decode) = self.moe.sizes.decode.filter(|_| !is_masked) {
            // It may have sent rows that nothing took.
            for (at, bytes) in decode.rows_of(&self.moe.exchange, rank) {
                self.engine.order.stream.zero(self.moe.control + at, bytes)?;
            }
            self.engine.order.stream.synchronize()?;
        }
        self.masks_or_none()?.write(self.engine.order.context(), rank, is_masked)
    }
}
