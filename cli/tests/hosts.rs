//! `tokenyard run --as-rank` on several hosts, which are network namespaces.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use tokenyard_launch::{Hosts, Job, Launcher, Net, Outcome, Running, Stderr};

const SOON: Duration = Duration::from_secs(30);
const PORT: u16 = 4000;

/// A config in its own folder; `world` are lines of its first section.
struct Config(tempfile::TempDir);

impl Config {
    fn new(world: &str, rest: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text =
            format!("[world]\ndeadline_ms = 4000\n{world}\n[kernels]\nuse = \"cpu\"\n{rest}\n");
        std::fs::write(folder.path().join("config.toml"), text).unwrap();
        Self(folder)
    }

    /// With a transport that does not leave its host, so that the ranks meet, count their hosts and
    /// go no further.
    fn of_one_host(world: &str) -> Self {
        Self::new(world, "[transport.scale_up]\nuse = \"shm\"")
    }

    /// With libfabric's TCP provider over `eth0` between all ranks, or between those of a rail where
    /// `scale_up` joins the ranks of a host.
    fn of_all_hosts(scale_up: &str) -> Self {
        let program = Path::new(env!("CARGO_BIN_EXE_tokenyard"));
        let plugin = program.with_file_name("libtokenyard_plugin_libfabric.so");
        let fix = "cargo build --package tokenyard-plugin-libfabric";
        assert!(plugin.exists(), "{} is not there. Fix: {fix}", plugin.display());
        let rest = format!(
            "[transport.scale_up]\nuse = \"{scale_up}\"\n[transport.scale_out]\nuse = \"libfabric\"\n\
             [transport.scale_out.libfabric]\nprovider = \"tcp\"\nrails = [\"eth0\"]\n\
             [plugins]\npaths = [\"{}\"]",
            plugin.display()
        );
        Self::new("", &rest)
    }

    fn job(&self, ranks: u32) -> Job {
        let small = "--tokens 24 --hidden 128 --topk 3 --steps 3 --as-rank --json";
        let mut args = vec!["run".into(), self.0.path().join("config.toml").into_os_string()];
        args.extend(small.split(' ').map(Into::into));
        Job {
            program: PathBuf::from(env!("CARGO_BIN_EXE_tokenyard")),
            args,
            ranks,
            env: vec![("TOKENYARD_LOG".into(), "debug".into())],
            stderr: Stderr::Capture,
        }
    }
}

/// All ranks ended with an error that says this.
fn expect_error(outcomes: &[Outcome], says: &str) {
    for outcome in outcomes {
        let text = &outcome.stderr_tail;
        assert!(text.contains(says), "rank {}: {outcome:?}\n{text}", outcome.rank);
        assert!(!outcome.success() && !outcome.timed_out, "{outcome:?}");
    }
}

#[test]
fn ranks_of_every_launcher_meet_across_hosts_and_count_them() {
    let hosts = Hosts::new(2).unwrap();
    let config = Config::of_one_host("");
    for launcher in [Launcher::Hand, Launcher::Torchrun, Launcher::Slurm] {
        let running = config.job(4).start_on(&hosts, launcher).unwrap();
        let outcomes = running.wait_all(SOON);
        expect_error(&outcomes, "the ranks are in 2 domains, scale-up transport `shm` reaches one");
        // Rank 0 has the addresses of the others, and the names of their hosts.
        let log = &outcomes[0].stderr_tail;
        for (rank, from) in [(1, "node0 at 192.0.2.1"), (3, "node1 at 192.0.2.2")] {
            let joined = log.lines().find(|line| line.contains(&format!("rank={rank}")));
            assert!(joined.is_some_and(|line| line.contains(from)), "{launcher:?}: {log}");
        }
    }
}

#[test]
fn whole_jobs_on_several_hosts_are_right_whoever_launched_them() {
    let shapes = [
        (2, 2, Launcher::Hand, "flat"),
        (2, 4, Launcher::Torchrun, "expert-major --alignment 8"),
        (4, 4, Launcher::Slurm, "packed"),
        (3, 3, Launcher::Slurm, "flat --experts 24"),
    ];
    for (hosts, ranks, launcher, layout) in shapes {
        let hosts = Hosts::new(hosts).unwrap();
        let config = Config::of_all_hosts("none");
        let report = right_result(&hosts, &config, ranks, launcher, layout);
        assert_eq!(report["ranks"].as_array().unwrap().len(), ranks as usize, "{report}");
    }
}

#[test]
fn hosts_are_the_domains_of_a_job_with_shared_memory_inside_and_a_network_between() {
    // (hosts, ranks, scale-up team of rank 0, algorithm)
    let shapes =
        [(2, 4, &[0, 1][..], "hierarchical"), (3, 3, &[], "direct"), (2, 2, &[], "direct")];
    for (hosts, ranks, domain, algorithm) in shapes {
        let hosts = Hosts::new(hosts).unwrap();
        let config = Config::of_all_hosts("shm");
        for layout in ["flat --experts 24", "packed --experts 24"] {
            let report = right_result(&hosts, &config, ranks, Launcher::Slurm, layout);
            let comm = &report["communicator"];
            assert_eq!(comm["algorithm"], algorithm, "{report}");
            assert_eq!(comm["domains"], hosts.count(), "{report}");
            let team = |level: &str| comm[level]["team"].clone();
            if domain.is_empty() {
                assert!(comm["scale_up"].is_null(), "{report}");
            } else {
                assert_eq!(team("scale_up"), serde_json::json!(domain), "{report}");
                assert_eq!(team("scale_out"), serde_json::json!([0, 2]), "{report}");
            }
            let places = comm["places"].as_array().unwrap();
            let host_of = |rank: usize| &places[rank]["host"];
            let per_host = ranks as usize / hosts.count();
            for rank in 0..ranks as usize {
                let same = host_of(rank) == host_of(0);
                assert_eq!(same, rank < per_host, "rank {rank}: {report}");
            }
        }
    }
}

/// Runs a job to its end, which checks all received and combined rows. Returns its report.
fn right_result(
    hosts: &Hosts,
    config: &Config,
    ranks: u32,
    launcher: Launcher,
    layout: &str,
) -> serde_json::Value {
    let mut job = config.job(ranks);
    job.args.extend(["--layout"].into_iter().chain(layout.split(' ')).map(Into::into));
    let outcomes = job.start_on(hosts, launcher).unwrap().wait_all(SOON);
    for outcome in &outcomes {
        assert!(outcome.success(), "{launcher:?} {outcome:?}\n{}", outcome.stderr_tail);
    }
    let report = outcomes[0].lines.last().unwrap();
    let report: serde_json::Value = serde_json::from_str(report).unwrap();
    assert_eq!(report["check"]["passed"], true, "{report}");
    report
}

/// Runs mpirun on the first of two hosts. It starts processes on the other by this script instead
/// of ssh.
fn mpirun(hosts: &Hosts, name: &str, arguments: &str, program: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    // A process to enter, until the hosts are removed.
    let stay = "sleep 600 > /dev/null 2>&1 < /dev/null & echo $!";
    let stays = hosts.run(1, Command::new("sh").args(["-c", stay])).unwrap();
    let pid = String::from_utf8(stays.stdout).unwrap();
    let agent = folder.path().join("agent");
    let text = format!(
        "#!/bin/sh\nwhile [ \"${{1#-}}\" != \"$1\" ]; do shift; done\n[ \"$1\" = node1 ] || exit 9\n\
         shift\nexec nsenter -t {} -n -u -m sh -c \"$*\"\n",
        pid.trim()
    );
    std::fs::write(&agent, text).unwrap();
    std::fs::set_permissions(&agent, PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = Command::new(name);
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap()).env("TMPDIR", folder.path());
    let arguments = arguments.replace("{agent}", agent.to_str().unwrap());
    command.env("TOKENYARD_SECRET", "0123456789abcdef0123456789abcdef");
    command.args(arguments.split(' ')).arg(env!("CARGO_BIN_EXE_tokenyard")).args(program);
    hosts.run(0, &mut command).unwrap()
}

#[test]
fn ranks_of_mpirun_meet_across_hosts_by_the_documented_commands_and_not_without() {
    let open_mpi = "--allow-run-as-root --mca plm_rsh_agent {agent} --mca oob_tcp_if_include eth0 \
                    --host node0:2,node1:2 --bind-to none";
    let hydra = "-launcher ssh -launcher-exec {agent} -iface eth0 -hosts node0:2,node1:2";
    let master = "-x MASTER_ADDR=node0 -x TOKENYARD_SECRET";
    let bootstrap = "-genv TOKENYARD_BOOTSTRAP tcp://node0:29600";
    let config = Config::of_all_hosts("shm");
    let file = config.0.path().join("config.toml");
    let small = "--tokens 24 --hidden 128 --topk 3 --steps 3 --json";
    let run: Vec<&str> =
        ["run", file.to_str().unwrap()].into_iter().chain(small.split(' ')).collect();
    for (name, usual, more) in
        [("mpirun.openmpi", open_mpi, master), ("mpirun.mpich", hydra, bootstrap)]
    {
        let hosts = Hosts::new(2).unwrap();
        let refused = mpirun(&hosts, name, usual, &run);
        let text = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{name}: {text}");
        assert!(text.contains("MASTER_ADDR is not set"), "{name}: {text}");
        assert!(text.contains("2 of 4 ranks are on this host"), "{name}: {text}");

        let right = mpirun(&hosts, name, &format!("{usual} {more}"), &run);
        let text = String::from_utf8_lossy(&right.stderr);
        assert!(right.status.success(), "{name}: {text}");
        let out = String::from_utf8_lossy(&right.stdout);
        let report: serde_json::Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
        assert_eq!(report["check"]["passed"], true, "{report}");
        assert_eq!(report["ranks"].as_array().unwrap().len(), 4, "{report}");
        assert_eq!(report["communicator"]["domains"], 2, "{report}");
    }
}

#[test]
fn a_link_is_measured_between_two_hosts() {
    let config = Config::of_all_hosts("none");
    let small = "--namespaces --samples 1 --tokens 16 --hidden 128 --json";
    let output = Command::new(env!("CARGO_BIN_EXE_tokenyard"))
        .args(["bench", "link"])
        .arg(config.0.path().join("config.toml"))
        .args(small.split(' '))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["link"].as_array().unwrap();
    assert_eq!(rows.len(), 3, "{report}");
    for row in rows {
        let link = row["link"].as_str().unwrap();
        let ends = [0, 1].map(|host| Hosts::address(host, Net::Data).to_string());
        assert!(ends.iter().all(|end| link.contains(end)), "{link}: expected {ends:?}");
        assert!(row["bare"].as_f64().unwrap() > 0.0 && row["ours"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn the_named_interface_is_the_only_one_that_rank_0_listens_on() {
    let hosts = Hosts::new(2).unwrap();
    let shared = tempfile::tempdir().unwrap();
    let file = format!("file://{}", shared.path().join("job").display());
    let v4 = |net| IpAddr::from(Hosts::address(0, net));
    let v6 = |net| IpAddr::from(Hosts::address_v6(0, net));
    for (bootstrap, interface, listens) in [
        ("tcp://node0:4000", "eth0", v4(Net::Data)),
        ("tcp://node0-control:4000", "eth1", v4(Net::Control)),
        ("tcp://node0-ipv6:4000", "eth0", v6(Net::Data)),
        ("tcp://[2001:db8:1::1]:4000", "eth1", v6(Net::Control)),
        (&file, "eth1", v4(Net::Control)),
    ] {
        let world = format!("bootstrap = \"{bootstrap}\"\ninterface = \"{interface}\"");
        // The other rank cannot connect, so rank 0 continues to listen.
        hosts.cut(1, &Net::BOTH).unwrap();
        let config = Config::of_one_host(&world);
        let running = config.job(2).start_on(&hosts, Launcher::Hand).unwrap();
        let found = await_listener(&running);
        assert_eq!(found.iter().map(SocketAddr::ip).collect::<Vec<_>>(), [listens], "{bootstrap}");
        if bootstrap.starts_with("tcp") {
            assert_eq!(found[0].port(), PORT);
        }
        hosts.restore(1, &Net::BOTH).unwrap();
        expect_error(&running.wait_all(SOON), "the ranks are in 2 domains");
    }
}

#[test]
fn the_other_ranks_connect_from_the_named_interface() {
    let hosts = Hosts::new(2).unwrap();
    // A second address of the same network: the system itself would take the first.
    for (host, address) in [(0, "198.51.100.101/24"), (1, "198.51.100.102/24")] {
        let line = format!("addr add {address} dev eth1 label eth1:b");
        let output = hosts.run(host, Command::new("ip").args(line.split(' '))).unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    let world = "bootstrap = \"tcp://198.51.100.101:4000\"\ninterface = \"eth1:b\"";
    let config = Config::of_one_host(world);
    let running = config.job(2).start_on(&hosts, Launcher::Hand).unwrap();
    let outcomes = running.wait_all(SOON);
    expect_error(&outcomes, "the ranks are in 2 domains");
    let log = &outcomes[0].stderr_tail;
    assert!(log.contains("on node1 at 198.51.100.102:"), "{log}");
}

#[test]
fn an_interface_that_is_not_there_ends_every_rank_with_those_that_are() {
    let hosts = Hosts::new(2).unwrap();
    let config = Config::of_one_host("interface = \"ib0\"");
    let outcomes = config.job(2).start_on(&hosts, Launcher::Torchrun).unwrap().wait_all(SOON);
    for (host, outcome) in outcomes.iter().enumerate() {
        let text = &outcome.stderr_tail;
        assert!(text.contains("found no interface \"ib0\", expected one of"), "{text}");
        for net in Net::BOTH {
            let address = Hosts::address(host, net);
            assert!(text.contains(&format!("{} ({address}, ", net.interface())), "{text}");
        }
        assert!(!outcome.success());
    }
}

#[test]
fn a_rank_0_that_is_looked_for_on_another_interface_says_so() {
    let hosts = Hosts::new(2).unwrap();
    let config = Config::of_one_host("interface = \"eth1\"\nlate_ms = 4000");
    let outcomes = config.job(2).start_on(&hosts, Launcher::Hand).unwrap().wait_all(SOON);
    let text = &outcomes[0].stderr_tail;
    assert!(
        text.contains("the ranks look for rank 0 at \"node0\" (192.0.2.1), expected an address of interface \"eth1\" (198.51.100.1"),
        "{text}"
    );
    expect_error(&outcomes[1..], "cannot reach rank 0");
}

/// The addresses at which rank 0 listens, once it does: all listeners of its host.
fn await_listener(running: &Running) -> Vec<SocketAddr> {
    let pid = running.pid(0).unwrap();
    let start = Instant::now();
    loop {
        let found = listeners(pid);
        if !found.is_empty() {
            return found;
        }
        let log = running.stderr_tail(0);
        assert!(start.elapsed() < SOON, "rank 0 listens nowhere: {log}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The listening sockets of a process's network, from the kernel's tables.
fn listeners(pid: u32) -> Vec<SocketAddr> {
    const LISTEN: &str = "0A";
    let mut found = Vec::new();
    for table in ["tcp", "tcp6"] {
        let text = std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap();
        for line in text.lines().skip(1) {
            let words: Vec<&str> = line.split_whitespace().collect();
            if words[3] == LISTEN {
                found.push(address(words[1]));
            }
        }
    }
    found
}

/// Reads `010200C0:0FA0`: words of 4 bytes in the byte order of the machine.
fn address(text: &str) -> SocketAddr {
    let (ip, port) = text.split_once(':').unwrap();
    let word = |at: usize| u32::from_str_radix(&ip[at..at + 8], 16).unwrap().to_ne_bytes();
    let ip: IpAddr = if ip.len() == 8 {
        Ipv4Addr::from(word(0)).into()
    } else {
        let bytes: Vec<u8> = [0, 8, 16, 24].into_iter().flat_map(word).collect();
        Ipv6Addr::from(<[u8; 16]>::try_from(bytes).unwrap()).into()
    };
    SocketAddr::new(ip, u16::from_str_radix(port, 16).unwrap())
}
