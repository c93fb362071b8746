//! Network interfaces and bonds.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;

use serde::Serialize;

use crate::tree::Tree;
use crate::{Fact, PciAddress, pci};

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
    /// IPv6 addresses (`proc/net/if_inet6`). No file lists the IPv4 addresses by interface; those
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

const INTERFACES: &str = "sys/class/net";
/// Most interfaces that are read; a node of many containers has thousands of virtual ones.
const MOST_INTERFACES: usize = 1024;
const COUNTERS: [&str; 4] = ["rx_errors", "tx_errors", "rx_dropped", "rx_crc_errors"];

pub(crate) fn read(tree: &Tree) -> Vec<Interface> {
    let addresses = tree.text("proc/net/if_inet6").get().map_or(Vec::new(), |text| inet6(&text));
    tree.list(INTERFACES)
        .into_iter()
        .filter(|name| tree.has(&format!("{INTERFACES}/{name}/operstate")))
        .take(MOST_INTERFACES)
        .map(|name| interface(tree, name, &addresses))
        .collect()
}

fn interface(tree: &Tree, name: String, addresses: &[(String, Ipv6Addr)]) -> Interface {
    let path = format!("{INTERFACES}/{name}");
    let file = |rest: &str| format!("{path}/{rest}");
    let text = |rest: &str| tree.word(&file(rest), |text| Some(text.to_owned()));
    let mut counters = BTreeMap::new();
    for counter in COUNTERS {
        if let Fact::Known(value) = tree.value(&file(&format!("statistics/{counter}"))) {
            counters.insert(counter.to_owned(), value);
        }
    }
    Interface {
        mtu: tree.value(&file("mtu")),
        operstate: text("operstate"),
        megabits: match tree.value::<i64>(&file("speed")) {
            Fact::Known(speed) if speed <= 0 => Fact::Missing,
            fact => fact.and_then(|speed| u64::try_from(speed).ok()),
        },
        flags: tree.word(&file("flags"), |text| u32::try_from(pci::hex(text)?).ok()),
        hardware: tree.value(&file("type")),
        address: text("address"),
        ipv6: addresses.iter().filter(|(of, _)| *of == name).map(|(_, address)| *address).collect(),
        driver: tree.target_name(&file("device/driver")),
        pci: match tree.target_name(&file("device")) {
            Fact::Known(device) => device.parse().map_or(Fact::Missing, Fact::Known),
            _ => Fact::Missing,
        },
        master: tree.target_name(&file("master")),
        bond: tree.has(&file("bonding/mode")).then(|| bond(tree, &file("bonding"))),
        counters,
        name,
    }
}

fn bond(tree: &Tree, path: &str) -> Bond {
    // The kernel writes a name and its number: `802.3ad 4`.
    let first = |name: &str| {
        tree.word(&format!("{path}/{name}"), |text| {
            text.split_whitespace().next().map(str::to_owned)
        })
    };
    Bond {
        mode: first("mode"),
        members: tree
            .text(&format!("{path}/slaves"))
            .get()
            .map_or(Vec::new(), |text| text.split_whitespace().map(str::to_owned).collect()),
        xmit_hash_policy: first("xmit_hash_policy"),
        mii_status: first("mii_status"),
        aggregated_ports: tree.value(&format!("{path}/ad_num_ports")),
        partner: first("ad_partner_mac"),
    }
}

/// Lines of `if_inet6`: address, index, prefix, scope, flags, name.
fn inet6(text: &str) -> Vec<(String, Ipv6Addr)> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let address = words.next().filter(|digits| digits.len() == 32)?;
            let name = words.nth(4)?;
            let bits = u128::from_str_radix(address, 16).ok()?;
            Some((name.to_owned(), Ipv6Addr::from(bits)))
        })
        .collect()
}
