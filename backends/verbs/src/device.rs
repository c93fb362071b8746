//! From the config to an open device with a port, a GID and a packet size.

use std::sync::Arc;

use tokenyard_core::abi;
use tokenyard_core::transport::{Capabilities, NO_CAPABILITIES};
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_sys_verbs::ffi::{self, DeviceAttr, GidEntry, PortAttr};
use tokenyard_sys_verbs::{CallError, Context, Devices, Library};

use crate::config::{DeviceChoice, VerbsConfig};
use crate::endpoint::{MAX_LANES, MAX_SIGNALS, MAX_WINDOWS};
use crate::rules::{self, PortFacts, SignalMode};

/// Most ranks of a team; the index of a peer also has to fit a work request's id.
const MAX_PEERS: u32 = 1024;
/// Work requests that one command may become: a write and an addition.
pub(crate) const REQUESTS: u32 = 2;
/// Entries of a lane's completion queue per command of its depth. Two are those of the work
/// requests under way. When a connection breaks, a command ends with its first completion and
/// leaves one more behind, while its place in the lane is taken again.
pub(crate) const COMPLETIONS: u32 = 3;
/// Reads and atomics of one queue pair at once: more brings nothing, and devices have few.
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

/// Every adapter that the config lets ranks use, in the order in which they take them; with
/// `device = "auto"` the one of `nics`, which the topology chose for this rank, if it can be used.
///
/// # Errors
/// [`ErrorKind::Unavailable`] with what is missing.
pub(crate) fn adapters(config: &VerbsConfig, nics: &[String]) -> Result<Vec<Adapter>> {
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
    let ports = open.iter().map(facts).collect::<Result<Vec<_>>>()?.concat();
    choose(config, nics, &ports)?
        .into_iter()
        .map(|port| {
            let context = open.iter().find(|context| context.name() == port.device);
            let context = context.ok_or_else(|| broken("a port of a device that is not open"))?;
            Adapter::new(config, context, port)
        })
        .collect()
}

fn choose<'a>(
    config: &VerbsConfig,
    nics: &[String],
    ports: &'a [PortFacts],
) -> Result<Vec<&'a PortFacts>> {
    if let (DeviceChoice::Auto, Some(port)) =
        (&config.device, rules::placed(ports, nics, config.port))
    {
        return Ok(vec![port]);
    }
    let chosen = match &config.device {
        DeviceChoice::Named(names) => {
            let port = |name: &String| rules::port(ports, name, config.port);
            return names.iter().map(port).collect();
        }
        DeviceChoice::Auto => match config.port {
            None => rules::automatic(ports),
            Some(port) => {
                let of_number: Vec<_> = ports.iter().filter(|p| p.port == port).cloned().collect();
                let names = rules::automatic(&of_number).into_iter().map(|p| p.device.clone());
                let names: Vec<_> = names.collect();
                return names.iter().map(|name| rules::port(ports, name, Some(port))).collect();
            }
        },
    };
    if chosen.is_empty() {
        let shown: Vec<_> = ports.iter().map(|p| format!("{} port {}", p.device, p.port)).collect();
        return Err(Error::new(
            ErrorKind::Unavailable,
            "choose device",
            format!("no port of {} is active", shown.join(", ")),
        )
        .with_fix("bring a link up: see `ibv_devinfo` and `rdma link`"));
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

/// What the ports of a device say.
fn facts(context: &Arc<Context>) -> Result<Vec<PortFacts>> {
    let failed = |e| unavailable("ask device", e).with_context("device", context.name());
    let attr = context.attributes().map_err(failed)?;
    (1..=attr.phys_port_cnt)
        .map(|port| {
            let attr = context.port(port).map_err(failed)?;
            Ok(PortFacts {
                device: context.name().to_owned(),
                port,
                active: attr.state == ffi::PORT_ACTIVE,
                link_layer: attr.link_layer,
                width: attr.active_width,
                speed: attr.active_speed,
            })
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

    /// Reads and atomics that one queue pair has under way at once.
    pub(crate) fn reads_asked(&self) -> u8 {
        self.attr.max_qp_init_rd_atom.clamp(1, MOST_READS) as u8
    }

    /// What can be declared of it.
    pub(crate) fn capabilities(&self, config: &VerbsConfig) -> Capabilities {
        let signals = match self.signals {
            // Signals count, and receives are posted again, when somebody drives.
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
            max_lanes: MAX_LANES,
            max_signals: MAX_SIGNALS,
            max_queue_depth: depth,
            max_windows: MAX_WINDOWS,
            largest_put: u64::from(self.port_attr.max_msg_sz),
            ..NO_CAPABILITIES
        }
    }

    /// Device memory comes by dmabuf or by a peer memory module of the kernel; whether the driver
    /// has either shows when a window is registered. It needs signals that are counted after a
    /// read-back (INV-1).
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

fn broken(message: &'static str) -> Error {
    Error::new(ErrorKind::Internal, "choose device", message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::tests::facts;

    #[test]
    fn auto_opens_the_nic_of_the_topology_and_else_the_fastest() {
        let ports = [facts("mlx5_0", 32), facts("mlx5_9", 128)];
        let opened = |nics: &[&str]| {
            let nics: Vec<String> = nics.iter().map(|nic| (*nic).to_owned()).collect();
            let chosen = choose(&VerbsConfig::default(), &nics, &ports).unwrap();
            chosen.iter().map(|port| port.device.clone()).collect::<Vec<_>>()
        };
        assert_eq!(opened(&["mlx5_0"]), ["mlx5_0"]);
        assert_eq!(opened(&[]), ["mlx5_9"]);
    }
}
