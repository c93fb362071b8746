//! RDMA devices, their ports and their GIDs.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};

use serde::Serialize;

use crate::tree::{Tree, natural};
use crate::{Fact, PciAddress, pci};

/// An RDMA device: an entry of `sys/class/infiniband`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Nic {
    /// Name: `mlx5_0`, `rdmap85s0`, `ionic_0`.
    pub name: String,
    /// Its family, by driver and name.
    pub family: NicFamily,
    /// Kernel driver of its PCI function; missing for software devices.
    pub driver: Fact<String>,
    /// Its PCI function; missing for software devices.
    pub pci: Fact<PciAddress>,
    /// NUMA node of the device.
    pub numa_node: Fact<u32>,
    /// Model: `MT4129`.
    pub hca_type: Fact<String>,
    /// Board: `MT_0000000838`.
    pub board_id: Fact<String>,
    /// Firmware: `28.39.2048`.
    pub firmware: Fact<String>,
    /// Globally unique identifier of the node.
    pub node_guid: Fact<String>,
    /// Its character device, `uverbs0`, as `sys/class/infiniband_verbs` lists it. Whether a process
    /// may open it is in [`crate::Devices`].
    pub uverbs: Fact<String>,
    /// Network interfaces of the same PCI function.
    pub interfaces: Vec<String>,
    /// Ports by number.
    pub ports: Vec<Port>,
    /// Largest message unit that the port negotiated, by port number, where `ibv_devinfo` reported
    /// it.
    pub active_mtu: BTreeMap<u32, u32>,
}

/// The family of a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NicFamily {
    /// ConnectX and BlueField (`mlx5_core`).
    Mlx5,
    /// Elastic Fabric Adapter (`efa`).
    Efa,
    /// Pollara and other Pensando cards (`ionic`).
    Ionic,
    /// Thor (`bnxt_en`).
    Broadcom,
    /// E810 and relatives (`irdma`, `ice`).
    Intel,
    /// Elastic RDMA (`erdma`).
    Erdma,
    /// Soft-RoCE.
    Rxe,
    /// Soft-iWARP.
    Siw,
    /// None of these.
    Other,
}

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Port {
    /// Number, from 1.
    pub number: u32,
    /// Logical state.
    pub state: Fact<PortState>,
    /// Physical state: `LinkUp`, `Polling`, `Disabled`, `Sleep`.
    pub physical: Fact<String>,
    /// Link rate.
    pub rate: Fact<LinkRate>,
    /// The link layer on the wire.
    pub link_layer: Fact<LinkLayer>,
    /// Local identifier of the subnet manager; 0 where there is none (RoCE).
    pub lid: Fact<u32>,
    /// Entries of the GID table that hold an address.
    pub gids: Vec<Gid>,
    /// Error counters that are there, by the kernel's name: of `counters` (`symbol_error`,
    /// `link_downed` …) and of `hw_counters` (`out_of_sequence`, `rnr_nak_retry_err` …).
    pub counters: BTreeMap<String, u64>,
    /// The growth of the counters between two readings; nothing where there was only one reading.
    pub growth: Option<Growth>,
}

/// How much a port's counters grew between two readings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Growth {
    /// Milliseconds between the readings.
    pub milliseconds: u64,
    /// The counters that grew, by the kernel's name.
    pub counters: BTreeMap<String, u64>,
}

/// The error counters of all ports at one moment, by NIC and port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters(BTreeMap<(String, u32), BTreeMap<String, u64>>);

/// Logical state of a port, by the kernel's numbers 1 to 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortState {
    /// 1: no link.
    Down,
    /// 2: a link, and no subnet manager has set it up.
    Init,
    /// 3: armed.
    Armed,
    /// 4: usable.
    Active,
    /// 5: active, with a pause.
    Deferred,
}

/// The link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE, or iWARP.
    Ethernet,
    /// Neither; EFA reports this.
    Unspecified,
}

/// A port's rate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LinkRate {
    /// Megabits a second.
    pub megabits: u64,
    /// Lanes, where the kernel states them: 4 for `4X`.
    pub lanes: Option<u32>,
    /// Generation of the link, where the kernel states it: `NDR`, `HDR`, `EDR`.
    pub generation: Option<String>,
}

/// An entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gid {
    /// Place in the table.
    pub index: u32,
    /// The address.
    pub address: Ipv6Addr,
    /// The use of the entry.
    pub kind: Fact<GidKind>,
    /// Network interface that it belongs to (RoCE).
    pub interface: Fact<String>,
}

impl Gid {
    /// The IPv4 address of a RoCE entry that stands for one (`::ffff:10.0.0.1`).
    pub fn ipv4(&self) -> Option<Ipv4Addr> {
        self.address.to_ipv4_mapped()
    }

    /// The entry is a link-local address (`fe80::/10`), which routers do not forward.
    pub fn is_link_local(&self) -> bool {
        self.address.segments()[0] & 0xffc0 == 0xfe80
    }
}

/// Kinds of GIDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GidKind {
    /// InfiniBand, or RoCE v1: the kernel writes both as `IB/RoCE v1`.
    IbOrRoceV1,
    /// RoCE v2: over UDP, so routable.
    RoceV2,
}

const DEVICES: &str = "sys/class/infiniband";
const VERBS: &str = "sys/class/infiniband_verbs";
/// Most entries of a GID table that are read; ConnectX has 255 of RoCE.
const MOST_GIDS: usize = 256;
/// Counters of errors. Those of traffic are left out.
const COUNTERS: [&str; 6] = [
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_xmit_discards",
    "excessive_buffer_overrun_errors",
];
const HARDWARE_COUNTERS: [&str; 14] = [
    "out_of_sequence",
    "packet_seq_err",
    "rnr_nak_retry_err",
    "local_ack_timeout_err",
    "implied_nak_seq_err",
    "out_of_buffer",
    "req_cqe_error",
    "resp_cqe_error",
    "roce_adp_retrans_to",
    "np_cnp_sent",
    "rp_cnp_handled",
    "rx_drops",
    "retrans_timeout_events",
    "unresponsive_remote_events",
];

impl Counters {
    /// Reads the current values.
    pub fn read(tree: &Tree) -> Self {
        Self::read_below(tree, "")
    }

    /// The second reading of a recorded tree, and its delay after the first in milliseconds.
    pub(crate) fn recorded_later(tree: &Tree) -> Option<(Self, u64)> {
        let milliseconds = tree.value("tokenyard/later.ms").get()?;
        Some((Self::read_below(tree, "tokenyard/later/"), milliseconds))
    }

    fn read_below(tree: &Tree, root: &str) -> Self {
        let mut all = BTreeMap::new();
        for nic in tree.list(&format!("{root}{DEVICES}")) {
            let ports = format!("{root}{DEVICES}/{nic}/ports");
            for port in tree.list(&ports) {
                if let Ok(number) = port.parse() {
                    let counters = read_counters(tree, &format!("{ports}/{port}"));
                    all.insert((nic.clone(), number), counters);
                }
            }
        }
        Self(all)
    }

    /// Some port has counted something.
    pub fn has_some(&self) -> bool {
        self.0.values().flat_map(BTreeMap::values).any(|count| *count > 0)
    }

    /// The counters that grew from these to `later`. A counter that is missing there, or that was
    /// reset meanwhile, did not grow.
    pub(crate) fn growth(&self, later: &Self, nic: &str, port: u32) -> BTreeMap<String, u64> {
        let key = (nic.to_owned(), port);
        let (Some(first), Some(second)) = (self.0.get(&key), later.0.get(&key)) else {
            return BTreeMap::new();
        };
        let grew = |(name, count): (&String, &u64)| {
            let more = second.get(name)?.checked_sub(*count).filter(|more| *more > 0)?;
            Some((name.clone(), more))
        };
        first.iter().filter_map(grew).collect()
    }
}

impl Nic {
    /// The port of that number.
    pub fn port(&self, number: u32) -> Option<&Port> {
        self.ports.iter().find(|port| port.number == number)
    }

    /// The fix for a port of it that is not active, as commands.
    pub fn link_fix(&self, port: &Port) -> String {
        let interface = self.interfaces.first().map_or("IFACE", String::as_str);
        match (port.state.get(), port.link_layer.get()) {
            (Some(PortState::Init | PortState::Armed), _) => {
                "no subnet manager has set the port up: wait some seconds where the link has just come up, \
                 else start the subnet manager (opensm, or the switch's own)"
                    .to_owned()
            }
            (_, Some(LinkLayer::Ethernet)) => format!(
                "ip link set {interface} up; then look at cable, transceiver and switch port"
            ),
            _ => format!(
                "look at cable, transceiver and switch port; `ibstat {}` shows changes",
                self.name
            ),
        }
    }
}

impl Port {
    /// The port's state is known to be one that carries traffic.
    pub fn is_active(&self) -> bool {
        matches!(self.state, Fact::Known(PortState::Active | PortState::Deferred))
    }

    /// It is active, and on Ethernet some entry of its GID table holds an address. The transport
    /// decides which entries are usable.
    pub fn can_carry(&self) -> bool {
        let is_ethernet = self.link_layer == Fact::Known(LinkLayer::Ethernet);
        self.is_active() && !(is_ethernet && self.gids.is_empty())
    }

    /// Its state and physical state: `down, Polling`.
    pub fn state_in_words(&self) -> String {
        let state = match self.state.get() {
            Some(PortState::Down) => "down",
            Some(PortState::Init) => "init",
            Some(PortState::Armed) => "armed",
            Some(PortState::Active) => "active",
            Some(PortState::Deferred) => "active, deferred",
            None => "state unknown",
        };
        let physical = self.physical.known().map_or("physical state unknown", String::as_str);
        format!("{state}, {physical}")
    }
}

pub(crate) fn read(tree: &Tree) -> Vec<Nic> {
    let verbs: Vec<(String, String)> = tree
        .list(VERBS)
        .into_iter()
        .filter_map(|node| Some((tree.text(&format!("{VERBS}/{node}/ibdev")).get()?, node)))
        .collect();
    let mut nics: Vec<Nic> = tree.list(DEVICES).into_iter().map(|name| nic(tree, name)).collect();
    for nic in &mut nics {
        if let Some((_, node)) = verbs.iter().find(|(name, _)| *name == nic.name) {
            nic.uverbs = Fact::Known(node.clone());
        }
    }
    nics.sort_by(|a, b| natural(&a.name, &b.name));
    nics
}

fn nic(tree: &Tree, name: String) -> Nic {
    let path = format!("{DEVICES}/{name}");
    let file = |rest: &str| format!("{path}/{rest}");
    let text = |rest: &str| tree.word(&file(rest), |text| Some(text.to_owned()));
    let device = tree.target_name(&file("device"));
    let driver = tree.target_name(&file("device/driver"));
    // Only Soft-RoCE names the interface that it was made on.
    let (family, interfaces) = match text("parent") {
        Fact::Known(parent) => (NicFamily::Rxe, vec![parent]),
        _ => {
            let driver = driver.known().map_or("", String::as_str);
            (family(driver, &name), tree.list(&file("device/net")))
        }
    };
    Nic {
        family,
        driver,
        pci: match device {
            Fact::Known(device) => device.parse().map_or(Fact::Missing, Fact::Known),
            _ => Fact::Missing,
        },
        numa_node: pci::numa_node(tree, &file("device")),
        hca_type: text("hca_type"),
        board_id: text("board_id"),
        firmware: text("fw_ver"),
        node_guid: text("node_guid"),
        uverbs: Fact::Missing,
        interfaces,
        ports: tree
            .list(&file("ports"))
            .iter()
            .filter_map(|number| Some(port(tree, number.parse().ok()?, &file("ports"))))
            .collect(),
        active_mtu: BTreeMap::new(),
        name,
    }
}

fn family(driver: &str, name: &str) -> NicFamily {
    match driver {
        "mlx5_core" => NicFamily::Mlx5,
        "efa" => NicFamily::Efa,
        "ionic" => NicFamily::Ionic,
        "bnxt_en" => NicFamily::Broadcom,
        "irdma" | "ice" | "i40e" => NicFamily::Intel,
        "erdma" => NicFamily::Erdma,
        _ if name.starts_with("rxe") => NicFamily::Rxe,
        _ if name.starts_with("siw") => NicFamily::Siw,
        _ => NicFamily::Other,
    }
}

fn port(tree: &Tree, number: u32, ports: &str) -> Port {
    let path = format!("{ports}/{number}");
    let file = |rest: &str| format!("{path}/{rest}");
    let gids = tree.list(&file("gids"));
    Port {
        number,
        state: tree.word(&file("state"), port_state),
        physical: tree.word(&file("phys_state"), |text| {
            Some(text.split_once(':').map_or(text, |(_, name)| name).trim().to_owned())
        }),
        rate: tree.word(&file("rate"), link_rate),
        link_layer: tree.word(&file("link_layer"), link_layer),
        lid: tree.word(&file("lid"), |text| u32::try_from(pci::hex(text)?).ok()),
        gids: gids.iter().take(MOST_GIDS).filter_map(|index| gid(tree, index, &path)).collect(),
        counters: read_counters(tree, &path),
        growth: None,
    }
}

fn read_counters(tree: &Tree, port: &str) -> BTreeMap<String, u64> {
    let kinds = [("counters", &COUNTERS[..]), ("hw_counters", &HARDWARE_COUNTERS[..])];
    let names =
        kinds.into_iter().flat_map(|(folder, names)| names.iter().map(move |n| (folder, *n)));
    names
        .filter_map(|(folder, name)| {
            Some((name.to_owned(), tree.value(&format!("{port}/{folder}/{name}")).get()?))
        })
        .collect()
}

fn gid(tree: &Tree, index: &str, port: &str) -> Option<Gid> {
    let number = index.parse().ok()?;
    let address: Ipv6Addr = tree.value(&format!("{port}/gids/{index}")).get()?;
    if address.is_unspecified() {
        return None;
    }
    Some(Gid {
        index: number,
        address,
        kind: tree.word(&format!("{port}/gid_attrs/types/{index}"), |text| match text {
            "RoCE v2" => Some(GidKind::RoceV2),
            "IB/RoCE v1" => Some(GidKind::IbOrRoceV1),
            _ => None,
        }),
        interface: tree
            .word(&format!("{port}/gid_attrs/ndevs/{index}"), |text| Some(text.to_owned())),
    })
}

/// `4: ACTIVE`.
fn port_state(text: &str) -> Option<PortState> {
    match text.split(':').next()?.trim() {
        "1" => Some(PortState::Down),
        "2" => Some(PortState::Init),
        "3" => Some(PortState::Armed),
        "4" => Some(PortState::Active),
        "5" => Some(PortState::Deferred),
        _ => None,
    }
}

fn link_layer(text: &str) -> Option<LinkLayer> {
    match text {
        "InfiniBand" => Some(LinkLayer::InfiniBand),
        "Ethernet" => Some(LinkLayer::Ethernet),
        "Unspecified" | "Unknown" => Some(LinkLayer::Unspecified),
        _ => None,
    }
}

/// `400 Gb/sec (4X NDR)`, `2.5 Gb/sec (1X SDR)`, `100 Gb/sec`.
fn link_rate(text: &str) -> Option<LinkRate> {
    let (number, rest) = text.split_once(" Gb/sec")?;
    let gigabits: f64 = number.trim().parse().ok()?;
    let inside = rest.trim().trim_start_matches('(').trim_end_matches(')');
    let (lanes, generation) = match inside.split_once("X ") {
        Some((lanes, generation)) => (lanes.parse().ok(), Some(generation.trim().to_owned())),
        None => (inside.strip_suffix('X').and_then(|lanes| lanes.parse().ok()), None),
    };
    (0.0..1e6).contains(&gigabits).then(|| LinkRate {
        megabits: (gigabits * 1000.0).round() as u64,
        lanes,
        generation,
    })
}

#[cfg(test)]
#[path = "nic_tests.rs"]
mod tests;
