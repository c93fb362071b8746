//! Ranks that operations go on without: see `masking.cuh`.
//!
//! The watchdog says which ranks are lost. Kernels cannot read its table, so the observer passes each loss on to
//! pinned memory, where a kernel that waits looks for it.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::driver::{Buffer, Context, Pinned, copy};
use crate::engine::args::Masking;
use crate::engine::member::Member;

/// Most ranks of which some may be masked: `kMostMasked` of the kernels.
const MOST_RANKS: u32 = 128;
/// Words that are settled about each rank and slot: `kSettled` of the kernels.
const SETTLED: u64 = 3;

/// The masks of one communicator.
#[derive(Debug)]
pub(crate) struct Masks {
    /// By rank, written by the watchdog.
    lost: &'static [AtomicU8],
    passed_on: Pinned<u64>,
    masks: Buffer,
    settled: Buffer,
    leaving: Buffer,
    after: Option<Duration>,
    rank: u32,
    /// The arguments, for waits of kernels.
    shared: OnceLock<Buffer>,
}

impl Masks {
    /// Makes the masks; none where a lost rank ends the communicator. A wait for a live rank masks the rank when it
    /// has lasted `after`. `ends`: the reason why operations do not go on without a rank.
    ///
    /// # Errors
    /// `Unsupported` where the exchange, or a communicator without some ranks, has no masks.
    ///
    /// # Safety
    /// The plan's table of lost ranks outlives the result.
    pub(crate) unsafe fn new(
        context: &Arc<Context>,
        member: &Member,
        ends: Option<&str>,
        plan: &abi::TyPlan,
        after: Option<Duration>,
    ) -> Result<Option<Self>> {
        if plan.lost.is_null() {
            return Ok(None);
        }
        let ranks = member.ranks;
        // SAFETY: R bytes that are only accessed atomically, by this function's contract.
        let lost =
            unsafe { std::slice::from_raw_parts(plan.lost.cast::<AtomicU8>(), ranks as usize) };
        check(ranks, ends, lost)?;
        let of = |words: u64| Buffer::new(context, words * u64::from(ranks));
        Ok(Some(Self {
            lost,
            passed_on: Pinned::new(context, ranks as usize)?,
            masks: of(4)?,
            settled: of(8 * SETTLED * u64::from(member.slots))?,
            leaving: Buffer::new(context, 4)?,
            after,
            rank: member.rank,
            shared: OnceLock::new(),
        }))
    }

    /// The address of the arguments in device memory.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn shared(&self, context: &Arc<Context>) -> Result<u64> {
        let made = Buffer::of(context, &[self.arguments()])?;
        Ok(self.shared.get_or_init(|| made).address())
    }

    /// The arguments of kernels.
    pub(crate) fn arguments(&self) -> Masking {
        let after_ns = self.after.map_or(u64::MAX, |after| after.as_nanos() as u64);
        Masking {
            masks: self.masks.address(),
            lost: self.passed_on.at(0) as u64,
            settled: self.settled.address(),
            leaving: self.leaving.address(),
            after_ns,
            rank: self.rank,
            reserved: 0,
        }
    }

    /// By rank: whether operations leave it out.
    pub(crate) fn read(&self, context: &Context) -> Result<Vec<bool>> {
        let mut words = vec![0_u32; self.lost.len()];
        copy(context, words.as_mut_ptr() as u64, self.masks.address(), 4 * words.len() as u64)?;
        Ok(words.into_iter().map(|word| word & 1 != 0).collect())
    }

    /// Checks that a rank may be masked, or unmasked, by hand.
    pub(crate) fn check(&self, rank: u32, is_masked: bool) -> Result<()> {
        let refuse = |found: &str| {
            let text = format!("found {found}; expected another rank that lives");
            Err(Error::new(ErrorKind::InvalidInput, "mask ranks", text).with_rank(rank))
        };
        if rank == self.rank {
            return refuse("this rank");
        }
        match self.lost.get(rank as usize) {
            None => refuse("no such rank"),
            Some(lost) if lost.load(Ordering::Acquire) != 0 && !is_masked => {
                refuse("a rank that is lost, and comes back only to a renewed communicator")
            }
            Some(_) => Ok(()),
        }
    }

    pub(crate) fn write(&self, context: &Context, rank: u32, is_masked: bool) -> Result<()> {
        let word = u32::from(is_masked);
        copy(context, self.masks.address() + 4 * u64::from(rank), &raw const word as u64, 4)
    }

    /// Passes losses on to the kernels.
    pub(crate) fn pass_on(&self) {
        for (rank, lost) in self.lost.iter().enumerate() {
            if lost.load(Ordering::Acquire) != 0 && rank != self.rank as usize {
                // SAFETY: a word of pinned memory that lives as long as `self`; kernels only read it.
                unsafe { AtomicU64::from_ptr(self.passed_on.at(rank)).store(1, Ordering::Release) };
            }
        }
    }
}

fn check(ranks: u32, ends: Option<&str>, lost: &[AtomicU8]) -> Result<()> {
    let unsupported = |found: String, fix: &str| {
        let message = format!("on_failure = \"mask\": found {found}");
        Err(Error::new(ErrorKind::Unsupported, "plan kernels", message).with_fix(fix))
    };
    let stop = "let a lost rank end the communicator, or use kernels = \"cpu\"";
    if let Some(found) = ends {
        return unsupported(found.to_owned(), stop);
    }
    if ranks > MOST_RANKS {
        let found = format!("{ranks} ranks; expected at most {MOST_RANKS}");
        return unsupported(found, stop);
    }
    let is_absent = |lost: &AtomicU8| lost.load(Ordering::Acquire) == abi::TY_RANK_ABSENT;
    match lost.iter().position(is_absent) {
        None => Ok(()),
        Some(rank) => unsupported(
            format!("no rank {rank}; kernels on GPUs need all ranks when a communicator opens"),
            "start the missing rank before the others open or renew a communicator",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(ends: Option<&str>, ranks: u32, states: &[u8]) -> Option<String> {
        let lost: Vec<_> = states.iter().copied().map(AtomicU8::new).collect();
        check(ranks, ends, &lost).err().map(|error| error.to_string())
    }

    #[test]
    fn only_some_operations_of_a_communicator_with_all_ranks_go_on_without_one() {
        assert_eq!(refusal(None, 3, &[0, abi::TY_RANK_LOST, 0]), None);
        let text = refusal(Some("fast = false"), 3, &[0; 3]).unwrap();
        assert!(text.contains("found fast = false") && text.contains("mask"), "{text}");
        let text = refusal(None, 129, &[0; 129]).unwrap();
        assert!(text.contains("129 ranks; expected at most 128"), "{text}");
        let text = refusal(None, 3, &[0, 0, abi::TY_RANK_ABSENT]).unwrap();
        assert!(text.contains("no rank 2"), "{text}");
    }
}
