//! The process of Hydra that started the ranks of a host. Hydra sets no variable with the name of a job. But
//! this process is the parent, or a parent's parent, of all ranks of one job on a host, and of no rank of
//! another job.

use std::path::PathBuf;

use super::refuse;
use tokenyard_errors::Result;

/// The end of the process's name: those of MPICH and Intel MPI begin differently.
const PROXY: &str = "pmi_proxy";
/// Wrappers may stand between Hydra and a rank; more than these are a mistake.
const MOST_PARENTS: usize = 64;

/// A process, as `/proc/PID/stat` describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Process {
    pid: u32,
    name: String,
    parent: u32,
    /// In clock ticks since the machine's start: a later process of the same id has another value.
    started: u64,
}

/// The rendezvous file, in the folder for temporary files.
///
/// # Errors
/// [`ErrorKind::InvalidInput`](tokenyard_errors::ErrorKind::InvalidInput): no process of Hydra is above this one.
pub(super) fn meeting_file() -> Result<PathBuf> {
    let Some(Process { pid, started, .. }) = proxy(std::process::id(), &read) else {
        return Err(refuse(format!(
            "found no process whose name ends in {PROXY} above this one, expected the one that started the ranks"
        )));
    };
    let user = rustix::process::geteuid().as_raw();
    let folder = std::path::absolute(std::env::temp_dir()).map_err(|error| {
        refuse(format!(
            "found no folder for temporary files ({error}), expected TMPDIR to name one"
        ))
    })?;
    Ok(folder.join(format!("tokenyard-{user}-hydra-{pid}-{started}")))
}

/// The nearest process of Hydra above `pid`.
fn proxy(pid: u32, read: &dyn Fn(u32) -> Option<Process>) -> Option<Process> {
    let parents = std::iter::successors(read(pid), |child| read(child.parent));
    parents.take(MOST_PARENTS).find(|process| process.name.ends_with(PROXY))
}

fn read(pid: u32) -> Option<Process> {
    parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// `pid (name) state parent ...`; the name may hold anything, brackets as well.
fn parse(stat: &str) -> Option<Process> {
    let (head, tail) = stat.rsplit_once(')')?;
    let (pid, name) = head.split_once(" (")?;
    // The third field comes first here; proc(5) counts from one.
    let fields: Vec<&str> = tail.split_ascii_whitespace().collect();
    let field = |number: usize| fields.get(number - 3).copied();
    Some(Process {
        pid: pid.parse().ok()?,
        name: name.to_owned(),
        parent: field(4)?.parse().ok()?,
        started: field(22)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn process(pid: u32, name: &str, parent: u32) -> Process {
        Process { pid, name: name.to_owned(), parent, started: 7 }
    }

    #[test]
    fn the_line_of_a_process_is_read_whatever_its_name() {
        let rest = "S 12 40 40 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 98765 100";
        for name in ["hydra_pmi_proxy", "a) b (c", ""] {
            let found = parse(&format!("42 ({name}) {rest}")).unwrap();
            let started = 98765;
            assert_eq!(found, Process { pid: 42, name: name.to_owned(), parent: 12, started });
        }
        assert_eq!(parse("42 (a) S 12"), None);
        let here = read(std::process::id()).unwrap();
        assert_eq!(here.pid, std::process::id());
        assert_eq!(here.parent, std::os::unix::process::parent_id());
        assert!(here.started > 0);
    }

    #[test]
    fn the_nearest_process_of_hydra_is_found_through_wrappers() {
        let all = [
            process(1, "init", 0),
            process(2, "hydra_pmi_proxy", 1),
            process(3, "hydra_pmi_proxy", 2),
            process(4, "bash", 3),
            process(5, "tokenyard", 4),
            process(6, "tokenyard", 1),
            process(7, "loop", 8),
            process(8, "loop", 7),
        ];
        let read = |pid: u32| all.iter().find(|process| process.pid == pid).cloned();
        assert_eq!(proxy(5, &read).map(|process| process.pid), Some(3));
        assert_eq!(proxy(2, &read).map(|process| process.pid), Some(2));
        assert_eq!(proxy(6, &read), None);
        assert_eq!(proxy(7, &read), None);
        assert_eq!(proxy(99, &read), None);
    }

    proptest! {
        #[test]
        fn reading_any_line_never_panics(line in "[0-9a-z() -]{0,80}") {
            let _ = parse(&line);
        }
    }
}
