//! Opens the device of the config, with a port, a GID and a packet size.

use std::sync::Arc;

use tokenyard_core::abi;
use tokenyard_core::transport::{Capabilities, NO_CAPABILITIES, Team};
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_sys_verbs::Context;
use tokenyard_sys_verbs::ffi::{self, DeviceAttr, GidEntry, PortAttr};

use crate::config::{DeviceChoice, VerbsConfig};
use crate::endpoint::{MAX_QUEUES, MAX_SIGNALS, MAX_WINDOWS};
use crate::ports;
use crate::rules::{self, PortFacts, SignalMode};

/// Most ranks of a team; the index of a peer also has to fit a work request's id.
const MAX_PEERS: u32 = 1024;
/// Work requests that one command may become: a write and an addition.
pub(crate) const REQUESTS: u32 = 2;
/// Entries of a completion queue per command of the queue's depth. Two are for the work requests in
/// flight. When a connection breaks, a command ends with its first completion. Its second
/// completion is still to come when a new command takes its place in the queue.
pub(crate) const COMPLETIONS: u32 = 3;
/// Reads and atomics of one queue pair at once. More has no benefit, and devices support few.
const MOST_READS: i32 = 16;

/// A device as a rank uses it.
#[derive(Debug)]
pub(crate) struct Adapter {
    pub(crate) context: Arc<Context>,
    pub(crate) attr: DeviceAttr,
    pub(crate) port: u8,
    pub(crate) port_attr: PortAttr,
    pub(crate) gid: GidEntry,
    pub(crate) mtu: u8,
    pub(crate) signals: SignalMode,
}

/// Every adapter that the config allows, in the order in which ranks take them. With a team, only
/// the adapter of its rank; with `device = "auto"` that is the one that the topology chose.
///
/// # Errors
/// [`ErrorKind::Unavailable`], which names what is missing.
pub(crate) fn adapters(config: &VerbsConfig, team: Option<&Team>) -> Result<Vec<Adapter>> {
    let ports = config.ports().open(team)?;
    ports.iter().map(|(context, port)| Adapter::new(config, context, port)).collect()
}

impl Adapter {
    fn new(config: &VerbsConfig, context: &Arc<Context>, port: &PortFacts) -> Result<Self> {
        let failed = |e| ports::unavailable("ask device", e).with_context("device", &port.device);
        let attr = context.attributes().map_err(failed)?;
        let port_attr = context.port(port.port).map_err(failed)?;
        let gids = context.gids().map_err(failed)?;
        let receives = u32::try_from(attr.max_srq_wr.min(attr.max_cqe)).unwrap_or(0);
        let receives = if attr.max_srq > 0 { receives } else { 0 };
        let named = |error: Error| error.with_context("device", &port.device);
        if attr.max_qp_rd_atom < 1 || attr.max_qp_init_rd_atom < 1 {
            let message = "the device serves no RDMA reads; expected a device with RC queue pairs";
            return Err(named(Error::new(ErrorKind::Unavailable, "ask device", message)));
        }
        Ok(Self {
            context: Arc::clone(context),
            gid: rules::gid(&gids, port, config.gid_index)?,
            mtu: rules::mtu(config.mtu, port_attr.active_mtu).map_err(named)?,
            signals: rules::signals(
                config.signals,
                receives.min(config.receive_depth),
                attr.atomic_cap != ffi::ATOMIC_NONE,
            )
            .map_err(named)?,
            attr,
            port: port.port,
            port_attr,
        })
    }

    /// Signals that can wait for a poll.
    pub(crate) fn receive_depth(&self, config: &VerbsConfig) -> u32 {
        let most = u32::try_from(self.attr.max_srq_wr.min(self.attr.max_cqe)).unwrap_or(0);
        config.receive_depth.min(most)
    }

    /// Reads and atomics of a peer that one queue pair serves at once.
    pub(crate) fn reads_served(&self) -> u8 {
        self.attr.max_qp_rd_atom.clamp(1, MOST_READS) as u8
    }

    /// Reads and atomics that one queue pair has in flight at once.
    pub(crate) fn reads_asked(&self) -> u8 {
        self.attr.max_qp_init_rd_atom.clamp(1, MOST_READS) as u8
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
        let depth = (count(self.attr.max_qp_wr) / REQUESTS)
            .min(count(self.attr.max_cqe) / COMPLETIONS)
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
            largest_put: u64::from(self.port_attr.max_msg_sz),
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

pub(crate) fn no_port() -> Error {
    Error::new(ErrorKind::Unavailable, "choose device", "found no port; expected one")
}
