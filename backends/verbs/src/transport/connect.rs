//! The endpoints that ranks exchange, the checks of them, and the connection of queue pairs.

use rustix::io::Errno;
use tokenyard_core::transport::Team;
use tokenyard_core::{Error, ErrorKind};
use tokenyard_sys_verbs::{Address, CallError, Init, Qp, Receive, Rts, Send};

use crate::config::VerbsConfig;
use crate::device::Adapter;
use crate::endpoint::{Endpoint, RemoteQp};
use crate::rules::SignalMode;

/// The errors of a peer that its address does not reach, or that has another kind of GID.
pub(super) const FAR: [Errno; 4] =
    [Errno::HOSTUNREACH, Errno::NETUNREACH, Errno::TIMEDOUT, Errno::INVAL];
/// The code for 0.64 ms: the time that a peer waits after it found no receive here.
const RNR_TIMER: u8 = 12;

/// The settings of both directions of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setup<'a> {
    pub(super) adapter: &'a Adapter,
    pub(super) config: &'a VerbsConfig,
}

impl Setup<'_> {
    /// Moves a queue pair to the state in which it sends and receives. The only wait is for the
    /// kernel's look-up of the peer's address.
    pub(super) fn connect(
        &self,
        qp: Qp<Init>,
        psn: u32,
        endpoint: &Endpoint,
        remote_qp: RemoteQp,
    ) -> Result<Qp<Rts>, CallError> {
        let port = &self.adapter.port;
        let VerbsConfig { traffic_class, service_level, .. } = *self.config;
        let to = Address {
            route: port.route(endpoint.lid, endpoint.gid, traffic_class, service_level),
            qpn: remote_qp.number,
            mtu: i32::from(port.mtu.min(endpoint.mtu)),
        };
        let reads = port.reads_served();
        let receiving =
            qp.receive(&to, &Receive { psn: remote_qp.psn, reads, rnr_timer: RNR_TIMER })?;
        receiving.send(&Send {
            psn,
            reads: port.reads_asked().min(endpoint.reads),
            timeout: self.config.timeout,
            retries: self.config.retry_count,
            rnr_retries: self.config.rnr_retry,
        })
    }

    /// Connects a queue pair to itself.
    pub(super) fn connect_to_itself(&self, qp: Qp<Init>) -> Result<Qp<Rts>, CallError> {
        let (number, psn) = (qp.number(), 0);
        let endpoint = self.adapter.port.endpoint(&Team::world(0, 1), 0);
        self.connect(qp, psn, &endpoint, RemoteQp { number, psn })
    }

    /// This rank's port, in one line for people.
    pub(super) fn here(&self) -> String {
        let signals = match self.adapter.signals {
            SignalMode::Immediate => "immediate",
            SignalMode::Atomic => "atomic",
        };
        format!("{}, {signals} signals", self.adapter.port)
    }
}

/// The error for a connect that the system or the device refused. These are the numbers of errors for a peer that its
/// address does not reach.
pub fn unreachable(error: CallError, far: &[Errno], rank: u32, link: &str) -> Error {
    let errno = error.source.raw_os_error().map(Errno::from_raw_os_error);
    let (kind, fix) = if errno.is_some_and(|errno| far.contains(&errno)) {
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
