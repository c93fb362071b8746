//! The namespaces that make a host, as file descriptors.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;

use anyhow::{Context, Result, anyhow};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, unmount,
};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

const SYS: &str = "/sys";

/// A network, a host name and a tree of mounts. They live as long as this value, or a process in
/// them.
#[derive(Debug)]
pub(crate) struct Spaces {
    network: OwnedFd,
    name: OwnedFd,
    mounts: OwnedFd,
}

/// The inputs from which a host is made.
pub(super) struct Sharing<'a> {
    /// Its host name.
    pub(super) name: &'a str,
    /// The contents of its `/etc/hosts`.
    pub(super) names: &'a str,
}

impl Spaces {
    pub(super) fn new(sharing: &Sharing<'_>) -> Result<Self> {
        // Only the thread that makes the namespaces moves into them, and it ends here.
        on_a_thread(|| Self::make(sharing)).with_context(|| format!("make host {}", sharing.name))
    }

    fn make(sharing: &Sharing<'_>) -> Result<Self> {
        leave(UnshareFlags::NEWNET | UnshareFlags::NEWUTS | UnshareFlags::NEWNS)
            .map_err(explain_rights)?;
        rustix::system::sethostname(sharing.name.as_bytes()).context("set its host name")?;
        // Otherwise the mounts below would appear on the machine.
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
            .context("make its mounts private")?;
        mount_names(sharing.names).context("mount its /etc/hosts")?;
        // The machine's /sys shows the machine's interfaces.
        mount("sysfs", SYS, "sysfs", MountFlags::empty(), None).context("mount its /sys")?;
        let open = |kind: &str| {
            let path = format!("/proc/thread-self/ns/{kind}");
            File::open(&path).map(OwnedFd::from).with_context(|| format!("open {path}"))
        };
        Ok(Self { network: open("net")?, name: open("uts")?, mounts: open("mnt")? })
    }

    /// Moves the calling thread into the host for good. Processes that it starts from then on run
    /// there.
    pub(crate) fn enter(&self) -> Result<()> {
        // A thread that shares its working directory with others may not move between mounts.
        leave(UnshareFlags::FS).context("enter host")?;
        for (fd, kind) in [
            (&self.network, LinkNameSpaceType::Network),
            (&self.name, LinkNameSpaceType::HostNameAndNISDomainName),
            (&self.mounts, LinkNameSpaceType::Mount),
        ] {
            move_into_link_name_space(fd.as_fd(), Some(kind))
                .with_context(|| format!("enter host: the kernel refused its {kind:?}"))?;
        }
        Ok(())
    }

    /// A path to the network that `ip` accepts, valid while this value lives.
    pub(super) fn network_path(&self) -> String {
        use std::os::fd::AsRawFd;
        format!("/proc/{}/fd/{}", std::process::id(), self.network.as_raw_fd())
    }

    /// Whether the main thread of a process runs on this host. False for a process that has ended.
    pub(super) fn holds(&self, pid: u32) -> Result<bool> {
        let own = rustix::fs::fstat(&self.network).context("look at a host's network")?;
        let other = fs::metadata(format!("/proc/{pid}/ns/net"));
        Ok(other.is_ok_and(|other| (other.dev(), other.ino()) == (own.st_dev, own.st_ino)))
    }
}

/// Mounts a file over `/etc/hosts` that has no name anywhere else, so that no file remains.
fn mount_names(names: &str) -> Result<()> {
    // Any folder serves as a temporary mount point.
    mount("tmpfs", SYS, "tmpfs", MountFlags::empty(), None)?;
    let file = Path::new(SYS).join("hosts");
    fs::write(&file, names)?;
    mount_bind(&file, "/etc/hosts")?;
    // The mount of the file itself stays.
    unmount(SYS, UnmountFlags::DETACH)?;
    Ok(())
}

/// Runs `work` on a thread of its own in `spaces`.
pub(super) fn inside<T: Send>(
    spaces: &Spaces,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    on_a_thread(|| {
        spaces.enter()?;
        work()
    })
}

fn on_a_thread<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("tokenyard-host".into());
        let thread = thread.spawn_scoped(scope, work).context("start a thread")?;
        thread.join().unwrap_or_else(|_| Err(anyhow!("a thread of the hosts panicked")))
    })
}

/// Gives the calling thread namespaces of its own.
fn leave(flags: UnshareFlags) -> Result<(), Errno> {
    // SAFETY: the only unsafe flag is FILES, with which other threads could close this thread's
    // descriptors unnoticed; no caller passes it.
    unsafe { rustix::thread::unshare_unsafe(flags) }
}

fn explain_rights(errno: Errno) -> anyhow::Error {
    anyhow!(
        "the kernel refused new namespaces ({errno}), expected the rights CAP_SYS_ADMIN and \
         CAP_NET_ADMIN. Fix: run as root, or in a user namespace: unshare --map-root-user COMMAND; \
         in a container, add both rights"
    )
}
