//! The events that a launcher receives from its ranks. The ranks are small shell scripts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tokenyard_launch::{Event, Exit, Job, Running, Stderr};

const SOON: Duration = Duration::from_secs(20);
const SIGKILL: Exit = Exit::Signal(9);
const SIGTERM: Exit = Exit::Signal(15);

fn shell(ranks: u32, script: &str) -> Job {
    Job {
        program: PathBuf::from("sh"),
        args: vec!["-c".into(), script.into()],
        ranks,
        env: Vec::new(),
        stderr: Stderr::Capture,
    }
}

fn next_line(running: &mut Running) -> (u32, String) {
    match running.next_event(SOON) {
        Some(Event::Line { rank, line }) => (rank, line),
        other => panic!("expected a line, found {other:?}"),
    }
}

fn exists(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn each_rank_gets_its_variables_and_is_heard_by_rank() {
    let script =
        r#"echo "$TOKENYARD_RANK $TOKENYARD_RANKS $TOKENYARD_LOCAL_RANK $COLOUR"; echo two"#;
    let mut job = shell(3, script);
    job.env = vec![("COLOUR".into(), "green".into()), ("TOKENYARD_RANK".into(), "9".into())];
    let outcomes = job.start().unwrap().wait_all(SOON);
    assert_eq!(outcomes.len(), 3);
    for (rank, outcome) in outcomes.iter().enumerate() {
        assert_eq!(outcome.rank as usize, rank);
        assert_eq!(outcome.lines, [format!("{rank} 3 {rank} green"), "two".to_string()]);
        assert!(outcome.success(), "{outcome:?}");
    }
}

#[test]
fn ranks_share_a_secret_that_is_fresh_per_job_and_not_in_argv() {
    let script = r#"echo "$TOKENYARD_SECRET"; tr '\0' ' ' < /proc/$$/cmdline; echo"#;
    let mut seen = Vec::new();
    for _ in 0..2 {
        let outcomes = shell(2, script).start().unwrap().wait_all(SOON);
        let secret = outcomes[0].lines[0].clone();
        assert_eq!(secret.len(), 64);
        assert!(secret.bytes().all(|c| c.is_ascii_hexdigit()), "{secret}");
        assert_eq!(outcomes[1].lines[0], secret);
        for outcome in &outcomes {
            let argv = &outcome.lines[1..].join(" ");
            assert!(argv.contains("TOKENYARD_SECRET") && !argv.contains(&secret), "{argv}");
        }
        seen.push(secret);
    }
    assert_ne!(seen[0], seen[1]);
}

#[test]
fn exit_codes_and_signals_are_distinguished() {
    let script = "case $TOKENYARD_RANK in 0) exit 0;; 1) exit 7;; 2) kill -TERM $$;; esac";
    let outcomes = shell(3, script).start().unwrap().wait_all(SOON);
    let exits: Vec<_> = outcomes.iter().map(|outcome| outcome.exit.unwrap()).collect();
    assert_eq!(exits, [Exit::Code(0), Exit::Code(7), SIGTERM]);
    assert!(outcomes.iter().all(|outcome| !outcome.timed_out));
    assert_eq!(exits[1].to_string(), "exit code 7");
}

#[test]
fn a_megabyte_on_both_pipes_arrives_and_does_not_deadlock() {
    // Both pipes are filled in turn, far beyond what they hold.
    let script = r#"i=0; x=$(head -c 1023 /dev/zero | tr '\0' x)
        while [ $i -lt 1024 ]; do echo "$x"; echo "e$i" >&2; echo "$x" >&2; i=$((i+1)); done"#;
    for outcome in shell(2, script).start().unwrap().wait_all(SOON) {
        assert!(outcome.success(), "{:?}", outcome.exit);
        assert_eq!(outcome.lines.len(), 1024);
        assert!(outcome.lines.iter().all(|line| line.len() == 1023));
        assert_eq!(outcome.stderr_tail.len(), 64 << 10);
        assert!(outcome.stderr_tail.contains("e1023\n") && !outcome.stderr_tail.contains("e9\n"));
    }
}

#[test]
fn a_line_without_newline_is_delivered_before_the_exit() {
    let mut running = shell(1, "printf '{\"a\":1}'; printf bad >&2; exit 3").start().unwrap();
    assert_eq!(next_line(&mut running), (0, "{\"a\":1}".into()));
    assert!(!running.all_exited());
    let exited = Event::Exited { rank: 0, status: Exit::Code(3) };
    assert_eq!(running.next_event(SOON), Some(exited));
    assert!(running.all_exited());
    assert_eq!(running.stderr_tail(0), "bad");
    assert_eq!(running.next_event(SOON), None, "nothing can follow, so this returns at once");
    assert_eq!(running.wait_all(SOON)[0].exit, Some(Exit::Code(3)), "an exit taken is not lost");
}

#[test]
fn an_exit_is_reported_even_while_a_grandchild_holds_the_pipes() {
    let start = Instant::now();
    let outcomes = shell(1, "sleep 60 & echo $!; exit 4").start().unwrap().wait_all(SOON);
    assert_eq!(outcomes[0].exit, Some(Exit::Code(4)));
    assert!(start.elapsed() < SOON);
    let grandchild: i32 = outcomes[0].lines[0].parse().unwrap();
    let pid = rustix::process::Pid::from_raw(grandchild).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn a_rank_with_an_endless_line_is_killed_and_named() {
    let script = "[ $TOKENYARD_RANK = 0 ] && exec head -c 80000000 /dev/zero; echo fine";
    let outcomes = shell(2, script).start().unwrap().wait_all(SOON);
    assert_eq!(outcomes[0].exit, Some(SIGKILL));
    let tail = &outcomes[0].stderr_tail;
    assert!(tail.contains("[launcher] killed: a line of stdout is longer than"), "{tail}");
    assert!(outcomes[0].lines.is_empty());
    assert_eq!(outcomes[1].lines, ["fine"]);
}

#[test]
fn a_sleeper_is_terminated_at_the_deadline_and_others_keep_their_exit() {
    let script = "echo up; [ $TOKENYARD_RANK = 1 ] && exec sleep 60; exit 0";
    let start = Instant::now();
    let outcomes = shell(2, script).start().unwrap().wait_all(Duration::from_secs(2));
    assert!(start.elapsed() < SOON);
    assert_eq!((outcomes[0].exit, outcomes[0].timed_out), (Some(Exit::Code(0)), false));
    assert_eq!((outcomes[1].exit, outcomes[1].timed_out), (Some(SIGTERM), true));
    assert_eq!(outcomes[1].lines, ["up"]);
    assert!(!outcomes[1].success());
}

#[test]
fn a_rank_that_ignores_sigterm_is_killed() {
    let script = "trap '' TERM; echo up; while :; do sleep 0.05; done";
    let mut running = shell(1, script).start().unwrap();
    assert_eq!(next_line(&mut running).1, "up");
    let outcomes = running.wait_all(Duration::ZERO);
    assert_eq!((outcomes[0].exit, outcomes[0].timed_out), (Some(SIGKILL), true));
}

#[test]
fn a_stopped_rank_ends_at_the_deadline() {
    let mut running = shell(1, "echo up; exec sleep 60").start().unwrap();
    assert_eq!(next_line(&mut running).1, "up");
    running.stop(0).unwrap();
    let outcomes = running.wait_all(Duration::from_millis(50));
    assert_eq!((outcomes[0].exit, outcomes[0].timed_out), (Some(SIGTERM), true));
}

#[test]
fn stop_freezes_a_rank_and_resume_lets_it_go_on() {
    let script = "while :; do echo tick; sleep 0.02; done";
    let mut running = shell(1, script).start().unwrap();
    assert_eq!(next_line(&mut running).1, "tick");
    running.stop(0).unwrap();
    while running.next_event(Duration::from_millis(300)).is_some() {}
    let stat = fs::read_to_string(format!("/proc/{}/stat", running.pid(0).unwrap())).unwrap();
    assert!(stat.contains(") T "), "{stat}");
    running.resume(0).unwrap();
    assert_eq!(next_line(&mut running).1, "tick");
}

#[test]
fn kill_ends_one_rank_only_and_refuses_a_dead_or_unknown_one() {
    let mut running = shell(2, "echo up; exec sleep 60").start().unwrap();
    next_line(&mut running);
    next_line(&mut running);
    running.kill(1).unwrap();
    let exited = Event::Exited { rank: 1, status: SIGKILL };
    assert_eq!(running.next_event(SOON), Some(exited));
    assert_eq!(running.next_event(Duration::from_millis(50)), None, "rank 0 lives");
    assert!(running.kill(1).unwrap_err().to_string().contains("rank 1"));
    let unknown = running.stop(2).unwrap_err().to_string();
    assert_eq!(unknown, "signal rank: found rank 2, expected one below 2");
    assert_eq!(running.pid(2), None);
}

#[test]
fn drop_leaves_no_process_and_no_folder() {
    let script = r#"echo "$TOKENYARD_BOOTSTRAP"; exec sleep 60"#;
    let mut running = shell(3, script).start().unwrap();
    let mut bootstrap = String::new();
    for _ in 0..3 {
        bootstrap = next_line(&mut running).1;
    }
    let folder = Path::new(bootstrap.strip_prefix("file://").unwrap()).parent().unwrap();
    assert!(folder.is_absolute());
    let mode = fs::metadata(folder).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    fs::write(folder.join("rendezvous"), "left by a rank").unwrap();
    let pids: Vec<u32> = (0..3).map(|rank| running.pid(rank).unwrap()).collect();
    assert!(pids.iter().all(|&pid| exists(pid)));
    running.stop(1).unwrap();

    drop(running);
    // A zombie would still be in /proc, so this says that they were reaped too.
    assert!(pids.iter().all(|&pid| !exists(pid)), "{pids:?}");
    assert!(!folder.exists());
}

#[test]
fn no_rank_sees_another_one_end_when_all_are_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("held-by-rank-0");
    let made = Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    // The others read end of file as soon as rank 0 is gone.
    let script = r#"cd "$FOLDER"
        if [ "$TOKENYARD_RANK" = 0 ]; then exec 3>held-by-rank-0; echo up; while :; do :; done; fi
        exec 3<held-by-rank-0; echo up; read line <&3; : >"seen-by-$TOKENYARD_RANK""#;
    let mut job = shell(24, script);
    job.env = vec![("FOLDER".into(), folder.path().display().to_string().into())];
    let mut running = job.start().unwrap();
    for _ in 0..24 {
        assert_eq!(next_line(&mut running).1, "up");
    }
    drop(running);
    let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names.collect::<Vec<_>>(), ["held-by-rank-0"]);
}

#[test]
fn a_program_that_cannot_start_is_named() {
    let mut job = shell(2, "");
    job.program = "/nonexistent/tokenyard".into();
    let error = format!("{:#}", job.start().err().unwrap());
    assert!(error.contains("program /nonexistent/tokenyard: rank 0"), "{error}");
    let error = shell(0, "").start().err().unwrap().to_string();
    assert_eq!(error, "start job: found 0 ranks, expected at least 1");
}
