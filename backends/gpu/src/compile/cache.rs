//! Compiled kernels on disk: one rank of a machine compiles, the other ranks wait for its file.

use std::fs::File;
use std::io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use sha2::{Digest as _, Sha256};
use tokenyard_core::{Error, ErrorKind, Result, files};

use crate::platform::Names;

/// A compilation takes seconds. A process that holds the lock for longer than this is stuck. If the
/// holder dies, the lock is free at once.
const LONGEST_WAIT: Duration = Duration::from_secs(600);
const LOOK: Duration = Duration::from_millis(20);
/// Bytes of the hash in front of an image.
const HASH: usize = 32;
/// The largest file that is accepted as an image, in bytes; kernels of one program are less than 10
/// MiB.
const MAX_IMAGE: u64 = 256 << 20;

/// A folder of compiled kernels. A file is a hash and the image; a torn file is not used.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// Opens `configured`, else a folder in the user's cache folder. The device runs the contents,
    /// so the folder must be one that only this user, or root, can write.
    ///
    /// # Errors
    /// The folder does not exist and cannot be made; or other users can write to it.
    pub(crate) fn open(names: &Names, configured: Option<&Path>) -> Result<Self> {
        let of = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let folder = configured
            .map(Path::to_owned)
            .or_else(|| of("XDG_CACHE_HOME").map(|p| p.join("tokenyard").join(names.kernels)))
            .or_else(|| of("HOME").map(|p| p.join(".cache/tokenyard").join(names.kernels)))
            .ok_or_else(|| {
                let message =
                    "found neither XDG_CACHE_HOME nor HOME; expected a folder for kernels";
                Error::new(ErrorKind::Unavailable, "open cache", message)
                    .with_fix(format!("set cache in {} to a folder", names.table()))
            })?;
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.map_err(|e| failed("make folder", &folder, e))?;
        let found = std::fs::metadata(&folder).map_err(|e| failed("look at folder", &folder, e))?;
        let user = rustix::process::geteuid().as_raw();
        check_owner(found.uid(), found.mode(), user)
            .map_err(|e| e.with_context("path", folder.display()))?;
        Ok(Self { folder })
    }

    /// Where the files are.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The image called `key`; `compile` makes it if no process has made it yet.
    pub(crate) fn get(
        &self,
        key: &str,
        compile: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<Vec<u8>> {
        let path = self.folder.join(format!("{key}.cubin"));
        if let Some(image) = read(&path) {
            return Ok(image);
        }
        let lock = self.lock(key)?;
        // The previous holder of the lock may have made it.
        if let Some(image) = read(&path) {
            return Ok(image);
        }
        let image = compile()?;
        // The kernels are good, even if they cannot be stored.
        if lock.is_some()
            && let Err(error) = self.write(key, &path, &image)
        {
            tracing::warn!("kernels are compiled again at the next start: {error}");
        }
        Ok(image)
    }

    /// Takes the lock. It is released when the file is closed, also by the death of its process.
    /// None where this user may not write.
    fn lock(&self, key: &str) -> Result<Option<File>> {
        let path = self.folder.join(format!("{key}.lock"));
        let file = match File::options().create(true).append(true).mode(0o600).open(&path) {
            Ok(file) => file,
            Err(e) if matches!(e.kind(), PermissionDenied | ReadOnlyFilesystem) => {
                let error = failed("open lock", &path, e);
                tracing::warn!("kernels are compiled at every start: {error}");
                return Ok(None);
            }
            Err(e) => return Err(failed("open lock", &path, e)),
        };
        let start = Instant::now();
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(file)),
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
                Err(e) => return Err(failed("take lock", &path, e.into())),
            }
            if start.elapsed() > LONGEST_WAIT {
                return Err(Error::new(
                    ErrorKind::Deadline,
                    "take lock",
                    format!("another process has compiled for {} s", LONGEST_WAIT.as_secs()),
                )
                .with_context("file", path.display())
                .with_fix("end the process that holds the file (fuser names it)"));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Writes under another name first, so that no process reads half a file. Only the holder of
    /// the lock uses that name; it overwrites the leftover of a killed process.
    fn write(&self, key: &str, path: &Path, image: &[u8]) -> Result<()> {
        let own = self.folder.join(format!("{key}.new"));
        let open = File::options().create(true).truncate(true).write(true).mode(0o644).open(&own);
        let mut file = open.map_err(|e| failed("write kernels", &own, e))?;
        file.write_all(&Sha256::digest(image))
            .and_then(|()| file.write_all(image))
            .and_then(|()| file.sync_all())
            .and_then(|()| std::fs::rename(&own, path))
            .map_err(|e| failed("write kernels", path, e))
    }
}

/// Checks that only `user` and root can write to a folder.
fn check_owner(owner: u32, mode: u32, user: u32) -> Result<()> {
    let refuse = |found: String, fix: &'static str| {
        let message =
            format!("found a folder {found}; expected one that no other user can write to");
        Err(Error::new(ErrorKind::Unavailable, "open cache", message).with_fix(fix))
    };
    if owner != user && owner != 0 {
        return refuse(
            format!("of user {owner}"),
            "set `cache` of the kernel set to one of your own",
        );
    }
    if mode & 0o022 != 0 {
        return refuse(format!("with mode {:o}", mode & 0o7777), "chmod go-w it");
    }
    Ok(())
}

/// The image in a file; none if the file is missing or torn.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = files::read(path, MAX_IMAGE).ok()?;
    if bytes.len() < HASH {
        return None;
    }
    let image = bytes.split_off(HASH);
    (Sha256::digest(&image).as_slice() == bytes).then_some(image)
}

fn failed(operation: &'static str, path: &Path, error: std::io::Error) -> Error {
    Error::system(operation, "the kernel cache cannot be used", error)
        .with_context("path", path.display())
        .with_fix("make the folder writable, or set `cache` of the kernel set to another")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::platform::tests::NAMES;

    fn cache() -> (tempfile::TempDir, Cache) {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(&NAMES, Some(&folder.path().join("deep/er"))).unwrap();
        (folder, cache)
    }

    #[test]
    fn many_ranks_compile_once_and_read_the_same() {
        let (_folder, cache) = cache();
        let compiled = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let image = cache.get("key", || {
                        compiled.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(50));
                        Ok(vec![7; 1000])
                    });
                    assert_eq!(image.unwrap(), vec![7; 1000]);
                });
            }
        });
        assert_eq!(compiled.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_torn_file_is_compiled_again() {
        let (_folder, cache) = cache();
        cache.get("key", || Ok(vec![1; 100])).unwrap();
        let path = cache.folder.join("key.cubin");
        for damage in [Vec::new(), vec![0; 40], std::fs::read(&path).unwrap()[..90].to_vec()] {
            std::fs::write(&path, damage).unwrap();
            assert_eq!(cache.get("key", || Ok(vec![2; 100])).unwrap(), vec![2; 100]);
        }
        assert_eq!(cache.get("key", || panic!("it is there")).unwrap(), vec![2; 100]);
    }

    #[test]
    fn what_a_killed_process_left_is_overwritten() {
        let (_folder, cache) = cache();
        let left = cache.folder.join("key.new");
        std::fs::write(&left, [9; 5000]).unwrap();
        cache.get("key", || Ok(vec![4; 10])).unwrap();
        assert!(!left.exists());
        assert_eq!(cache.get("key", || panic!("it is there")).unwrap(), vec![4; 10]);
    }

    #[test]
    fn kernels_that_cannot_be_kept_are_used_all_the_same() {
        let (_folder, cache) = cache();
        // A rename onto a folder that is not empty fails.
        let path = cache.folder.join("key.cubin");
        std::fs::create_dir_all(path.join("full")).unwrap();
        assert_eq!(cache.get("key", || Ok(vec![5])).unwrap(), vec![5]);
    }

    #[test]
    fn folders_that_others_can_write_to_are_refused() {
        assert!(check_owner(1000, 0o40755, 1000).is_ok() && check_owner(0, 0o40755, 7).is_ok());
        let text = check_owner(1001, 0o40700, 1000).unwrap_err().to_string();
        assert!(text.contains("of user 1001"), "{text}");
        for mode in [0o40775, 0o40757, 0o41777] {
            let text = check_owner(1000, mode, 1000).unwrap_err().to_string();
            assert!(text.contains("with mode") && text.contains("chmod"), "{text}");
        }
        let folder = tempfile::tempdir().unwrap();
        let open = || Cache::open(&NAMES, Some(folder.path()));
        assert!(open().is_ok());
        let shared = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(folder.path(), shared).unwrap();
        assert!(open().unwrap_err().to_string().contains("with mode 777"));
    }

    #[test]
    fn a_compiler_that_fails_leaves_nothing_behind() {
        let (_folder, cache) = cache();
        let bad = || Err(Error::new(ErrorKind::System, "compile kernels", "no"));
        assert!(cache.get("key", bad).is_err());
        assert_eq!(cache.get("key", || Ok(vec![3])).unwrap(), vec![3]);
    }
}
