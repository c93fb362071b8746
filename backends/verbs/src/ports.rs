//! The choice of devices and ports, for every transport over libibverbs.

use std::sync::Arc;

use tokenyard_core::nics::{ListedNic, NicSearch};
use tokenyard_core::transport::Team;
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_sys_verbs::ffi;
use tokenyard_sys_verbs::{CallError, Context, Devices, Library};

use crate::config::DeviceChoice;
use crate::rules::{self, PortFacts};

/// The keys of a config about ports.
#[derive(Clone, Copy, Debug)]
pub struct PortWish<'a> {
    /// The name of the transport, for messages.
    pub transport: &'static str,
    /// The devices.
    pub device: &'a DeviceChoice,
    /// The port of the device.
    pub port: Option<u8>,
    /// The entry of the port's GID table.
    pub gid_index: Option<u8>,
}

/// The devices of this machine; at least one.
///
/// # Errors
/// [`ErrorKind::Unavailable`], which names what is missing.
pub fn list() -> Result<Devices> {
    let library = Library::get().map_err(|e| {
        Error::new(ErrorKind::Unavailable, "load libibverbs", e.to_string())
            .with_fix("apt-get install libibverbs1 ibverbs-providers, or the vendor's package")
    })?;
    let devices = Devices::list(library).map_err(|e| {
        unavailable("list RDMA devices", e).with_fix("load the kernel modules: modprobe ib_uverbs")
    })?;
    if !devices.names().is_empty() {
        return Ok(devices);
    }
    Err(Error::new(
        ErrorKind::Unavailable,
        "list RDMA devices",
        "found no device; expected an InfiniBand or RoCE device",
    )
    .with_fix(
        "see `ibv_devices`; load the NIC's driver, or pass /dev/infiniband into the container",
    ))
}

/// The error for a device that cannot be opened.
pub fn not_opened(error: CallError, name: &str) -> Error {
    unavailable("open device", error)
        .with_context("device", name)
        .with_fix("give the user read and write access to /dev/infiniband/uverbs*")
}

/// The error for a device that is not there.
pub fn no_device(devices: &Devices, name: &str) -> Error {
    let names = devices.names().join(", ");
    let message = format!("found no device `{name}`; expected one of {names}");
    Error::new(ErrorKind::Unavailable, "open device", message).with_fix("correct `device`")
}

/// The error for a call that the library or the device refuses.
pub fn unavailable(operation: &'static str, error: CallError) -> Error {
    Error::new(ErrorKind::Unavailable, operation, error.call).with_source(error.source)
}

impl PortWish<'_> {
    /// The ports that ranks use, as of [`choose`](Self::choose), each with its open device.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`], which names what is missing.
    pub fn open(&self, team: Option<&Team>) -> Result<Vec<(Arc<Context>, PortFacts)>> {
        let devices = list()?;
        let wanted = match self.device {
            DeviceChoice::Auto => devices.names(),
            DeviceChoice::Named(wanted) => wanted.clone(),
        };
        let open = |name: &String| {
            let opened = devices.open(name).map_err(|e| not_opened(e, name))?;
            opened.ok_or_else(|| no_device(&devices, name))
        };
        let open: Vec<_> = wanted.iter().map(open).collect::<Result<_>>()?;
        self.of_open(team, &open, |context| context)
    }

    /// The ports of these open devices that ranks use, as of [`choose`](Self::choose), each with its device.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`], which names what is missing.
    pub fn of_open<D: Clone>(
        &self,
        team: Option<&Team>,
        open: &[D],
        context: impl Fn(&D) -> &Arc<Context>,
    ) -> Result<Vec<(D, PortFacts)>> {
        let ports: Vec<_> = open.iter().map(|it| self.facts(context(it))).collect::<Result<_>>()?;
        let ports = ports.concat();
        let of_port = |port: &PortFacts| {
            let device = open.iter().find(|it| context(it).name() == port.device)?;
            Some((device.clone(), port.clone()))
        };
        Ok(self.choose(team, &ports)?.into_iter().filter_map(of_port).collect())
    }

    /// The ports that ranks use; with a team, only the port of its rank: rank i takes entry i modulo
    /// their count.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`], which names the ports and why they cannot be used.
    pub fn choose<'a>(
        &self,
        team: Option<&Team>,
        ports: &'a [PortFacts],
    ) -> Result<Vec<&'a PortFacts>> {
        let mut chosen = match self.device {
            DeviceChoice::Auto => self.automatic(team, ports)?,
            DeviceChoice::Named(names) => {
                let port = |name: &String| rules::port(ports, name, self.port);
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
        &self,
        team: Option<&Team>,
        ports: &'a [PortFacts],
    ) -> Result<Vec<&'a PortFacts>> {
        let is_wished = |of: &&PortFacts| self.port.is_none_or(|wish| of.port == wish);
        let wished: Vec<&PortFacts> = ports.iter().filter(is_wished).collect();
        let listed: Vec<ListedNic> = wished.iter().map(|port| port.listed()).collect();
        let search = NicSearch {
            transport: self.transport,
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

    /// The facts of the ports of a device.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] where the device does not answer.
    pub fn facts(&self, context: &Arc<Context>) -> Result<Vec<PortFacts>> {
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
                    gids.as_ref().is_none_or(|all| rules::gid(all, &facts, self.gid_index).is_ok());
                Ok(PortFacts { has_gid, ..facts })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenyard_core::abi;
    use tokenyard_core::nics::Nics;

    use crate::config::VerbsConfig;
    use crate::rules::tests::facts;

    fn team(nics: &[&str], any_rails: bool) -> Team {
        let names = nics.iter().map(|nic| (*nic).to_owned()).collect();
        Team { nics: Nics { names, any_rails }, ..Team::world(0, 8) }
    }

    fn opened(config: &VerbsConfig, team: &Team, ports: &[PortFacts]) -> Result<(String, u8)> {
        let chosen = config.ports().choose(Some(team), ports)?;
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
        let error = VerbsConfig::default().ports().choose(None, &[down, bare]).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains(
                "no port can be used; found not active: mlx5_0 port 1; no GID: mlx5_1 port 1"
            ),
            "{text}"
        );
    }
}
