//! The commands that connect a queue pair, from the addresses of both ends.

use std::sync::Arc;

use rustix::io::Errno;
use tokenyard_core::Error;
use tokenyard_sys_mlx5::CallError;
use tokenyard_sys_mlx5::mailbox::{Init2Rtr, Rst2Init, Rtr2Rts};
use tokenyard_sys_verbs::ffi::GID_TYPE_ROCE_V2;
use tokenyard_sys_verbs::{AddressHandle, Pd};
use tokenyard_verbs::connection;
use tokenyard_verbs::endpoint::{Endpoint, RemoteQp};
use tokenyard_verbs::port::HOPS;

use crate::config::IbgdaConfig;
use crate::device::Adapter;
use crate::pair::Steps;

/// The longest message, as a power of two.
const LOG_LONGEST: u8 = 30;
/// Atomics of 8 bytes and below.
const ATOMICS_8: u8 = 3;
/// The code for 0.64 ms. No queue pair here uses receives, but the field must be valid.
const RNR_TIMER: u8 = 12;
/// The first UDP port of RoCE version 2. Switches spread connections by the port.
const FIRST_PORT: u32 = 0xc000;

/// The settings of this rank for all its connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup<'a> {
    pub(crate) adapter: &'a Adapter,
    pub(crate) config: &'a IbgdaConfig,
}

/// A peer's port, as this rank reaches it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NextHop<'a> {
    pub(crate) endpoint: &'a Endpoint,
    /// RoCE: the MAC address of the peer, or of the router on the way.
    mac: [u8; 6],
}

impl Setup<'_> {
    /// Finds the way to a peer. On RoCE the kernel looks up the next hop's address.
    ///
    /// # Errors
    /// The kernel's error where no neighbour answers.
    pub(crate) fn next_hop<'e>(
        &self,
        pd: &Arc<Pd>,
        endpoint: &'e Endpoint,
    ) -> Result<NextHop<'e>, CallError> {
        let (port, config) = (&self.adapter.port, self.config);
        if !port.is_ethernet() {
            return Ok(NextHop { endpoint, mac: [0; 6] });
        }
        let (class, level) = (config.traffic_class, config.service_level);
        let route = port.route(endpoint.lid, endpoint.gid, class, level);
        let mac = self.adapter.devx.next_hop(&AddressHandle::new(pd, &route)?)?;
        Ok(NextHop { endpoint, mac })
    }

    /// The commands that connect a queue pair of this rank to one of a peer.
    pub(crate) fn steps(&self, local: RemoteQp, remote: RemoteQp, to: &NextHop<'_>) -> Steps {
        let (from, config) = (&self.adapter.port, self.config);
        let log = |count: u8| count.max(1).ilog2() as u8;
        let init = Rst2Init {
            qpn: 0,
            atomic_mode: ATOMICS_8,
            remote_read: true,
            remote_write: true,
            remote_atomic: true,
            pkey_index: config.pkey_index,
            port: from.number,
        };
        let receive = Init2Rtr {
            mtu: from.mtu.min(to.endpoint.mtu),
            log_msg_max: LOG_LONGEST,
            remote_qpn: remote.number,
            log_rra_max: log(from.reads_served()),
            min_rnr_nak: RNR_TIMER,
            next_receive_psn: remote.psn,
            pkey_index: config.pkey_index,
            port: from.number,
            ..if from.is_ethernet() {
                self.roce(local, remote, to)
            } else {
                self.infiniband(to.endpoint)
            }
        };
        let send = Rtr2Rts {
            qpn: 0,
            ack_timeout: config.timeout,
            log_sra_max: log(from.reads_asked().min(to.endpoint.reads)),
            retry_count: config.retry_count,
            rnr_retry: 7,
            next_send_psn: local.psn,
        };
        Steps { init, receive, send }
    }

    /// Within an InfiniBand subnet the local id is enough.
    fn infiniband(&self, endpoint: &Endpoint) -> Init2Rtr {
        let near = Init2Rtr {
            remote_lid: endpoint.lid,
            service_level: self.config.service_level,
            ..Init2Rtr::default()
        };
        if !self.adapter.port.is_routed(&endpoint.gid, self.config.traffic_class) {
            return near;
        }
        Init2Rtr { global_route: true, ..self.global(endpoint, near) }
    }

    /// As mlx5's kernel driver fills it in: the bit of a global route is InfiniBand's.
    fn roce(&self, local: RemoteQp, remote: RemoteQp, to: &NextHop<'_>) -> Init2Rtr {
        let version_2 = self.adapter.port.gid.gid_type == GID_TYPE_ROCE_V2;
        let near = Init2Rtr {
            ethernet_priority: self.config.service_level & 7,
            dscp: if version_2 { self.config.traffic_class >> 2 } else { 0 },
            udp_source_port: if version_2 { udp_port(local.number, remote.number) } else { 0 },
            remote_mac: to.mac,
            ..Init2Rtr::default()
        };
        self.global(to.endpoint, near)
    }

    fn global(&self, endpoint: &Endpoint, near: Init2Rtr) -> Init2Rtr {
        Init2Rtr {
            source_gid_index: self.adapter.port.gid.gid_index as u8,
            hop_limit: HOPS,
            traffic_class: self.config.traffic_class,
            remote_gid: endpoint.gid,
            ..near
        }
    }
}

/// A port that differs between the connections of two hosts, so that switches spread them.
fn udp_port(local: u32, remote: u32) -> u16 {
    let mixed = local.wrapping_mul(0x9e37_79b1) ^ remote.wrapping_mul(0x85eb_ca6b);
    (FIRST_PORT | mixed >> 18) as u16
}

/// The error for a connect that the system or the device refused.
pub(crate) fn unreachable(error: CallError, rank: u32, link: &str) -> Error {
    const FAR: [Errno; 3] = [Errno::HOSTUNREACH, Errno::NETUNREACH, Errno::TIMEDOUT];
    connection::unreachable(error, &FAR, rank, link)
}

#[cfg(test)]
mod tests {
    use tokenyard_core::ErrorKind;

    use super::*;

    #[test]
    fn a_port_is_one_of_roce_and_differs_between_connections() {
        let ports: Vec<_> = (0..64).map(|qp| udp_port(0x100 + qp, 0x200)).collect();
        assert!(ports.iter().all(|port| *port >= 0xc000), "{ports:x?}");
        let mut different = ports.clone();
        different.sort_unstable();
        different.dedup();
        assert!(different.len() > 60, "{ports:x?}");
    }

    #[test]
    fn a_peer_that_no_neighbour_knows_is_lost_and_other_refusals_are_the_systems() {
        for (errno, kind) in [
            (Errno::HOSTUNREACH, ErrorKind::PeerLost),
            (Errno::TIMEDOUT, ErrorKind::PeerLost),
            (Errno::REMOTEIO, ErrorKind::System),
        ] {
            let source = std::io::Error::from_raw_os_error(errno.raw_os_error());
            let error = unreachable(CallError { call: "Init2Rtr", source }, 3, "mlx5_0");
            assert_eq!((error.kind(), error.rank()), (kind, Some(3)));
            assert!(error.to_string().contains("Init2Rtr"), "{error}");
        }
    }
}
