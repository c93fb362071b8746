//! Ranks that low-latency operations leave out.

use super::course::Course;
use crate::config::OnFailure;
use crate::{Error, ErrorKind, Result, abi};

/// The ranks that the operations of this rank leave out. See [`Communicator::masks`](super::Communicator::masks).
pub struct Masks<'c> {
    pub(super) course: &'c mut Course,
}

impl std::fmt::Debug for Masks<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Masks").field("rank", &self.course.rank()).finish_non_exhaustive()
    }
}

impl Masks<'_> {
    /// Ranks that the operations of this rank leave out now, in order: lost, [masked](Self::mask), or too late for a
    /// wait. Waits until all operations have ended, and the first halves of those that were not received. Local: no
    /// other rank takes part, and ranks may differ.
    ///
    /// # Errors
    /// As [`Communicator::flush`](super::Communicator::flush), but an open operation is no error; `Unsupported` where
    /// the kernel set leaves out lost ranks alone:
    /// [`Communicator::lost_ranks`](super::Communicator::lost_ranks) names them.
    pub fn ranks(&mut self) -> Result<Vec<u32>> {
        let course = &mut *self.course;
        course.check_open()?;
        check_taken(course)?;
        let masks = course.components.kernels().masks(course.components.shape.ranks);
        let masks = masks.map_err(|error| course.end_failed_now(error))?;
        Ok((0..).zip(masks).filter(|(_, mask)| *mask != 0).map(|(rank, _)| rank).collect())
    }

    /// Leaves a rank out of this rank's operations from now on, as if it were lost: nothing is sent to it, and nothing
    /// waits for it. Local; a rank that is masked by some ranks alone waits for those in vain.
    ///
    /// # Errors
    /// As [`ranks`](Self::ranks); `InvalidInput` for this rank, or a rank that is not there.
    pub fn mask(&mut self, rank: u32) -> Result<()> {
        self.check(rank)?;
        self.course.flush()?;
        check_taken(self.course)?;
        self.course.components.kernels().set_mask(rank, true)
    }

    /// Takes a rank back into the operations of all ranks, itself included. Collective. It must have called as many
    /// operations as the others.
    ///
    /// # Errors
    /// As [`mask`](Self::mask); a rank that is lost.
    pub fn unmask(&mut self, rank: u32) -> Result<()> {
        self.check(rank).map_err(|why| self.refuse_unmask(why))?;
        if rank == self.course.rank() {
            // Others may have sent rows to it meanwhile that it never took.
            return self.clear();
        }
        self.between_operations(|course| course.components.kernels().set_mask(rank, false))
    }

    /// Takes part in the call of [`unmask`](Self::unmask) that the other ranks make now, with a refusal, and returns
    /// it: they raise [`ErrorKind::Refused`], and no mask changes.
    pub fn refuse_unmask(&self, why: Error) -> Error {
        self.course.standing.world.refuse("unmask ranks", &why);
        why
    }

    /// Takes all ranks back that are not lost. Collective, as [`unmask`](Self::unmask).
    ///
    /// # Errors
    /// As [`ranks`](Self::ranks).
    pub fn clear(&mut self) -> Result<()> {
        self.between_operations(|course| {
            let (me, lost) = (course.rank(), course.lost_ranks());
            let mut others = (0..course.components.shape.ranks)
                .filter(|rank| *rank != me && !lost.contains(rank));
            others.try_for_each(|rank| course.components.kernels().set_mask(rank, false))
        })
    }

    /// Runs while no rank is inside an operation.
    fn between_operations(&mut self, run: impl FnOnce(&Course) -> Result<()>) -> Result<()> {
        let course = &mut *self.course;
        let flushed = course.flush();
        if course.is_closed() {
            return flushed;
        }
        // Others come to the barriers, whatever is wrong with this call.
        course.standing.world.barrier("unmask ranks")?;
        let done = flushed.and_then(|()| check_taken(course)).and_then(|()| run(course));
        course.standing.world.barrier("unmask ranks")?;
        done
    }

    fn check(&self, rank: u32) -> Result<()> {
        let ranks = self.course.components.shape.ranks;
        if rank < ranks {
            return Ok(());
        }
        let text = format!("rank: found {rank}; expected less than ranks = {ranks}");
        Err(Error::new(ErrorKind::InvalidInput, "mask ranks", text))
    }
}

/// Checks that the kernel set masks ranks that live.
fn check_taken(course: &Course) -> Result<()> {
    let has_masks = course.components.user.takes(abi::TY_KERNELS_CAP_MASKS);
    if has_masks && course.standing.world.on_failure() == OnFailure::Mask {
        return Ok(());
    }
    let why = match has_masks {
        true => "a lost rank ends this communicator",
        false => "the kernel set leaves out lost ranks alone",
    };
    let text = format!("found a call about masks; expected none: {why}");
    Err(Error::new(ErrorKind::Unsupported, "mask ranks", text)
        .with_fix("use kernels of a GPU with decode = \"low_latency\" and on_failure = \"mask\""))
}
