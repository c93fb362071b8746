//! An open port, as every transport over libibverbs uses it: its GID and packet size are chosen.

use std::fmt;
use std::net::Ipv6Addr;
use std::sync::Arc;

use tokenyard_core::transport::{Capabilities, Team};
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_sys_verbs::ffi::{
    AhAttr, DeviceAttr, Gid, GidEntry, GlobalRoute, LINK_LAYER_ETHERNET, PortAttr,
};
use tokenyard_sys_verbs::{CallError, Context};

use crate::config::Mtu;
use crate::endpoint::{Endpoint, SignalArea};
use crate::ports;
use crate::rules::{self, PortFacts};

/// Most ranks of a team; the index of a peer also has to fit a work request's id.
pub const MAX_PEERS: u32 = 1024;
/// Work requests that one command may become: a write and an addition.
pub const REQUESTS: u32 = 2;
/// The hop limit of routed packets.
pub const HOPS: u8 = 64;
/// Reads and atomics of one queue pair at once. More has no benefit, and devices support few.
const MOST_READS: i32 = 16;

/// A port of an open device.
#[derive(Debug)]
pub struct Port {
    /// The device.
    pub context: Arc<Context>,
    /// The limits of the device.
    pub device: DeviceAttr,
    /// Number of the port, from 1.
    pub number: u8,
    /// State and limits of the port.
    pub attr: PortAttr,
    /// The entry of its GID table that packets carry.
    pub gid: GidEntry,
    /// Packet size, a code of 1 to 5.
    pub mtu: u8,
}

impl Port {
    /// Asks the device about a port, and chooses GID and packet size by the keys `gid_index` and `mtu`.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`], which names what is missing.
    pub fn new(
        context: &Arc<Context>,
        port: &PortFacts,
        gid_index: Option<u8>,
        mtu: Mtu,
    ) -> Result<Self> {
        let failed = |e| ports::unavailable("ask device", e).with_context("device", &port.device);
        let device = context.attributes().map_err(failed)?;
        let attr = context.port(port.port).map_err(failed)?;
        let gids = context.gids().map_err(failed)?;
        let named = |error: Error| error.with_context("device", &port.device);
        if device.max_qp_rd_atom < 1 || device.max_qp_init_rd_atom < 1 {
            let message = "the device serves no RDMA reads; expected a device with RC queue pairs";
            return Err(named(Error::new(ErrorKind::Unavailable, "ask device", message)));
        }
        Ok(Self {
            context: Arc::clone(context),
            device,
            number: port.port,
            gid: rules::gid(&gids, port, gid_index)?,
            mtu: rules::mtu(mtu, attr.active_mtu).map_err(named)?,
            attr,
        })
    }

    /// Whether it is RoCE.
    pub fn is_ethernet(&self) -> bool {
        self.attr.link_layer == LINK_LAYER_ETHERNET
    }

    /// Reads and atomics of a peer that one queue pair serves at once.
    pub fn reads_served(&self) -> u8 {
        self.device.max_qp_rd_atom.clamp(1, MOST_READS) as u8
    }

    /// Reads and atomics that one queue pair has in flight at once.
    pub fn reads_asked(&self) -> u8 {
        self.device.max_qp_init_rd_atom.clamp(1, MOST_READS) as u8
    }

    /// Whether packets to this GID have a global header. Within an InfiniBand subnet the local id is enough.
    pub fn is_routed(&self, gid: &[u8; 16], traffic_class: u8) -> bool {
        self.is_ethernet() || gid[..8] != self.gid.gid.raw[..8] || traffic_class != 0
    }

    /// The route to a peer's port, by the keys `traffic_class` and `service_level`.
    pub fn route(&self, lid: u16, gid: [u8; 16], traffic_class: u8, service_level: u8) -> AhAttr {
        AhAttr {
            grh: GlobalRoute {
                dgid: Gid { raw: gid },
                flow_label: 0,
                sgid_index: self.gid.gid_index as u8,
                hop_limit: HOPS,
                traffic_class,
            },
            dlid: lid,
            sl: service_level,
            is_global: u8::from(self.is_routed(&gid, traffic_class)),
            port_num: self.number,
            ..AhAttr::default()
        }
    }

    /// The endpoint for `receiver` of a team, without queues, windows and signals.
    pub fn endpoint(&self, team: &Team, receiver: u32) -> Endpoint {
        Endpoint {
            sender: team.me,
            receiver,
            ranks: team.world_ranks.len() as u32,
            link_layer: self.attr.link_layer,
            mtu: self.mtu,
            reads: self.reads_served(),
            lid: if self.is_ethernet() { 0 } else { self.attr.lid },
            gid: self.gid.gid.raw,
            signal_count: 0,
            signals: SignalArea::Immediate,
            queue_pairs: Vec::new(),
            windows: Vec::new(),
        }
    }

    /// Checks that the device has as many queue pairs as a transport makes: `each` to every rank of the team.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`]; `fewer` is the way to need fewer.
    pub fn check_queue_pairs(&self, team: &Team, each: u64, fewer: &str) -> Result<()> {
        let wanted = team.world_ranks.len() as u64 * each;
        let most = u64::try_from(self.device.max_qp).unwrap_or(0);
        if wanted <= most {
            return Ok(());
        }
        let message =
            format!("found a device of {most} queue pairs; expected {wanted}: {each} per rank");
        Err(Error::new(ErrorKind::Unavailable, "open", message)
            .with_context("device", self.context.name())
            .with_fix(format!("{fewer}, or spread the ranks over more devices")))
    }

    /// The error for a resource that the device refuses; `keys` are those of the config that lower the need.
    pub fn refused(&self, error: CallError, keys: &str) -> Error {
        Error::new(ErrorKind::System, "open", error.call)
            .with_context("device", self.context.name())
            .with_source(error.source)
            .with_fix(format!(
                "raise the limit on locked memory (`ulimit -l`), lower {keys}, or see the kernel's log for the device"
            ))
    }
}

/// The port, in one line for people.
impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = Ipv6Addr::from(self.gid.gid.raw);
        let (name, index) = (self.context.name(), self.gid.gid_index);
        write!(f, "{name} port {} gid {index} ({address})", self.number)
    }
}

/// The capabilities that all devices have: ranks of one node may have different ones.
///
/// # Errors
/// There is no device.
pub fn common(mut each: impl Iterator<Item = Capabilities>) -> Result<Capabilities> {
    let first = each.next().ok_or_else(no_port)?;
    Ok(each.fold(first, |a, b| Capabilities {
        flags: a.flags & b.flags,
        memory_kinds: a.memory_kinds & b.memory_kinds,
        max_queue_depth: a.max_queue_depth.min(b.max_queue_depth),
        largest_put: a.largest_put.min(b.largest_put),
        ..a
    }))
}

/// The error for a rank without a port.
pub fn no_port() -> Error {
    Error::new(ErrorKind::Unavailable, "choose device", "found no port; expected one")
}
