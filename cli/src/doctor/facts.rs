//! What this node has. Where something can be tried without leaving a trace, it is tried.

use std::net::{TcpListener, ToSocketAddrs};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, statvfs};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use tokenyard_core::bootstrap::{Identity, Rendezvous, Secret};
use tokenyard_core::config::Config;
use tokenyard_core::machine;

use crate::memory::{self, container_memory, meminfo};

/// The node, as the rules see it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Facts {
    /// Major and minor version of the kernel.
    pub(crate) kernel: Option<(u32, u32)>,
    /// Logical processors that this process may run on.
    pub(crate) processors: usize,
    /// Processors' worth of time that the container may use.
    pub(crate) processor_quota: Option<f64>,
    /// Bytes that can be used without swapping.
    pub(crate) memory_available: Option<u64>,
    /// Bytes that the container may still use.
    pub(crate) container_available: Option<u64>,
    /// Soft limit; absent if there is none.
    pub(crate) open_files: Option<u64>,
    /// Soft limit in bytes; absent if there is none.
    pub(crate) locked_memory: Option<u64>,
    /// Free bytes of /dev/shm.
    pub(crate) posix_shm_free: Option<u64>,
    /// Why memory cannot be shared by descriptor and sealed.
    pub(crate) memfd_error: Option<String>,
    /// Why processes cannot meet at an abstract Unix socket.
    pub(crate) socket_error: Option<String>,
    pub(crate) clock_source: Option<String>,
    pub(crate) meeting: Meeting,
    pub(crate) secret: SecretFact,
}

/// How ranks will find each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Meeting {
    /// No launcher's variables are set here.
    NoLauncher,
    /// The variables or the config cannot be used.
    Wrong(String),
    /// At a TCP port.
    Tcp { address: String, loopback: bool, port: Port },
    /// Through a file.
    File { path: String, folder_error: Option<String> },
}

/// Whether rank 0 could listen at its port here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Port {
    Free,
    /// The address belongs to another node.
    Elsewhere,
    Refused(String),
}

/// Whether there is a job secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SecretFact {
    None,
    Set,
    Unusable(String),
}

fn env(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

impl Facts {
    pub(crate) fn gather(config: Option<&Config>) -> Self {
        let memory = memory::read("/proc/meminfo");
        Self {
            kernel: machine::kernel_release().and_then(|r| version(&r)),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            processor_quota: memory::read("/sys/fs/cgroup/cpu.max").and_then(|t| quota(&t)),
            memory_available: memory.and_then(|text| meminfo(&text, "MemAvailable")),
            container_available: container_memory().map(|c| c.limit.saturating_sub(c.used)),
            open_files: getrlimit(Resource::Nofile).current,
            locked_memory: getrlimit(Resource::Memlock).current,
            posix_shm_free: statvfs("/dev/shm").ok().map(|fs| fs.f_bavail * fs.f_frsize),
            memfd_error: try_memfd().err().map(|error| error.to_string()),
            socket_error: try_abstract_socket().err().map(|error| error.to_string()),
            clock_source: memory::read(
                "/sys/devices/system/clocksource/clocksource0/current_clocksource",
            ),
            meeting: meeting(config.map_or("env", |config| &config.world.bootstrap)),
            secret: match Secret::from_env(&env) {
                Ok(secret) if secret.is_none() => SecretFact::None,
                Ok(_) => SecretFact::Set,
                Err(error) => SecretFact::Unusable(error.to_string()),
            },
        }
    }
}

/// Major and minor number of a release such as `6.8.0-31-generic`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Processors' worth of time: `200000 100000` is 2; `max 100000` is no limit.
fn quota(text: &str) -> Option<f64> {
    let (time, period) = text.split_once(' ')?;
    let (time, period): (f64, f64) = (time.parse().ok()?, period.trim().parse().ok()?);
    (period > 0.0).then(|| time / period)
}

fn try_memfd() -> std::io::Result<()> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("tokenyard-doctor", flags)?;
    ftruncate(&file, 4096)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(())
}

fn try_abstract_socket() -> std::io::Result<()> {
    let name = format!("tokenyard-doctor-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(name)?;
    let listener = UnixListener::bind_addr(&address)?;
    let _caller = UnixStream::connect_addr(&address)?;
    listener.accept().map(drop)
}

fn meeting(spec: &str) -> Meeting {
    let rendezvous = if spec == "env" {
        match Identity::resolve("env", &env) {
            Ok(identity) => Ok(identity.rendezvous),
            // Nothing is set at all, unlike variables that contradict each other.
            Err(_) if !launcher_variables() => return Meeting::NoLauncher,
            Err(error) => Err(error),
        }
    } else {
        Rendezvous::parse(spec)
    };
    match rendezvous {
        Err(error) => Meeting::Wrong(error.to_string()),
        Ok(Rendezvous::Tcp { host, port }) => tcp(&host, port),
        Ok(Rendezvous::File { path }) => {
            let folder = path.parent().unwrap_or(&path);
            let folder_error = match std::fs::metadata(folder) {
                Ok(meta) if meta.is_dir() => None,
                Ok(_) => Some("it is not a folder".to_owned()),
                Err(error) => Some(error.to_string()),
            };
            Meeting::File { path: path.display().to_string(), folder_error }
        }
        Ok(Rendezvous::Exchange(_)) => Meeting::NoLauncher,
    }
}

/// Whether any launcher has left a trace.
fn launcher_variables() -> bool {
    let names =
        ["TOKENYARD_BOOTSTRAP", "RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"];
    names.into_iter().any(|name| env(name).is_some_and(|value| !value.is_empty()))
}

fn tcp(host: &str, port: u16) -> Meeting {
    let address = format!("{host}:{port}");
    let found = match (host, port).to_socket_addrs() {
        Ok(found) => found.collect::<Vec<_>>(),
        Err(error) => return Meeting::Wrong(format!("{address} is not known here: {error}")),
    };
    let loopback = !found.is_empty() && found.iter().all(|a| a.ip().is_loopback());
    let port = match TcpListener::bind(&*found) {
        Ok(_) => Port::Free,
        Err(error) if error.kind() == std::io::ErrorKind::AddrNotAvailable => Port::Elsewhere,
        Err(error) => Port::Refused(error.to_string()),
    };
    Meeting::Tcp { address, loopback, port }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_and_quotas_of_the_kernel_are_read() {
        assert_eq!(version("6.8.0-31-generic"), Some((6, 8)));
        assert_eq!(version("5.10-rc1"), Some((5, 10)));
        assert_eq!(version("unknown"), None);
        assert_eq!(quota("150000 100000"), Some(1.5));
        assert_eq!(quota("max 100000"), None);
        assert_eq!(quota(""), None);
    }

    #[test]
    fn a_port_in_use_and_a_free_one_are_told_apart() {
        let held = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = held.local_addr().unwrap().port();
        let Meeting::Tcp { loopback, port: found, .. } = tcp("127.0.0.1", port) else { panic!() };
        assert!(loopback);
        assert!(matches!(found, Port::Refused(_)), "{found:?}");
        // An address of the documentation range belongs to nobody here.
        let Meeting::Tcp { loopback, port: found, .. } = tcp("192.0.2.1", port) else { panic!() };
        assert!(!loopback);
        assert_eq!(found, Port::Elsewhere);
    }

    #[test]
    fn what_the_cpu_backend_rests_on_can_be_tried() {
        assert_eq!(try_memfd().map_err(|e| e.to_string()), Ok(()));
        assert_eq!(try_abstract_socket().map_err(|e| e.to_string()), Ok(()));
    }

    #[test]
    fn a_rendezvous_that_cannot_be_is_said() {
        assert!(matches!(meeting("tcp://nowhere"), Meeting::Wrong(_)));
        let Meeting::File { folder_error, .. } = meeting("file:///no/such/folder/f") else {
            panic!()
        };
        assert!(folder_error.is_some());
    }
}
