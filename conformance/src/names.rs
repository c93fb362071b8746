//! Names that outlive a process: files in shared memory and huge pages, queues of messages, sockets and pipes in
//! folders for temporary files, and System V's objects. Names that a job leaves behind are those which are new,
//! belong to this user, and no process uses.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::FileType;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// POSIX shared memory and semaphores. Every name counts.
const SHARED_MEMORY: &str = "/dev/shm";
/// File systems whose names all count, wherever they are mounted: POSIX message queues, and huge pages.
const FILE_SYSTEMS: [&str; 2] = [QUEUES, "hugetlbfs"];
const QUEUES: &str = "mqueue";
/// The kernel's lists of System V's shared memory, semaphores and message queues. A name is that of the list, with the
/// object's number.
const SYSTEM_V: [&str; 3] = ["/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg"];

/// The names of this user, now.
pub(crate) fn of_this_user() -> BTreeSet<PathBuf> {
    let user = user();
    let socket = |kind: FileType| kind.is_socket() || kind.is_fifo();
    let mut names = in_folder(Path::new(SHARED_MEMORY), |_| true);
    names.extend(mounts(&FILE_SYSTEMS).iter().flat_map(|folder| in_folder(folder, |_| true)));
    names.extend(temporary(user).iter().flat_map(|folder| in_folder(folder, socket)));
    names.extend(system_v(user).into_iter().map(|object| object.name));
    names
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Folders where other programs of this user leave files: there sockets and pipes count alone.
fn temporary(user: u32) -> Vec<PathBuf> {
    let mut folders = vec!["/tmp".into(), "/var/tmp".into(), format!("/run/user/{user}").into()];
    folders.extend(std::env::var_os("TMPDIR").map(PathBuf::from));
    folders
}

/// The places where file systems of these types are mounted.
fn mounts(types: &[&str]) -> Vec<PathBuf> {
    places(&std::fs::read_to_string("/proc/self/mounts").unwrap_or_default(), types)
}

/// The same, in the kernel's list: device, place, type.
fn places(list: &str, types: &[&str]) -> Vec<PathBuf> {
    let words = list.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let mounted = words.filter(|words| words.get(2).is_some_and(|kind| types.contains(kind)));
    mounted.map(|words| words[1].replace("\\040", " ").into()).collect()
}

/// One of System V's objects.
#[derive(Debug, PartialEq, Eq)]
struct Object {
    name: PathBuf,
    /// Whether a process has it attached. Only shared memory says so.
    used: bool,
}

fn system_v(user: u32) -> Vec<Object> {
    let of_list = |list: &&str| {
        let text = std::fs::read_to_string(list).unwrap_or_default();
        objects(list, &text, user)
    };
    SYSTEM_V.iter().flat_map(of_list).collect()
}

/// The objects of a user in a list, whose first line names its columns; the second column is the object's number.
fn objects(list: &str, text: &str, user: u32) -> Vec<Object> {
    let mut lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let head = lines.next().unwrap_or_default();
    let column = |name: &str| head.iter().position(|head| *head == name);
    let (owner, attached) = (column("uid"), column("nattch"));
    let own = lines.filter(|line| {
        owner.and_then(|at| line.get(at)).and_then(|owner| owner.parse().ok()) == Some(user)
    });
    own.filter_map(|line| {
        let name = Path::new(list).join(line.get(1)?);
        let used = attached.and_then(|at| line.get(at)).is_some_and(|count| *count != "0");
        Some(Object { name, used })
    })
    .collect()
}

fn in_folder(folder: &Path, counts: impl Fn(FileType) -> bool) -> BTreeSet<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return BTreeSet::new() };
    let user = user();
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
    // The kernel names an open queue without the place where queues are mounted.
    let queues = mounts(&[QUEUES]);
    let at_root = used.iter().filter(|path| path.parent() == Some(Path::new("/")));
    let names = at_root.filter_map(|path| path.file_name().map(OsStr::to_owned));
    let names: Vec<OsString> = names.collect();
    used.extend(names.iter().flat_map(|name| queues.iter().map(move |place| place.join(name))));
    used.extend(
        system_v(user()).into_iter().filter(|object| object.used).map(|object| object.name),
    );
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
    fn shared_memory_of_system_v_is_left_once_no_process_has_it_attached() {
        let before = of_this_user();
        // SAFETY: a new segment, which this test alone knows; it is attached, and removed, once.
        let (id, place) = unsafe {
            let id = libc::shmget(libc::IPC_PRIVATE, 4096, 0o600);
            (id, libc::shmat(id, std::ptr::null(), 0))
        };
        assert!(id >= 0 && place as isize != -1, "{}", std::io::Error::last_os_error());
        let used = left(&before, || Duration::ZERO);
        // SAFETY: attached above.
        let detached = unsafe { libc::shmdt(place) };
        let unused = left(&before, || Duration::ZERO);
        // SAFETY: made above.
        let removed = unsafe { libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()) };
        assert_eq!((detached, removed), (0, 0));
        let name = Path::new(SYSTEM_V[0]).join(id.to_string());
        assert!(!is_left(&used, &name) && is_left(&unused, &name), "{used:?} {unused:?}");
    }

    #[test]
    fn semaphores_and_queues_of_system_v_count_by_their_owner() {
        let text = "       key      semid perms      nsems   uid   gid  cuid  cgid      otime      ctime\n\
                    \x20        0          7   600          1  1000  1000  1000  1000          0 1700000000\n\
                    \x20        0          8   600          1     5  1000  1000  1000          0 1700000000\n";
        let name = Path::new(SYSTEM_V[1]).join("7");
        assert_eq!(objects(SYSTEM_V[1], text, 1000), [Object { name, used: false }]);
        assert_eq!(objects(SYSTEM_V[2], "", 1000), []);
    }

    #[test]
    fn queues_and_huge_pages_are_found_where_they_are_mounted() {
        let list = "proc /proc proc rw 0 0\nmqueue /dev/mqueue mqueue rw 0 0\n\
                    none /mnt/huge\\040pages hugetlbfs rw,pagesize=2M 0 0\nhugetlbfs /tmp tmpfs rw 0 0\n";
        let found = places(list, &FILE_SYSTEMS);
        assert_eq!(found, [Path::new("/dev/mqueue"), Path::new("/mnt/huge pages")]);
    }

    #[test]
    fn a_socket_without_a_listener_is_left_and_a_file_beside_it_is_none_of_ours() {
        let before = of_this_user();
        let folder = Path::new("/tmp");
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
