//! A rank 0 that ranks on other hosts do not reach, because it listens on loopback.

use std::fmt;
use std::net::{IpAddr, SocketAddr, TcpListener};

use super::identity::BOOTSTRAP_VARIABLE;
use super::rendezvous::OPERATION;
use tokenyard_errors::{Error, ErrorKind};

/// Whether a host's name, rather than an address that a config or variable names, stands for loopback addresses alone.
pub(super) fn is_loopback_name(host: &str, addresses: &[SocketAddr]) -> bool {
    let is_chosen = host == "localhost" || host.parse::<IpAddr>().is_ok();
    !is_chosen && !addresses.is_empty() && addresses.iter().all(|a| a.ip().is_loopback())
}

/// The error where rank 0 would listen at the loopback addresses that the name of its host has there, and ranks are
/// on other hosts.
pub(super) fn only_loopback(host: &str, addresses: &[SocketAddr]) -> Error {
    let found: Vec<_> = addresses.iter().map(|address| address.ip().to_string()).collect();
    let message = format!(
        "rank 0 would listen on loopback only: its host, {host:?}, is {} here, and the launcher has ranks on several \
         hosts; expected an address that all of them reach",
        found.join(", ")
    );
    Error::new(ErrorKind::InvalidInput, OPERATION, message).with_fix(fix())
}

fn fix() -> String {
    format!(
        "give all ranks an address of that host on the network (`hostname -I` prints them) as MASTER_ADDR or \
         {BOOTSTRAP_VARIABLE}=tcp://ADDRESS:PORT; ranks that are all on one host can meet at 127.0.0.1"
    )
}

/// The loopback address at which rank 0 listens. Where the launcher does not say that it has ranks on other hosts,
/// these are among the ranks that do not join.
#[derive(Clone, Copy, Debug)]
pub(super) struct OnlyHere(IpAddr);

impl OnlyHere {
    /// Nothing where other hosts may reach the listener.
    pub(super) fn of(listener: &TcpListener) -> Option<Self> {
        let ip = listener.local_addr().ok()?.ip();
        ip.is_loopback().then_some(Self(ip))
    }

    /// The fix for ranks that did not join.
    pub(super) fn fix(self) -> String {
        format!("if ranks are on other hosts, {}", fix())
    }
}

impl fmt::Display for OnlyHere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank 0 listens on loopback only ({}), where no other host reaches it", self.0)
    }
}
