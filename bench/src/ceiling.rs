//! The ceiling: a plain copy of the same bytes between the same processes.
//!
//! It has its own windows, in memory that the `cpu` kernel set allocates and the `shm` transport
//! shares, so that only the exchange itself differs. Its signals are also the barrier before each
//! sample: they cross in well under a microsecond, while the rendezvous' barrier takes as long as a
//! network.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tokenyard_core::abi;
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::host::{OpenTransport, Registry};
use tokenyard_core::kernels::{KernelSet, KernelShape, kernel_shape};
use tokenyard_core::moe::Shape;
use tokenyard_core::transport::{Command, NO_COMMAND, Team, TransportNeeds, TransportOpen};
use tokenyard_cpu::CpuKernels;
use tokenyard_cpu::kernels::CpuConfig;

/// How long a barrier may take.
const DEADLINE: Duration = Duration::from_secs(30);
const QUEUE: u32 = 0;
const WINDOW: u32 = 0;

/// Shared windows for plain copies. Used by one thread.
#[derive(Debug)]
pub struct Ceiling {
    /// Dropped before the memory that it shares.
    transport: OpenTransport,
    _memory: CpuKernels,
    rank: u32,
    /// The address at which each rank's window is mapped in this process.
    windows: Vec<*mut u8>,
    /// Bytes that one rank may write into a window.
    room: usize,
    barriers: u64,
}

impl Ceiling {
    /// Shares a window with room for `room` bytes from each rank. Collective.
    ///
    /// # Errors
    /// The system refuses memory or sockets.
    pub fn open(world: &World, room: usize) -> Result<Self> {
        let (rank, ranks) = (world.rank(), world.ranks());
        let room = room.next_multiple_of(4096);
        let bytes = (room * ranks as usize) as u64;
        let needs = TransportNeeds {
            windows: 1,
            queues: 1,
            signals: ranks,
            queue_depth: 16,
            largest_put: bytes,
            deadline: DEADLINE,
        };
        let shm = Registry::built_in()?.transport("shm")?;
        let mut memory = CpuKernels::open(CpuConfig::default(), &any_shape(rank, ranks))?;
        let mut transport = shm.open(
            &ComponentTable::empty(),
            &TransportOpen::new(&Team::world(rank, ranks), &needs),
        )?;
        let window = memory.allocate(WINDOW, bytes, &transport.memory_needs()?)?;
        // SAFETY: the memory is dropped after the transport (field order, and order of locals here).
        unsafe { transport.register(&window)? };
        let outgoing: Vec<_> =
            (0..ranks).map(|peer| transport.endpoint(peer)).collect::<Result<_, _>>()?;
        let incoming = world.exchange("ceiling endpoints", outgoing)?;
        for (peer, endpoint) in (0..).zip(&incoming) {
            transport.connect(peer, endpoint)?;
        }
        transport.commit()?;
        let windows = (0..ranks)
            .map(|peer| transport.peer_address(WINDOW, peer))
            .collect::<Result<Vec<_>, _>>()?;
        world.barrier("ceiling ready")?;
        Ok(Self { transport, _memory: memory, rank, windows, room, barriers: 0 })
    }

    /// Returns once all ranks have called it.
    ///
    /// # Errors
    /// A rank does not call it within 30 seconds.
    pub fn barrier(&mut self) -> Result<()> {
        self.barriers += 1;
        let ranks = self.windows.len() as u32;
        for peer in 0..ranks {
            let command =
                Command { op: abi::TY_OP_SIGNAL, peer, signal: self.rank, add: 1, ..NO_COMMAND };
            // SAFETY: the command moves no memory; the signal is this rank's to raise; one thread.
            let accepted = unsafe { self.transport.post(QUEUE, &[command]) };
            if accepted != Ok(1) {
                self.transport.health()?;
                bail!("barrier: found {accepted:?}; expected the signal to be posted");
            }
        }
        let start = Instant::now();
        for peer in 0..ranks {
            while self.transport.read_signal(QUEUE, peer) < self.barriers {
                if start.elapsed() > DEADLINE {
                    bail!("barrier: rank {peer} did not come within {} s", DEADLINE.as_secs());
                }
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Ranks in the order in which the exchange visits them, this rank first.
    fn rotation(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, ranks) = (self.rank as usize, self.windows.len());
        (0..ranks).map(move |i| (rank + i) % ranks)
    }

    /// Copies the first `bytes[r]` bytes of `from` into the window of each rank r.
    ///
    /// # Errors
    /// `bytes` is more than `from` has, or than the window has room for.
    pub fn write(&mut self, from: &[u8], bytes: &[usize]) -> Result<()> {
        self.check(from.len(), bytes)?;
        for peer in self.rotation() {
            let target = self.windows[peer].wrapping_add(self.rank as usize * self.room);
            // SAFETY: checked against the room of this rank, which no other rank writes; readers
            // read it after a barrier. The windows are mapped while the transport lives.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), target, bytes[peer]) };
        }
        Ok(())
    }

    /// Copies `bytes[r]` bytes out of the window of each rank r into `into`.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn read(&mut self, into: &mut [u8], bytes: &[usize]) -> Result<()> {
        self.check(into.len(), bytes)?;
        for peer in self.rotation() {
            let source = self.windows[peer].wrapping_add(self.rank as usize * self.room);
            // SAFETY: as in `write`; `into` is private and has as many bytes.
            unsafe { std::ptr::copy_nonoverlapping(source, into.as_mut_ptr(), bytes[peer]) };
            std::hint::black_box(into.first());
        }
        Ok(())
    }

    fn check(&self, private: usize, bytes: &[usize]) -> Result<()> {
        let most = private.min(self.room);
        let fits = bytes.len() == self.windows.len() && bytes.iter().all(|bytes| *bytes <= most);
        fits.then_some(()).with_context(|| format!("found {bytes:?} bytes; expected up to {most}"))
    }
}

/// The kernel set only allocates memory here, for which the shape does not matter.
fn any_shape(rank: u32, ranks: u32) -> KernelShape {
    let shape = Shape { ranks, experts: ranks, topk: 1, hidden: 16, max_tokens: 1 };
    KernelShape { rank, ..kernel_shape(&shape, 1, 1, 1) }
}
