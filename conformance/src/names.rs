//! Names that outlive a process: files in shared memory, sockets and pipes in folders for temporary files. Names
//! that a job leaves behind are those which are new, belong to this user, and no process uses.

use std::collections::BTreeSet;
use std::fs::FileType;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// POSIX shared memory and semaphores. Every name counts.
const SHARED_MEMORY: &str = "/dev/shm";
/// Folders where other programs of this user leave files: there sockets and pipes count alone.
const TEMPORARY: [&str; 2] = ["/tmp", "/var/tmp"];

/// The names of this user, now.
pub(crate) fn of_this_user() -> BTreeSet<PathBuf> {
    let socket = |kind: FileType| kind.is_socket() || kind.is_fifo();
    let mut names = in_folder(Path::new(SHARED_MEMORY), |_| true);
    names.extend(TEMPORARY.iter().flat_map(|folder| in_folder(Path::new(folder), socket)));
    names
}

fn in_folder(folder: &Path, counts: impl Fn(FileType) -> bool) -> BTreeSet<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return BTreeSet::new() };
    let user = rustix::process::geteuid().as_raw();
    let own = entries.flatten().filter(|entry| {
        // The metadata are those of the name itself, not of a link's target.
        entry.metadata().is_ok_and(|meta| meta.uid() == user && counts(meta.file_type()))
    });
    own.map(|entry| entry.path()).collect()
}

/// The names that are new since `before` and that no process uses, each with words that say so. Jobs of this
/// machine create and remove names, so this polls until the new names are gone. `limit` may grow while it waits.
pub(crate) fn left(before: &BTreeSet<PathBuf>, limit: impl Fn() -> Duration) -> Vec<String> {
    let start = Instant::now();
    let mut left: BTreeSet<PathBuf> = of_this_user().difference(before).cloned().collect();
    loop {
        let used = if left.is_empty() { BTreeSet::new() } else { used_names() };
        left.retain(|name| !used.contains(name));
        if left.is_empty() || start.elapsed() >= limit() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
        left = left.intersection(&of_this_user()).cloned().collect();
    }
    left.into_iter().map(|name| format!("{} is left behind", name.display())).collect()
}

/// The names that a process maps, has open or listens on.
fn used_names() -> BTreeSet<PathBuf> {
    let mut used = BTreeSet::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let text = std::fs::read_to_string(process.path().join("maps")).unwrap_or_default();
        used.extend(text.lines().filter_map(path_in));
        let open = std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        used.extend(open.filter_map(|fd| std::fs::read_link(fd.path()).ok()));
    }
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    used.extend(sockets.lines().filter_map(path_in));
    used
}

/// The path at the end of a line of the kernel.
fn path_in(line: &str) -> Option<PathBuf> {
    Some(Path::new("/").join(line.split_once(" /")?.1))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A name in shared memory, without a word of this project in it.
    fn own_name(word: &str) -> PathBuf {
        Path::new(SHARED_MEMORY).join(format!("left-{word}-{}", std::process::id()))
    }

    fn is_left(left: &[String], name: &Path) -> bool {
        // Other tests of this machine may leave names for some time as well.
        left.iter().any(|text| text.contains(&*name.to_string_lossy()))
    }

    #[test]
    fn a_limit_that_grows_while_names_are_left_is_honoured() {
        let before = of_this_user();
        let name = own_name("limit");
        std::fs::write(&name, "").unwrap();
        assert!(is_left(&left(&before, || Duration::ZERO), &name));
        let looks = Cell::new(0);
        let after = left(&before, || {
            looks.set(looks.get() + 1);
            if looks.get() == 3 {
                std::fs::remove_file(&name).unwrap();
            }
            if looks.get() < 5 { Duration::from_secs(3600) } else { Duration::ZERO }
        });
        assert!(!is_left(&after, &name), "it did not wait for the name that went");
    }

    #[test]
    fn a_name_that_a_process_has_open_is_not_left() {
        let before = of_this_user();
        let name = own_name("used");
        let file = std::fs::File::create(&name).unwrap();
        let used = left(&before, || Duration::ZERO);
        drop(file);
        let unused = left(&before, || Duration::ZERO);
        std::fs::remove_file(&name).unwrap();
        assert!(!is_left(&used, &name) && is_left(&unused, &name), "{used:?} {unused:?}");
    }

    #[test]
    fn a_socket_without_a_listener_is_left_and_a_file_beside_it_is_none_of_ours() {
        let before = of_this_user();
        let folder = Path::new(TEMPORARY[0]);
        let name = |end: &str| folder.join(format!("left-{}-{end}", std::process::id()));
        let listener = std::os::unix::net::UnixListener::bind(name("socket")).unwrap();
        std::fs::write(name("file"), "").unwrap();
        let used = left(&before, || Duration::ZERO);
        drop(listener);
        let unused = left(&before, || Duration::ZERO);
        std::fs::remove_file(name("socket")).unwrap();
        std::fs::remove_file(name("file")).unwrap();
        assert!(!is_left(&used, &name("socket")) && is_left(&unused, &name("socket")));
        assert!(!is_left(&unused, &name("file")));
    }
}
