//! `nvlink` without its loads and stores.

use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;

use tokenyard_core::config::ComponentTable;
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, Transport, TransportNeeds, TransportOpen, Window,
};
use tokenyard_core::{Error, ErrorKind, Result, abi};
use tokenyard_cuda::Nvlink;
use tokenyard_gpu::driver::{Context, Device};
use tokenyard_gpu::{Devices, PeersConfig};

use crate::config::{COMPONENT, DevicePutConfig};
use crate::nested;
use crate::ring::{CAPACITY, Rings};
use crate::server::{Habits, RingServer};

const SOURCE: &str = include_str!("device_put.cuh");
/// Queues that kernels may use.
const MOST_QUEUES: u32 = 4;

/// The transport; see the crate.
#[derive(Debug)]
pub struct DevicePut {
    /// Dropped first: its thread uses the rest.
    server: OnceLock<RingServer>,
    device_side: OnceLock<Vec<u64>>,
    rings: Arc<Rings>,
    /// Shared with the server's thread once that thread runs.
    nvlink: Arc<Nvlink>,
    habits: Habits,
    me: u32,
}

fn inner_config(config: &DevicePutConfig) -> PeersConfig {
    PeersConfig { device: config.device.clone(), ..PeersConfig::default() }
}

/// The device API of `nvlink` in a namespace, then that of this transport.
static DEVICE_API: LazyLock<String> = LazyLock::new(|| nested::text(SOURCE));

/// Words of `DeviceApi::Params` behind those of `nvlink`.
const OWN_PARAMS: usize = 3;

impl DevicePut {
    /// The instance below, while no other code holds it.
    fn below(&mut self) -> Result<&mut Nvlink> {
        Arc::get_mut(&mut self.nvlink).ok_or_else(|| {
            let message = "the server runs already; expected every connection before it";
            Error::new(ErrorKind::Internal, "connect", message)
        })
    }

    /// `DeviceApi::Params` of `device_put.cuh`.
    fn params(&self) -> Result<Vec<u64>> {
        let own: [u64; OWN_PARAMS] = [
            self.rings.address(),
            u64::from(CAPACITY - 1) | u64::from(self.habits.signals) << 32,
            self.me.into(),
        ];
        let params = nested::params(&self.nvlink, &own)?;
        let server =
            RingServer::start(Arc::clone(&self.nvlink), Arc::clone(&self.rings), self.habits)?;
        // The server of a second caller is dropped, so it ends.
        drop(self.server.set(server));
        Ok(params)
    }

    /// The transport below knows no queues: each has signals of its own there.
    fn below_signal(&self, queue: u32, signal: u32) -> u32 {
        queue * self.habits.signals + signal
    }
}

impl Transport for DevicePut {
    const NAME: &'static str = COMPONENT;
    const ABOUT: &'static str =
        "a tool for tests: kernels put, and a thread executes late and in any order";
    type Config = DevicePutConfig;

    fn configure(table: &ComponentTable) -> Result<DevicePutConfig> {
        DevicePutConfig::read(table)
    }

    fn probe(config: &DevicePutConfig) -> Result<Capabilities> {
        let found = Nvlink::probe(&inner_config(config))?;
        Ok(Capabilities {
            // The memory of a lost peer outlives it: only a get shows that its puts arrive.
            flags: abi::TY_CAP_DEVICE_API | abi::TY_CAP_BOUNDED_PUT | abi::TY_CAP_GET,
            max_queues: MOST_QUEUES,
            max_signals: found.max_signals / MOST_QUEUES,
            ..found
        })
    }

    fn open(config: DevicePutConfig, open: &TransportOpen<'_>) -> Result<Self> {
        let TransportOpen { team, needs, .. } = *open;
        let inner = inner_config(&config);
        let device = inner.device.as_ref().map(Devices::mine).or(open.device);
        let context = Context::retain(Device::choose(&tokenyard_cuda::PLATFORM, device)?)?;
        let below = TransportNeeds {
            queues: needs.queues + 1,
            signals: needs.queues * needs.signals,
            // Every command of every ring at once.
            queue_depth: needs.queue_depth.max(CAPACITY * needs.queues),
            ..*needs
        };
        Ok(Self {
            server: OnceLock::new(),
            device_side: OnceLock::new(),
            rings: Arc::new(Rings::new(&context, needs.queues)?),
            nvlink: Arc::new(Nvlink::open(inner, &TransportOpen { needs: &below, ..*open })?),
            habits: Habits {
                seed: config.seed,
                rank: team.me,
                hold: Duration::from_micros(config.hold_us.into()),
                fault: config.fault,
                signals: needs.signals,
                queue: needs.queues,
            },
            me: team.me,
        })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        self.nvlink.memory_needs()
    }

    unsafe fn register(&mut self, window: &Window) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.below()?.register(window) }
    }

    fn endpoint(&mut self, peer: u32) -> Result<Vec<u8>> {
        self.below()?.endpoint(peer)
    }

    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        self.below()?.connect(peer, data)
    }

    fn commit(&mut self) -> Result<()> {
        self.below()?.commit()
    }

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32> {
        for (done, command) in commands.iter().enumerate() {
            let signal = self.below_signal(queue, command.signal);
            // SAFETY: by this function's contract.
            let accepted = unsafe { self.nvlink.post(queue, &[Command { signal, ..*command }])? };
            if accepted == 0 {
                return Ok(done);
            }
        }
        Ok(commands.len())
    }

    fn poll(&self, queue: u32, events: &mut [Event]) -> std::result::Result<usize, i32> {
        self.nvlink.poll(queue, events)
    }

    fn read_signal(&self, queue: u32, id: u32) -> u64 {
        self.nvlink.read_signal(queue, self.below_signal(queue, id))
    }

    fn health(&self) -> Result<()> {
        self.nvlink.health()
    }

    fn device_api(&self) -> Result<abi::TyDeviceApi> {
        let params = match self.device_side.get() {
            Some(params) => params,
            None => {
                let made = self.params()?;
                self.device_side.get_or_init(|| made)
            }
        };
        Ok(abi::TyDeviceApi { params: params.as_ptr().cast(), ..Self::device_source()? })
    }

    fn device_source() -> Result<abi::TyDeviceApi> {
        nested::device_source(&DEVICE_API, OWN_PARAMS)
    }

    fn link_name(&self, peer: u32) -> String {
        format!("device-put (a tool for tests) over {}", self.nvlink.link_name(peer))
    }
}
