//! This rank's signals, and the word into which additions return old values.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_core::Result;
use tokenyard_gpu::driver::{self, Context, Vmm};
use tokenyard_sys_mlx5::wqe::Local;
use tokenyard_sys_verbs::ffi::{ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC};
use tokenyard_sys_verbs::{Mr, Pd};
use tokenyard_verbs::connection::{Memory, registration_refused};

use super::gpu;

/// The place for the values that additions return. No code reads them.
pub(super) fn sink(memory: &Memory) -> Local {
    let (address, key) = memory.scratch();
    Local { address, key, bytes: 8 }
}

/// Totals of 8 bytes, by queue and id, to which devices of peers add. They lie where windows lie: a receiver
/// then sees a total behind its payload, because both took the same way (INV-1). Registered without relaxed
/// ordering.
#[derive(Debug)]
pub(super) struct Signals {
    /// Field order is drop order: the access of peers ends before the totals.
    region: Mr,
    totals: Totals,
    per_queue: u32,
}

#[derive(Debug)]
enum Totals {
    Host(Box<[AtomicU64]>),
    Device(Vmm, Arc<Context>),
}

/// The number of signals.
#[derive(Clone, Copy, Debug)]
pub(super) struct SignalCount {
    pub(super) queues: u32,
    pub(super) per_queue: u32,
}

impl SignalCount {
    fn bytes(self) -> usize {
        // At least one: nothing cannot be registered.
        8 * (self.queues as usize * self.per_queue as usize).max(1)
    }
}

impl Signals {
    /// Totals in memory of the host.
    pub(super) fn on_host(pd: &Arc<Pd>, count: SignalCount) -> Result<Self> {
        let totals: Box<[_]> = (0..count.bytes() / 8).map(|_| AtomicU64::new(0)).collect();
        let (address, bytes) = (totals.as_ptr().cast_mut().cast(), size_of_val(&*totals));
        let access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_ATOMIC;
        // SAFETY: the totals live as long as the registration, beside it. They are only read, as atomics, and the
        // device adds to whole words.
        let region = unsafe { Mr::new(pd, address, bytes, access) };
        let region = region.map_err(|e| registration_refused(e, bytes as u64))?;
        Ok(Self { region, totals: Totals::Host(totals), per_queue: count.per_queue })
    }

    /// Totals in memory of the GPU.
    pub(super) fn on_device(
        pd: &Arc<Pd>,
        context: &Arc<Context>,
        count: SignalCount,
    ) -> Result<Self> {
        let totals = Vmm::new(context, count.bytes() as u64)?;
        let access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_ATOMIC;
        // SAFETY: the totals live as long as the registration, beside it. Kernels only read them.
        let region = unsafe { gpu::register(pd, &totals, access)? };
        let totals = Totals::Device(totals, Arc::clone(context));
        Ok(Self { region, totals, per_queue: count.per_queue })
    }

    /// Address and key for peers.
    pub(super) fn area(&self) -> (u64, u32) {
        (self.address(), self.region.rkey())
    }

    /// The first total, for those that read them.
    pub(super) fn address(&self) -> u64 {
        match &self.totals {
            Totals::Host(totals) => totals.as_ptr() as u64,
            Totals::Device(totals, _) => totals.address(),
        }
    }

    /// The total of a signal; `None` if the driver does not copy it.
    ///
    /// Acquire order, INV-1: the device adds after it has written the payload, because both come on one connection.
    #[inline]
    pub(super) fn read(&self, queue: u32, id: u32) -> Option<u64> {
        let at = queue as usize * self.per_queue as usize + id as usize;
        match &self.totals {
            Totals::Host(totals) => totals.get(at).map(|total| total.load(Ordering::Acquire)),
            Totals::Device(totals, context) => copied(context, totals.address() + 8 * at as u64),
        }
    }
}

#[cold]
fn copied(context: &Context, at: u64) -> Option<u64> {
    let mut total = 0_u64;
    driver::copy(context, &raw mut total as u64, at, 8).ok()?;
    Some(total)
}
