//! Ranks die with their launcher, however it ends. This binary plays all roles: without a role it
//! runs the tests, as `launcher` it starts ranks, as `rank` it is a rank.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};
use tokenyard_launch::{Event, Job, Running, Stderr};

const SOON: Duration = Duration::from_secs(20);

fn main() {
    match env::args().nth(1).as_deref() {
        Some("rank") => be_a_rank(),
        Some("launcher") => be_a_launcher(),
        _ => run_tests(),
    }
}

fn run_tests() {
    let tests = vec![
        Trial::test("ranks_die_when_their_launcher_is_killed", || {
            ranks_end_with_the_launcher(Signal::KILL, false)
        }),
        Trial::test("ranks_die_when_their_launcher_is_terminated", || {
            ranks_end_with_the_launcher(Signal::TERM, false)
        }),
        Trial::test("stopped_ranks_die_when_their_launcher_is_killed", || {
            ranks_end_with_the_launcher(Signal::KILL, true)
        }),
        Trial::test("ranks_outlive_the_thread_that_started_them", outlive_the_starting_thread),
        Trial::test("a_rank_whose_launcher_is_not_its_parent_refuses_to_run", refuse_a_stranger),
        Trial::test("a_process_without_a_launcher_may_adopt", adopt_without_a_launcher),
        Trial::test("inherited_stderr_is_prefixed_with_the_rank", stderr_is_prefixed),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit();
}

fn be_a_rank() {
    tokenyard_launch::adopt().unwrap();
    eprintln!("rank is up");
    println!("ready");
    // The process ends by itself, so that a failing test leaves no process for long.
    thread::sleep(3 * SOON);
}

fn be_a_launcher() {
    let mut running = start_ranks(Stderr::Inherit);
    for rank in 0..2 {
        if env::args().nth(2).as_deref() == Some("stop") {
            running.stop(rank).unwrap();
        }
        println!("{}", running.pid(rank).unwrap());
    }
    running.next_event(3 * SOON);
}

fn start_ranks(stderr: Stderr) -> Running {
    let program = env::current_exe().unwrap();
    let job = Job { program, args: vec!["rank".into()], ranks: 2, env: Vec::new(), stderr };
    let mut running = job.start().unwrap();
    for _ in 0..2 {
        match running.next_event(SOON) {
            Some(Event::Line { line, .. }) if line == "ready" => {}
            other => panic!("expected a rank to be ready, found {other:?}"),
        }
    }
    running
}

/// Starts a launcher process with a temporary folder of its own, and waits until its ranks are up.
fn start_launcher(tmp: &tempfile::TempDir, role: &[&str]) -> (Child, Vec<u32>) {
    let mut launcher = Command::new(env::current_exe().unwrap())
        .args(role)
        .env("TMPDIR", tmp.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(launcher.stdout.take().unwrap()).lines();
    let pids = lines.take(2).map(|line| line.unwrap().parse().unwrap()).collect();
    (launcher, pids)
}

fn ranks_end_with_the_launcher(signal: Signal, stopped: bool) -> Result<(), Failed> {
    let tmp = tempfile::tempdir()?;
    let role: &[&str] = if stopped { &["launcher", "stop"] } else { &["launcher"] };
    let (mut launcher, pids) = start_launcher(&tmp, role);
    assert_eq!(pids.len(), 2);
    assert!(pids.iter().all(|&pid| alive(pid)), "{pids:?}");
    kill_process(Pid::from_child(&launcher), signal)?;
    launcher.wait()?;
    let start = Instant::now();
    while pids.iter().any(|&pid| alive(pid)) {
        assert!(start.elapsed() < SOON, "ranks {pids:?} outlived their launcher");
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn outlive_the_starting_thread() -> Result<(), Failed> {
    let mut running =
        thread::spawn(|| start_ranks(Stderr::Capture)).join().map_err(|_| "no start")?;
    assert_eq!(running.next_event(Duration::from_millis(200)), None);
    assert!((0..2).all(|rank| alive(running.pid(rank).unwrap())));
    Ok(())
}

fn refuse_a_stranger() -> Result<(), Failed> {
    let output = rank_process().env("TOKENYARD_LAUNCHER", "1").output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(stderr.contains("expected launcher 1 of TOKENYARD_LAUNCHER"), "{stderr}");

    let output = rank_process().env("TOKENYARD_LAUNCHER", "me").output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(stderr.contains("TOKENYARD_LAUNCHER=\"me\""), "{stderr}");
    Ok(())
}

fn adopt_without_a_launcher() -> Result<(), Failed> {
    let mut rank = rank_process().env_remove("TOKENYARD_LAUNCHER").spawn()?;
    let mut line = String::new();
    BufReader::new(rank.stdout.take().unwrap()).read_line(&mut line)?;
    rank.kill()?;
    rank.wait()?;
    assert_eq!(line, "ready\n");
    Ok(())
}

fn stderr_is_prefixed() -> Result<(), Failed> {
    let tmp = tempfile::tempdir()?;
    let (mut launcher, _) = start_launcher(&tmp, &["launcher"]);
    let lines = BufReader::new(launcher.stderr.take().unwrap()).lines();
    let mut lines: Vec<String> = lines.take(2).collect::<Result<_, _>>()?;
    launcher.kill()?;
    launcher.wait()?;
    lines.sort();
    assert_eq!(lines, ["[rank 0] rank is up", "[rank 1] rank is up"]);
    Ok(())
}

fn rank_process() -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.arg("rank").stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A zombie counts as dead: reaping an orphan is the duty of process 1, which a container may lack.
fn alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}
