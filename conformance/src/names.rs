//! Names that outlive a process: files in shared memory and huge pages, queues of messages, sockets and pipes in
//! folders for temporary files, and System V's objects. Names that a job leaves behind are those which are new,
//! belong to this user, and no process uses. Files in folders for temporary files are too many: there those count
//! alone that a rank was seen to use.
//!
//! Other programs of this user make names as well. So a name is the job's for certain if one of its ranks was seen to
//! use it, or has made it, which the system says of System V's shared memory. Any other one counts only if a new name
//! is left again when the job runs again.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::FileType;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// POSIX shared memory and semaphores. Every name counts.
const SHARED_MEMORY: &str = "/dev/shm";
/// File systems whose names all count, wherever they are mounted: POSIX message queues, and huge pages.
const FILE_SYSTEMS: [&str; 2] = [QUEUES, "hugetlbfs"];
const QUEUES: &str = "mqueue";
/// The kernel's lists of System V's shared memory, semaphores and message queues. A name is that of the list, with the
/// object's number.
const SYSTEM_V: [&str; 3] = ["/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg"];

/// A look at the names of this user while a job runs.
pub(crate) struct Watch {
    start: SystemTime,
    before: BTreeSet<PathBuf>,
    /// The processes of the job.
    processes: BTreeSet<u32>,
    /// The names that they were seen to use.
    used: BTreeSet<PathBuf>,
}

/// The names that a job has left, each with words that say so.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct LeftNames {
    /// Those that are the job's for certain.
    pub(crate) own: Vec<String>,
    /// Those that may be another program's.
    pub(crate) others: Vec<String>,
}

impl Watch {
    /// Starts before the job does.
    pub(crate) fn start() -> Self {
        let (processes, used) = (BTreeSet::new(), BTreeSet::new());
        Self { start: SystemTime::now(), before: of_this_user(), processes, used }
    }

    /// Notes the names that these processes of the job use now.
    pub(crate) fn note(&mut self, processes: impl IntoIterator<Item = u32>) {
        for process in processes {
            self.processes.insert(process);
            self.used.extend(used_by(process));
        }
    }

    /// Names that are not the job's, although one of its processes was seen to use them.
    pub(crate) fn forget(&mut self, names: &BTreeSet<PathBuf>) {
        self.used.retain(|name| !names.contains(name));
    }

    /// Notes names that a process of the job has used.
    pub(crate) fn note_names(&mut self, names: impl IntoIterator<Item = PathBuf>) {
        self.used.extend(names);
    }

    /// The names that are new and that no process uses. Jobs create and remove names, so this polls until the new
    /// names are gone. `limit` may grow while it waits.
    pub(crate) fn left(&self, limit: impl Fn() -> Duration) -> LeftNames {
        let start = Instant::now();
        let mut left: BTreeSet<PathBuf> =
            of_this_user().difference(&self.before).cloned().collect();
        loop {
            let used = if left.is_empty() { BTreeSet::new() } else { used_names() };
            left.retain(|name| !used.contains(name));
            if left.is_empty() || start.elapsed() >= limit() {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
            left = left.intersection(&of_this_user()).cloned().collect();
        }
        self.sort(&left)
    }

    /// The files in folders for temporary files that were made since the start, that a process of the job was seen to
    /// use, and that no process uses now. Those alone count which `counts` says.
    pub(crate) fn left_files(&self, counts: impl Fn(&Path) -> bool) -> Vec<String> {
        let (folders, user) = (temporary(user()), user());
        let mut files = self.used.iter().filter(|file| {
            let is_new = |meta: &std::fs::Metadata| {
                let made = meta.created().or_else(|_| meta.modified());
                meta.is_file() && meta.uid() == user && made.is_ok_and(|made| made >= self.start)
            };
            folders.iter().any(|folder| file.starts_with(folder))
                && counts(file)
                && std::fs::symlink_metadata(file).is_ok_and(|meta| is_new(&meta))
        });
        let Some(first) = files.next() else { return Vec::new() };
        let used = used_names();
        let unused = std::iter::once(first).chain(files).filter(|file| !used.contains(*file));
        unused.map(|file| format!("{} is left behind", file.display())).collect()
    }

    fn sort(&self, left: &BTreeSet<PathBuf>) -> LeftNames {
        let made_here = |object: &Object| {
            object.creator.is_some_and(|creator| self.processes.contains(&creator))
        };
        let objects = if left.is_empty() { Vec::new() } else { system_v(user()) };
        let made: BTreeSet<_> =
            objects.into_iter().filter(made_here).map(|object| object.name).collect();
        let mut sorted = LeftNames::default();
        for name in left {
            let is_own = self.used.contains(name) || made.contains(name);
            let list = if is_own { &mut sorted.own } else { &mut sorted.others };
            list.push(format!("{} is left behind", name.display()));
        }
        sorted
    }
}

/// The names of this user, now.
fn of_this_user() -> BTreeSet<PathBuf> {
    let user = user();
    let socket = |kind: FileType| kind.is_socket() || kind.is_fifo();
    let mut names = BTreeSet::new();
    for folder in mounts(&FILE_SYSTEMS).iter().map(PathBuf::as_path).chain([SHARED_MEMORY.as_ref()])
    {
        in_folder(folder, &|_| true, DEEPEST, &mut names);
    }
    for folder in temporary(user) {
        in_folder(&folder, &socket, DEEPEST, &mut names);
    }
    names.extend(system_v(user).into_iter().map(|object| object.name));
    names
}

/// Folders below those that are named here: programs make one for a job, and seldom one in that.
const DEEPEST: u32 = 3;

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
    /// The process that has made it. Only shared memory says so.
    creator: Option<u32>,
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
    let (owner, attached, maker) = (column("uid"), column("nattch"), column("cpid"));
    let own = lines.filter(|line| {
        owner.and_then(|at| line.get(at)).and_then(|owner| owner.parse().ok()) == Some(user)
    });
    own.filter_map(|line| {
        let name = Path::new(list).join(line.get(1)?);
        let used = attached.and_then(|at| line.get(at)).is_some_and(|count| *count != "0");
        let creator = maker.and_then(|at| line.get(at)?.parse().ok());
        Some(Object { name, used, creator })
    })
    .collect()
}

/// Adds the names in a folder that are this user's and of such a kind. Folders of this user in it are looked into as
/// well, if they are of the same file system.
fn in_folder(
    folder: &Path,
    counts: &dyn Fn(FileType) -> bool,
    depth: u32,
    names: &mut BTreeSet<PathBuf>,
) {
    let (Ok(entries), Ok(own)) = (std::fs::read_dir(folder), std::fs::metadata(folder)) else {
        return;
    };
    let user = user();
    for entry in entries.flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if !counts(kind) && !kind.is_dir() {
            continue;
        }
        // The metadata are those of the name itself, not of a link's target.
        let Ok(meta) = entry.metadata() else { continue };
        if meta.uid() != user {
            continue;
        }
        if counts(kind) {
            names.insert(entry.path());
        }
        if kind.is_dir() && depth > 0 && meta.dev() == own.dev() {
            in_folder(&entry.path(), counts, depth - 1, names);
        }
    }
}

/// The names that any process maps, has open or listens on.
fn used_names() -> BTreeSet<PathBuf> {
    let mut used = BTreeSet::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        used.extend(open_in(&process.path()));
    }
    used.extend(text_of("/proc/net/unix").lines().filter_map(path_in));
    used.extend(
        system_v(user()).into_iter().filter(|object| object.used).map(|object| object.name),
    );
    in_queues(used)
}

/// The names that one process uses in shared memory and in folders for temporary files.
pub(crate) fn lasting_names(process: u32) -> Vec<PathBuf> {
    let folders = temporary(user());
    let lasts = |name: &PathBuf| {
        name.starts_with(SHARED_MEMORY) || folders.iter().any(|folder| name.starts_with(folder))
    };
    used_by(process).into_iter().filter(lasts).collect()
}

/// The names that one process maps, has open or listens on.
pub(crate) fn used_by(process: u32) -> BTreeSet<PathBuf> {
    let mut used = open_in(Path::new(&format!("/proc/{process}")));
    let sockets = text_of("/proc/net/unix");
    // The seventh column is the number by which a descriptor names its socket.
    let is_own = |line: &&str| {
        let number = line.split_whitespace().nth(6).unwrap_or_default();
        used.contains(Path::new(&format!("socket:[{number}]")))
    };
    let listens: Vec<_> = sockets.lines().filter(is_own).filter_map(path_in).collect();
    used.extend(listens);
    in_queues(used)
}

/// The files that a process, a folder of `/proc`, maps and has open.
fn open_in(process: &Path) -> BTreeSet<PathBuf> {
    let mut used: BTreeSet<_> = text_of(process.join("maps")).lines().filter_map(path_in).collect();
    let open = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    used.extend(open.filter_map(|fd| std::fs::read_link(fd.path()).ok()));
    used
}

/// Adds the places of queues: the kernel names an open one without the place where queues are mounted.
fn in_queues(mut used: BTreeSet<PathBuf>) -> BTreeSet<PathBuf> {
    let queues = mounts(&[QUEUES]);
    let at_root = used.iter().filter(|path| path.parent() == Some(Path::new("/")));
    let names = at_root.filter_map(|path| path.file_name().map(OsStr::to_owned));
    let names: Vec<OsString> = names.collect();
    used.extend(names.iter().flat_map(|name| queues.iter().map(move |place| place.join(name))));
    used
}

fn text_of(file: impl AsRef<Path>) -> String {
    std::fs::read_to_string(file).unwrap_or_default()
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

    fn is_left(left: &LeftNames, name: &Path) -> bool {
        // Other tests of this machine may leave names for some time as well.
        left.own.iter().chain(&left.others).any(|text| text.contains(&*name.to_string_lossy()))
    }

    #[test]
    fn a_limit_that_grows_while_names_are_left_is_honoured() {
        let before = Watch::start();
        let name = own_name("limit");
        std::fs::write(&name, "").unwrap();
        assert!(is_left(&before.left(|| Duration::ZERO), &name));
        let looks = Cell::new(0);
        let after = before.left(|| {
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
        let before = Watch::start();
        let name = own_name("used");
        let file = std::fs::File::create(&name).unwrap();
        let used = before.left(|| Duration::ZERO);
        drop(file);
        let unused = before.left(|| Duration::ZERO);
        std::fs::remove_file(&name).unwrap();
        assert!(!is_left(&used, &name) && is_left(&unused, &name), "{used:?} {unused:?}");
    }

    #[test]
    fn shared_memory_of_system_v_is_left_once_no_process_has_it_attached() {
        let before = Watch::start();
        // SAFETY: a new segment, which this test alone knows; it is attached, and removed, once.
        let (id, place) = unsafe {
            let id = libc::shmget(libc::IPC_PRIVATE, 4096, 0o600);
            (id, libc::shmat(id, std::ptr::null(), 0))
        };
        assert!(id >= 0 && place as isize != -1, "{}", std::io::Error::last_os_error());
        let used = before.left(|| Duration::ZERO);
        // SAFETY: attached above.
        let detached = unsafe { libc::shmdt(place) };
        let unused = before.left(|| Duration::ZERO);
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
        assert_eq!(objects(SYSTEM_V[1], text, 1000), [Object { name, used: false, creator: None }]);
        assert_eq!(objects(SYSTEM_V[2], "", 1000), []);
    }

    #[test]
    fn shared_memory_of_system_v_is_that_of_the_job_whose_process_has_made_it() {
        let text = "       key      shmid perms                  size  cpid  lpid nattch   uid\n\
                    \x20        0          7   600                  4096    41    42      0  1000\n";
        let name = Path::new(SYSTEM_V[0]).join("7");
        assert_eq!(
            objects(SYSTEM_V[0], text, 1000),
            [Object { name, used: false, creator: Some(41) }]
        );
    }

    #[test]
    fn names_in_folders_count_and_are_the_jobs_where_its_processes_used_them() {
        let before = Watch::start();
        let folder = own_name("folder");
        std::fs::create_dir(&folder).unwrap();
        let (used, unused) = (folder.join("used"), folder.join("unused"));
        std::fs::write(&unused, "").unwrap();
        let file = std::fs::File::create(&used).unwrap();
        let mut noted = Watch { before: before.before.clone(), ..Watch::start() };
        noted.note([std::process::id()]);
        drop(file);
        let (found, without) = (noted.left(|| Duration::ZERO), before.left(|| Duration::ZERO));
        std::fs::remove_dir_all(&folder).unwrap();
        let says = |name: &Path| format!("{} is left behind", name.display());
        assert!(found.own.contains(&says(&used)) && !found.own.contains(&says(&unused)));
        assert!(found.others.contains(&says(&unused)), "{found:?}");
        assert!(without.others.contains(&says(&used)), "{without:?}");
    }

    #[test]
    fn a_temporary_file_is_left_where_a_process_of_the_job_used_it() {
        let mut watch = Watch::start();
        let name =
            |end: &str| PathBuf::from(format!("/tmp/left-file-{}-{end}", std::process::id()));
        // The system's clock of files ticks more slowly than that of programs.
        std::thread::sleep(Duration::from_millis(20));
        std::fs::write(name("unseen"), "").unwrap();
        let file = std::fs::File::create(name("seen")).unwrap();
        watch.note([std::process::id()]);
        let used = watch.left_files(|_| true);
        drop(file);
        let unused = watch.left_files(|_| true);
        std::fs::remove_file(name("seen")).unwrap();
        std::fs::remove_file(name("unseen")).unwrap();
        let says = |end: &str| format!("{} is left behind", name(end).display());
        assert!(!used.contains(&says("seen")), "{used:?}");
        assert!(unused.contains(&says("seen")) && !unused.contains(&says("unseen")), "{unused:?}");
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
        let before = Watch::start();
        let folder = Path::new("/tmp");
        let name = |end: &str| folder.join(format!("left-{}-{end}", std::process::id()));
        let listener = std::os::unix::net::UnixListener::bind(name("socket")).unwrap();
        std::fs::write(name("file"), "").unwrap();
        let used = before.left(|| Duration::ZERO);
        drop(listener);
        let unused = before.left(|| Duration::ZERO);
        std::fs::remove_file(name("socket")).unwrap();
        std::fs::remove_file(name("file")).unwrap();
        assert!(!is_left(&used, &name("socket")) && is_left(&unused, &name("socket")));
        assert!(!is_left(&unused, &name("file")));
    }
}
