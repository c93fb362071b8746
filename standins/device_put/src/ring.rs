//! The memory of the rings, which kernels fill and a host thread empties.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_core::transport::{Command, NO_COMMAND};
use tokenyard_core::{Result, abi};
use tokenyard_gpu::driver::{Buffer, Context, Pinned};

/// Slots of a ring, a power of two: few, so that kernels meet a full one.
pub(crate) const CAPACITY: u32 = 64;

/// `DeviceApi::Ring` of `device_put.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct DeviceRing {
    head: u64,
    commands: u64,
    submitted: u64,
    done: u64,
    failed: u64,
}

/// The words of a ring that both sides use.
#[derive(Clone, Copy, Debug)]
enum Word {
    Submitted,
    Done,
    Failed,
}

/// The ring of one queue.
#[derive(Debug)]
struct Ring {
    /// In the layout of the GPU ring's commands: `DeviceApi::Command` of `device_put.cuh` has the
    /// same fields.
    commands: Pinned<abi::TyGpuRingCommand>,
    /// One of each `Word`.
    words: Pinned<u64>,
    head: Buffer,
}

impl Ring {
    fn new(context: &Arc<Context>) -> Result<Self> {
        Ok(Self {
            commands: Pinned::new(context, CAPACITY as usize)?,
            words: Pinned::new(context, 3)?,
            head: Buffer::new(context, 8)?,
        })
    }

    fn word(&self, word: Word) -> &AtomicU64 {
        // SAFETY: one of three aligned words of pinned memory that lives as long as `self`; kernels and the
        // host access them whole.
        unsafe { AtomicU64::from_ptr(self.words.at(word as usize)) }
    }

    fn for_device(&self) -> DeviceRing {
        DeviceRing {
            head: self.head.address(),
            commands: self.commands.at(0) as u64,
            submitted: self.words.at(Word::Submitted as usize) as u64,
            done: self.words.at(Word::Done as usize) as u64,
            failed: self.words.at(Word::Failed as usize) as u64,
        }
    }
}

/// One ring for each queue.
#[derive(Debug)]
pub(crate) struct Rings {
    rings: Vec<Ring>,
    table: Buffer,
}

impl Rings {
    pub(crate) fn new(context: &Arc<Context>, queues: u32) -> Result<Self> {
        let rings: Vec<Ring> = (0..queues).map(|_| Ring::new(context)).collect::<Result<_>>()?;
        let table: Vec<DeviceRing> = rings.iter().map(Ring::for_device).collect();
        Ok(Self { table: Buffer::of(context, &table)?, rings })
    }

    pub(crate) fn queues(&self) -> u32 {
        self.rings.len() as u32
    }

    /// The address of the rings for kernels.
    pub(crate) fn address(&self) -> u64 {
        self.table.address()
    }

    /// Command `number` of a queue, once it is submitted and written.
    pub(crate) fn take(&self, queue: u32, number: u64) -> Option<Command> {
        let ring = self.rings.get(queue as usize)?;
        if number >= ring.word(Word::Submitted).load(Ordering::Acquire) {
            return None;
        }
        let slot = ring.commands.at((number % u64::from(CAPACITY)) as usize);
        // SAFETY: a slot of the ring; kernels store its sequence last, with release order.
        let sequence = unsafe { AtomicU64::from_ptr(&raw mut (*slot).sequence) };
        if sequence.load(Ordering::Acquire) != number + 1 {
            return None;
        }
        // SAFETY: the slot was written whole, and is written again once the command is done (INV-5).
        let found = unsafe { slot.read_volatile() };
        Some(Command {
            op: found.op as u8,
            queue,
            peer: found.peer,
            signal: found.signal,
            add: found.add,
            src_window: found.src_window as u16,
            dst_window: found.dst_window as u16,
            src_offset: found.src_offset,
            dst_offset: found.dst_offset,
            bytes: found.bytes,
            value: found.value,
            ..NO_COMMAND
        })
    }

    /// All commands of a queue below `done` are done.
    pub(crate) fn publish(&self, queue: u32, done: u64) {
        if let Some(ring) = self.rings.get(queue as usize) {
            ring.word(Word::Done).store(done, Ordering::Release);
        }
    }

    /// Stops the rings: no more commands are taken.
    pub(crate) fn fail(&self) {
        self.rings.iter().for_each(|ring| ring.word(Word::Failed).store(1, Ordering::Release));
    }
}
