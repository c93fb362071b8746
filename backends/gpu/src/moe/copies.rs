//! The small arrays of an output: copies for callers, and counts of experts for the host.

use std::cell::RefCell;

use tokenyard_core::kernels::Copies;
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::driver::{Launch, RawStream};
use crate::engine::Engine;
use crate::engine::args::THREADS;
use crate::engine::outcome::ticket;
use crate::moe::args::{ArrayCopy, CopyArgs, CountArgs};
use crate::moe::state::MoeState;

/// Elements that a thread copies before there are more blocks.
const EACH: u64 = 4;

/// Copies and counts for the caller of one exchange.
#[derive(Debug)]
pub(crate) struct OutputCopies<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) moe: &'a MoeState,
}

impl OutputCopies<'_> {
    /// The rows of each local expert of a dispatch, once its kernel has them.
    pub(crate) fn expert_counts(&self, operation: u64, counts: &mut [u32]) -> Result<()> {
        self.engine.check()?;
        self.engine.check_recent(operation)?;
        let (slot, ticket) = (self.engine.slot(operation), ticket(operation));
        let given = &self.moe.counts;
        if !given.was_asked(slot, ticket) {
            let text = format!("operation {operation} gives the host no counts");
            return Err(Error::new(ErrorKind::Unsupported, "read counts", text));
        }
        if given.read(slot, ticket, counts) {
            return Ok(());
        }
        let event = &self.engine.order.events[slot];
        let found = RefCell::new(counts);
        let is_there = || given.read(slot, ticket, &mut found.borrow_mut());
        let wait = self.engine.wait(operation, abi::TY_PHASE_ENTRY);
        let waited = self.engine.waits.until(wait, &is_there, &|| event.is_done());
        self.engine.abort_on_fatal(waited)
    }

    /// Launches the kernel that copies, on the caller's stream or on the engine's.
    ///
    /// # Safety
    /// The arrays and their copies are valid until the kernel has ended.
    pub(crate) unsafe fn copy_out(&self, copies: &Copies<'_>) -> Result<()> {
        let arguments = arguments(copies)?;
        let most = copies.copies.iter().map(|copy| copy.elements.max(copy.room)).max();
        let blocks = most.unwrap_or(0).div_ceil(EACH * u64::from(THREADS));
        let blocks = blocks.clamp(1, self.moe.blocks.local.max(1).into()) as u32;
        let stream = copies.stream.map_or(self.engine.order.stream.name(), RawStream::of);
        let launch = Launch::of_threads(blocks, THREADS, 0);
        // SAFETY: the kernel's type; the memory by this function's contract.
        unsafe { self.engine.launcher.run(&self.moe.kernels.copy_out, stream, launch, &arguments) }
    }

    /// Launches the kernel that counts a routing, on the caller's stream.
    ///
    /// # Safety
    /// Memory that `counts` names is valid until the kernel has ended.
    pub(crate) unsafe fn count_routing(&self, counts: &abi::TyRoutingCounts) -> Result<()> {
        let abi::TyRoutingCounts { topk_idx, experts, ranks, .. } = *counts;
        let [tokens, topk] = topk_idx.shape;
        let stream = RawStream::of(counts.stream);
        let (of_ranks, of_experts) = (counts.rank_tokens as u64, counts.expert_tokens as u64);
        for (at, count) in [(of_ranks, ranks), (of_experts, experts)] {
            stream.zero(self.engine.order.context(), at, 4 * u64::from(count))?;
        }
        let arguments = CountArgs {
            topk_idx: topk_idx.data as u64,
            rank_tokens: of_ranks,
            expert_tokens: of_experts,
            is_token_in_rank: counts.is_token_in_rank as u64,
            tokens,
            topk: topk as u32,
            experts,
            ranks,
            reserved: 0,
        };
        let most = self.moe.blocks.local.max(1);
        let blocks = tokens.div_ceil(THREADS.into()).clamp(1, most.into()) as u32;
        let launch = Launch::of_threads(blocks, THREADS, 0);
        let kernel = &self.moe.kernels.count_routing;
        // SAFETY: the kernel's type; the memory by this function's contract.
        unsafe { self.engine.launcher.run(kernel, stream, launch, &arguments) }
    }
}

fn arguments(copies: &Copies<'_>) -> Result<CopyArgs> {
    let mut arguments = CopyArgs {
        totals: copies.totals as u64,
        count: copies.copies.len() as u32,
        reserved: 0,
        copies: [ArrayCopy::default(); abi::TY_MAX_COPIES],
    };
    let Some(places) = arguments.copies.get_mut(..copies.copies.len()) else {
        let text = format!(
            "found {} copies; expected at most {}",
            copies.copies.len(),
            abi::TY_MAX_COPIES
        );
        return Err(Error::new(ErrorKind::InvalidInput, "copy output", text));
    };
    let known = abi::TY_COPY_WIDE | abi::TY_COPY_FILL | abi::TY_COPY_COLUMNS;
    for (place, copy) in places.iter_mut().zip(copies.copies) {
        if copy.flags & !known != 0 {
            let text =
                format!("found flags {:#x} of a copy; expected some of {known:#x}", copy.flags);
            return Err(Error::new(ErrorKind::Unsupported, "copy output", text)
                .with_fix("use a host and a plugin of matching versions"));
        }
        let abi::TyCopy { from, to, elements, room, columns, modulus, fill, flags } = *copy;
        let (from, to) = (from as u64, to as u64);
        *place = ArrayCopy { from, to, elements, room, columns, modulus, fill, flags };
    }
    Ok(arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_has_as_many_copies_as_its_kernel_takes() {
        let copy = abi::TyCopy {
            from: std::ptr::null(),
            to: std::ptr::null_mut(),
            elements: 3,
            room: 4,
            columns: 1,
            modulus: 0,
            fill: -1,
            flags: abi::TY_COPY_WIDE,
        };
        let all = [copy; abi::TY_MAX_COPIES + 1];
        let of = |count: usize| {
            arguments(&Copies { copies: &all[..count], totals: std::ptr::null(), stream: None })
        };
        let most = of(abi::TY_MAX_COPIES).expect("as many as fit");
        assert_eq!((most.count, most.copies[12].room, most.copies[12].fill), (13, 4, -1));
        assert_eq!(of(2).expect("two").copies[2].elements, 0);
        let unknown = [abi::TyCopy { flags: 8, ..copy }];
        let copies = Copies { copies: &unknown, totals: std::ptr::null(), stream: None };
        assert!(arguments(&copies).unwrap_err().to_string().contains("found flags 0x8"));
        assert!(of(14).unwrap_err().to_string().contains("found 14 copies; expected at most 13"));
    }

    #[test]
    fn the_kernel_names_what_a_copy_does_as_the_abi() {
        let kernel = include_str!("../../device/moe/copies.cuh");
        for (name, bit) in [
            ("Wide", abi::TY_COPY_WIDE),
            ("Fill", abi::TY_COPY_FILL),
            ("Columns", abi::TY_COPY_COLUMNS),
        ] {
            assert!(kernel.contains(&format!("constexpr u32 kCopy{name} = {bit};")), "{name}");
        }
    }
}
