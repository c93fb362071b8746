//! Choices as pure functions on the facts of devices: port, GID, packet size, way of signals, and
//! the time until a dead peer is noticed.

use std::cmp::Ordering;
use std::net::Ipv6Addr;
use std::time::Duration;

use tokenyard_core::error::words::first_names;
use tokenyard_core::nics::ListedNic;
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_machine::gid::choose;
use tokenyard_machine::{Fact, Gid, GidKind, LinkLayer};
use tokenyard_sys_verbs::ffi;

use crate::config::{Mtu, SignalChoice};

/// The facts of a port before it is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortFacts {
    /// Name of its device.
    pub device: String,
    /// Number of the port, from 1.
    pub port: u8,
    /// Its link is up.
    pub active: bool,
    /// Its table has an entry that the config's `gid_index`, or the rule, selects.
    pub has_gid: bool,
    /// `LINK_LAYER_*`.
    pub link_layer: u8,
    /// Bits `active_width` of the port: its number of lanes.
    pub width: u8,
    /// Code `active_speed` of the port: the speed of a lane.
    pub speed: u8,
}

impl PortFacts {
    fn has_link(&self) -> bool {
        let known =
            matches!(self.link_layer, ffi::LINK_LAYER_INFINIBAND | ffi::LINK_LAYER_ETHERNET);
        self.active && known
    }

    /// The reason why it cannot be used, in words.
    fn fault(&self) -> Option<&'static str> {
        match (self.has_link(), self.has_gid) {
            (true, true) => None,
            (true, false) => Some("no GID"),
            (false, _) => Some("not active"),
        }
    }

    /// The port as an entry for the choice of NICs.
    pub fn listed(&self) -> ListedNic {
        let fault = self.fault().map(|fault| format!("port {}: {fault}", self.port));
        ListedNic { name: self.device.clone(), fault }
    }

    /// The rate in tenths of Gbit/s.
    fn rate(&self) -> u32 {
        let queues = match self.width {
            2 => 4,
            4 => 8,
            8 => 12,
            16 => 2,
            _ => 1,
        };
        let queue = match self.speed {
            2 => 50,
            4 | 8 => 100,
            16 => 140,
            32 => 250,
            64 => 500,
            128 => 1000,
            _ => 25,
        };
        queues * queue
    }
}

/// The reasons why ports cannot be used, grouped: `not active: mlx5_0 port 1, mlx5_1 port 1`.
pub fn by_fault(ports: &[PortFacts]) -> String {
    let of = |fault: &&str| {
        let of = ports.iter().filter(|port| port.fault() == Some(fault));
        let names: Vec<_> = of.map(|port| format!("{} port {}", port.device, port.port)).collect();
        (!names.is_empty()).then(|| format!("{fault}: {}", first_names(names)))
    };
    let groups: Vec<String> = ["not active", "no GID"].iter().filter_map(of).collect();
    if groups.is_empty() { "no port".to_owned() } else { groups.join("; ") }
}

/// The ports over which `"auto"` spreads the ranks if the topology chose none. They are the fastest of the
/// usable ports, one per device, in order of device names with numbers compared by value.
pub fn automatic<'a>(ports: impl IntoIterator<Item = &'a PortFacts>) -> Vec<&'a PortFacts> {
    let mut chosen: Vec<_> = ports.into_iter().filter(|port| port.fault().is_none()).collect();
    let fastest = chosen.iter().map(|port| port.rate()).max();
    chosen.retain(|port| Some(port.rate()) == fastest);
    chosen.sort_by(|a, b| natural(&a.device, &b.device).then(a.port.cmp(&b.port)));
    chosen.dedup_by(|a, b| a.device == b.device);
    chosen
}

/// The port of a named device: the requested port, or the first that is active.
///
/// # Errors
/// [`ErrorKind::Unavailable`] where there is no such port, or it is down.
pub fn port<'a>(ports: &'a [PortFacts], device: &str, wish: Option<u8>) -> Result<&'a PortFacts> {
    let mut of_device = ports.iter().filter(|port| port.device == device);
    let found = of_device.clone().find(|port| match wish {
        Some(wish) => port.port == wish,
        None => port.has_link(),
    });
    let unusable = |message: String, fix: &str| {
        Err(Error::new(ErrorKind::Unavailable, "choose port", message)
            .with_context("device", device)
            .with_fix(fix))
    };
    match (found, wish) {
        (Some(port), _) if port.has_link() => Ok(port),
        (Some(port), _) => unusable(
            format!("port {} is not active; expected an active InfiniBand or RoCE port", port.port),
            "set the link up, or name another `device` or `port`",
        ),
        (None, Some(wish)) => {
            let last = of_device.next_back().map_or(0, |port| port.port);
            unusable(format!("found no port {wish}; expected 1 to {last}"), "correct `port`")
        }
        (None, None) => {
            unusable("found no active port".into(), "set the link up, or name another `device`")
        }
    }
}

/// Compares names with numbers in them: `mlx5_2` comes before `mlx5_10`.
fn natural(a: &str, b: &str) -> Ordering {
    let split = |name: &str| {
        let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count();
        let (stem, number) = name.split_at(name.len() - digits);
        (stem.to_owned(), number.parse::<u64>().unwrap_or(0))
    };
    split(a).cmp(&split(b)).then_with(|| a.cmp(b))
}

/// The GID that a port is addressed by.
///
/// By [`tokenyard_machine::gid::choose`]. InfiniBand: entry 0. RoCE: of the entries of version 2,
/// the first with an IPv4 address; without one, the first with a routable IPv6 address, then the
/// first with a link-local one. `wish` selects an entry without these rules, also of version 1.
///
/// # Errors
/// [`ErrorKind::Unavailable`], which lists the entries of the table.
pub fn gid(entries: &[ffi::GidEntry], port: &PortFacts, wish: Option<u8>) -> Result<ffi::GidEntry> {
    let of_port = || entries.iter().filter(|e| e.port_num == u32::from(port.port));
    let infiniband = port.link_layer == ffi::LINK_LAYER_INFINIBAND;
    let by_index = |index: u8| of_port().find(|e| e.gid_index == u32::from(index));
    let found = match (wish, infiniband) {
        (Some(wish), _) => by_index(wish),
        (None, true) => by_index(0),
        (None, false) => {
            let table: Vec<Gid> = of_port().map(as_gid).collect();
            let chosen = choose(LinkLayer::Ethernet, &table).map(|gid| gid.index);
            of_port().find(|e| Some(e.gid_index) == chosen)
        }
    };
    found.copied().ok_or_else(|| {
        let expected = match (wish, infiniband) {
            (Some(wish), _) => format!("entry {wish}"),
            (None, true) => "entry 0".into(),
            (None, false) => "an entry of RoCE v2".into(),
        };
        let table: Vec<_> = of_port().map(shown).collect();
        let table = if table.is_empty() { "nothing".into() } else { table.join(", ") };
        Error::new(
            ErrorKind::Unavailable,
            "choose GID",
            format!("found {table}; expected {expected}"),
        )
        .with_context("device", &port.device)
        .with_context("port", port.port)
        .with_fix("give the port's network interface an IPv4 address, or set `gid_index`")
    })
}

/// The entry in the form of the shared rule, which `tokenyard doctor` uses too.
fn as_gid(entry: &ffi::GidEntry) -> Gid {
    let kind = match entry.gid_type {
        ffi::GID_TYPE_ROCE_V2 => GidKind::RoceV2,
        _ => GidKind::IbOrRoceV1,
    };
    Gid {
        index: entry.gid_index,
        address: Ipv6Addr::from(entry.gid.raw),
        kind: Fact::Known(kind),
        interface: Fact::Missing,
    }
}

fn shown(entry: &ffi::GidEntry) -> String {
    let version = match entry.gid_type {
        ffi::GID_TYPE_IB => "IB",
        ffi::GID_TYPE_ROCE_V1 => "RoCE v1",
        ffi::GID_TYPE_ROCE_V2 => "RoCE v2",
        _ => "unknown",
    };
    format!("{}: {} ({version})", entry.gid_index, Ipv6Addr::from(entry.gid.raw))
}

/// The packet size that this rank requests, as a code of 1 to 5. A connection uses the smaller size
/// of its two ends.
///
/// # Errors
/// [`ErrorKind::Config`] where the port cannot carry the requested size.
pub fn mtu(wish: Mtu, active: i32) -> Result<u8> {
    let active = u8::try_from(active).ok().filter(|code| (1..=5).contains(code)).unwrap_or(1);
    let Mtu::Bytes(bytes) = wish else { return Ok(active) };
    let code = (bytes / 128).ilog2() as u8;
    if code > active {
        let most = 128_u32 << active;
        return Err(Error::new(
            ErrorKind::Config,
            "choose mtu",
            format!("found mtu {bytes}; expected at most {most}, which the port has"),
        )
        .with_key("mtu")
        .with_fix("lower `mtu`, or raise that of the network interface and its switch"));
    }
    Ok(code)
}

/// The way in which signals arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalMode {
    /// As immediate data of a write, counted by the receiving process.
    Immediate,
    /// By atomic additions of the device to memory.
    Atomic,
}

/// The way in which signals arrive on a device with `receives` shared receives, and with atomics or
/// not.
///
/// # Errors
/// [`ErrorKind::Unavailable`] where the device does not support the choice.
pub fn signals(choice: SignalChoice, receives: u32, atomics: bool) -> Result<SignalMode> {
    let immediate = receives >= 64;
    let unavailable = |message: &str, fix: &str| {
        Err(Error::new(ErrorKind::Unavailable, "choose signals", message).with_fix(fix))
    };
    match choice {
        SignalChoice::Auto | SignalChoice::Immediate if immediate => Ok(SignalMode::Immediate),
        SignalChoice::Auto | SignalChoice::Atomic if atomics => Ok(SignalMode::Atomic),
        SignalChoice::Immediate => unavailable(
            "the device has no shared receive queue of 64 entries; expected one for immediate data",
            "set signals = \"atomic\"",
        ),
        SignalChoice::Atomic => {
            unavailable("the device has no remote atomics", "set signals = \"immediate\"")
        }
        SignalChoice::Auto => unavailable(
            "the device has neither shared receive queues nor remote atomics",
            "name another `device`",
        ),
    }
}

/// The shortest time for which a device repeats a request to a peer that does not answer.
pub fn shortest_silence(timeout: u8, retries: u8) -> Duration {
    Duration::from_nanos(4096) * (1 << timeout) * (u32::from(retries) + 1)
}

/// The longest time for which it does: by the specification, an interval may be four times the
/// nominal one.
pub fn longest_silence(timeout: u8, retries: u8) -> Duration {
    4 * shortest_silence(timeout, retries)
}

/// Warns if the device may take longer than the deadline to give up a dead peer. Waits still end by the deadline,
/// because the watchdog of the queues gives up first.
pub fn warn_of_silence(timeout: u8, retry_count: u8, deadline: Duration) {
    let longest = longest_silence(timeout, retry_count);
    if longest > deadline {
        tracing::warn!(
            "timeout = {timeout} and retry_count = {retry_count} let the device repeat for up to {longest:?}, which is \
             more than the deadline of {deadline:?}: stalled connections are given up then"
        );
    }
}

#[cfg(test)]
pub(crate) mod tests;
