//! The folder in which libibverbs finds the device, and the world that the device belongs to.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{env, fs, io};

/// Names the folder of the world: an empty folder, the same for all processes that reach each other.
const WORLD: &str = "TOKENYARD_HCA_WORLD";
/// The variable from which libibverbs reads its folder.
const SYSFS: &str = "SYSFS_PATH";
/// The device's name. It shows in every log that this is a stand-in.
pub(crate) const NAME: &str = "standin0";

/// The folder of the world; none where the program is to run as if this library were not there.
pub(crate) fn world() -> Option<&'static Path> {
    static WORLD_PATH: OnceLock<Option<PathBuf>> = OnceLock::new();
    WORLD_PATH.get_or_init(|| env::var_os(WORLD).map(PathBuf::from)).as_deref()
}

/// This process's folder.
fn folder(world: &Path) -> PathBuf {
    world.join(format!("sysfs-{}", std::process::id()))
}

/// Writes the folder and sets its variable for libibverbs.
pub(crate) fn publish() {
    let Some(world) = world() else { return };
    let folder = folder(world);
    match write_device(&folder) {
        // SAFETY: the loader runs this before the program's first thread.
        Ok(()) => unsafe { env::set_var(SYSFS, &folder) },
        Err(error) => {
            eprintln!("stand-in of mlx5: cannot write {}: {error}; see {WORLD}", folder.display());
        }
    }
}

fn write_device(folder: &Path) -> io::Result<()> {
    let verbs = folder.join("class/infiniband_verbs");
    let device = folder.join("class/infiniband").join(NAME);
    let uverbs = verbs.join("uverbs0");
    for dir in [uverbs.join("device"), device.join("device"), device.join("ports/1/gids")] {
        fs::create_dir_all(dir)?;
    }
    fs::create_dir_all(device.join("ports/1/gid_attrs/types"))?;
    // A ConnectX-7.
    let modalias = "pci:v000015B3d00001021sv000015B3sd00000001bc02sc07i00\n";
    for (path, text) in [
        (verbs.join("abi_version"), "6\n"),
        (uverbs.join("abi_version"), "1\n"),
        // The numbers of /dev/null.
        (uverbs.join("dev"), "1:3\n"),
        (uverbs.join("ibdev"), "standin0\n"),
        (uverbs.join("device/modalias"), modalias),
        (device.join("device/modalias"), modalias),
        (device.join("node_type"), "1: CA\n"),
        (device.join("node_guid"), "5374:616e:6449:6e00\n"),
        (device.join("fw_ver"), "0.0.0\n"),
    ] {
        fs::write(path, text)?;
    }
    Ok(())
}

/// Writes the port's address, once it is known.
pub(crate) fn publish_gid(lid: u16) -> io::Result<()> {
    let Some(world) = world() else { return Ok(()) };
    let port = folder(world).join("class/infiniband").join(NAME).join("ports/1");
    let gid = format!("fe80:0000:0000:0000:5374:616e:6449:{lid:04x}\n");
    fs::write(port.join("gids/0"), gid)?;
    fs::write(port.join("gid_attrs/types/0"), "IB/RoCE v1\n")
}
