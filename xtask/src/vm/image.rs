//! The kernel and the initramfs of the machine, built once from Debian's packages and stored.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use super::modules::{WANTED, load_order};
use super::scratch::Scratch;
use crate::exec::{self, HangLimits, Line, Output};

const META_PACKAGE: &str = "linux-image-amd64";
const BUSYBOX: &str = "/bin/busybox";
const INIT: &str = include_str!("init.sh");
const NETWORK: &str = include_str!("network.sh");

/// All that the image is made from, the package and busybox apart.
const RECIPE: [&str; 4] = [INIT, NETWORK, include_str!("modules.rs"), include_str!("image.rs")];

/// When one command counts as hanging, downloads included.
const LIMITS: HangLimits =
    HangLimits { idle: Duration::from_secs(300), processor: Duration::from_secs(1800) };

/// Files to boot.
pub(super) struct Image {
    pub(super) kernel: PathBuf,
    pub(super) initramfs: PathBuf,
}

/// A kernel of the distribution.
#[derive(Debug, PartialEq, Eq)]
struct Package {
    name: String,
    version: String,
}

/// The image of today's kernel package. It is built if the folder `cache` does not have it.
pub(super) fn ready(cache: &Path) -> Result<Image> {
    let busybox = static_busybox()?;
    let mut package = known_package().or_else(|_| renew_lists().and_then(|()| known_package()))?;
    if !folder(cache, &package, &busybox).is_dir() {
        fs::create_dir_all(cache).with_context(|| format!("make {}", cache.display()))?;
        let scratch = Scratch::new(cache)?;
        let deb = scratch.path().join("deb");
        fs::create_dir(&deb).context("make a folder for the kernel package")?;
        if download(&package, &deb).is_err() {
            // An archive keeps the newest version only, and the lists may be older.
            renew_lists()?;
            package = known_package()?;
            download(&package, &deb)?;
        }
        build(scratch.path(), &busybox)?;
        keep(scratch.path(), &folder(cache, &package, &busybox))?;
    }
    let folder = folder(cache, &package, &busybox);
    Ok(Image { kernel: folder.join("vmlinuz"), initramfs: folder.join("initramfs") })
}

fn folder(cache: &Path, package: &Package, busybox: &[u8]) -> PathBuf {
    let mut hash = Sha256::new();
    for part in RECIPE.iter().map(|text| text.as_bytes()).chain([busybox]) {
        hash.update(part.len().to_le_bytes());
        hash.update(part);
    }
    let hash: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    cache.join(format!("{}-{hash}", package.version))
}

/// The initramfs holds no library.
fn static_busybox() -> Result<Vec<u8>> {
    let dynamic = Command::new("ldd").arg(BUSYBOX).output().context("run ldd")?.status.success();
    ensure!(
        !dynamic,
        "check {BUSYBOX}: found one that is linked dynamically, expected that of \
         busybox-static: apt-get install busybox-static"
    );
    fs::read(BUSYBOX).with_context(|| format!("read {BUSYBOX}: apt-get install busybox-static"))
}

fn known_package() -> Result<Package> {
    let out = Command::new("apt-cache")
        .args(["show", "--no-all-versions", META_PACKAGE])
        .output()
        .context("run apt-cache: the kernel comes from Debian's archive")?;
    kernel_package(&String::from_utf8_lossy(&out.stdout)).with_context(|| {
        format!("find the package {META_PACKAGE}: apt knows none; run apt-get update")
    })
}

/// Reads the kernel that the meta package depends on from what `apt-cache show` prints.
fn kernel_package(text: &str) -> Option<Package> {
    let depends = text.lines().find_map(|line| line.strip_prefix("Depends: "))?;
    let kernel = depends.split(", ").find(|part| part.starts_with("linux-image-"))?;
    let (name, version) = kernel.split_once(" (= ")?;
    let (name, version) = (name.to_string(), version.strip_suffix(')')?.to_string());
    Some(Package { name, version })
}

fn renew_lists() -> Result<()> {
    run(Path::new("/"), "apt-get -q update")
}

fn download(package: &Package, folder: &Path) -> Result<()> {
    // apt has a user of its own, who cannot write here.
    let Package { name, version } = package;
    run(folder, &format!("apt-get -q -o APT::Sandbox::User=root download {name}={version}"))
}

/// Makes `image/` from the package in `deb/`, both in the folder `work`.
fn build(work: &Path, busybox: &[u8]) -> Result<()> {
    let (unpacked, root, image) = (work.join("kernel"), work.join("root"), work.join("image"));
    run(work, "dpkg-deb -x deb/*.deb kernel")?;
    let modules = only_entry(&unpacked.join("lib/modules"))?;
    let version = modules.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    run(work, &format!("PATH=$PATH:/usr/sbin:/sbin depmod -b kernel {version}"))?;
    let read =
        |name: &str| fs::read_to_string(modules.join(name)).with_context(|| format!("read {name}"));
    let order = load_order(&WANTED, &read("modules.dep")?, &read("modules.builtin")?)?;
    for folder in ["bin", "modules", "proc", "sys", "dev", "host", "layer", "root"] {
        fs::create_dir_all(root.join(folder)).context("make the initramfs")?;
    }
    write_program(&root.join("bin/busybox"), busybox)?;
    write_program(&root.join("init"), INIT.as_bytes())?;
    fs::write(root.join("network.sh"), NETWORK).context("make the initramfs")?;
    let mut names = String::new();
    for file in &order {
        let name = file.rsplit('/').next().unwrap_or(file);
        ensure!(
            name.ends_with(".ko"),
            "read the kernel module {name}: found a compressed one, which busybox cannot load"
        );
        fs::copy(modules.join(file), root.join("modules").join(name))
            .with_context(|| format!("copy the kernel module {file}"))?;
        names += &format!("{name}\n");
    }
    fs::write(root.join("modules/order"), names).context("make the initramfs")?;
    fs::create_dir(&image).context("make the image")?;
    run(&root, "find . | cpio --quiet -o -H newc > ../image/initramfs")?;
    let kernel = unpacked.join("boot").join(format!("vmlinuz-{version}"));
    fs::rename(&kernel, image.join("vmlinuz")).context("find the kernel in its package")
}

/// Moves the image to its place, unless another process was faster.
fn keep(work: &Path, folder: &Path) -> Result<()> {
    let moved = fs::rename(work.join("image"), folder);
    if folder.is_dir() {
        Ok(())
    } else {
        moved.with_context(|| format!("make {}", folder.display()))
    }
}

fn write_program(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o755)))
        .with_context(|| format!("write {}", path.display()))
}

fn only_entry(folder: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))?;
    let paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    match <[PathBuf; 1]>::try_from(paths) {
        Ok([path]) => Ok(path),
        Err(paths) => bail!("read {}: found {} entries, expected 1", folder.display(), paths.len()),
    }
}

fn run(folder: &Path, script: &str) -> Result<()> {
    let words = ["sh", "-e", "-c", script].map(String::from).to_vec();
    match exec::run(&Line { words, env: &[], folder }, LIMITS, &mut Output::Shown).failure {
        Some(failure) => bail!("build the machine's image: {failure}"),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_the_one_that_the_meta_package_depends_on() {
        let text = "Package: linux-image-amd64\nVersion: 6.1.9-2\n\
                    Depends: initramfs-tools, linux-image-6.1.0-56-amd64 (= 6.1.9-2)\n";
        let expected =
            Package { name: "linux-image-6.1.0-56-amd64".into(), version: "6.1.9-2".into() };
        assert_eq!(kernel_package(text), Some(expected));
        assert_eq!(kernel_package(""), None);
        assert_eq!(kernel_package("Depends: linux-image-amd64\n"), None);
    }

    #[test]
    fn another_version_or_another_busybox_is_another_image() {
        let package = |version: &str| Package { name: "linux".into(), version: version.into() };
        let name = |version, busybox| folder(Path::new("/c"), &package(version), busybox);
        assert_eq!(name("1", b"b"), name("1", b"b"));
        assert_ne!(name("1", b"b"), name("2", b"b"));
        assert_ne!(name("1", b"b"), name("1", b"c"));
        assert!(name("1", b"b").to_str().unwrap().starts_with("/c/1-"));
    }

    #[test]
    fn the_slower_of_two_builders_takes_the_image_of_the_faster() {
        let cache = tempfile::tempdir().unwrap();
        for work in ["a", "b"] {
            let image = cache.path().join(work).join("image");
            fs::create_dir_all(&image).unwrap();
            fs::write(image.join("vmlinuz"), work).unwrap();
            keep(&cache.path().join(work), &cache.path().join("kept")).unwrap();
        }
        assert_eq!(fs::read(cache.path().join("kept/vmlinuz")).unwrap(), b"a");
        assert!(keep(&cache.path().join("none"), &cache.path().join("other")).is_err());
    }
}
