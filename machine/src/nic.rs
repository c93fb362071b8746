//! RDMA devices, their ports and their GIDs.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};

use serde::Serialize;

use crate::{Fact, PciAddress};

/// An RDMA device: an entry of `sys/class/infiniband`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Nic {
    /// Name: `mlx5_0`, `rdmap85s0`, `ionic_0`.
    pub name: String,
    /// Who made it, as driver and name tell.
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
    /// Its character device, `uverbs0`, as `sys/class/infiniband_verbs` tells. Whether a process
    /// may open it is in [`crate::Devices`].
    pub uverbs: Fact<String>,
    /// Network interfaces of the same PCI function.
    pub interfaces: Vec<String>,
    /// Ports by number.
    pub ports: Vec<Port>,
    /// Largest message unit that the port negotiated, by port number, where `ibv_devinfo` told it.
    pub active_mtu: BTreeMap<u32, u32>,
}

/// Who made a NIC.
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
    /// What runs on the wire.
    pub link_layer: Fact<LinkLayer>,
    /// Local identifier of the subnet manager; 0 where there is none (RoCE).
    pub lid: Fact<u32>,
    /// Entries of the GID table that hold an address.
    pub gids: Vec<Gid>,
    /// Error counters that are there, by the kernel's name: of `counters` (`symbol_error`,
    /// `link_downed` …) and of `hw_counters` (`out_of_sequence`, `rnr_nak_retry_err` …).
    pub counters: BTreeMap<String, u64>,
}

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

/// What a port speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE, or iWARP.
    Ethernet,
    /// Neither; EFA says so.
    Unspecified,
}

/// A port's rate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LinkRate {
    /// Megabits a second.
    pub megabits: u64,
    /// Lanes, where the kernel says them: 4 for `4X`.
    pub lanes: Option<u32>,
    /// Generation of the link, where the kernel says it: `NDR`, `HDR`, `EDR`.
    pub generation: Option<String>,
}

/// An entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gid {
    /// Place in the table.
    pub index: u32,
    /// The address.
    pub address: Ipv6Addr,
    /// What the entry is used for.
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
