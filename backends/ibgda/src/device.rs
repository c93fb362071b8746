//! Opens the ConnectX of the config by DEVX, with a port, a GID and a packet size.

use std::sync::Arc;

use tokenyard_core::abi;
use tokenyard_core::transport::{Capabilities, NO_CAPABILITIES, Team};
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_sys_mlx5::mailbox::{QueryHcaCap, QueryHcaCapOut};
use tokenyard_sys_mlx5::wqe::MOST_BYTES;
use tokenyard_sys_mlx5::{CallError, Devx, Library};
use tokenyard_sys_verbs::{Devices, ffi};
use tokenyard_verbs::endpoint::{MAX_SIGNALS, MAX_WINDOWS};
use tokenyard_verbs::port::{MAX_PEERS, Port, REQUESTS};
use tokenyard_verbs::{DeviceChoice, ports};

use crate::config::IbgdaConfig;

/// The form of completions that kernels read.
const CQE_VERSION: u8 = 1;

/// A device as a rank uses it.
#[derive(Debug)]
pub(crate) struct Adapter {
    pub(crate) devx: Arc<Devx>,
    pub(crate) port: Port,
}

/// Every adapter that the config allows, in the order in which ranks take them. With a team, only the adapter of its
/// rank; with `device = "auto"` that is the one that the topology chose.
///
/// # Errors
/// [`ErrorKind::Unavailable`], which names what is missing.
pub(crate) fn adapters(config: &IbgdaConfig, team: Option<&Team>) -> Result<Vec<Adapter>> {
    let library = Library::get().map_err(|e| {
        Error::new(ErrorKind::Unavailable, "load libmlx5", e.to_string())
            .with_fix("apt-get install ibverbs-providers (rdma-core 36 or newer)")
    })?;
    let (devices, wish) = (ports::list()?, config.ports());
    let is_mlx5 = |name: &String| library.is_supported(&devices, name) == Some(true);
    let wanted = choose_devices(&config.device, &devices.names(), is_mlx5)?;
    let open: Vec<_> =
        wanted.iter().map(|name| open(library, &devices, name)).collect::<Result<_>>()?;
    let ports = wish.of_open(team, &open, |devx| devx.context())?;
    let adapter = |(devx, facts): (Arc<Devx>, _)| {
        let port = Port::new(devx.context(), &facts, config.gid_index, config.mtu)?;
        Adapter::new(devx, port)
    };
    ports.into_iter().map(adapter).collect()
}

/// The devices that are a ConnectX: all, or those that are named.
fn choose_devices(
    choice: &DeviceChoice,
    names: &[String],
    is_mlx5: impl Fn(&String) -> bool,
) -> Result<Vec<String>> {
    let refuse = |message: String, fix: &str| {
        Err(Error::new(ErrorKind::Unavailable, "choose device", message).with_fix(fix))
    };
    match choice {
        DeviceChoice::Auto => {
            let all: Vec<_> = names.iter().filter(|name| is_mlx5(name)).cloned().collect();
            if all.is_empty() {
                let found = format!(
                    "found {}; expected a ConnectX (driver mlx5)",
                    tokenyard_core::error::words::first_names(names.to_vec())
                );
                return refuse(found, "use verbs or libfabric, which drive any RDMA NIC");
            }
            Ok(all)
        }
        DeviceChoice::Named(wanted) => {
            let other = wanted.iter().find(|name| names.contains(name) && !is_mlx5(name));
            match other {
                Some(other) => refuse(
                    format!("found {other}, which is no mlx5 device; expected a ConnectX"),
                    "name a ConnectX in `device`, or use verbs or libfabric",
                ),
                None => Ok(wanted.clone()),
            }
        }
    }
}

fn open(library: &'static Library, devices: &Devices, name: &str) -> Result<Arc<Devx>> {
    let opened = Devx::open(library, devices, name).map_err(|error| no_devx(error, name))?;
    let devx = opened.ok_or_else(|| ports::no_device(devices, name))?;
    let found: QueryHcaCapOut =
        devx.command(&QueryHcaCap::default()).map_err(|error| no_devx(error, name))?;
    if found.cqe_version != CQE_VERSION {
        let message = format!(
            "found completions of version {}; expected {CQE_VERSION}, which ConnectX-4 and newer have",
            found.cqe_version
        );
        return Err(Error::new(ErrorKind::Unavailable, "ask device", message)
            .with_context("device", name)
            .with_fix("name a newer ConnectX in `device`, or use verbs"));
    }
    Ok(devx)
}

/// The error for a device that takes no commands of this process.
fn no_devx(error: CallError, name: &str) -> Error {
    if error.source.kind() == std::io::ErrorKind::PermissionDenied {
        return ports::not_opened(error, name);
    }
    let message = format!("{}: the device takes no commands of a process (DEVX)", error.call);
    Error::new(ErrorKind::Unavailable, "open device", message)
        .with_context("device", name)
        .with_source(error.source)
        .with_fix(
            "use a ConnectX-5 or newer with firmware that has DEVX (UCTX_EN=1 by mlxconfig), kernel 5.0 or newer; a \
             virtual function needs it from its host; or use verbs, which needs no DEVX",
        )
}

impl Adapter {
    fn new(devx: Arc<Devx>, port: Port) -> Result<Self> {
        if port.device.atomic_cap == ffi::ATOMIC_NONE {
            let message = "the device has no remote atomics; expected them for signals";
            let error = Error::new(ErrorKind::Unavailable, "ask device", message);
            return Err(error
                .with_context("device", port.context.name())
                .with_fix("use verbs, which signals without atomics too"));
        }
        Ok(Self { devx, port })
    }

    /// The capabilities of this adapter; `gpu`: whether there is a GPU whose kernels could post.
    pub(crate) fn capabilities(&self, config: &IbgdaConfig, gpu: bool) -> Capabilities {
        let placed = match config.device {
            DeviceChoice::Auto => abi::TY_CAP_PLACED_NICS,
            DeviceChoice::Named(_) => 0,
        };
        let (device_api, cuda) =
            if gpu { (abi::TY_CAP_DEVICE_API, abi::TY_MEMORY_CUDA) } else { (0, 0) };
        Capabilities {
            flags: abi::TY_CAP_NATIVE_ATOMICS
                | abi::TY_CAP_GET
                | abi::TY_CAP_BOUNDED_PUT
                | abi::TY_CAP_MASKING
                | placed
                | device_api,
            memory_kinds: abi::TY_MEMORY_HOST | cuda,
            max_peers: MAX_PEERS,
            max_queues: config.queue_pairs,
            max_signals: MAX_SIGNALS,
            max_queue_depth: config.depth / REQUESTS,
            max_windows: MAX_WINDOWS,
            largest_put: u64::from(self.port.attr.max_msg_sz.min(MOST_BYTES)),
            ..NO_CAPABILITIES
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(choice: DeviceChoice, names: &[&str]) -> Result<Vec<String>> {
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        choose_devices(&choice, &names, |name| name.starts_with("mlx5"))
    }

    #[test]
    fn only_a_connectx_is_taken_and_others_are_named() {
        let names = ["rxe0", "mlx5_0", "bnxt_re0", "mlx5_1"];
        assert_eq!(chosen(DeviceChoice::Auto, &names).unwrap(), ["mlx5_0", "mlx5_1"]);
        let named = |name: &str| DeviceChoice::Named(vec![name.to_owned()]);
        assert_eq!(chosen(named("mlx5_1"), &names).unwrap(), ["mlx5_1"]);
        for (choice, expected) in [
            (DeviceChoice::Auto, "found rxe0, bnxt_re0; expected a ConnectX"),
            (named("rxe0"), "found rxe0, which is no mlx5 device"),
        ] {
            let error = chosen(choice, &["rxe0", "bnxt_re0"]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            assert!(error.to_string().contains(expected), "{error}");
            assert!(error.fix().is_some_and(|fix| fix.contains("verbs")), "{error}");
        }
    }

    #[test]
    fn a_device_without_devx_is_refused_with_what_it_takes() {
        let error = |errno| {
            let source = std::io::Error::from_raw_os_error(errno);
            no_devx(CallError { call: "mlx5dv_open_device", source }, "mlx5_0")
        };
        // EOPNOTSUPP, EINVAL.
        for errno in [95, 22] {
            let error = error(errno);
            assert!(error.to_string().contains("(DEVX)"), "{error}");
            assert!(error.fix().is_some_and(|fix| fix.contains("UCTX_EN=1")), "{error}");
        }
        // EACCES is about the file of the device.
        assert!(error(13).fix().is_some_and(|fix| fix.contains("/dev/infiniband")));
    }
}
