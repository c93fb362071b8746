//! Jobs whose ranks are spread over hosts.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{self, Command, Stdio};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use super::Hosts;
use crate::interrupt;
use crate::job::{Job, fresh_secret};
use crate::keeper::{self, Start};
use crate::running::Running;

/// The port on which rank 0 listens when no launcher's variable gives it.
const PORT: u16 = 29_600;
/// The port on which torch's own store would listen.
const STORE_PORT: u16 = 29_500;

/// The launcher whose variables the ranks get. The launcher itself does not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// Variables that a person sets: `TOKENYARD_BOOTSTRAP=tcp://node0:...`, `TOKENYARD_RANK` and so
    /// on.
    Hand,
    /// The variables of torchrun.
    Torchrun,
    /// The variables of srun.
    Slurm,
}

/// One rank's place.
struct Seat {
    rank: u32,
    ranks: u32,
    host: u32,
    hosts: u32,
    local_rank: u32,
    local_ranks: u32,
}

impl Job {
    /// Starts the ranks on `hosts`, the same number on each, in order: the first ranks on host 0.
    /// The ranks get the variables that `launcher` would set and `TOKENYARD_SECRET` (fresh for this
    /// job), and no variable of another launcher. They die with this process.
    ///
    /// # Errors
    /// The number of ranks is not a multiple of the number of hosts, or a process could not be
    /// started. No rank runs then.
    pub fn start_on(&self, hosts: &Hosts, launcher: Launcher) -> Result<Running> {
        let count = hosts.count() as u32;
        ensure!(
            self.ranks > 0 && self.ranks.is_multiple_of(count),
            "start job: found {} ranks on {count} hosts, expected a multiple",
            self.ranks
        );
        let secret = fresh_secret()?;
        let folder = std::env::current_dir().context("start job: no working directory")?;
        let local_ranks = self.ranks / count;
        let starts = (0..self.ranks).map(|rank| {
            let host = rank / local_ranks;
            let seat = Seat {
                rank,
                ranks: self.ranks,
                host,
                hosts: count,
                local_rank: rank % local_ranks,
                local_ranks,
            };
            let mut command = self.command_on(&seat, launcher);
            command.env("TOKENYARD_SECRET", &secret).current_dir(&folder);
            Start { command, spaces: hosts.hosts.get(host as usize).cloned() }
        });
        let kept = keeper::start(starts.collect(), self.stderr)
            .with_context(|| format!("start job: program {}", self.program.display()))?;
        Ok(Running::new(kept, None))
    }

    fn command_on(&self, seat: &Seat, launcher: Launcher) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        for (name, _) in std::env::vars_os().filter(|(name, _)| is_of_a_launcher(name)) {
            command.env_remove(name);
        }
        command
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .envs(seat.variables(launcher))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        die_with_this_process(&mut command);
        interrupt::restore_in(&mut command);
        command
    }
}

impl Seat {
    fn variables(&self, launcher: Launcher) -> Vec<(&'static str, String)> {
        let Self { rank, ranks, host, hosts, local_rank, local_ranks } = self;
        let first = Hosts::name(0);
        match launcher {
            Launcher::Hand => vec![
                ("TOKENYARD_BOOTSTRAP", format!("tcp://{first}:{PORT}")),
                ("TOKENYARD_RANK", rank.to_string()),
                ("TOKENYARD_RANKS", ranks.to_string()),
                ("TOKENYARD_LOCAL_RANK", local_rank.to_string()),
            ],
            Launcher::Torchrun => vec![
                ("MASTER_ADDR", first),
                ("MASTER_PORT", STORE_PORT.to_string()),
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", ranks.to_string()),
                ("LOCAL_RANK", local_rank.to_string()),
                ("LOCAL_WORLD_SIZE", local_ranks.to_string()),
                ("GROUP_RANK", host.to_string()),
                ("GROUP_WORLD_SIZE", hosts.to_string()),
                ("ROLE_RANK", rank.to_string()),
                ("ROLE_WORLD_SIZE", ranks.to_string()),
                ("TORCHELASTIC_RUN_ID", "none".to_owned()),
            ],
            Launcher::Slurm => {
                let list = format!("node[0-{}]", hosts - 1);
                vec![
                    ("SLURM_PROCID", rank.to_string()),
                    ("SLURM_NTASKS", ranks.to_string()),
                    ("SLURM_LOCALID", local_rank.to_string()),
                    ("SLURM_NODEID", host.to_string()),
                    ("SLURM_NNODES", hosts.to_string()),
                    ("SLURM_NTASKS_PER_NODE", local_ranks.to_string()),
                    ("SLURMD_NODENAME", Hosts::name(*host as usize)),
                    ("SLURM_JOB_ID", "4242".to_owned()),
                    ("SLURM_STEP_ID", "0".to_owned()),
                    ("SLURM_JOB_NODELIST", list.clone()),
                    ("SLURM_STEP_NODELIST", list),
                ]
            }
        }
    }
}

/// Whether a launcher set a variable, for a rank or for the process that starts it.
fn is_of_a_launcher(name: &OsString) -> bool {
    let name = name.to_string_lossy();
    let starts = [
        "TOKENYARD_",
        "SLURM",
        "OMPI_",
        "PMI",
        "MPI_",
        "MASTER_",
        "TORCHELASTIC_",
        "GROUP_",
        "ROLE_",
    ];
    starts.iter().any(|start| name.starts_with(start))
        || ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"].contains(&&*name)
}

/// Ties a rank to this process before it runs, as a rank of torchrun or Slurm does not call
/// [`adopt`](crate::adopt).
fn die_with_this_process(command: &mut Command) {
    let parent = process::id().cast_signed();
    let tie = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the line above.
        if Pid::as_raw(getppid()) != parent {
            return Err(io::Error::from(rustix::io::Errno::SRCH));
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes two system calls and nothing else: it takes
    // no lock and allocates nothing, also where it fails.
    unsafe { command.pre_exec(tie) };
}
