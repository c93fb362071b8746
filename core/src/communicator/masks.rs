//! Ranks that low-latency operations leave out.

use super::Communicator;
use crate::{Error, ErrorKind, Result};

impl Communicator {
    /// Ranks that the operations of this rank leave out now, in order: lost, masked by
    /// [`mask_rank`](Self::mask_rank), or too late for a wait. Waits until all operations have ended, and the first
    /// halves of those that were not received. Local: no other rank takes part, and ranks may differ.
    ///
    /// # Errors
    /// As [`flush`](Self::flush), but an open operation is no error; `Unsupported` where the kernel set leaves out lost
    /// ranks alone: [`lost_ranks`](Self::lost_ranks) names them.
    pub fn masked_ranks(&mut self) -> Result<Vec<u32>> {
        self.check_open()?;
        let masks = self.components.kernels().masks(self.shape.ranks);
        let masks = masks.map_err(|error| match error.kind() {
            ErrorKind::Unsupported => error,
            _ => self.end_failed(self.next_operation, error),
        })?;
        Ok((0..).zip(masks).filter(|(_, mask)| *mask != 0).map(|(rank, _)| rank).collect())
    }

    /// Leaves a rank out of this rank's operations from now on, as if it were lost: nothing is sent to it, and nothing
    /// waits for it. Local; a rank that is masked by some ranks alone waits for those in vain.
    ///
    /// # Errors
    /// As [`masked_ranks`](Self::masked_ranks); `InvalidInput` for this rank, or a rank that is not there.
    pub fn mask_rank(&mut self, rank: u32) -> Result<()> {
        self.check_masked(rank)?;
        self.flush()?;
        self.components.kernels().set_mask(rank, true)
    }

    /// Takes a rank back into the operations of all ranks, itself included. Collective. It must have called as many
    /// operations as the others.
    ///
    /// # Errors
    /// As [`mask_rank`](Self::mask_rank); a rank that is lost.
    pub fn unmask_rank(&mut self, rank: u32) -> Result<()> {
        self.check_masked(rank).map_err(|why| self.refuse_unmask(why))?;
        if rank == self.rank() {
            // Others may have sent rows to it meanwhile that it never took.
            return self.clear_masks();
        }
        self.between_operations(|comm| comm.components.kernels().set_mask(rank, false))
    }

    /// Takes part in the call of [`unmask_rank`](Self::unmask_rank) that the other ranks make now, with a refusal, and
    /// returns it: they raise [`ErrorKind::Refused`], and no mask changes.
    pub fn refuse_unmask(&self, why: Error) -> Error {
        self.world.refuse("unmask ranks", &why);
        why
    }

    /// Takes all ranks back that are not lost. Collective, as [`unmask_rank`](Self::unmask_rank).
    ///
    /// # Errors
    /// As [`masked_ranks`](Self::masked_ranks).
    pub fn clear_masks(&mut self) -> Result<()> {
        self.between_operations(|comm| {
            let (me, lost) = (comm.rank(), comm.lost_ranks());
            let mut others =
                (0..comm.shape.ranks).filter(|rank| *rank != me && !lost.contains(rank));
            others.try_for_each(|rank| comm.components.kernels().set_mask(rank, false))
        })
    }

    /// Runs while no rank is inside an operation.
    fn between_operations(&mut self, run: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        let flushed = self.flush();
        if self.is_closed() {
            return flushed;
        }
        // Others come to the barriers, whatever is wrong with this call.
        self.world.barrier("unmask ranks")?;
        let done = flushed.and_then(|()| run(self));
        self.world.barrier("unmask ranks")?;
        done
    }

    fn check_masked(&self, rank: u32) -> Result<()> {
        if rank < self.shape.ranks {
            return Ok(());
        }
        let text = format!("rank: found {rank}; expected less than ranks = {}", self.shape.ranks);
        Err(Error::new(ErrorKind::InvalidInput, "mask ranks", text))
    }
}
