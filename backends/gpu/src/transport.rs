//! The transport between GPUs of one machine that map each other's memory: `nvlink`, for example.
//!
//! Windows and signals are shareable allocations (VMM); their descriptors cross sockets while ranks
//! connect. Legacy IPC is not used: it is undefined when an owner dies. Kernels use the device API;
//! the host API copies with the copy engines and is for callers without kernels.
//!
//! Watched by the tests in these files, and on GPUs by L0 of the suite.

mod card;
mod memory;
mod queue;

use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokenyard_core::abi;
use tokenyard_core::fd_exchange::{Extent, Links, MAX_WINDOWS, Offer};
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, NO_CAPABILITIES, Transport, TransportNeeds,
    TransportOpen, Window,
};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::compile::{DeviceApiSource, Needed, check_architecture};
use crate::config::PeersConfig;
use crate::driver::{self, Buffer, Context, Device, Stream, granularity};
use crate::platform::Components;
use card::{Card, reachable};
use memory::Local;
use queue::Queue;

/// The source of the device API.
const DEVICE_API: &str = include_str!("transport/nvlink.cuh");

/// The device API, for callers that compile it without a transport.
pub(crate) fn peers_device_api() -> DeviceApiSource<'static> {
    DeviceApiSource {
        text: DEVICE_API,
        defines: &[],
        include_folders: &[],
        compiler: Needed::RunTime,
        param_bytes: size_of::<Params>(),
        puts: false,
        by_host: false,
    }
}

/// Bytes between two signals: no two writers share a line.
const SPACING: u64 = 64;

/// Peer access between the GPUs of one machine, over NVLink, xGMI or PCIe.
#[derive(Debug)]
pub struct Peers<C: Components> {
    context: Arc<Context>,
    deadline: Duration,
    needs: TransportNeeds,
    /// Whether the config names the device: then ranks may share it.
    shares: bool,
    /// Dropped before `links`: its queues copy to peers' memory.
    queues: Vec<Mutex<Queue>>,
    /// One for each user: the device API points to them.
    tables: Mutex<Vec<PeerTable>>,
    links: Links<Local>,
    failure: OnceLock<(Command, String)>,
    _components: PhantomData<C>,
}

/// The memory that the device API of one user points to; dropped with the transport.
#[derive(Debug)]
struct PeerTable {
    /// The user's first numbers.
    first: abi::TyFirst,
    _windows: Buffer,
    _signals: Buffer,
    params: Box<Params>,
}

/// `DeviceApi::Params` of `nvlink.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Params {
    windows: u64,
    signals: u64,
    peers: u32,
    me: u32,
    spacing: u32,
    reserved: u32,
}

impl<C: Components> Transport for Peers<C> {
    const NAME: &'static str = C::LINK;
    const ABOUT: &'static str = C::LINK_ABOUT;
    type Config = PeersConfig;

    fn probe(config: &PeersConfig) -> Result<Capabilities> {
        C::PLATFORM.driver.load(config.libraries.as_deref())?;
        let device = Device::choose(C::PLATFORM, config.ordinal())?;
        check_device(device)?;
        tokenyard_core::fd_exchange::probe()?;
        Ok(Capabilities {
            flags: abi::TY_CAP_LOAD_STORE
                | abi::TY_CAP_GET
                | abi::TY_CAP_ORDERED
                | abi::TY_CAP_BOUNDED_PUT
                | abi::TY_CAP_DEVICE_API
                | abi::TY_CAP_MASKING,
            memory_kinds: C::PLATFORM.memory,
            max_peers: 72,
            max_queues: 64,
            max_signals: 65_536,
            max_queue_depth: 4096,
            max_windows: MAX_WINDOWS,
            largest_put: 1 << 40,
            ..NO_CAPABILITIES
        })
    }

    fn open(config: PeersConfig, open: &TransportOpen<'_>) -> Result<Self> {
        let TransportOpen { team, needs, .. } = *open;
        let device = device_of(config.ordinal(), open.device)?;
        C::PLATFORM.driver.load(config.libraries.as_deref())?;
        let context = Context::retain(Device::choose(C::PLATFORM, device)?)?;
        let (local, memory) = Local::new(&context, needs.signals)?;
        let peers = team.world_ranks.len();
        let queues = (0..needs.queues).map(|_| Queue::new(&context, needs, peers).map(Mutex::new));
        Ok(Self {
            deadline: needs.deadline,
            needs: *needs,
            shares: config.device.is_some(),
            queues: queues.collect::<Result<_>>()?,
            tables: Mutex::default(),
            links: Links::new(Offer::new(team, needs.signals, memory)?, local)?,
            failure: OnceLock::new(),
            _components: PhantomData,
            context,
        })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        MemoryNeeds {
            size: size_of::<MemoryNeeds>(),
            kinds: C::PLATFORM.memory,
            handles: abi::TY_HANDLE_POSIX,
            alignment: granularity(self.context.device).unwrap_or(2 << 20),
        }
    }

    unsafe fn register(&mut self, window: &Window) -> Result<()> {
        let refused = |message: String| {
            Err(Error::new(ErrorKind::InvalidInput, "register", message)
                .with_context("window", window.id)
                .with_fix("allocate the window as `memory_needs` says: shareable device memory"))
        };
        let device = self.context.device.ordinal;
        let is_exported = window.handle == abi::TY_HANDLE_POSIX && window.fd >= 0;
        if window.kind != C::PLATFORM.memory || !is_exported || window.fd_offset != 0 {
            return refused(format!(
                "found kind {}, handle {}, descriptor {} at {}; expected {} memory with an exported \
                 descriptor ({}) at 0",
                window.kind,
                window.handle,
                window.fd,
                window.fd_offset,
                C::PLATFORM.names.interface,
                abi::TY_HANDLE_POSIX
            ));
        }
        if window.device != device {
            return refused(format!("found device {}; expected {device}", window.device));
        }
        // SAFETY: open for as long as the links are, by this function's contract.
        let fd = unsafe { BorrowedFd::borrow_raw(window.fd) };
        self.links.offer.add_window(fd, Extent { offset: 0, bytes: window.bytes });
        self.links.memory.windows.push(window.pointer as u64);
        Ok(())
    }

    fn endpoint(&mut self, _: u32) -> Result<Vec<u8>> {
        let device = self.context.device.uuid()?;
        Ok(Card { device, endpoint: self.links.offer.endpoint }.to_bytes())
    }

    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        let card = Card::parse(data)?;
        if peer != self.links.offer.team.me {
            let checked = card.check(self.context.device, self.shares);
            let rank = self.links.offer.team.world_ranks.get(peer as usize);
            checked.map_err(|e| match rank {
                Some(rank) => e.with_rank(*rank),
                None => e,
            })?;
        }
        self.links.connect(peer, &card.endpoint, self.deadline)
    }

    fn peer_address(&self, window: u32, peer: u32) -> Result<*mut u8> {
        self.window(window, peer).map(|at| at as *mut u8).ok_or_else(|| {
            let message = "the peer is not connected, or there is no such window";
            Error::new(ErrorKind::InvalidInput, "peer_address", message)
        })
    }

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32> {
        let mut queue = self.queue(queue)?;
        for (done, command) in commands.iter().enumerate() {
            if queue.is_full() {
                return Ok(done);
            }
            let result = self.execute(&mut queue, command);
            let failed = result.map_err(|e| self.failure.set((*command, e.to_string()))).is_err();
            queue.note(command, failed);
        }
        Ok(commands.len())
    }

    fn poll(&self, queue: u32, events: &mut [Event]) -> std::result::Result<usize, i32> {
        Ok(self.queue(queue)?.take(events))
    }

    fn read_signal(&self, _: u32, id: u32) -> u64 {
        let mut total = 0_u64;
        let at = self.links.memory.signals() + u64::from(id) * SPACING;
        let copied = driver::copy(&self.context, &raw mut total as u64, at, 8);
        if let Err(error) = copied {
            let _ = self.failure.set((tokenyard_core::transport::NO_COMMAND, error.to_string()));
        }
        total
    }

    fn health(&self) -> Result<()> {
        match self.failure.get() {
            None => Ok(()),
            Some((command, why)) => {
                Err(Error::new(ErrorKind::Transport, "execute command", why.clone())
                    .with_context("op", command.op)
                    .with_context("peer", command.peer)
                    .with_context("tag", command.tag))
            }
        }
    }

    fn device_api(&self) -> Result<abi::TyDeviceApi> {
        let size = size_of::<abi::TyFirst>();
        self.device_api_of(&abi::TyFirst { size, window: 0, queue: 0, signal: 0, reserved: 0 })
    }

    fn device_api_of(&self, first: &abi::TyFirst) -> Result<abi::TyDeviceApi> {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let found = tables.iter().position(|table| table.first == *first);
        let at = match found {
            Some(at) => at,
            None => {
                tables.push(self.make_table(first)?);
                tables.len() - 1
            }
        };
        // In a box: its address stays when the list grows.
        let params = &raw const *tables[at].params;
        Ok(abi::TyDeviceApi { params: params.cast(), ..Self::device_source()? })
    }

    fn device_source() -> Result<abi::TyDeviceApi> {
        Ok(abi::TyDeviceApi {
            size: size_of::<abi::TyDeviceApi>(),
            version: abi::TY_DEVICE_API_VERSION,
            dialect: C::PLATFORM.dialect.code,
            compiler: C::PLATFORM.dialect.compilers[0].0,
            flags: abi::TY_DEVICE_API_LOAD_STORE,
            source: abi::TyStr { data: DEVICE_API.as_ptr(), bytes: DEVICE_API.len() },
            include_folders: std::ptr::null(),
            include_folder_count: 0,
            defines: std::ptr::null(),
            define_count: 0,
            params: std::ptr::null(),
            param_bytes: size_of::<Params>(),
            param_alignment: align_of::<Params>(),
        })
    }

    fn link_name(&self, peer: u32) -> String {
        let rank = self.links.offer.team.world_ranks.get(peer as usize);
        format!(
            "{} from device {} to that of rank {}",
            C::LINK,
            self.context.device.ordinal,
            rank.map_or("?".to_owned(), u32::to_string)
        )
    }
}

impl<C: Components> Peers<C> {
    fn queue(&self, queue: u32) -> std::result::Result<std::sync::MutexGuard<'_, Queue>, i32> {
        let queue = self.queues.get(queue as usize).ok_or(abi::TY_INTERNAL)?;
        Ok(queue.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn window(&self, window: u32, peer: u32) -> Option<u64> {
        self.links.peer(peer)?.windows.get(window as usize).copied()
    }

    /// The address of a command's signal, and the index of its total in the queue.
    fn signal(&self, command: &Command) -> Option<(u64, usize)> {
        let base = self.links.peer(command.peer)?.signals;
        let (signal, signals) = (command.signal, self.needs.signals);
        let index = command.peer as usize * signals as usize + signal as usize;
        (signal < signals).then_some((base + u64::from(signal) * SPACING, index))
    }

    fn execute(&self, queue: &mut Queue, command: &Command) -> Result<()> {
        let missing = |what: &str| {
            Error::new(ErrorKind::Transport, "execute command", format!("there is no such {what}"))
        };
        let ends = || -> Option<(u64, u64)> {
            let own = self.links.memory.windows.get(usize::from(command.src_window))?;
            let there = self.window(command.dst_window.into(), command.peer)?;
            Some((own + command.src_offset, there + command.dst_offset))
        };
        match command.op {
            abi::TY_OP_PUT | abi::TY_OP_PUT_SIGNAL => {
                let (own, there) = ends().ok_or_else(|| missing("peer or window"))?;
                queue.copy(there, own, command.bytes)?;
            }
            abi::TY_OP_GET => {
                let (own, there) = ends().ok_or_else(|| missing("peer or window"))?;
                queue.copy(own, there, command.bytes)?;
            }
            abi::TY_OP_PUT_VALUE => {
                let there = self.window(command.dst_window.into(), command.peer);
                let there = there.ok_or_else(|| missing("peer or window"))?;
                queue.write(there + command.dst_offset, command.value)?;
            }
            abi::TY_OP_SIGNAL => {}
            _ => return Err(missing("op")),
        }
        if matches!(command.op, abi::TY_OP_PUT_SIGNAL | abi::TY_OP_SIGNAL) {
            let (at, index) = self.signal(command).ok_or_else(|| missing("peer or signal"))?;
            queue.raise(at, index, command.add)?;
        }
        Ok(())
    }

    /// The addresses of peers, from a user's first window and first signal on. Its queues need no numbers: stores have
    /// none.
    fn make_table(&self, first: &abi::TyFirst) -> Result<PeerTable> {
        let peers = self.links.offer.team.world_ranks.len() as u32;
        let mut windows = Vec::new();
        for window in first.window..self.links.memory.windows.len() as u32 {
            for peer in 0..peers {
                windows.push(self.peer_address(window, peer)? as u64);
            }
        }
        let behind = u64::from(first.signal) * SPACING;
        let signals: Option<Vec<u64>> =
            (0..peers).map(|peer| self.links.peer(peer).map(|p| p.signals + behind)).collect();
        let signals = signals.ok_or_else(|| {
            Error::new(ErrorKind::Internal, "device_api", "a peer is not connected yet")
        })?;
        let windows = Buffer::of(&self.context, &windows)?;
        let signals = Buffer::of(&self.context, &signals)?;
        let params = Box::new(Params {
            windows: windows.address(),
            signals: signals.address(),
            peers,
            me: self.links.offer.team.me,
            spacing: SPACING as u32,
            reserved: 0,
        });
        Ok(PeerTable { first: *first, _windows: windows, _signals: signals, params })
    }
}

/// The device of the kernels, which the config may name, too.
fn device_of(configured: Option<u32>, kernels: Option<u32>) -> Result<Option<u32>> {
    match (configured, kernels) {
        (Some(found), Some(expected)) if found != expected => {
            let message =
                format!("found device = {found}; expected {expected}, where the kernels run");
            Err(Error::new(ErrorKind::Config, "open transport", message)
                .with_fix("name the same device in both tables, or none in the transport's"))
        }
        _ => Ok(configured.or(kernels)),
    }
}

/// Whether the device can share its memory with the others of the machine.
fn check_device(device: Device) -> Result<()> {
    let unavailable = |message: String, fix: &str| {
        Err(Error::new(ErrorKind::Unavailable, "probe", message).with_fix(fix))
    };
    let facts = device.facts()?;
    check_architecture(facts.architecture)?;
    let Some(shares_by) = facts.shares_by else {
        return unavailable(
            "the device cannot hand its memory to other processes".to_owned(),
            "see whether the hypervisor, or a partition of the device, keeps it from doing so",
        );
    };
    tracing::debug!("device {} shares memory by {shares_by}", device.ordinal);
    // The peers that this rank will reach are known once they connect.
    let mut unreachable = Ok(());
    for other in device.others()? {
        unreachable = reachable(device, other, device.reach(other)?);
        if unreachable.is_ok() {
            break;
        }
    }
    unreachable
}

impl<C: Components> Drop for Peers<C> {
    /// Peers' memory is unmapped after this: neither queues nor kernels may still use it. Streams of
    /// the framework do not use it, and are not waited for.
    fn drop(&mut self) {
        if let Err(error) = Stream::synchronize_all(&self.context) {
            tracing::warn!("the streams of this device did not end well: {error}");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests fail by panic")]
mod device_tests {
    use super::device_of;

    #[test]
    fn a_transport_works_on_the_device_of_the_kernels_and_its_table_may_name_no_other() {
        assert_eq!(device_of(None, Some(3)).unwrap(), Some(3));
        assert_eq!(device_of(Some(3), Some(3)).unwrap(), Some(3));
        assert_eq!(device_of(Some(2), None).unwrap(), Some(2));
        assert_eq!(device_of(None, None).unwrap(), None);
        let text = device_of(Some(2), Some(3)).unwrap_err().to_string();
        assert!(text.contains("found device = 2; expected 3, where the kernels run"), "{text}");
    }
}
