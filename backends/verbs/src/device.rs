//! Opens the device of the config, with a port, a GID and a packet size.

use tokenyard_core::abi;
use tokenyard_core::transport::{Capabilities, NO_CAPABILITIES, Team};
use tokenyard_core::{Error, Result};
use tokenyard_sys_verbs::ffi;

use crate::config::{DeviceChoice, VerbsConfig};
use crate::endpoint::{MAX_QUEUES, MAX_SIGNALS, MAX_WINDOWS};
use crate::port::{MAX_PEERS, Port, REQUESTS};
use crate::rules::{self, SignalMode};

/// Entries of a completion queue per command of the queue's depth. Two are for the work requests in
/// flight. When a connection breaks, a command ends with its first completion. Its second
/// completion is still to come when a new command takes its place in the queue.
pub(crate) const COMPLETIONS: u32 = 3;

/// A device as a rank uses it.
#[derive(Debug)]
pub(crate) struct Adapter {
    pub(crate) port: Port,
    pub(crate) signals: SignalMode,
}

/// Every adapter that the config allows, in the order in which ranks take them. With a team, only
/// the adapter of its rank; with `device = "auto"` that is the one that the topology chose.
///
/// # Errors
/// [`ErrorKind::Unavailable`](tokenyard_core::ErrorKind::Unavailable), which names what is missing.
pub(crate) fn adapters(config: &VerbsConfig, team: Option<&Team>) -> Result<Vec<Adapter>> {
    let ports = config.ports().open(team)?;
    let adapter = |(context, facts): &(_, _)| {
        Adapter::new(config, Port::new(context, facts, config.gid_index, config.mtu)?)
    };
    ports.iter().map(adapter).collect()
}

impl Adapter {
    fn new(config: &VerbsConfig, port: Port) -> Result<Self> {
        let atomics = port.device.atomic_cap != ffi::ATOMIC_NONE;
        let most = if port.device.max_srq > 0 { most_receives(&port) } else { 0 };
        let signals = rules::signals(config.signals, most.min(config.receive_depth), atomics);
        let named = |error: Error| error.with_context("device", port.context.name());
        Ok(Self { signals: signals.map_err(named)?, port })
    }

    /// Signals that can wait for a poll.
    pub(crate) fn receive_depth(&self, config: &VerbsConfig) -> u32 {
        config.receive_depth.min(most_receives(&self.port))
    }

    /// The capabilities of this adapter.
    pub(crate) fn capabilities(&self, config: &VerbsConfig) -> Capabilities {
        let signals = match self.signals {
            // Signals are counted, and receives are posted again, when a thread drives the
            // transport.
            SignalMode::Immediate => abi::TY_CAP_IMMEDIATE | abi::TY_CAP_MANUAL_PROGRESS,
            SignalMode::Atomic => abi::TY_CAP_NATIVE_ATOMICS,
        };
        let count = |found: i32| u32::try_from(found).unwrap_or(0);
        let depth = (count(self.port.device.max_qp_wr) / REQUESTS)
            .min(count(self.port.device.max_cqe) / COMPLETIONS)
            .min(config.queue_depth);
        let placed = match config.device {
            DeviceChoice::Auto => abi::TY_CAP_PLACED_NICS,
            _ => 0,
        };
        Capabilities {
            flags: abi::TY_CAP_ORDERED
                | abi::TY_CAP_GET
                | abi::TY_CAP_BOUNDED_PUT
                | abi::TY_CAP_MASKING
                | placed
                | signals,
            memory_kinds: self.memory_kinds(),
            max_peers: MAX_PEERS,
            max_queues: MAX_QUEUES,
            max_signals: MAX_SIGNALS,
            max_queue_depth: depth,
            max_windows: MAX_WINDOWS,
            largest_put: u64::from(self.port.attr.max_msg_sz),
            ..NO_CAPABILITIES
        }
    }

    /// Device memory is registered by dmabuf or by a peer memory module of the kernel; whether the
    /// driver supports either is known only when a window is registered. Device memory needs
    /// signals that are counted after a read-back (INV-1).
    pub(crate) fn memory_kinds(&self) -> u32 {
        match self.signals {
            SignalMode::Immediate => abi::TY_MEMORY_HOST | abi::TY_MEMORY_CUDA | abi::TY_MEMORY_HIP,
            SignalMode::Atomic => abi::TY_MEMORY_HOST,
        }
    }
}

/// Receives that a shared receive queue of the device holds, each with room for its completion.
fn most_receives(port: &Port) -> u32 {
    u32::try_from(port.device.max_srq_wr.min(port.device.max_cqe)).unwrap_or(0)
}
