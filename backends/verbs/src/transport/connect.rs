//! The endpoints that ranks exchange, the checks of them, and the connection of queue pairs.

use std::net::Ipv6Addr;

use rustix::io::Errno;
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_sys_verbs::ffi::{AhAttr, Gid, GlobalRoute, LINK_LAYER_ETHERNET};
use tokenyard_sys_verbs::{Address, CallError, Init, Qp, Receive, Rts, Send};

use crate::config::VerbsConfig;
use crate::device::Adapter;
use crate::endpoint::{Endpoint, RemoteQp};
use crate::rules::SignalMode;

/// The code for 0.64 ms: the time that a peer waits after it found no receive here.
const RNR_TIMER: u8 = 12;
/// The hop limit of routed RoCE.
const HOPS: u8 = 64;

/// The settings of both directions of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setup<'a> {
    pub(super) adapter: &'a Adapter,
    pub(super) config: &'a VerbsConfig,
}

impl Setup<'_> {
    /// The route to a peer's port.
    fn route(&self, lid: u16, gid: [u8; 16]) -> AhAttr {
        let mine = self.adapter.gid.gid.raw;
        let ethernet = self.adapter.port_attr.link_layer == LINK_LAYER_ETHERNET;
        // Within an InfiniBand subnet the local id is enough.
        let routed = ethernet || gid[..8] != mine[..8] || self.config.traffic_class != 0;
        AhAttr {
            grh: GlobalRoute {
                dgid: Gid { raw: gid },
                flow_label: 0,
                sgid_index: self.adapter.gid.gid_index as u8,
                hop_limit: HOPS,
                traffic_class: self.config.traffic_class,
            },
            dlid: lid,
            sl: self.config.service_level,
            is_global: u8::from(routed),
            port_num: self.adapter.port,
            ..AhAttr::default()
        }
    }

    /// Moves a queue pair to the state in which it sends and receives. The only wait is for the
    /// kernel's look-up of the peer's address.
    pub(super) fn connect(
        &self,
        qp: Qp<Init>,
        psn: u32,
        endpoint: &Endpoint,
        remote_qp: RemoteQp,
    ) -> Result<Qp<Rts>, CallError> {
        let to = Address {
            route: self.route(endpoint.lid, endpoint.gid),
            qpn: remote_qp.number,
            mtu: i32::from(self.adapter.mtu.min(endpoint.mtu)),
        };
        let reads = self.adapter.reads_served();
        let receiving =
            qp.receive(&to, &Receive { psn: remote_qp.psn, reads, rnr_timer: RNR_TIMER })?;
        receiving.send(&Send {
            psn,
            reads: self.adapter.reads_asked().min(endpoint.reads),
            timeout: self.config.timeout,
            retries: self.config.retry_count,
            rnr_retries: self.config.rnr_retry,
        })
    }

    /// Connects a queue pair to itself.
    pub(super) fn connect_to_itself(&self, qp: Qp<Init>) -> Result<Qp<Rts>, CallError> {
        let (number, psn) = (qp.number(), 0);
        let endpoint = self.endpoint(0, 0, 1);
        self.connect(qp, psn, &endpoint, RemoteQp { number, psn })
    }

    /// This rank's endpoint for (itself, a peer, the ranks), without queues, windows and signals.
    pub(super) fn endpoint(&self, sender: u32, receiver: u32, ranks: u32) -> Endpoint {
        let ethernet = self.adapter.port_attr.link_layer == LINK_LAYER_ETHERNET;
        Endpoint {
            sender,
            receiver,
            ranks,
            link_layer: self.adapter.port_attr.link_layer,
            mtu: self.adapter.mtu,
            reads: self.adapter.reads_served(),
            lid: if ethernet { 0 } else { self.adapter.port_attr.lid },
            gid: self.adapter.gid.gid.raw,
            signal_count: 0,
            signals: crate::endpoint::SignalArea::Immediate,
            queue_pairs: Vec::new(),
            windows: Vec::new(),
        }
    }

    /// This rank's port, in one line for people.
    pub(super) fn here(&self) -> String {
        let signals = match self.adapter.signals {
            SignalMode::Immediate => "immediate",
            SignalMode::Atomic => "atomic",
        };
        format!(
            "{} port {} gid {} ({}), {signals} signals",
            self.adapter.context.name(),
            self.adapter.port,
            self.adapter.gid.gid_index,
            Ipv6Addr::from(self.adapter.gid.gid.raw),
        )
    }
}

/// The error for a connect that the system refused.
pub(super) fn unreachable(error: CallError, rank: u32, link: &str) -> Error {
    let errno = error.source.raw_os_error().map(Errno::from_raw_os_error);
    let address = matches!(
        errno,
        Some(Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::TIMEDOUT | Errno::INVAL)
    );
    let (kind, fix) = if address {
        (
            ErrorKind::PeerLost,
            "see that the interfaces of both GIDs reach each other (ping -I), and that both sides \
             have the same kind of GID: set `gid_index`",
        )
    } else {
        (ErrorKind::System, "see the kernel's log for the device")
    };
    Error::new(kind, "connect", error.call)
        .with_context("link", link)
        .with_source(error.source)
        .with_rank(rank)
        .with_fix(fix)
}
