//! Opens the device of the config, with a port, a GID and a packet size.

use std::sync::Arc;

use tokenyard_core::abi;
use tokenyard_core::nics::{ListedNic, NicSearch};
use tokenyard_core::transport::{Capabilities, NO_CAPABILITIES, Team};
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_sys_verbs::ffi::{self, DeviceAttr, GidEntry, PortAttr};
use tokenyard_sys_verbs::{CallError, Context, Devices, Library};

use crate::config::{DeviceChoice, VerbsConfig};
use crate::endpoint::{MAX_QUEUES, MAX_SIGNALS, MAX_WINDOWS};
use crate::rules::{self, PortFacts, SignalMode};

/// Most ranks of a team; the index of a peer also has to fit a work request's id.
const MAX_PEERS: u32 = 1024;
/// Work requests that one command may become: a write and an addition.
pub(crate) const REQUESTS: u32 = 2;
/// Entries of a completion queue per command of the queue's depth. Two are for the work requests in
/// flight. When a connection breaks, a command ends with its first completion. Its second
/// completion is still to come when a new command takes its place in the queue.
pub(crate) const COMPLETIONS: u32 = 3;
/// Reads and atomics of one queue pair at once. More has no benefit, and devices support few.
const MOST_READS: i32 = 16;

/// A device as a rank uses it.
#[derive(Debug)]
pub(crate) struct Adapter {
    pub(crate) context: Arc<Context>,
    pub(crate) attr: DeviceAttr,
    pub(crate) port: u8,
    pub(crate) port_attr: PortAttr,
    pub(crate) gid: GidEntry,
    pub(crate) mtu: u8,
    pub(crate) signals: SignalMode,
}

/// Every adapter that the config allows, in the order in which ranks take them. With a team, only
/// the adapter of its rank; with `device = "auto"` that is the one that the topology chose.
///
/// # Errors
/// [`ErrorKind::Unavailable`], which names what is missing.
pub(crate) fn adapters(config: &VerbsConfig, team: Option<&Team>) -> Result<Vec<Adapter>> {
    let library = Library::get().map_err(|e| {
        Error::new(ErrorKind::Unavailable, "load libibverbs", e.to_string())
            .with_fix("apt-get install libibverbs1 ibverbs-providers, or the vendor's package")
    })?;
    let devices = Devices::list(library).map_err(|e| {
        unavailable("list RDMA devices", e).with_fix("load the kernel modules: modprobe ib_uverbs")
    })?;
    let names = devices.names();
    if names.is_empty() {
        return Err(Error::new(
            ErrorKind::Unavailable,
            "list RDMA devices",
            "found no device; expected an InfiniBand or RoCE device",
        )
        .with_fix(
            "see `ibv_devices`; load the NIC's driver, or pass /dev/infiniband into the container",
        ));
    }
    let wanted = match &config.device {
        DeviceChoice::Auto => names.clone(),
        DeviceChoice::Named(wanted) => wanted.clone(),
    };
    let open: Vec<_> =
        wanted.iter().map(|name| open(&devices, name, &names)).collect::<Result<_>>()?;
    let ports: Vec<_> = open.iter().map(|of| facts(config, of)).collect::<Result<_>>()?;
    let ports = ports.concat();
    choose(config, team, &ports)?
        .into_iter()
        .map(|port| {
            let context = open.iter().find(|context| context.name() == port.device);
            let context = context.ok_or_else(|| broken("a port of a device that is not open"))?;
            Adapter::new(config, context, port)
        })
        .collect()
}

/// The ports that ranks use; with a team, only the port of its rank: rank i takes entry i modulo
/// their count.
fn choose<'a>(
    config: &VerbsConfig,
    team: Option<&Team>,
    ports: &'a [PortFacts],
) -> Result<Vec<&'a PortFacts>> {
    let mut chosen = match &config.device {
        DeviceChoice::Auto => automatic(config, team, ports)?,
        DeviceChoice::Named(names) => {
            let port = |name: &String| rules::port(ports, name, config.port);
            names.iter().map(port).collect::<Result<_>>()?
        }
    };
    if let Some(team) = team {
        let turn = team.me as usize % chosen.len().max(1);
        chosen = chosen.get(turn..=turn).unwrap_or_default().to_vec();
    }
    Ok(chosen)
}

/// The port of the NIC that the topology chose for the rank of a team; without a team, all ports
/// that ranks may use.
fn automatic<'a>(
    config: &VerbsConfig,
    team: Option<&Team>,
    ports: &'a [PortFacts],
) -> Result<Vec<&'a PortFacts>> {
    let is_wished = |of: &&PortFacts| config.port.is_none_or(|wish| of.port == wish);
    let wished: Vec<&PortFacts> = ports.iter().filter(is_wished).collect();
    let listed: Vec<ListedNic> = wished.iter().map(|port| port.listed()).collect();
    let search = NicSearch {
        transport: "verbs",
        listed: &listed,
        most: 1,
        own_names: false,
        fix: "repair its link or `gid_index` (`ibv_devinfo -v`), or name others in `device`",
    };
    let own = team.map_or(Ok(Vec::new()), |team| team.nics.choose(&search))?;
    let chosen = match own.as_slice() {
        [] => rules::automatic(wished),
        own => own.iter().map(|index| wished[*index]).collect(),
    };
    if chosen.is_empty() {
        return Err(Error::new(
            ErrorKind::Unavailable,
            "choose device",
            format!("no port can be used; found {}", rules::by_fault(ports)),
        )
        .with_fix(
            "set a link up, and on RoCE give its interface an address: see `ibv_devinfo -v` and `rdma link`",
        ));
    }
    Ok(chosen)
}

fn open(devices: &Devices, name: &str, names: &[String]) -> Result<Arc<Context>> {
    let opened = devices.open(name).map_err(|e| {
        unavailable("open device", e)
            .with_context("device", name)
            .with_fix("give the user read and write access to /dev/infiniband/uverbs*")
    })?;
    opened.ok_or_else(|| {
        Error::new(
            ErrorKind::Unavailable,
            "open device",
            format!("found no device `{name}`; expected one of {}", names.join(", ")),
        )
        .with_fix("correct `device`")
    })
}

/// The facts of the ports of a device.
fn facts(config: &VerbsConfig, context: &Arc<Context>) -> Result<Vec<PortFacts>> {
    let failed = |e| unavailable("ask device", e).with_context("device", context.name());
    let attr = context.attributes().map_err(failed)?;
    // A table that cannot be read now is read again when the port is opened, where the error is
    // reported.
    let gids = context.gids().ok();
    (1..=attr.phys_port_cnt)
        .map(|port| {
            let attr = context.port(port).map_err(failed)?;
            let facts = PortFacts {
                device: context.name().to_owned(),
                port,
                active: attr.state == ffi::PORT_ACTIVE,
                has_gid: true,
                link_layer: attr.link_layer,
                width: attr.active_width,
                speed: attr.active_speed,
            };
            let has_gid =
                gids.as_ref().is_none_or(|all| rules::gid(all, &facts, config.gid_index).is_ok());
            Ok(PortFacts { has_gid, ..facts })
        })
        .collect()
}

impl Adapter {
    fn new(config: &VerbsConfig, context: &Arc<Context>, port: &PortFacts) -> Result<Self> {
        let failed = |e| unavailable("ask device", e).with_context("device", &port.device);
        let attr = context.attributes().map_err(failed)?;
        let port_attr = context.port(port.port).map_err(failed)?;
        let gids = context.gids().map_err(failed)?;
        let receives = u32::try_from(attr.max_srq_wr.min(attr.max_cqe)).unwrap_or(0);
        let receives = if attr.max_srq > 0 { receives } else { 0 };
        let named = |error: Error| error.with_context("device", &port.device);
        if attr.max_qp_rd_atom < 1 || attr.max_qp_init_rd_atom < 1 {
            let message = "the device serves no RDMA reads; expected a device with RC queue pairs";
            return Err(named(Error::new(ErrorKind::Unavailable, "ask device", message)));
        }
        Ok(Self {
            context: Arc::clone(context),
            gid: rules::gid(&gids, port, config.gid_index)?,
            mtu: rules::mtu(config.mtu, port_attr.active_mtu).map_err(named)?,
            signals: rules::signals(
                config.signals,
                receives.min(config.receive_depth),
                attr.atomic_cap != ffi::ATOMIC_NONE,
            )
            .map_err(named)?,
            attr,
            port: port.port,
            port_attr,
        })
    }

    /// Signals that can wait for a poll.
    pub(crate) fn receive_depth(&self, config: &VerbsConfig) -> u32 {
        let most = u32::try_from(self.attr.max_srq_wr.min(self.attr.max_cqe)).unwrap_or(0);
        config.receive_depth.min(most)
    }

    /// Reads and atomics of a peer that one queue pair serves at once.
    pub(crate) fn reads_served(&self) -> u8 {
        self.attr.max_qp_rd_atom.clamp(1, MOST_READS) as u8
    }

    /// Reads and atomics that one queue pair has in flight at once.
    pub(crate) fn reads_asked(&self) -> u8 {
        self.attr.max_qp_init_rd_atom.clamp(1, MOST_READS) as u8
    }

    /// The capabilities of this adapter.
    pub(crate) fn capabilities(&self, config: &VerbsConfig) -> Capabilities {
        let signals = match self.signals {
            // Signals are counted, and receives are posted again, when a thread drives the
            // transport.
            SignalMode::Immediate => abi::TY_CAP_IMMEDIATE | abi::TY_CAP_MANUAL_PROGRESS,
            SignalMode::Atomic => abi::TY_CAP_NATIVE_ATOMICS,
        };
        let count = |found: i32| u32::try_from(found).unwrap_or(0);
        let depth = (count(self.attr.max_qp_wr) / REQUESTS)
            .min(count(self.attr.max_cqe) / COMPLETIONS)
            .min(config.queue_depth);
        let placed = match config.device {
            DeviceChoice::Auto => abi::TY_CAP_PLACED_NICS,
            _ => 0,
        };
        Capabilities {
            flags: abi::TY_CAP_ORDERED
                | abi::TY_CAP_GET
                | abi::TY_CAP_BOUNDED_PUT
                | abi::TY_CAP_MASKING
                | placed
                | signals,
            memory_kinds: self.memory_kinds(),
            max_peers: MAX_PEERS,
            max_queues: MAX_QUEUES,
            max_signals: MAX_SIGNALS,
            max_queue_depth: depth,
            max_windows: MAX_WINDOWS,
            largest_put: u64::from(self.port_attr.max_msg_sz),
            ..NO_CAPABILITIES
        }
    }

    /// Device memory is registered by dmabuf or by a peer memory module of the kernel; whether the
    /// driver supports either is known only when a window is registered. Device memory needs
    /// signals that are counted after a read-back (INV-1).
    pub(crate) fn memory_kinds(&self) -> u32 {
        match self.signals {
            SignalMode::Immediate => abi::TY_MEMORY_HOST | abi::TY_MEMORY_CUDA | abi::TY_MEMORY_HIP,
            SignalMode::Atomic => abi::TY_MEMORY_HOST,
        }
    }
}

fn unavailable(operation: &'static str, error: CallError) -> Error {
    Error::new(ErrorKind::Unavailable, operation, error.call).with_source(error.source)
}

pub(crate) fn no_port() -> Error {
    Error::new(ErrorKind::Unavailable, "choose device", "found no port; expected one")
}

fn broken(message: &'static str) -> Error {
    Error::new(ErrorKind::Internal, "choose device", message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenyard_core::nics::Nics;

    use crate::rules::tests::facts;

    fn team(nics: &[&str], any_rails: bool) -> Team {
        let names = nics.iter().map(|nic| (*nic).to_owned()).collect();
        Team { nics: Nics { names, any_rails }, ..Team::world(0, 8) }
    }

    fn opened(config: &VerbsConfig, team: &Team, ports: &[PortFacts]) -> Result<(String, u8)> {
        let chosen = choose(config, Some(team), ports)?;
        assert_eq!(chosen.len(), 1);
        Ok((chosen[0].device.clone(), chosen[0].port))
    }

    #[test]
    fn a_rank_takes_the_device_that_the_topology_chose_and_else_its_turn() {
        let names = ["mlx5_0", "mlx5_1", "mlx5_2"];
        let ports = names.map(|name| facts(name, 128));
        let auto = VerbsConfig::default();
        let device = DeviceChoice::Named(names.map(str::to_owned).to_vec());
        let named = VerbsConfig { device, ..VerbsConfig::default() };
        let device = |config: &VerbsConfig, me: u32, nics: &[&str]| {
            opened(config, &Team { me, ..team(nics, true) }, &ports).unwrap().0
        };
        assert_eq!(device(&auto, 0, &["mlx5_2", "mlx5_1"]), "mlx5_2");
        assert_eq!(device(&auto, 0, &["mlx5_7", "mlx5_1"]), "mlx5_1");
        assert_eq!(device(&auto, 4, &[]), "mlx5_1");
        assert_eq!(device(&auto, 5, &["mlx5_7"]), "mlx5_2");
        assert_eq!(device(&named, 1, &["mlx5_2"]), "mlx5_1");
    }

    #[test]
    fn the_nic_that_the_topology_chose_is_taken_though_another_one_is_faster() {
        let down = PortFacts { active: false, ..facts("mlx5_1", 128) };
        let second = PortFacts { port: 2, ..facts("mlx5_2", 32) };
        let ports = [facts("mlx5_0", 128), down, facts("mlx5_2", 32), second];
        let taken = |nics: &[&str], port| {
            let config = VerbsConfig { port, ..VerbsConfig::default() };
            opened(&config, &team(nics, false), &ports).unwrap()
        };
        assert_eq!(taken(&["mlx5_2", "mlx5_0"], None), ("mlx5_2".into(), 1));
        assert_eq!(taken(&["mlx5_2"], Some(2)), ("mlx5_2".into(), 2));
        assert_eq!(taken(&["mlx5_1", "mlx5_2"], None), ("mlx5_2".into(), 1));
        assert_eq!(taken(&[], None), ("mlx5_0".into(), 1));
    }

    #[test]
    fn a_nic_of_the_topology_that_cannot_be_used_is_refused_unless_all_reach_each_other() {
        let down = PortFacts { active: false, ..facts("mlx5_1", 128) };
        let bare = PortFacts { has_gid: false, ..facts("mlx5_2", 128) };
        let ports = [facts("mlx5_0", 128), down, bare];
        let auto = VerbsConfig::default();
        let open = |config: &VerbsConfig, nics: &[&str], any_rails: bool| {
            opened(config, &team(nics, any_rails), &ports).map(|(device, _)| device)
        };
        for (nic, found) in [
            ("mlx5_1", "port 1: not active"),
            ("mlx5_2", "port 1: no GID"),
            ("mlx5_7", "not listed"),
        ] {
            let error = open(&auto, &[nic], false).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            let text = error.to_string();
            let chosen = format!(
                "verbs cannot use {nic} ({found}), which the topology chose for this rank; it can use mlx5_0"
            );
            assert!(text.contains(&chosen) && text.contains("rails = \"any\""), "{text}");
            // Each suggested fix works, and so does a NIC that is equally near.
            assert_eq!(open(&auto, &[nic], true).unwrap(), "mlx5_0");
            assert_eq!(open(&auto, &[nic, "mlx5_0"], false).unwrap(), "mlx5_0");
            let device = DeviceChoice::Named(vec!["mlx5_0".to_owned()]);
            let named = VerbsConfig { device, ..VerbsConfig::default() };
            assert_eq!(open(&named, &[nic], false).unwrap(), "mlx5_0");
        }
    }

    #[test]
    fn an_error_about_many_devices_leaves_room_for_the_way_out() {
        let bare = |i: u32| PortFacts { has_gid: i != 31, ..facts(&format!("rocep249s{i}"), 32) };
        let ports: Vec<_> = (0..32).map(bare).collect();
        let bare_nics: Vec<String> =
            (0..31).map(|i| format!("rocep249s{i}")).rev().take(8).collect();
        let many: Vec<&str> = bare_nics.iter().map(String::as_str).collect();
        let none: Vec<_> =
            ports.iter().map(|port| PortFacts { has_gid: false, ..port.clone() }).collect();
        let down: Vec<_> =
            ports.iter().map(|port| PortFacts { active: false, ..port.clone() }).collect();
        let most: Vec<_> = ports
            .iter()
            .map(|port| PortFacts { has_gid: !bare_nics.contains(&port.device), ..port.clone() })
            .collect();
        for (nics, ports, end) in [
            (&["rocep249s31"][..], ports, "all names reach each other"),
            (&many, most, "all names reach each other"),
            (&[], none, "`rdma link`"),
            (&[], down, "`rdma link`"),
        ] {
            let text = opened(&VerbsConfig::default(), &team(nics, false), &ports).unwrap_err();
            let text = text.to_string();
            assert!(text.len() < abi::TY_ERROR_MESSAGE && text.ends_with(end), "{text}");
        }
    }

    #[test]
    fn where_no_port_can_be_used_each_is_named() {
        let down = PortFacts { active: false, ..facts("mlx5_0", 32) };
        let bare = PortFacts { has_gid: false, ..facts("mlx5_1", 32) };
        let error = choose(&VerbsConfig::default(), None, &[down, bare]).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains(
                "no port can be used; found not active: mlx5_0 port 1; no GID: mlx5_1 port 1"
            ),
            "{text}"
        );
    }
}
