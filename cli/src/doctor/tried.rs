//! Facts that only a process on the node can find out. Where something can be tried without leaving a
//! trace, it is tried.

use std::io;
use std::net::{self, TcpListener, ToSocketAddrs};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, statvfs};
use tokenyard_core::bootstrap::{Identity, Rendezvous, Secret};
use tokenyard_core::config::Config;
use tokenyard_doctor::{Meeting, PortState, Secret as SecretFact, Tried};

use crate::memory::{self, container_memory};

/// How long the rendezvous' name may take to resolve: the whole answer is to come within a second.
const NAMES: Duration = Duration::from_millis(500);

fn env(name: &str) -> Option<String> {
    tokenyard_core::bootstrap::environment(name)
}

/// Looks, and tries.
pub(crate) fn gather(config: Option<&Config>) -> Tried {
    Tried {
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        processor_quota: memory::read("/sys/fs/cgroup/cpu.max").and_then(|t| quota(&t)),
        container_available: container_memory().map(|c| c.limit.saturating_sub(c.used)),
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
    let names = [
        "TOKENYARD_BOOTSTRAP",
        "RANK",
        "WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
        "PMIX_RANK",
        "SLURM_PROCID",
    ];
    names.into_iter().any(|name| env(name).is_some_and(|value| !value.is_empty()))
}

/// The answer of `ask` within the deadline; nothing where it takes longer, or panics.
pub(super) fn within<T: Send + 'static>(
    deadline: Duration,
    ask: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (send, receive) = mpsc::channel();
    // Not joined: neither a resolver nor a driver takes a deadline.
    thread::spawn(move || {
        let _ = send.send(ask());
    });
    receive.recv_timeout(deadline).ok()
}

fn tcp(host: &str, port: u16) -> Meeting {
    let name = host.to_owned();
    let found = within(NAMES, move || Ok((name.as_str(), port).to_socket_addrs()?.collect()));
    at(format!("{host}:{port}"), found)
}

fn at(address: String, found: Option<io::Result<Vec<net::SocketAddr>>>) -> Meeting {
    let found = match found {
        Some(Ok(found)) => found,
        Some(Err(error)) => return Meeting::Wrong(format!("{address} is not known here: {error}")),
        None => return Meeting::Unresolved { address, milliseconds: NAMES.as_millis() as u64 },
    };
    let loopback = !found.is_empty() && found.iter().all(|a| a.ip().is_loopback());
    let port = match TcpListener::bind(&*found) {
        Ok(_) => PortState::Free,
        Err(error) if error.kind() == std::io::ErrorKind::AddrNotAvailable => PortState::Elsewhere,
        Err(error) => PortState::Refused(error.to_string()),
    };
    Meeting::Tcp { address, loopback, port }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_of_the_kernel_are_read() {
        assert_eq!(quota("150000 100000"), Some(1.5));
        assert_eq!(quota("max 100000"), None);
        assert_eq!(quota(""), None);
    }

    #[test]
    fn a_port_in_use_and_a_free_one_are_distinguished() {
        let held = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = held.local_addr().unwrap().port();
        let Meeting::Tcp { loopback, port: found, .. } = tcp("127.0.0.1", port) else { panic!() };
        assert!(loopback);
        assert!(matches!(found, PortState::Refused(_)), "{found:?}");
        // An address of the documentation range belongs to no host here.
        let Meeting::Tcp { loopback, port: found, .. } = tcp("192.0.2.1", port) else { panic!() };
        assert!(!loopback);
        assert_eq!(found, PortState::Elsewhere);
    }

    #[test]
    fn a_name_server_that_does_not_answer_is_not_waited_for() {
        let (release, held) = mpsc::channel::<()>();
        let found = within(Duration::from_millis(20), move || {
            let _ = held.recv();
            Ok(Vec::new())
        });
        assert!(found.is_none());
        let meeting = at("node0:1234".to_owned(), found);
        assert!(
            matches!(&meeting, Meeting::Unresolved { address, .. } if address == "node0:1234"),
            "{meeting:?}"
        );
        drop(release);
        let refused = within(Duration::from_secs(20), || Err(io::ErrorKind::NotFound.into()));
        assert!(matches!(at("node0:1234".to_owned(), refused), Meeting::Wrong(_)));
    }

    #[test]
    fn what_the_cpu_backend_rests_on_can_be_tried() {
        assert_eq!(try_memfd().map_err(|e| e.to_string()), Ok(()));
        assert_eq!(try_abstract_socket().map_err(|e| e.to_string()), Ok(()));
    }

    #[test]
    fn a_rendezvous_that_cannot_be_is_reported() {
        assert!(matches!(meeting("tcp://nowhere"), Meeting::Wrong(_)));
        let Meeting::File { folder_error, .. } = meeting("file:///no/such/folder/f") else {
            panic!()
        };
        assert!(folder_error.is_some());
    }
}
