use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Resource, getrlimit};

use super::*;

/// Tells a test that this process has the limit that it needs.
const IS_CHILD: &str = "TOKENYARD_TEST_LIMITS";
const SOFT: u64 = 64;

/// Runs the test of this name in a process of its own, where `ulimit` has these words. Its limit is that of all tests
/// of a process.
fn in_own_process(name: &str, ulimit: &str) {
    let name = format!("bootstrap::tests::limits::{name}");
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit {ulimit} && exec \"$@\""), "sh"]);
    command.arg(std::env::current_exe().unwrap()).args(["--exact", &name, "--nocapture"]);
    let output = command.env(IS_CHILD, "1").process_group(0).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{ulimit}: {text}");
}

fn is_child() -> bool {
    std::env::var_os(IS_CHILD).is_some()
}

#[test]
fn eighty_ranks_meet_where_the_soft_limit_of_open_files_is_64() {
    const RANKS: u32 = 80;
    if !is_child() {
        return in_own_process(
            "eighty_ranks_meet_where_the_soft_limit_of_open_files_is_64",
            &format!("-Sn {SOFT}"),
        );
    }
    assert_eq!(getrlimit(Resource::Nofile).current, Some(SOFT));
    let meeting = Meeting::new();
    on_threads(RANKS, |rank| {
        if rank > 0 {
            wait_for("the address of rank 0", 10 * LATE, || meeting.path().exists());
        }
        // Many ranks share few processors.
        let options = WorldOptions {
            deadline: 20 * DEADLINE,
            late: 20 * LATE,
            ..meeting.options(rank, RANKS)
        };
        World::join(options).unwrap().barrier("met").unwrap();
    });
}

#[test]
fn a_hard_limit_of_open_files_that_is_too_low_is_an_error_at_once() {
    if !is_child() {
        return in_own_process(
            "a_hard_limit_of_open_files_that_is_too_low_is_an_error_at_once",
            &format!("-n {SOFT}"),
        );
    }
    let late = Duration::from_secs(600);
    let options = WorldOptions { late, ..Meeting::new().options(0, 80) };
    let text = World::join(options).unwrap_err().to_string();
    assert!(text.contains("found a limit of 64 open files (hard limit 64), "), "{text}");
    assert!(text.contains("holds a connection to each of 80 ranks"), "{text}");
    assert!(text.contains("Fix: raise the limit where rank 0 starts: `ulimit -n "), "{text}");
}
