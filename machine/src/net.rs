//! Network interfaces and bonds.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;

use serde::Serialize;

use crate::{Fact, PciAddress};

/// A network interface: an entry of `sys/class/net`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Interface {
    /// Name.
    pub name: String,
    /// Largest packet in bytes.
    pub mtu: Fact<u32>,
    /// `up`, `down`, `dormant`, `unknown` …
    pub operstate: Fact<String>,
    /// Megabits a second; missing while the link is down and for interfaces without one.
    pub megabits: Fact<u64>,
    /// Flags of the kernel's `IFF_*`: 1 up, 8 loopback.
    pub flags: Fact<u32>,
    /// Type of the hardware: 1 Ethernet, 32 InfiniBand, 772 loopback.
    pub hardware: Fact<u32>,
    /// Hardware address.
    pub address: Fact<String>,
    /// IPv6 addresses (`proc/net/if_inet6`). No file tells the IPv4 addresses by interface; those
    /// of RoCE interfaces are in [`crate::Gid::ipv4`].
    pub ipv6: Vec<Ipv6Addr>,
    /// Kernel driver.
    pub driver: Fact<String>,
    /// PCI function.
    pub pci: Fact<PciAddress>,
    /// The bond or bridge that it belongs to.
    pub master: Fact<String>,
    /// Set if it is a bond.
    pub bond: Option<Bond>,
    /// Error counters that are there: `rx_errors`, `tx_errors`, `rx_dropped`, `rx_crc_errors`.
    pub counters: BTreeMap<String, u64>,
}

/// A bond of interfaces.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bond {
    /// Mode by name: `802.3ad`, `active-backup`, `balance-xor` …
    pub mode: Fact<String>,
    /// Members by name.
    pub members: Vec<String>,
    /// How flows are spread over the members: `layer2`, `layer3+4` …
    pub xmit_hash_policy: Fact<String>,
    /// `up` or `down`.
    pub mii_status: Fact<String>,
    /// Members in the active aggregate (LACP).
    pub aggregated_ports: Fact<u32>,
    /// Hardware address of the switch (LACP); all zero if no switch answers.
    pub partner: Fact<String>,
}
