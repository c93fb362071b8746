//! Hosts that are network namespaces: separate, joined, cut, frozen, and removed without a trace.
//! This binary also runs as the processes on the hosts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use tokenyard_launch::{Event, Hosts, Job, Launcher, Net, Running, Stderr};

const SOON: Duration = Duration::from_secs(20);
const PORT: u16 = 7000;

fn main() {
    let arguments: Vec<String> = env::args().collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, "listen"] => listen(),
        [_, "reach", host] => reach(host),
        [_, "describe"] => describe(),
        [_, "launch", end] => launch(end),
        [_, "make"] => make(),
        _ => run_tests(),
    }
}

fn run_tests() {
    let tests = vec![
        Trial::test("hosts_reach_each_other_by_name_on_both_networks", reach_by_name),
        Trial::test("a_host_has_a_name_a_network_and_interfaces_of_its_own", are_apart),
        Trial::test("ranks_get_the_variables_of_their_launcher", variables_of_launchers),
        Trial::test("a_cut_host_is_out_of_reach_until_it_is_restored", cut_and_restore),
        Trial::test("a_switch_that_swallows_is_not_seen_on_the_host", swallow_and_restore),
        Trial::test("a_frozen_host_stands_still_until_it_is_thawed", freeze_and_thaw),
        Trial::test("the_network_of_the_machine_is_not_touched", machine_is_untouched),
        Trial::test("nothing_is_left_when_the_owner_drops_its_hosts", || nothing_is_left("drop")),
        Trial::test("nothing_is_left_when_the_owner_panics", || nothing_is_left("panic")),
        Trial::test("nothing_is_left_when_the_owner_is_killed", || nothing_is_left("wait")),
        Trial::test("without_the_rights_the_error_says_what_to_do", without_rights),
        Trial::test("numbers_that_do_not_fit_are_refused", wrong_numbers),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit();
}

/// This program, in one of its roles.
fn this(role: &[&str]) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(role);
    command
}

fn job(ranks: u32, role: &[&str]) -> Job {
    Job {
        program: env::current_exe().unwrap(),
        args: role.iter().map(Into::into).collect(),
        ranks,
        env: Vec::new(),
        stderr: Stderr::Inherit,
    }
}

/// Role: accepts every connection, at every address.
fn listen() {
    let listener = TcpListener::bind(("::", PORT)).unwrap();
    println!("ready");
    for stream in listener.incoming() {
        drop(stream);
    }
}

/// Role: succeeds if the host can be connected to.
fn reach(host: &str) {
    let address = (host, PORT).to_socket_addrs().unwrap().next().unwrap();
    TcpStream::connect_timeout(&address, Duration::from_millis(500)).unwrap();
}

/// Role: prints its host name, interfaces and addresses.
fn describe() {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let network = fs::read_link("/proc/self/ns/net").unwrap();
    let interfaces = names_in("/sys/class/net").into_iter().collect::<Vec<_>>().join(" ");
    println!("{} {} {interfaces}", name.trim(), network.display());
    let own = |name: &str| {
        ["RANK", "WORLD_", "LOCAL_", "MASTER_", "GROUP_", "SLURM", "TOKENYARD_"]
            .iter()
            .any(|start| name.starts_with(start))
    };
    let mut variables: Vec<_> = env::vars().filter(|(name, _)| own(name)).collect();
    variables.sort();
    for (name, value) in variables {
        println!("{name}={value}");
    }
}

/// Role: owns two hosts with a listener on each, prints them, and ends in the given way.
fn launch(end: &str) {
    let hosts = Hosts::new(2).unwrap();
    let running = listeners(&hosts);
    for rank in 0..2 {
        println!("{}", running.pid(rank).unwrap());
        let pid = running.pid(rank).unwrap();
        println!("{}", fs::read_link(format!("/proc/{pid}/ns/net")).unwrap().display());
    }
    match end {
        "drop" => {}
        "panic" => panic!("as the role demands"),
        _ => thread::sleep(3 * SOON),
    }
}

/// Role: gives up all rights and tries to make hosts.
fn make() {
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, none).unwrap();
    if let Err(error) = Hosts::new(2) {
        println!("{error:#}");
    }
}

fn listeners(hosts: &Hosts) -> Running {
    let mut running =
        job(hosts.count() as u32, &["listen"]).start_on(hosts, Launcher::Hand).unwrap();
    for _ in 0..hosts.count() {
        match running.next_event(SOON) {
            Some(Event::Line { line, .. }) if line == "ready" => {}
            other => panic!("expected a listener to be ready, found {other:?}"),
        }
    }
    running
}

fn can_reach(hosts: &Hosts, from: usize, to: &str) -> bool {
    hosts.run(from, &mut this(&["reach", to])).unwrap().status.success()
}

fn reach_by_name() -> Result<(), Failed> {
    let hosts = Hosts::new(3)?;
    let _running = listeners(&hosts);
    for to in 0..3 {
        let name = Hosts::name(to);
        for name in [name.clone(), format!("{name}-control"), format!("{name}-ipv6")] {
            assert!(can_reach(&hosts, (to + 1) % 3, &name), "{name}");
        }
    }
    Ok(())
}

fn are_apart() -> Result<(), Failed> {
    let hosts = Hosts::new(2)?;
    let mut networks = BTreeSet::from([fs::read_link("/proc/self/ns/net")?.display().to_string()]);
    for host in 0..2 {
        let output = hosts.run(host, &mut this(&["describe"]))?;
        let text = String::from_utf8(output.stdout)?;
        let words: Vec<&str> = text.lines().next().unwrap().split(' ').collect();
        assert_eq!(words[0], format!("node{host}"));
        assert!(networks.insert(words[1].to_owned()), "{text}");
        let interfaces = BTreeSet::from_iter(words[2..].iter().copied());
        // Some kernels give every network interfaces for tunnels.
        assert!(interfaces.is_superset(&["lo", "eth0", "eth1"].into()), "{text}");
    }
    Ok(())
}

fn variables_of_launchers() -> Result<(), Failed> {
    let hosts = Hosts::new(2)?;
    for (launcher, expected) in [
        (
            Launcher::Hand,
            &["TOKENYARD_BOOTSTRAP=tcp://node0:29600", "TOKENYARD_RANK=3", "TOKENYARD_RANKS=4"][..],
        ),
        (
            Launcher::Torchrun,
            &["MASTER_ADDR=node0", "RANK=3", "WORLD_SIZE=4", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2"],
        ),
        (
            Launcher::Slurm,
            &[
                "SLURM_PROCID=3",
                "SLURM_NTASKS=4",
                "SLURM_LOCALID=1",
                "SLURM_JOB_NODELIST=node[0-1]",
            ],
        ),
    ] {
        let mut job = job(4, &["describe"]);
        job.env = vec![("TOKENYARD_RANK".into(), "9".into())];
        if launcher != Launcher::Hand {
            job.env.clear();
        }
        let outcomes = job.start_on(&hosts, launcher)?.wait_all(SOON);
        let lines = &outcomes[3].lines;
        assert!(lines[0].starts_with("node1 "), "{lines:?}");
        for line in expected {
            assert!(lines.iter().any(|found| found == line), "{line}: {lines:?}");
        }
        assert!(lines.iter().any(|line| line.starts_with("TOKENYARD_SECRET=")), "{lines:?}");
        let foreign = lines.iter().any(|line| line.starts_with("TOKENYARD_LAUNCHER"));
        assert!(!foreign, "{lines:?}");
        assert!(outcomes[0].lines[0].starts_with("node0 ") && outcomes[0].success());
    }
    Ok(())
}

fn cut_and_restore() -> Result<(), Failed> {
    let hosts = Hosts::new(3)?;
    let _running = listeners(&hosts);
    hosts.cut(1, &[Net::Data])?;
    assert!(!can_reach(&hosts, 0, "node1") && !can_reach(&hosts, 1, "node0"));
    assert!(can_reach(&hosts, 0, "node1-control") && can_reach(&hosts, 0, "node2"));
    hosts.cut(1, &Net::BOTH)?;
    assert!(!can_reach(&hosts, 0, "node1-control") && !can_reach(&hosts, 1, "node2-ipv6"));
    hosts.restore(1, &Net::BOTH)?;
    let start = Instant::now();
    while !can_reach(&hosts, 0, "node1") || !can_reach(&hosts, 1, "node2-control") {
        assert!(start.elapsed() < SOON, "the host is restored and stays out of reach");
    }
    Ok(())
}

fn swallow_and_restore() -> Result<(), Failed> {
    let hosts = Hosts::new(2)?;
    let _running = listeners(&hosts);
    hosts.swallow(1, &[Net::Data])?;
    assert!(!can_reach(&hosts, 0, "node1") && can_reach(&hosts, 0, "node1-control"));
    let state = hosts.run(1, Command::new("cat").arg("/sys/class/net/eth0/operstate"))?;
    assert_eq!(String::from_utf8_lossy(&state.stdout).trim(), "up");
    hosts.restore(1, &[Net::Data])?;
    let start = Instant::now();
    while !can_reach(&hosts, 0, "node1") {
        assert!(start.elapsed() < SOON, "the switch forwards and the host stays out of reach");
    }
    Ok(())
}

fn freeze_and_thaw() -> Result<(), Failed> {
    let hosts = Hosts::new(2)?;
    let running = listeners(&hosts);
    assert_eq!(hosts.processes(1)?, [running.pid(1).unwrap()]);
    hosts.freeze(1)?;
    await_state(running.pid(1).unwrap(), 'T');
    assert_ne!(state(running.pid(0).unwrap()), Some('T'));
    hosts.thaw(1)?;
    await_state(running.pid(1).unwrap(), 'S');
    Ok(())
}

fn machine_is_untouched() -> Result<(), Failed> {
    let hosts = Hosts::new(4)?;
    let seen = names_in("/sys/class/net");
    let ours = seen.iter().find(|name| name.starts_with("switch-") || name.starts_with("node"));
    assert_eq!(ours, None);
    assert_eq!(fs::read_to_string("/etc/hosts")?.matches("192.0.2.").count(), 0);
    assert!(!Path::new("/run/netns/node0").exists());
    drop(hosts);
    Ok(())
}

fn nothing_is_left(end: &str) -> Result<(), Failed> {
    let tmp = tempfile::tempdir()?;
    let mut owner: Child = this(&["launch", end])
        .env("TMPDIR", tmp.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let lines = BufReader::new(owner.stdout.take().unwrap()).lines().take(4);
    let lines: Vec<String> = lines.collect::<Result<_, _>>()?;
    assert_eq!(lines.len(), 4, "the owner of the hosts did not come up");
    if end == "wait" {
        assert!(holder_of(&lines[1]).is_some(), "no process holds a host that lives");
        // Stopped processes are ended as well.
        kill_process(Pid::from_raw(lines[2].parse()?).unwrap(), Signal::STOP)?;
        kill_process(Pid::from_child(&owner), Signal::KILL)?;
    }
    owner.wait()?;
    let start = Instant::now();
    for pid in [&lines[0], &lines[2]] {
        while state(pid.parse()?).is_some_and(|state| state != 'Z') {
            assert!(start.elapsed() < SOON, "process {pid} is left behind");
            thread::sleep(Duration::from_millis(5));
        }
    }
    // Only processes, descriptors and mounts hold a namespace alive.
    for network in [&lines[1], &lines[3]] {
        while let Some(holder) = holder_of(network) {
            assert!(start.elapsed() < SOON, "{holder} still holds {network}");
            thread::sleep(Duration::from_millis(20));
        }
    }
    assert_eq!(names_in(tmp.path()), BTreeSet::new());
    Ok(())
}

fn without_rights() -> Result<(), Failed> {
    let output = this(&["make"]).output()?;
    let text = String::from_utf8(output.stdout)?;
    assert!(text.contains("expected the rights CAP_SYS_ADMIN and CAP_NET_ADMIN"), "{text}");
    assert!(text.contains("Fix: run as root, or in a user namespace"), "{text}");
    Ok(())
}

fn wrong_numbers() -> Result<(), Failed> {
    for count in [0, 1, 5] {
        let text = Hosts::new(count).unwrap_err().to_string();
        assert_eq!(text, format!("make hosts: found {count} hosts, expected 2 to 4"));
    }
    let hosts = Hosts::new(2)?;
    let text = hosts.cut(2, &Net::BOTH).unwrap_err().to_string();
    assert_eq!(text, "use host: found host 2, expected one below 2");
    let Err(error) = job(3, &["describe"]).start_on(&hosts, Launcher::Hand) else {
        return Err("three ranks were shared by two hosts".into());
    };
    assert_eq!(error.to_string(), "start job: found 3 ranks on 2 hosts, expected a multiple");
    Ok(())
}

fn names_in(folder: impl AsRef<Path>) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

fn await_state(pid: u32, wanted: char) {
    let start = Instant::now();
    while state(pid) != Some(wanted) {
        assert!(start.elapsed() < SOON, "{pid} is {:?}, expected {wanted}", state(pid));
        thread::sleep(Duration::from_millis(2));
    }
}

/// The process that holds a namespace (`net:[4026532177]`) alive, if there is one.
fn holder_of(network: &str) -> Option<String> {
    let links = |pattern: &str| {
        let (before, after) = pattern.split_once('*').unwrap();
        let folders = fs::read_dir(before).ok().into_iter().flatten().flatten();
        folders.map(|entry| entry.path().join(after)).collect::<Vec<_>>()
    };
    for process in fs::read_dir("/proc").ok()?.flatten().map(|entry| entry.path()) {
        let process = process.display();
        let mut held = links(&format!("{process}/task/*ns/net"));
        held.extend(links(&format!("{process}/fd/*")));
        let is_it = |path: &&std::path::PathBuf| {
            // A path that ends in a slash would be followed.
            let path = path.display().to_string();
            fs::read_link(path.trim_end_matches('/'))
                .is_ok_and(|target| target.display().to_string() == network)
        };
        if let Some(path) = held.iter().find(is_it) {
            return Some(path.display().to_string());
        }
        let mounts = fs::read_to_string(format!("{process}/mountinfo")).unwrap_or_default();
        if mounts.contains(network) {
            return Some(format!("{process}/mountinfo"));
        }
    }
    None
}
