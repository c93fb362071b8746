//! Counts of experts that kernels give the host in pinned memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_core::Result;

use crate::driver::{Context, Pinned};

/// Counts of experts for each slot. A word has the ticket of its operation above the count, so that each says by
/// itself whether it is there (INV-3).
#[derive(Debug)]
pub(crate) struct HostCounts {
    /// `[slots, El]`.
    memory: Pinned<u64>,
    experts: usize,
    /// The tickets of the operations whose kernels give counts; 0 for others.
    asked: Vec<u32>,
}

impl HostCounts {
    /// Memory for the counts of `experts`.
    pub(crate) fn new(context: &Arc<Context>, slots: usize, experts: u32) -> Result<Self> {
        let experts = experts as usize;
        Ok(Self { memory: Pinned::new(context, slots * experts)?, experts, asked: vec![0; slots] })
    }

    /// Where the kernel of an operation gives its counts, if it does so.
    pub(crate) fn ask(&mut self, slot: usize, ticket: u32, gives: bool) -> u64 {
        self.asked[slot] = if gives { ticket } else { 0 };
        if gives { self.memory.at(slot * self.experts) as u64 } else { 0 }
    }

    /// Whether an operation was asked for counts.
    pub(crate) fn was_asked(&self, slot: usize, ticket: u32) -> bool {
        self.asked.get(slot) == Some(&ticket)
    }

    /// Reads the counts; false where one of them is not there.
    pub(crate) fn read(&self, slot: usize, ticket: u32, counts: &mut [u32]) -> bool {
        counts.iter_mut().zip(0..self.experts).all(|(count, expert)| {
            let at = self.memory.at(slot * self.experts + expert);
            // SAFETY: pinned memory that lives as long as `self`; an aligned word.
            let word = unsafe { AtomicU64::from_ptr(at).load(Ordering::Relaxed) };
            *count = word as u32;
            (word >> 32) as u32 == ticket
        })
    }
}
