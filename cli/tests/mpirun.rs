//! Jobs that mpirun starts: that of Open MPI, and Hydra, which is part of MPICH.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

mod common;

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::{children, expect_code, json, lives, names, program, repository, stderr, stdout};
use rustix::process::{Pid, Signal, kill_process};

const SOON: Duration = Duration::from_secs(60);
const SMALL: &str = "--tokens 8 --hidden 64 --experts 8";
/// Jobs so far.
static JOBS: AtomicU32 = AtomicU32::new(0);
const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// Implementations of mpirun, by their names on Debian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mpirun {
    OpenMpi,
    Hydra,
}

impl Mpirun {
    const ALL: [Self; 2] = [Self::OpenMpi, Self::Hydra];

    fn command(self, ranks: u32) -> Command {
        let (name, more): (_, &[&str]) = match self {
            Self::OpenMpi => ("mpirun.openmpi", &["--allow-run-as-root", "--oversubscribe"]),
            Self::Hydra => ("mpirun.mpich", &[]),
        };
        let mut command = program(Path::new(name));
        command.args(more).args(["-n", &ranks.to_string()]);
        // Jobs of Open MPI that start at once fail where each makes the folder that they share: "File exists".
        let folder =
            format!("ompi-{}-{}", std::process::id(), JOBS.fetch_add(1, Ordering::Relaxed));
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
        command.env("OMPI_MCA_orte_tmpdir_base", folder);
        command
    }

    /// `tokenyard run configs/cpu.toml`, with variables that mpirun or a wrapper sets.
    fn run(self, ranks: u32, variables: &[&str], arguments: &str) -> Command {
        let mut command = self.command(ranks);
        command.arg("env").args(variables).arg(env!("CARGO_BIN_EXE_tokenyard"));
        command.arg("run").arg(repository("configs/cpu.toml"));
        command.args(arguments.split_whitespace());
        command
    }

    /// The variables of 2 ranks, each on its own host, as far as the variables of this launcher
    /// show.
    fn each_on_its_host(self) -> &'static str {
        match self {
            Self::OpenMpi => "OMPI_COMM_WORLD_LOCAL_SIZE=1",
            Self::Hydra => "MPI_LOCALNRANKS=1",
        }
    }
}

fn output(command: &mut Command) -> Output {
    Job::start(command).output()
}

/// An mpirun. It ends, and its ranks with it, when a test fails.
struct Job(Option<Child>);

impl Job {
    fn start(command: &mut Command) -> Self {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let missing = |e| panic!("{command:?} ({e}): apt-get install openmpi-bin mpich");
        Self(Some(child.unwrap_or_else(missing)))
    }

    fn id(&self) -> u32 {
        self.0.as_ref().unwrap().id()
    }

    fn output(mut self) -> Output {
        self.0.take().unwrap().wait_with_output().unwrap()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = kill_process(Pid::from_child(child), Signal::TERM);
            let _ = child.wait();
        }
    }
}

/// One world of `ranks` ranks ran, and its elements are right.
fn expect_one_world(output: &Output, ranks: usize) {
    expect_code(output, 0);
    let report = json(output);
    assert_eq!(report["ranks"].as_array().unwrap().len(), ranks, "{report}");
    assert_eq!(report["check"]["passed"], true, "{report}");
    // Rank 0 prints the report; the others print that they are done.
    let text = stderr(output);
    assert_eq!(text.matches(" are right").count(), ranks - 1, "{text}");
}

#[test]
fn the_ranks_of_mpirun_are_those_of_one_world_with_nothing_to_set() {
    for mpirun in Mpirun::ALL {
        for as_rank in ["", "--as-rank"] {
            let temporary = tempfile::tempdir().unwrap();
            let arguments = format!("{SMALL} --steps 3 --json {as_rank}");
            let mut command = mpirun.run(4, &[], &arguments);
            expect_one_world(&output(command.env("TMPDIR", temporary.path())), 4);
            assert_eq!(names(temporary.path()), [""; 0], "{mpirun:?}");
        }
    }
}

#[test]
fn a_rank_is_found_through_a_wrapper() {
    for mpirun in Mpirun::ALL {
        let mut command = mpirun.command(2);
        let line = format!(
            "{} run {} {SMALL} --steps 2 --json; exit $?",
            env!("CARGO_BIN_EXE_tokenyard"),
            repository("configs/cpu.toml").display()
        );
        expect_one_world(&output(command.args(["sh", "-c", &line])), 2);
    }
}

#[test]
fn jobs_at_the_same_time_on_a_host_do_not_meet_each_other() {
    // Ranks that joined another job's world would find that seed and steps differ.
    let jobs: Vec<_> = (0..3)
        .flat_map(|seed| Mpirun::ALL.map(|mpirun| (mpirun, seed)))
        .map(|(mpirun, seed)| {
            let arguments = format!("{SMALL} --steps {} --seed {seed} --json", 20 + seed);
            Job::start(&mut mpirun.run(2, &[], &arguments))
        })
        .collect();
    for job in jobs {
        expect_one_world(&job.output(), 2);
    }
}

/// The processes of a job's ranks, by rank, once all of them join or have joined.
fn ranks_of(job: &Job, variable: &str, count: usize) -> Vec<i32> {
    let start = Instant::now();
    loop {
        let mut found: Vec<(u32, i32)> = below(job.id())
            .into_iter()
            .filter_map(|pid| Some((rank_of(pid, variable)?, pid)))
            .collect();
        found.sort_unstable();
        if found.len() == count {
            return found.into_iter().map(|(_, pid)| pid).collect();
        }
        assert!(start.elapsed() < SOON, "found {found:?}, expected {count} ranks");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// All processes that a process, or one of these, has started.
fn below(parent: u32) -> Vec<i32> {
    let mine = children(parent);
    let further = mine.iter().flat_map(|pid| below(*pid as u32));
    mine.iter().copied().chain(further).collect()
}

/// The rank that a process of tokenyard is. It has threads once it joins.
fn rank_of(pid: i32, variable: &str) -> Option<u32> {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    let environment = std::fs::read_to_string(format!("/proc/{pid}/environ")).ok()?;
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.count();
    let start = format!("{variable}=");
    let value = environment.split('\0').find_map(|line| line.strip_prefix(&start))?;
    (name.trim() == "tokenyard" && threads > 1).then(|| value.parse().ok())?
}

#[test]
fn a_rank_that_is_killed_ends_the_job_and_is_named() {
    for (mpirun, variable, code, says) in [
        (Mpirun::OpenMpi, "OMPI_COMM_WORLD_RANK", 137, "process rank 1 with PID"),
        (Mpirun::Hydra, "PMI_RANK", 9, "Killed (signal 9)"),
    ] {
        let temporary = tempfile::tempdir().unwrap();
        let mut command = mpirun.run(3, &[], "--tokens 8 --hidden 64 --experts 9 --steps 40000000");
        let job = Job::start(command.env("TMPDIR", temporary.path()));
        let ranks = ranks_of(&job, variable, 3);
        kill_process(Pid::from_raw(ranks[1]).unwrap(), Signal::KILL).unwrap();
        // The deadlines of configs/cpu.toml end the job, or mpirun ends it at once.
        let output = job.output();
        expect_code(&output, code);
        let text = stdout(&output) + &stderr(&output);
        assert!(text.contains(says), "{mpirun:?}: {text}");
        let start = Instant::now();
        while ranks.iter().any(|pid| lives(*pid)) {
            assert!(start.elapsed() < SOON, "{mpirun:?}: a rank is left behind");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn the_exit_code_of_a_rank_that_cannot_run_is_that_of_mpirun() {
    for mpirun in Mpirun::ALL {
        let mut command = mpirun.command(2);
        command.args([env!("CARGO_BIN_EXE_tokenyard"), "run", "/no/such/config.toml"]);
        let output = output(&mut command);
        expect_code(&output, 2);
        assert!(stderr(&output).contains("/no/such/config.toml"), "{}", stderr(&output));
    }
}

#[test]
fn ranks_on_several_hosts_are_refused_by_name_and_run_with_the_command_that_the_error_gives() {
    for (mpirun, command) in [
        (Mpirun::OpenMpi, "mpirun -x MASTER_ADDR=$(hostname) -x TOKENYARD_SECRET ..."),
        (Mpirun::Hydra, "mpirun -genv TOKENYARD_BOOTSTRAP tcp://$(hostname):29600 ..."),
    ] {
        let hosts = [mpirun.each_on_its_host()];
        let refused = output(&mut mpirun.run(2, &hosts, SMALL));
        expect_code(&refused, 2);
        let text = stderr(&refused);
        assert!(text.contains("MASTER_ADDR is not set, expected the host of rank 0"), "{text}");
        assert!(text.contains("1 of 2 ranks are on this host"), "{text}");
        assert!(text.contains(command), "{text}");
    }
    // Addresses that others can reach, on a machine that may have no network: all addresses of the
    // machine.
    let hosts = [Mpirun::OpenMpi.each_on_its_host()];
    let arguments = format!("{SMALL} --steps 2 --json");
    let started = |secret: Option<&str>| {
        let mut command = Mpirun::OpenMpi.command(2);
        command.args(["-x", "MASTER_ADDR=0.0.0.0"]);
        if let Some(secret) = secret {
            command.env("TOKENYARD_SECRET", secret).args(["-x", "TOKENYARD_SECRET"]);
        }
        command.arg("env").args(hosts).arg(env!("CARGO_BIN_EXE_tokenyard"));
        command.arg("run").arg(repository("configs/cpu.toml"));
        output(command.args(arguments.split_whitespace()))
    };
    let refused = started(None);
    expect_code(&refused, 2);
    let text = stderr(&refused);
    assert!(text.contains("found no job secret") && text.contains("-x TOKENYARD_SECRET"), "{text}");
    expect_one_world(&started(Some(SECRET)), 2);
    // Hydra passes all variables on.
    let mut command = Mpirun::Hydra.run(2, &[Mpirun::Hydra.each_on_its_host()], &arguments);
    command.envs([("TOKENYARD_SECRET", SECRET), ("TOKENYARD_BOOTSTRAP", "tcp://0.0.0.0:29617")]);
    expect_one_world(&output(&mut command), 2);
}

#[test]
fn a_launcher_s_variables_that_contradict_those_of_mpirun_are_named() {
    for mpirun in Mpirun::ALL {
        let output = output(&mut mpirun.run(2, &["RANK=5", "WORLD_SIZE=16"], SMALL));
        expect_code(&output, 2);
        let text = stderr(&output);
        assert!(text.contains("RANK=5, WORLD_SIZE=16 (torchrun)"), "{mpirun:?}: {text}");
        let other = if mpirun == Mpirun::Hydra { "(Hydra)" } else { "(Open MPI)" };
        assert!(text.contains(other), "{mpirun:?}: {text}");
    }
}

#[test]
fn doctor_joins_the_world_of_mpirun() {
    for mpirun in Mpirun::ALL {
        let mut command = mpirun.command(2);
        command.args([env!("CARGO_BIN_EXE_tokenyard"), "doctor", "--world"]);
        let output = output(command.arg(repository("configs/cpu.toml")).arg("--json"));
        assert!(output.status.code().is_some_and(|code| code <= 1), "{}", stderr(&output));
        let ranks = json(&output)["ranks"].as_array().map(Vec::len);
        assert_eq!(ranks, Some(2), "{}", stdout(&output));
    }
}

#[test]
fn ranks_to_start_are_refused_where_mpirun_has_started_them() {
    let config = repository("configs/cpu.toml");
    for (words, says) in [
        (&["run", "--ranks", "4"][..], "found a world of 2 ranks; expected --ranks 4"),
        (&["bench", "link", "--ranks", "2"], "found --ranks 2 under mpirun"),
        (&["bench", "link", "--namespaces"], "found --namespaces under mpirun"),
    ] {
        let mut command = Mpirun::Hydra.command(2);
        let output = output(command.arg(env!("CARGO_BIN_EXE_tokenyard")).args(words).arg(&config));
        expect_code(&output, 2);
        assert!(stderr(&output).contains(says), "{words:?}: {}", stderr(&output));
    }
}
