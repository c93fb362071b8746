//! A rank 0 that ranks on other hosts do not reach, because it listens on loopback.

use std::fmt;
use std::net::{IpAddr, SocketAddr, TcpListener};

use super::identity::BOOTSTRAP_VARIABLE;
use super::other_hosts::OtherHosts;
use super::rendezvous::OPERATION;
use tokenyard_errors::{Error, ErrorKind, Result};

/// Whether a host's name, rather than an address that a config or variable names, stands for loopback addresses alone.
pub(super) fn is_loopback_name(host: &str, addresses: &[SocketAddr]) -> bool {
    let is_chosen = host == "localhost" || host.parse::<IpAddr>().is_ok();
    !is_chosen && !addresses.is_empty() && addresses.iter().all(|a| a.ip().is_loopback())
}

/// Refuses a name of rank 0's host that stands for loopback addresses alone, where ranks are on other hosts or may be.
pub(super) fn check_loopback(
    host: &str,
    addresses: &[SocketAddr],
    others: OtherHosts,
) -> Result<()> {
    let why = match others {
        _ if !is_loopback_name(host, addresses) => return Ok(()),
        OtherHosts::NotStated => return Ok(()),
        OtherHosts::Stated => "the launcher has ranks on several hosts",
        OtherHosts::Unknown => "no launcher says that all ranks are on this one",
    };
    let found: Vec<_> = addresses.iter().map(|address| address.ip().to_string()).collect();
    let message = format!(
        "rank 0 would listen on loopback only: its host, {host:?}, is {} here, and {why}; expected an address that \
         all ranks reach",
        found.join(", ")
    );
    Err(Error::new(ErrorKind::InvalidInput, OPERATION, message).with_fix(fix()))
}

fn fix() -> String {
    format!(
        "give all ranks an address of that host on the network (`hostname -I` prints them) as MASTER_ADDR or \
         {BOOTSTRAP_VARIABLE}=tcp://ADDRESS:PORT; ranks that are all on one host can meet at localhost or 127.0.0.1"
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
