//! The device API of the GPU ring, for a transport that has no device API of its own. Kernels write commands
//! into a ring in pinned memory, and a host thread serves the ring (`tokenyard_core::gpu_ring`).

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::compile::{DeviceApiSource, Needed};
use crate::driver::{self, Buffer, Context, Pinned};
use crate::engine::device_api::DeviceApi;

/// The source of the device API.
const DEVICE_API: &str = include_str!("../../device/common/gpu_ring.cuh");
/// Slots of a ring: what several operations move, so that kernels seldom wait for a free slot.
const CAPACITY: u32 = 1024;
/// The queue that kernels post on.
const QUEUE: u32 = 0;

/// Words of 8 bytes that kernels share in device memory.
const HEAD: u64 = 3;
/// Words of 8 bytes of `DeviceApi::Params`.
const PARAMS: usize = 5;

/// The device API, for callers that compile it without a ring.
pub(crate) fn gpu_ring_api() -> DeviceApiSource<'static> {
    DeviceApiSource {
        text: DEVICE_API,
        defines: &[],
        include_folders: &[],
        compiler: Needed::RunTime,
        param_bytes: 8 * PARAMS,
        puts: true,
        by_host: true,
    }
}

/// The memory of a ring.
#[derive(Debug)]
pub(crate) struct Ring {
    context: Arc<Context>,
    level: u64,
    signals: u32,
    commands: Pinned<abi::TyGpuRingCommand>,
    status: Pinned<abi::TyGpuRingStatus>,
    totals: Pinned<u64>,
    /// In device memory lie the number of commands so far, to which blocks of many kernels add; the number of
    /// commands that are known to be done; and whether a thread asks for more.
    head: Buffer,
}

impl Ring {
    pub(crate) fn new(context: &Arc<Context>, level: u64, signals: u32) -> Result<Self> {
        Ok(Self {
            context: Arc::clone(context),
            level,
            signals,
            commands: Pinned::new(context, CAPACITY as usize)?,
            status: Pinned::new(context, 1)?,
            totals: Pinned::new(context, signals as usize)?,
            head: Buffer::new(context, 8 * HEAD)?,
        })
    }

    /// The device API that kernels are compiled over, with its parameters.
    pub(crate) fn device_api(&self, me: u32) -> DeviceApi {
        let words: [u64; PARAMS] = [
            self.head.address(),
            self.commands.at(0) as u64,
            // `done` is the first field.
            self.status.at(0) as u64,
            self.totals.at(0) as u64,
            // The mask, then this rank's index in the team.
            u64::from(CAPACITY - 1) | u64::from(me) << 32,
        ];
        DeviceApi::of_proxy(DEVICE_API, words.to_vec())
    }

    /// The ring that the host serves.
    pub(crate) fn as_abi(&self) -> abi::TyGpuRing {
        abi::TyGpuRing {
            size: size_of::<abi::TyGpuRing>(),
            level: self.level,
            queue: QUEUE,
            capacity: CAPACITY,
            commands: self.commands.at(0),
            status: self.status.at(0),
            totals: self.totals.at(0),
            signals: self.signals,
            reserved: 0,
        }
    }

    /// Whether the ring is alive (INV-7).
    ///
    /// # Errors
    /// [`ErrorKind::Transport`] with the command that failed.
    pub(crate) fn check(&self) -> Result<()> {
        let status = self.status.at(0);
        // SAFETY: pinned memory that lives as long as `self`; aligned words that the host stores.
        let (failed, code) = unsafe {
            (
                AtomicU64::from_ptr(&raw mut (*status).failed).load(Ordering::Acquire),
                AtomicI64::from_ptr(&raw mut (*status).status).load(Ordering::Relaxed),
            )
        };
        if failed == 0 {
            return Ok(());
        }
        let which = match failed {
            u64::MAX => "the transport".to_owned(),
            number => format!("command {} of the kernels", number - 1),
        };
        let message = format!("{which} failed with status {code}");
        Err(Error::new(ErrorKind::Transport, "post for kernels", message)
            .with_fix("see the log of this rank; report it if the transport says that all is well"))
    }

    /// Commands that kernels have numbered. Kernels must have ended.
    pub(crate) fn numbered(&self) -> Result<u64> {
        let mut head = 0_u64;
        driver::copy(&self.context, &raw mut head as u64, self.head.address(), 8)?;
        Ok(head)
    }

    /// The number of commands that are done, all earlier ones included.
    pub(crate) fn done(&self) -> u64 {
        // SAFETY: as in `check`.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.status.at(0)).done) }.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn the_device_api_and_the_abi_agree_on_a_command_and_on_numbers() {
        use abi::TyGpuRingCommand as C;
        // In the order of `DeviceApi::Command`: six words of 4 bytes, five of 8.
        let narrow = [
            offset_of!(C, op),
            offset_of!(C, peer),
            offset_of!(C, signal),
            offset_of!(C, add),
            offset_of!(C, src_window),
            offset_of!(C, dst_window),
        ];
        assert_eq!(narrow, [0, 4, 8, 12, 16, 20]);
        let wide = [
            offset_of!(C, src_offset),
            offset_of!(C, dst_offset),
            offset_of!(C, bytes),
            offset_of!(C, value),
            offset_of!(C, sequence),
        ];
        assert_eq!(wide, [24, 32, 40, 48, 56]);
        assert_eq!(offset_of!(abi::TyGpuRingStatus, done), 0);
        let numbers = format!(
            "kPut = {}, kPutSignal = {}, kPutValue = {}, kSignal = {}, kQueue = {};",
            abi::TY_OP_PUT,
            abi::TY_OP_PUT_SIGNAL,
            abi::TY_OP_PUT_VALUE,
            abi::TY_OP_SIGNAL,
            abi::TY_PHASE_QUEUE
        );
        assert!(DEVICE_API.contains(&numbers), "{numbers}");
        assert!(DEVICE_API.contains("ty::u32 op, peer, signal, add, src_window, dst_window;"));
        assert!(DEVICE_API.contains("ty::u64 src_offset, dst_offset, bytes, value;"));
    }
}
