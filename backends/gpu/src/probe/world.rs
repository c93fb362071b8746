//! The windows of all ranks, mapped by the transport between devices.

use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::Duration;

use tokenyard_core::bootstrap::World;
use tokenyard_core::transport::{
    NO_WINDOW, Team, Transport as _, TransportNeeds, TransportOpen, Window,
};
use tokenyard_core::{Result, abi};

use crate::config::PeersConfig;
use crate::driver::{Context, Vmm};
use crate::kernels::DeviceApi;
use crate::platform::Components;
use crate::transport::Peers;

const WINDOW: u32 = 0;
const DEADLINE: Duration = Duration::from_secs(60);

/// One window of each rank.
#[derive(Debug)]
pub(super) struct Links<C: Components> {
    pub(super) rank: u32,
    pub(super) ranks: u32,
    /// Dropped before the window that it shares.
    transport: Peers<C>,
    pub(super) window: Vmm,
    context: Arc<Context>,
}

impl<C: Components> Links<C> {
    pub(super) fn open(
        world: &World,
        context: &Arc<Context>,
        config: &PeersConfig,
        bytes: u64,
    ) -> Result<Self> {
        let (rank, ranks) = (world.rank(), world.ranks());
        let needs = TransportNeeds {
            windows: 1,
            queues: 1,
            signals: ranks,
            queue_depth: 1,
            largest_put: 8,
            deadline: DEADLINE,
        };
        Peers::<C>::probe(config)?;
        let window = Vmm::new(context, bytes)?;
        let mut transport = Peers::<C>::open(
            config.clone(),
            &TransportOpen::new(&Team::world(rank, ranks), &needs),
        )?;
        let shared = Window {
            id: WINDOW,
            kind: C::PLATFORM.memory,
            pointer: window.address() as *mut u8,
            bytes: window.bytes(),
            fd: window.fd().as_raw_fd(),
            device: context.device.ordinal,
            handle: abi::TY_HANDLE_POSIX,
            ..NO_WINDOW
        };
        // SAFETY: the window is dropped after the transport (field order, and order of locals here).
        unsafe { transport.register(&shared)? };
        let outgoing = (0..ranks).map(|peer| transport.endpoint(peer));
        let incoming = world.exchange("probe endpoints", outgoing.collect::<Result<_>>()?)?;
        for (peer, endpoint) in (0..).zip(&incoming) {
            transport.connect(peer, endpoint)?;
        }
        world.barrier("probe connected")?;
        Ok(Self { rank, ranks, transport, window, context: Arc::clone(context) })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The device API by which kernels reach the windows.
    pub(super) fn device_api(&self) -> Result<DeviceApi> {
        let device_api = self.transport.device_api()?;
        // SAFETY: the transport lives, and with it the memory that its device API points to.
        unsafe { DeviceApi::read(&self.context.device.platform.dialect, &device_api) }
    }

    /// First byte of a rank's window, mapped here.
    pub(super) fn peer(&self, peer: u32) -> Result<u64> {
        self.transport.peer_address(WINDOW, peer).map(|at| at as u64)
    }
}
