//! The addresses of this host that a rank uses.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};

use nix::ifaddrs::getifaddrs;

use super::rendezvous::OPERATION;
use tokenyard_errors::{Error, ErrorKind, Result};

/// Names the network interface for the rendezvous where no config does: for frameworks whose users have
/// no config.
pub(super) const INTERFACE_VARIABLE: &str = "TOKENYARD_INTERFACE";

/// The address at which rank 0 listens, and from which the other ranks connect.
#[derive(Clone, Debug)]
pub(super) enum Local {
    /// Not specified.
    Any,
    /// The caller named an address for rank 0, with the scope of a link-local one. The port is 0.
    Address(SocketAddr),
    /// The operator named an interface.
    Interface(Interface),
}

/// A network interface of this process's network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Interface {
    name: String,
    /// IPv4 first; none of them needs a zone. At least one.
    addresses: Vec<IpAddr>,
}

impl Local {
    pub(super) fn new(bind: Option<SocketAddr>, interface: Option<&str>) -> Result<Self> {
        match (bind, interface) {
            (None, None) => Ok(Self::Any),
            (Some(mut address), None) => {
                address.set_port(0);
                Ok(Self::Address(address))
            }
            (None, Some(name)) => Interface::among(&all()?, name).map(Self::Interface),
            (Some(address), Some(name)) => Err(refuse(format!(
                "found both a bind address, {}, and an interface, {name:?}; expected one of them",
                address.ip()
            ))),
        }
    }

    /// The address at which rank 0 listens if the rendezvous names no host. The port is 0.
    pub(super) fn own(&self) -> SocketAddr {
        match self {
            Self::Any => (Ipv4Addr::LOCALHOST, 0).into(),
            Self::Address(address) => *address,
            Self::Interface(interface) => (interface.first(), 0).into(),
        }
    }

    /// The address of rank 0 as this rank reaches it: a link-local one lies behind this rank's own interface, which
    /// has another number on each host.
    pub(super) fn scoped(&self, mut peer: SocketAddr) -> SocketAddr {
        if let (SocketAddr::V6(peer), Self::Address(SocketAddr::V6(own))) = (&mut peer, self)
            && needs_zone(IpAddr::V6(*peer.ip()))
            && peer.scope_id() == 0
        {
            peer.set_scope_id(own.scope_id());
        }
        peer
    }

    /// The address from which a rank other than 0 connects to `peer`; none lets the system choose.
    pub(super) fn source(&self, peer: IpAddr) -> Result<Option<IpAddr>> {
        match self {
            Self::Interface(interface) if !peer.is_loopback() => interface.towards(peer).map(Some),
            _ => Ok(None),
        }
    }
}

impl Interface {
    fn among(all: &BTreeMap<String, Vec<IpAddr>>, name: &str) -> Result<Self> {
        let fix = "name an interface that has an address as `interface` in [world]";
        let Some(addresses) = all.get(name) else {
            let message = format!("found no interface {name:?}, expected one of {}", shown(all));
            return Err(refuse(message).with_fix(fix));
        };
        let mut addresses: Vec<_> =
            addresses.iter().copied().filter(|ip| !needs_zone(*ip)).collect();
        addresses.sort_by_key(IpAddr::is_ipv6);
        if addresses.is_empty() {
            let message = format!(
                "found no address on interface {name:?} that other hosts can connect to, expected \
                 one; there are {}",
                shown(all)
            );
            return Err(refuse(message).with_fix(fix));
        }
        Ok(Self { name: name.to_owned(), addresses })
    }

    fn first(&self) -> IpAddr {
        self.addresses.first().copied().unwrap_or(Ipv4Addr::UNSPECIFIED.into())
    }

    /// The address at which rank 0 listens so that ranks that connect to `host` reach it.
    pub(super) fn listen_at(&self, host: &str, port: u16) -> Result<SocketAddr> {
        // A host need not resolve its own name; the other hosts must.
        let found: Vec<IpAddr> = (host, port)
            .to_socket_addrs()
            .map(|found| found.map(|address| address.ip()).collect())
            .unwrap_or_default();
        if let Some(ip) = self.addresses.iter().find(|ip| found.contains(ip)) {
            return Ok(SocketAddr::new(*ip, port));
        }
        // Debian gives a host's own name a loopback address; on other hosts the name has another
        // address.
        let literal = host == "localhost" || host.parse::<IpAddr>().is_ok();
        if !literal && found.iter().all(IpAddr::is_loopback) {
            return Ok(SocketAddr::new(self.first(), port));
        }
        let found: Vec<_> = found.iter().map(IpAddr::to_string).collect();
        Err(refuse(format!(
            "the ranks look for rank 0 at {host:?} ({}), expected an address of interface {}",
            found.join(", "),
            self.describe()
        ))
        .with_fix("give rank 0 an address of that interface, or name the interface of that host"))
    }

    /// The local address for a connection to `peer`.
    fn towards(&self, peer: IpAddr) -> Result<IpAddr> {
        let same_family = |ip: &&IpAddr| ip.is_ipv6() == peer.is_ipv6();
        self.addresses.iter().find(same_family).copied().ok_or_else(|| {
            let family = if peer.is_ipv6() { "IPv6" } else { "IPv4" };
            refuse(format!(
                "found no {family} address on interface {}, expected one: rank 0 is at {peer}",
                self.describe()
            ))
            .with_fix("give rank 0 an address of the family that all ranks have")
        })
    }

    fn describe(&self) -> String {
        format!("{:?} ({})", self.name, joined(&self.addresses))
    }
}

/// A link-local address means nothing without the interface that it belongs to.
fn needs_zone(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// The interfaces of this network namespace and their addresses.
fn all() -> Result<BTreeMap<String, Vec<IpAddr>>> {
    let found = getifaddrs().map_err(|errno| {
        let error = std::io::Error::from(errno);
        Error::system(OPERATION, "cannot list the network interfaces", error)
    })?;
    let mut all: BTreeMap<String, Vec<IpAddr>> = BTreeMap::new();
    for entry in found {
        let addresses = all.entry(entry.interface_name).or_default();
        // Every interface has an entry for its hardware too, so those without an address are seen.
        let Some(address) = entry.address else { continue };
        if let Some(v4) = address.as_sockaddr_in() {
            addresses.push(v4.ip().into());
        } else if let Some(v6) = address.as_sockaddr_in6() {
            addresses.push(v6.ip().into());
        }
    }
    Ok(all)
}

/// `eth0 (192.0.2.1), eth1 (no address)`.
fn shown(all: &BTreeMap<String, Vec<IpAddr>>) -> String {
    let each = all.iter().map(|(name, addresses)| match addresses.as_slice() {
        [] => format!("{name} (no address)"),
        some => format!("{name} ({})", joined(some)),
    });
    each.collect::<Vec<_>>().join(", ")
}

fn joined(addresses: &[IpAddr]) -> String {
    addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ")
}

fn refuse(message: String) -> Error {
    Error::new(ErrorKind::InvalidInput, OPERATION, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// A host with every kind of interface.
    fn host() -> BTreeMap<String, Vec<IpAddr>> {
        [
            ("lo", &["127.0.0.1", "::1"][..]),
            ("eth0", &["fe80::1", "2001:db8::1", "192.0.2.1"]),
            ("eth1", &["198.51.100.1"]),
            ("eth2", &[]),
            ("eth3", &["fe80::3"]),
        ]
        .map(|(name, addresses)| (name.to_owned(), addresses.iter().map(|a| ip(a)).collect()))
        .into()
    }

    fn on(name: &str) -> Interface {
        Interface::among(&host(), name).unwrap()
    }

    #[test]
    fn an_unknown_interface_is_refused_with_those_that_exist_and_their_addresses() {
        let error = Interface::among(&host(), "eth9").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert_eq!(
            error.to_string(),
            "meet the other ranks: found no interface \"eth9\", expected one of eth0 (fe80::1, \
             2001:db8::1, 192.0.2.1), eth1 (198.51.100.1), eth2 (no address), eth3 (fe80::3), lo \
             (127.0.0.1, ::1). Fix: name an interface that has an address as `interface` in [world]"
        );
    }

    #[test]
    fn an_interface_without_an_address_for_other_hosts_is_refused() {
        for name in ["eth2", "eth3"] {
            let text = Interface::among(&host(), name).unwrap_err().to_string();
            let found = format!("found no address on interface {name:?} that other hosts can");
            assert!(text.contains(&found) && text.contains("eth1 (198.51.100.1)"), "{text}");
        }
    }

    #[test]
    fn an_interface_and_a_bind_address_are_one_too_many() {
        let bind = SocketAddr::new(ip("192.0.2.1"), 0);
        let text = Local::new(Some(bind), Some("lo")).unwrap_err().to_string();
        assert!(
            text.contains("both a bind address, 192.0.2.1, and an interface, \"lo\""),
            "{text}"
        );
    }

    #[test]
    fn rank_0_listens_at_the_address_that_it_is_looked_for_at() {
        for (host, at) in [
            ("192.0.2.1", "192.0.2.1:9"),
            ("2001:db8::1", "[2001:db8::1]:9"),
            // No resolver knows this name; IPv4 comes first.
            ("no.such.host.invalid", "192.0.2.1:9"),
        ] {
            assert_eq!(on("eth0").listen_at(host, 9).unwrap().to_string(), at);
        }
        assert_eq!(Local::Interface(on("eth0")).own().ip(), ip("192.0.2.1"));
    }

    #[test]
    fn a_link_local_rank_0_is_reached_behind_the_interface_of_this_host() {
        let local = Local::new(Some("[fe80::2%7]:9".parse().unwrap()), None).unwrap();
        assert_eq!(local.own().to_string(), "[fe80::2%7]:0");
        let scoped = |peer: &str| local.scoped(peer.parse().unwrap()).to_string();
        assert_eq!(scoped("[fe80::1]:4000"), "[fe80::1%7]:4000");
        assert_eq!(scoped("[fe80::1%3]:4000"), "[fe80::1%3]:4000");
        for other in ["[2001:db8::1]:4000", "192.0.2.1:4000"] {
            assert_eq!(scoped(other), other);
        }
        let peer: SocketAddr = "[fe80::1]:4000".parse().unwrap();
        assert_eq!(Local::Any.scoped(peer), peer);
    }

    #[test]
    fn a_rank_0_that_no_rank_would_find_is_refused() {
        for host in ["198.51.100.1", "127.0.0.1", "::1"] {
            let error = on("eth0").listen_at(host, 9).unwrap_err();
            assert_eq!(
                error.message(),
                format!(
                    "the ranks look for rank 0 at {host:?} ({host}), expected an address of \
                     interface \"eth0\" (192.0.2.1, 2001:db8::1)"
                )
            );
        }
    }

    #[test]
    fn others_connect_from_the_interface_unless_rank_0_is_on_the_loopback_one() {
        let local = Local::Interface(on("eth0"));
        assert_eq!(local.source(ip("192.0.2.9")).unwrap(), Some(ip("192.0.2.1")));
        assert_eq!(local.source(ip("2001:db8::9")).unwrap(), Some(ip("2001:db8::1")));
        assert_eq!(local.source(ip("127.0.0.1")).unwrap(), None);
        assert_eq!(Local::Any.source(ip("192.0.2.9")).unwrap(), None);
        let error = Local::Interface(on("eth1")).source(ip("2001:db8::9")).unwrap_err();
        assert_eq!(
            error.message(),
            "found no IPv6 address on interface \"eth1\" (198.51.100.1), expected one: rank 0 is at \
             2001:db8::9"
        );
    }

    #[test]
    fn the_interfaces_of_this_machine_are_found() {
        let all = all().unwrap();
        assert!(all.contains_key("lo"), "{}", shown(&all));
    }
}
