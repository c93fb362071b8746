//! The queue pairs on which kernels post: their memory, how they are rung, and the parameters of kernels.
//!
//! Nothing here has run on a GPU yet: see `docs.md`.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_gpu::driver::{Context, IoPage, Pinned, Vmm, copy};
use tokenyard_sys_mlx5::cqe::{self, Kind, Word};
use tokenyard_sys_mlx5::doorbell::{PAGE, SEND};
use tokenyard_sys_mlx5::mailbox::QP_STATE_ERR;
use tokenyard_sys_mlx5::wqe::BLOCK;
use tokenyard_sys_mlx5::{CallError, Uar, UarKind, Umem, UmemRequest};
use tokenyard_verbs::connection::{FailedAt, first_packet};
use tokenyard_verbs::endpoint::RemoteQp;

use super::fault::Fault;
use super::gpu;
use super::shared::Shared;
use crate::bell::{Bell, KernelBell, Ringer};
use crate::config::{Doorbell, IbgdaConfig, Placement};
use crate::device_api::DeviceQueue;
use crate::fault::FaultRecord;
use crate::pair::{Pair, Parents, QueueLayout, Steps, UmemPlace};
use crate::queue_pair::failure;

/// The interval at which queue pairs are asked for their state where the host does not read completions.
const ASK_EVERY: Duration = Duration::from_secs(10);

/// A page of pinned memory.
type Page = [u8; PAGE];

/// Memory of queues.
#[derive(Debug)]
enum Block {
    Device(Vmm),
    Host(Pinned<Page>),
}

impl Block {
    fn address(&self) -> u64 {
        match self {
            Self::Device(memory) => memory.address(),
            // Host and GPU use one address.
            Self::Host(memory) => memory.at(0).expose_provenance() as u64,
        }
    }
}

/// Memory of queues, as commands name it. The device ends its use first.
#[derive(Debug)]
struct Named {
    umem: Arc<Umem>,
    block: Block,
}

impl Named {
    fn on_host(parents: &Parents<'_>, context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let pages = bytes.div_ceil(PAGE);
        let memory = Pinned::<Page>::new(context, pages)?;
        let block = Block::Host(memory);
        let request = UmemRequest { address: block.address(), bytes: pages * PAGE, dmabuf: None };
        // SAFETY: the memory lives beside the umem and is dropped after it; it is accessed by atomics only.
        let umem = unsafe { Umem::new(parents.devx, &request) }.map_err(refused)?;
        Ok(Self { umem: Arc::new(umem), block })
    }

    fn on_device(parents: &Parents<'_>, context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let memory = Vmm::new(context, bytes as u64)?;
        // SAFETY: as above; kernels allow the device its accesses.
        let umem = unsafe { gpu::umem(parents.devx, &memory)? };
        Ok(Self { umem: Arc::new(umem), block: Block::Device(memory) })
    }
}

/// A choice for a key that says `"auto"`, and the reason.
#[derive(Debug)]
struct Choice {
    on_gpu: bool,
    why: String,
}

impl Choice {
    fn named(on_gpu: bool) -> Self {
        Self { on_gpu, why: "named by the config".to_owned() }
    }

    fn word(&self) -> &'static str {
        if self.on_gpu { "gpu" } else { "cpu" }
    }
}

/// The queue pairs of kernels. Field order is drop order: the thread that rings ends, then the queue pairs, then what
/// they use.
#[derive(Debug)]
pub(super) struct Kernels {
    ringer: Option<Ringer>,
    /// The queue pairs by peer and queue, with the first packet number of each.
    pairs: Vec<(Pair, u32)>,
    registers: Option<IoPage>,
    uar: Arc<Uar>,
    queues: Named,
    completions: Named,
    /// Words in which kernels store what is to be rung for, one for each queue pair.
    words: Pinned<u64>,
    /// A `FaultRecord`.
    fault: Pinned<[u64; 4]>,
    doorbell: Choice,
    placement: Choice,
    per_peer: u32,
    depth: u32,
    asked: Mutex<Instant>,
}

/// The number of queue pairs to make.
#[derive(Clone, Copy, Debug)]
pub(super) struct PairCount {
    pub(super) peers: u32,
    pub(super) queues: u32,
}

fn refused(error: CallError) -> Error {
    Error::new(ErrorKind::System, "make queues of kernels", error.call)
        .with_source(error.source)
        .with_fix(
            "raise the limit on locked memory (`ulimit -l`), lower `queue_pairs` or `depth`, or see the kernel's log",
        )
}

const DOORBELL_FIX: &str = "load NVIDIA's driver with the options NVreg_EnableStreamMemOPs=1 and \
     NVreg_RegistryDwords=\"PeerMappingOverride=1;\" (tokenyard doctor shows where), or set doorbell = \"auto\"";

impl Kernels {
    /// Makes the queue pairs, which are not connected yet.
    pub(super) fn new(
        context: &Arc<Context>,
        parents: &Parents<'_>,
        config: &IbgdaConfig,
        count: PairCount,
    ) -> Result<Self> {
        let (uar, registers, doorbell) = registers(context, parents, config.doorbell)?;
        let parents = &Parents { uar: &uar, ..*parents };
        let pairs = (count.peers * count.queues) as usize;
        let (queues, placement) = queues(context, parents, config, pairs, doorbell.on_gpu)?;
        let completions = match config.completions {
            Placement::Auto | Placement::Host => Named::on_host(parents, context, pairs * PAGE)?,
            Placement::Gpu => Named::on_device(parents, context, pairs * PAGE)?,
        };
        fill(context, &completions.block, pairs)?;
        tracing::info!(
            "kernels: doorbell {} ({}), queues {} ({}), completions in memory of the {}",
            doorbell.word(),
            doorbell.why,
            placement.word(),
            placement.why,
            if config.completions == Placement::Gpu { "GPU" } else { "host" }
        );
        let mut this = Self {
            ringer: None,
            pairs: Vec::with_capacity(pairs),
            registers,
            uar: Arc::clone(&uar),
            queues,
            completions,
            words: Pinned::new(context, pairs)?,
            fault: Pinned::new(context, 1)?,
            doorbell,
            placement,
            per_peer: count.queues,
            depth: config.depth,
            asked: Mutex::new(Instant::now()),
        };
        for index in 0..pairs {
            let place = |named, offset| UmemPlace { umem: named, offset };
            let layout = QueueLayout {
                requests: place(&this.queues.umem, index * stride(config.depth)),
                record: place(&this.queues.umem, record_at(config.depth, pairs, index)),
                completion: place(&this.completions.umem, index * PAGE),
            };
            let pair = Pair::new(parents, &layout, config.depth).map_err(refused)?;
            this.pairs.push((pair, first_packet()?));
        }
        Ok(this)
    }

    /// The queue pairs to a peer, one for each queue.
    pub(super) fn to_peer(&self, peer: u32) -> impl Iterator<Item = RemoteQp> + '_ {
        self.of(peer).iter().map(|(pair, psn)| RemoteQp { number: pair.number, psn: *psn })
    }

    fn of(&self, peer: u32) -> &[(Pair, u32)] {
        let first = (peer * self.per_peer) as usize;
        self.pairs.get(first..first + self.per_peer as usize).unwrap_or_default()
    }

    /// Connects the queue pairs to a peer; `steps` makes the commands from a queue's number and its own end.
    pub(super) fn connect(
        &self,
        peer: u32,
        steps: impl Fn(usize, RemoteQp) -> Steps,
    ) -> std::result::Result<(), CallError> {
        let own = self.to_peer(peer);
        let pairs = self.of(peer).iter().map(|(pair, _)| pair);
        pairs
            .zip(own)
            .enumerate()
            .try_for_each(|(queue, (pair, own))| pair.connect(&steps(queue, own)))
    }

    /// Starts to ring for kernels, where they do not ring themselves.
    pub(super) fn start(&mut self) -> Result<()> {
        if self.doorbell.on_gpu || self.ringer.is_some() {
            return Ok(());
        }
        let bells = self.pairs.iter().enumerate().map(|(index, (pair, _))| {
            let record = self.queues.block.address()
                + (record_at(self.depth, self.pairs.len(), index) + SEND) as u64;
            let bell = Bell {
                record: std::ptr::with_exposed_provenance::<AtomicU32>(record as usize),
                register: self.uar.register(),
                number: pair.number,
            };
            KernelBell { bell, word: self.words.at(index).cast_const().cast::<AtomicU64>() }
        });
        // SAFETY: queue pairs, records and words live until the ringer is dropped, which is the first field; kernels
        // ring by the words alone.
        let started = unsafe { Ringer::start(bells.collect()) };
        self.ringer = Some(started.map_err(|e| {
            Error::new(ErrorKind::System, "start", "no thread to ring for kernels").with_source(e)
        })?);
        Ok(())
    }

    /// Whether the host rings.
    pub(super) fn host_rings(&self) -> bool {
        !self.doorbell.on_gpu
    }

    /// The structures by which kernels post, by peer and queue.
    pub(super) fn device_queues(&self) -> Vec<DeviceQueue> {
        let (base, count) = (self.queues.block.address(), self.pairs.len());
        let queue = |(index, (pair, _)): (usize, &(Pair, u32))| DeviceQueue {
            requests: base + (index * stride(self.depth)) as u64,
            record: base + record_at(self.depth, count, index) as u64,
            doorbell: self.doorbell_of(index),
            completion: self.completions.block.address()
                + (index * PAGE + cqe::layout::COUNTER) as u64,
            number: pair.number,
            mask: self.depth - 1,
            ..DeviceQueue::default()
        };
        self.pairs.iter().enumerate().map(queue).collect()
    }

    fn doorbell_of(&self, index: usize) -> u64 {
        let Some(registers) = &self.registers else {
            return self.words.at(index).expose_provenance() as u64;
        };
        let offset = self.uar.register() as usize - self.uar.base() as usize;
        registers.address() + offset as u64
    }

    /// The place of the [`FaultRecord`], for kernels.
    pub(super) fn fault_record(&self) -> u64 {
        self.fault.at(0).expose_provenance() as u64
    }

    /// Adds failures that kernels, or the completions, show (INV-7). From any thread.
    pub(super) fn check(&self, shared: &Shared) {
        // SAFETY: four words of pinned memory, zeros at first, which kernels and the host access by atomics alone.
        let record = unsafe { &*self.fault.at(0).cast_const().cast::<FaultRecord>() };
        if let Some(fault) = record.read() {
            let place = FailedAt { queue: fault.queue, peer: fault.peer, command: None };
            shared.health.fail(Fault::Completion(fault), Some(place));
        }
        match &self.completions.block {
            Block::Host(pages) => (0..self.pairs.len())
                .for_each(|index| self.check_completion(shared, index, pages.at(index))),
            Block::Device(_) => self.ask(shared),
        }
    }

    fn check_completion(&self, shared: &Shared, index: usize, page: *mut Page) {
        let load = |offset: usize| {
            // SAFETY: 4 bytes of a completion in pinned memory, accessed by atomics alone.
            let word = unsafe { AtomicU32::from_ptr(page.cast::<u8>().add(offset).cast()) };
            word.load(Ordering::Acquire).to_ne_bytes()
        };
        if Word::from_bytes(load(cqe::layout::COUNTER)).kind != Kind::RequestError {
            return;
        }
        let place = self.place(index);
        let fault = failure(self.pairs[index].0.number, load);
        let fault = crate::QueueFault { peer: place.peer, queue: place.queue, ..fault };
        shared.health.fail(Fault::Completion(fault), Some(place));
    }

    fn place(&self, index: usize) -> FailedAt {
        let (peer, queue) = (index as u32 / self.per_peer, index as u32 % self.per_peer);
        FailedAt { queue, peer, command: None }
    }

    /// Asks the device for the state of all queue pairs, at long intervals: each question is a command.
    fn ask(&self, shared: &Shared) {
        let Ok(mut asked) = self.asked.try_lock() else { return };
        if asked.elapsed() < ASK_EVERY {
            return;
        }
        *asked = Instant::now();
        for (index, (pair, _)) in self.pairs.iter().enumerate() {
            if pair.state().is_ok_and(|state| state == QP_STATE_ERR) {
                shared.health.fail(Fault::Broken, Some(self.place(index)));
            }
        }
    }
}

impl std::fmt::Display for Kernels {
    /// For people: the poster of rings, and the memory of queues.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "doorbell {}, queues {}", self.doorbell.word(), self.placement.word())
    }
}

/// Bytes of one send queue, whole pages.
fn stride(depth: u32) -> usize {
    (BLOCK * depth as usize).next_multiple_of(PAGE)
}

/// The record of a queue pair: behind all send queues.
fn record_at(depth: u32, pairs: usize, index: usize) -> usize {
    pairs * stride(depth) + index * BLOCK
}

/// A page of registers, mapped for the GPU if its kernels are to ring.
fn registers(
    context: &Arc<Context>,
    parents: &Parents<'_>,
    wish: Doorbell,
) -> Result<(Arc<Uar>, Option<IoPage>, Choice)> {
    let shared = Arc::clone(parents.uar);
    if wish == Doorbell::Cpu {
        return Ok((shared, None, Choice::named(false)));
    }
    // rdma-core 44 does not know the first kind; the other one is the page that the host uses, too.
    let uar = Uar::new(parents.devx, UarKind::Dedicated).map_or(shared, Arc::new);
    // SAFETY: the page is mapped while `uar` lives, which `Kernels` holds longer than the mapping.
    match unsafe { IoPage::new(context, uar.base(), PAGE) } {
        Ok(page) => {
            let why = "the GPU's driver maps the NIC's registers".to_owned();
            Ok((uar, Some(page), Choice { on_gpu: true, why }))
        }
        Err(error) if wish == Doorbell::Gpu => {
            Err(error.with_key("doorbell").with_fix(DOORBELL_FIX))
        }
        Err(error) => {
            let why = format!("the GPU's driver does not map the NIC's registers: {error}");
            Ok((Arc::clone(parents.uar), None, Choice { on_gpu: false, why }))
        }
    }
}

/// Memory of the send queues and records of this many queue pairs.
fn queues(
    context: &Arc<Context>,
    parents: &Parents<'_>,
    config: &IbgdaConfig,
    pairs: usize,
    gpu_rings: bool,
) -> Result<(Named, Choice)> {
    let bytes = record_at(config.depth, pairs, pairs);
    let on_host = |choice| Ok((Named::on_host(parents, context, bytes)?, choice));
    match config.queues {
        Placement::Host => on_host(Choice::named(false)),
        Placement::Gpu if !gpu_rings => {
            let message = "found queues = \"gpu\" where the host rings; expected \"host\"";
            Err(Error::new(ErrorKind::Config, "make queues of kernels", message)
                .with_key("queues")
                .with_fix(DOORBELL_FIX))
        }
        Placement::Gpu => Ok((Named::on_device(parents, context, bytes)?, Choice::named(true))),
        Placement::Auto if !gpu_rings => {
            let why = "the host rings, and writes records".to_owned();
            on_host(Choice { on_gpu: false, why })
        }
        Placement::Auto => match Named::on_device(parents, context, bytes) {
            Ok(named) => {
                let why = "the NIC reaches the GPU's memory".to_owned();
                Ok((named, Choice { on_gpu: true, why }))
            }
            Err(error) => {
                on_host(Choice { on_gpu: false, why: format!("the NIC does not: {error}") })
            }
        },
    }
}

/// Marks every completion as "nothing has completed yet".
fn fill(context: &Arc<Context>, block: &Block, pairs: usize) -> Result<()> {
    let mut image = vec![[0_u8; PAGE]; pairs];
    image.iter_mut().for_each(|page| page[..cqe::BYTES].fill(cqe::FILL));
    copy(context, block.address(), image.as_ptr() as u64, size_of_val(&*image) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_begin_at_pages_and_records_of_queue_pairs_do_not_share_a_block() {
        for depth in [64, 128, 32_768] {
            assert!(stride(depth).is_multiple_of(PAGE) && stride(depth) >= 64 * depth as usize);
            let records: Vec<_> = (0..3).map(|index| record_at(depth, 3, index)).collect();
            assert_eq!(records[0], 3 * stride(depth));
            assert_eq!([records[1] - records[0], records[2] - records[1]], [BLOCK; 2]);
        }
    }
}
