//! A connected team: its regions, and the operations of this rank.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use crate::abi;
use crate::config::Config;
use crate::cuda::Cuda;
use crate::failure::{Failure, Result};
use crate::inbox::{Inbox, MOST_RANKS, SignalMessage};
use crate::mesh::{Address, Listener, Mesh};
use crate::operations::{Means, Operation, Operations, Transfer};
use crate::region::{Memory, Region};

/// The most bytes of a value that lies in the host's memory and goes to a device.
const MOST_VALUE: usize = 8;
/// Commands of a queue of NCCL's proxy: 32 for each of [`MAX_RECVS`].
const QUEUE: usize = 32 * MAX_RECVS as usize;
/// A power of two.
pub(crate) const MAX_RECVS: c_int = 8;

/// A range of a region, by its number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    /// None only where nothing is copied.
    pub(crate) region: Option<u64>,
    pub(crate) offset: u64,
}

/// A put or a get.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) own: Range,
    pub(crate) remote: Range,
    pub(crate) bytes: usize,
    pub(crate) rank: u32,
    pub(crate) is_get: bool,
    pub(crate) signal: Option<SignalMessage>,
    pub(crate) is_strong: bool,
}

/// See the [module](self). Control calls come on one thread, and meanwhile operations on NCCL's progress thread.
#[derive(Debug)]
pub(crate) struct Team {
    me: usize,
    inboxes: Vec<Arc<Inbox>>,
    operations: Mutex<Operations>,
    regions: RwLock<BTreeMap<u64, Arc<Region>>>,
    /// Used by the control thread, which waits for peers while operations continue.
    control: Mutex<Control>,
    /// Dropped after the regions that it has mapped.
    cuda: Option<Arc<Cuda>>,
}

#[derive(Debug)]
struct Control {
    mesh: Mesh,
    /// Regions ever registered. The first has number 1, so no handle is null.
    registered: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Team {
    /// Connects the ranks. Collective.
    pub(crate) fn connect(listener: &Listener, addresses: Vec<Address>, me: usize) -> Result<Self> {
        let config =
            Config::of_environment().map_err(|text| Failure::new(abi::INVALID_USAGE, text))?;
        let ranks = addresses.len();
        // Siblings may write here: some systems let only parents do so.
        // SAFETY: plain numbers.
        unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
        let cuda = Cuda::of_current_context(ranks)?.map(Arc::new);
        let mesh = Mesh::new(listener, addresses, me)?;
        Ok(Self {
            me,
            inboxes: mesh.inboxes.clone(),
            operations: Mutex::new(Operations::new(config, me as u32)),
            regions: RwLock::default(),
            control: Mutex::new(Control { mesh, registered: 0 }),
            cuda,
        })
    }

    /// Makes room for the operations of this many contexts.
    pub(crate) fn add_contexts(&self, contexts: c_int) -> Result<()> {
        let contexts = usize::try_from(contexts).unwrap_or(0);
        let count = QUEUE * self.inboxes.len() * contexts;
        self.cuda.as_ref().filter(|_| count > 0).map_or(Ok(()), |cuda| cuda.add_slots(count))
    }

    /// Registers memory. Collective.
    pub(crate) fn register(&self, memory: Memory) -> Result<u64> {
        let mut control = lock(&self.control);
        control.registered += 1;
        let number = control.registered;
        let region = Region::new(&mut control.mesh, self.cuda.as_ref(), memory, number)?;
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        regions.insert(number, Arc::new(region));
        Ok(number)
    }

    pub(crate) fn deregister(&self, number: u64) -> Result<()> {
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        let region = regions.remove(&number);
        drop(regions);
        region.map(drop).ok_or_else(|| no_region(number))
    }

    fn region(&self, number: u64) -> Result<Arc<Region>> {
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        regions.get(&number).cloned().ok_or_else(|| no_region(number))
    }

    /// Takes an operation, and returns its request.
    pub(crate) fn post(&self, asked: &Asked) -> Result<u64> {
        let peer = usize::try_from(asked.rank).ok().filter(|rank| *rank < self.inboxes.len());
        let Some(peer) = peer else {
            let text = format!("found rank {}; expected below {}", asked.rank, self.inboxes.len());
            return Err(Failure::new(abi::INVALID_ARGUMENT, text));
        };
        let transfer = if asked.bytes == 0 { None } else { Some(self.transfer(asked, peer)?) };
        let Asked { signal, is_strong, .. } = *asked;
        Ok(lock(&self.operations).post(Operation { peer, transfer, signal, is_strong }))
    }

    fn transfer(&self, asked: &Asked, peer: usize) -> Result<Transfer> {
        let region = |range: Range| {
            let none = || Failure::new(abi::INVALID_ARGUMENT, "found no region to copy from or to");
            self.region(range.region.ok_or_else(none)?)
        };
        let (own, remote) = (region(asked.own)?, region(asked.remote)?);
        let bytes = asked.bytes as u64;
        let here = own.own(asked.own.offset, bytes)?;
        let there = remote.of_rank(peer, asked.remote.offset, bytes)?;
        if asked.is_get {
            return Ok(Transfer { to: here, from: there, bytes: asked.bytes, value: None });
        }
        let mut value = None;
        if remote.on_device && !own.on_device {
            if asked.bytes > MOST_VALUE {
                let text = format!(
                    "found {} bytes of the host's memory for a device; expected at most {MOST_VALUE}",
                    asked.bytes
                );
                return Err(Failure::new(abi::INVALID_USAGE, text));
            }
            let mut bytes = [0; MOST_VALUE];
            let from = (own.base + asked.own.offset) as *const u8;
            // SAFETY: `own` has checked the range of a registered region.
            unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), asked.bytes) };
            value = Some(bytes);
        }
        Ok(Transfer { to: there, from: here, bytes: asked.bytes, value })
    }

    fn means(&self) -> Means<'_> {
        Means { me: self.me, inboxes: &self.inboxes, cuda: self.cuda.as_ref() }
    }

    pub(crate) fn test(&self, request: u64) -> Result<bool> {
        lock(&self.operations).test(request, self.means())
    }

    /// Advances this rank's operations, and applies the signals of others.
    pub(crate) fn progress(&self) -> Result<()> {
        lock(&self.operations).advance(self.means())?;
        for from in 0..self.inboxes.len().min(MOST_RANKS) {
            while let Some(signal) = self.inboxes[self.me].take(from) {
                let region = self.region(signal.region)?;
                region.raise(self.cuda.as_ref(), signal.offset, signal.add)?;
            }
        }
        Ok(())
    }

    /// Frees the regions that NCCL has not deregistered: after an abort, NCCL leaves contexts and regions behind.
    pub(crate) fn close(&self) {
        self.regions.write().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

fn no_region(number: u64) -> Failure {
    Failure::new(abi::INVALID_ARGUMENT, format!("found region {number}; expected a registered one"))
}
