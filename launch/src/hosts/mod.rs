//! Hosts that are network namespaces. They stand in for several machines, on one machine.

mod network;
mod processes;
mod spaces;
mod start;

use std::net::{Ipv4Addr, Ipv6Addr};
use std::process::{Command, Output};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};

use network::Ports;
pub(crate) use spaces::Spaces;
pub use start::Launcher;

use spaces::{Sharing, inside};

/// One of the two networks that every host is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Net {
    /// `eth0`: 192.0.2.0/24 and 2001:db8::/64. The host's name means this one.
    Data,
    /// `eth1`: 198.51.100.0/24 and 2001:db8:1::/64.
    Control,
}

impl Net {
    /// Both networks.
    pub const BOTH: [Self; 2] = [Self::Data, Self::Control];

    /// The name of a host's interface on it.
    pub fn interface(self) -> &'static str {
        match self {
            Self::Data => "eth0",
            Self::Control => "eth1",
        }
    }
}

/// 2 to 4 hosts on this machine, joined by two switches.
///
/// A host is a network, a host name (`node0`, `node1`, ...) and a view of `/etc/hosts` and `/sys`
/// of its own; files, processors, memory and the kernel are the machine's. The switches are in a
/// namespace of their own, so the machine's networks are neither visible nor changed; the addresses
/// are those set aside for documentation (RFC 5737, RFC 3849).
///
/// Nothing remains, however this process ends: nothing has a name outside of it. The namespaces are
/// held by file descriptors of this process and by the processes in them; a veth pair ends with its
/// namespace. Dropping this value kills all processes that still run on the hosts. If this process
/// is killed, the kernel closes its descriptors and kills the ranks that a job started (a rank must
/// itself end the processes that it started).
///
/// Methods may be called from any thread.
#[derive(Debug)]
pub struct Hosts {
    hosts: Vec<Arc<Spaces>>,
    switch: Spaces,
}

impl Hosts {
    /// The most hosts.
    pub const MOST: usize = 4;

    /// Makes `count` hosts, 2 to [`MOST`](Self::MOST).
    ///
    /// # Errors
    /// This user may not make network namespaces, or `ip` of iproute2 is missing; the error states
    /// the fix. Nothing remains then.
    pub fn new(count: usize) -> Result<Self> {
        ensure!(
            (2..=Self::MOST).contains(&count),
            "make hosts: found {count} hosts, expected 2 to {}",
            Self::MOST
        );
        let names = names(count);
        let switch = Spaces::new(&Sharing { name: "switch", names: &names })?;
        let hosts = (0..count)
            .map(|host| {
                let sharing = Sharing { name: &Self::name(host), names: &names };
                Spaces::new(&sharing).map(Arc::new)
            })
            .collect::<Result<Vec<_>>>()?;
        network::connect(&switch, &hosts)?;
        Ok(Self { hosts, switch })
    }

    /// How many hosts there are.
    pub fn count(&self) -> usize {
        self.hosts.len()
    }

    /// The name of a host. On all hosts it resolves to the host's address on [`Net::Data`]; with
    /// the suffix `-control` to its address on [`Net::Control`], with `-ipv6` to its IPv6 address
    /// on [`Net::Data`].
    pub fn name(host: usize) -> String {
        format!("node{host}")
    }

    /// The IPv4 address of a host.
    pub fn address(host: usize, net: Net) -> Ipv4Addr {
        match net {
            Net::Data => Ipv4Addr::new(192, 0, 2, 1 + host as u8),
            Net::Control => Ipv4Addr::new(198, 51, 100, 1 + host as u8),
        }
    }

    /// The IPv6 address of a host.
    pub fn address_v6(host: usize, net: Net) -> Ipv6Addr {
        let net = net as u16;
        Ipv6Addr::new(0x2001, 0xdb8, net, 0, 0, 0, 0, 1 + host as u16)
    }

    /// Disconnects the host from the switches of these networks: its links go down, and packets
    /// sent over them are lost without an error.
    ///
    /// # Errors
    /// There is no such host, or `ip` failed.
    pub fn cut(&self, host: usize, nets: &[Net]) -> Result<()> {
        self.spaces(host)?;
        network::set_ports(&self.switch, host, nets, Ports::Down)
    }

    /// Lets the switches of these networks drop all packets from the host and to it. Its links stay
    /// up: nothing on the host shows that they carry nothing.
    ///
    /// # Errors
    /// As [`cut`](Self::cut).
    pub fn swallow(&self, host: usize, nets: &[Net]) -> Result<()> {
        self.spaces(host)?;
        network::set_ports(&self.switch, host, nets, Ports::Swallow)
    }

    /// Connects the host again, lets the switches forward, and waits until the links run.
    ///
    /// # Errors
    /// As [`cut`](Self::cut).
    pub fn restore(&self, host: usize, nets: &[Net]) -> Result<()> {
        let spaces = self.spaces(host)?;
        network::set_ports(&self.switch, host, nets, Ports::Forward)?;
        network::await_links(spaces, nets)
    }

    /// Stops all processes of a host, with SIGSTOP.
    ///
    /// # Errors
    /// There is no such host, or its processes cannot be listed.
    pub fn freeze(&self, host: usize) -> Result<()> {
        processes::signal_all(self.spaces(host)?, rustix::process::Signal::STOP)
    }

    /// Lets the processes of a host go on, with SIGCONT.
    ///
    /// # Errors
    /// As [`freeze`](Self::freeze).
    pub fn thaw(&self, host: usize) -> Result<()> {
        processes::signal_all(self.spaces(host)?, rustix::process::Signal::CONT)
    }

    /// The ids of the processes on a host, in ascending order.
    ///
    /// # Errors
    /// As [`freeze`](Self::freeze).
    pub fn processes(&self, host: usize) -> Result<Vec<u32>> {
        processes::list(self.spaces(host)?)
    }

    /// Runs a command on a host to its end.
    ///
    /// # Errors
    /// There is no such host, or the command cannot be started.
    pub fn run(&self, host: usize, command: &mut Command) -> Result<Output> {
        inside(self.spaces(host)?, || {
            command.output().with_context(|| format!("run {command:?} on {}", Self::name(host)))
        })
    }

    fn spaces(&self, host: usize) -> Result<&Spaces> {
        let spaces = self.hosts.get(host).map(|spaces| &**spaces);
        spaces.with_context(|| {
            format!("use host: found host {host}, expected one below {}", self.count())
        })
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for spaces in &self.hosts {
            // A process that cannot be killed has ended by itself.
            let _ = processes::signal_all(spaces, rustix::process::Signal::KILL);
        }
    }
}

/// The `/etc/hosts` of all hosts.
fn names(count: usize) -> String {
    let mut text = "127.0.0.1 localhost\n::1 localhost\n".to_owned();
    for host in 0..count {
        let name = Hosts::name(host);
        let (data, control) = (Hosts::address(host, Net::Data), Hosts::address(host, Net::Control));
        let v6 = Hosts::address_v6(host, Net::Data);
        text.push_str(&format!("{data} {name}\n{control} {name}-control\n{v6} {name}-ipv6\n"));
    }
    text
}
