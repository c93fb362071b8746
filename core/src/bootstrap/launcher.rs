//! What the launchers put into the environment.

use super::hostlist;
use super::identity::{BOOTSTRAP_VARIABLE, OPERATION, Place, Rendezvous};
use crate::{Error, ErrorKind, Result};

const PORT_VARIABLE: &str = "TOKENYARD_PORT";
/// Slurm jobs get a port of this range unless told otherwise.
const SLURM_PORTS: std::ops::Range<u64> = 20_000..60_000;

/// The environment of a process. Empty variables count as unset, as scripts often leave them so.
pub(super) struct Env<'a>(&'a dyn Fn(&str) -> Option<String>);

impl<'a> Env<'a> {
    pub(super) fn new(lookup: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self(lookup)
    }

    pub(super) fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    fn require(&self, name: &str, expected: &str) -> Result<String> {
        self.get(name).ok_or_else(|| refuse(format!("{name} is not set, expected {expected}")))
    }

    fn number<T: std::str::FromStr>(&self, name: &str, expected: &str) -> Result<T> {
        let value = self.require(name, expected)?;
        value.parse().map_err(|_| refuse(format!("found {name}={value:?}, expected {expected}")))
    }

    fn port(&self, name: &str) -> Result<u16> {
        match self.number(name, "a port from 1 to 65535")? {
            0 => Err(refuse(format!("found {name}=\"0\", expected a port from 1 to 65535"))),
            port => Ok(port),
        }
    }
}

/// Who started the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Launcher {
    Torchrun,
    Slurm,
    OpenMpi,
}

impl Launcher {
    const ALL: [Self; 3] = [Self::Torchrun, Self::Slurm, Self::OpenMpi];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Torchrun => "torchrun",
            Self::Slurm => "Slurm",
            Self::OpenMpi => "Open MPI",
        }
    }

    /// The variables of rank, ranks and local rank.
    fn variables(self) -> [&'static str; 3] {
        match self {
            Self::Torchrun => ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
            Self::Slurm => ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
            Self::OpenMpi => {
                ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"]
            }
        }
    }

    fn is_present(self, env: &Env<'_>) -> bool {
        let [rank, ranks, _] = self.variables();
        let set = |name| env.get(name).is_some();
        match self {
            // RANK alone is a common name; only a launcher sets both.
            Self::Torchrun => set(rank) && (set(ranks) || set("MASTER_ADDR")),
            // Under mpirun, Slurm's ids are those of mpirun's daemons, one per host.
            Self::Slurm => {
                let [mpi_rank, mpi_ranks, _] = Self::OpenMpi.variables();
                let daemon = set(mpi_rank)
                    && (env.get(mpi_rank) != env.get(rank) || env.get(mpi_ranks) != env.get(ranks));
                set(rank) && !daemon
            }
            Self::OpenMpi => set(rank),
        }
    }

    pub(super) fn place(self, env: &Env<'_>) -> Result<Place> {
        place_from(self.variables(), env)
            .map_err(|error| error.with_context("launcher", self.name()))
    }

    /// Where rank 0 listens, as this launcher tells it.
    pub(super) fn rendezvous(self, env: &Env<'_>) -> Result<Rendezvous> {
        let place = match self {
            Self::Torchrun | Self::OpenMpi => master(env),
            Self::Slurm => first_host(env),
        };
        place.map(|(host, port)| Rendezvous::Tcp { host, port }).map_err(|error| {
            error.with_context("launcher", self.name()).with_fix(format!(
                "set {BOOTSTRAP_VARIABLE}=tcp://<host of rank 0>:<free port>, the same on all ranks"
            ))
        })
    }
}

/// The launcher of this process, if there is one.
pub(super) fn detect(env: &Env<'_>) -> Option<Launcher> {
    Launcher::ALL.into_iter().find(|launcher| launcher.is_present(env))
}

/// The rank's place, from tokenyard's own variables or else from the launcher, and who said so.
pub(super) fn place(env: &Env<'_>) -> Result<(Place, &'static str)> {
    const OWN: [&str; 3] = ["TOKENYARD_RANK", "TOKENYARD_RANKS", "TOKENYARD_LOCAL_RANK"];
    if OWN.iter().any(|name| env.get(name).is_some()) {
        return Ok((place_from(OWN, env)?, "TOKENYARD_RANK"));
    }
    let launcher = detect(env).ok_or_else(|| nobody(env, false))?;
    Ok((launcher.place(env)?, launcher.name()))
}

/// The error when no launcher is there. `wanted_address` says whether rank 0's address is open too.
pub(super) fn nobody(env: &Env<'_>, wanted_address: bool) -> Error {
    let seen: Vec<String> = Launcher::ALL
        .into_iter()
        .map(|launcher| {
            let state =
                |name| format!("{name} {}", if env.get(name).is_some() { "set" } else { "unset" });
            let [rank, ranks, _] = launcher.variables();
            format!("{} ({}, {})", launcher.name(), state(rank), state(ranks))
        })
        .collect();
    let own = if wanted_address { format!("{BOOTSTRAP_VARIABLE}, ") } else { String::new() };
    refuse(format!(
        "found no launcher; looked for {own}TOKENYARD_RANK, {}; expected one of them",
        seen.join(", ")
    ))
    .with_fix(format!(
        "start with torchrun, srun or mpirun, or set TOKENYARD_RANK, TOKENYARD_RANKS, \
         TOKENYARD_LOCAL_RANK{}",
        if wanted_address { format!(" and {BOOTSTRAP_VARIABLE}") } else { String::new() }
    ))
}

fn place_from([rank, ranks, local_rank]: [&str; 3], env: &Env<'_>) -> Result<Place> {
    let place = Place {
        rank: env.number(rank, "this process's rank")?,
        ranks: env.number(ranks, "the number of ranks")?,
        local_rank: env.number(local_rank, "the rank's index on its host")?,
    };
    place
        .new()
        .map_err(|error| error.with_context("variables", format!("{rank}, {ranks}, {local_rank}")))
}

/// `MASTER_ADDR` and the port after `MASTER_PORT`, which torch's own store holds.
fn master(env: &Env<'_>) -> Result<(String, u16)> {
    let host = env.require("MASTER_ADDR", "the host of rank 0")?;
    if env.get(PORT_VARIABLE).is_some() {
        return Ok((host, env.port(PORT_VARIABLE)?));
    }
    match env.port("MASTER_PORT")?.checked_add(1) {
        Some(port) => Ok((host, port)),
        None => Err(refuse(format!(
            "found MASTER_PORT=\"65535\", expected at most 65534: rank 0 listens on the next port, \
             or on {PORT_VARIABLE}"
        ))),
    }
}

/// The first host of a Slurm step, and a port that the job and step ids fix.
fn first_host(env: &Env<'_>) -> Result<(String, u16)> {
    let name = match env.get("SLURM_STEP_NODELIST") {
        Some(_) => "SLURM_STEP_NODELIST",
        None => "SLURM_JOB_NODELIST",
    };
    let list = env.require(name, "the hosts of the step (or SLURM_STEP_NODELIST)")?;
    let hosts = hostlist::expand(&list).map_err(|error| error.with_context("variable", name))?;
    let host = hosts.into_iter().next().ok_or_else(|| refuse(format!("{name} names no host")))?;
    if env.get(PORT_VARIABLE).is_some() {
        return Ok((host, env.port(PORT_VARIABLE)?));
    }
    let job: u64 = env.number("SLURM_JOB_ID", "the id of the job")?;
    let step_name = match env.get("SLURM_STEPID") {
        Some(_) => "SLURM_STEPID",
        None => "SLURM_STEP_ID",
    };
    let step: u64 = env.number(step_name, "the id of the step, as srun sets it")?;
    // Neighbouring jobs and steps of a host land far apart (Fibonacci hashing).
    let mixed = (job.rotate_left(20) ^ step).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    let port = SLURM_PORTS.start + mixed % (SLURM_PORTS.end - SLURM_PORTS.start);
    Ok((host, port as u16))
}

fn refuse(message: String) -> Error {
    Error::new(ErrorKind::InvalidInput, OPERATION, message)
}

#[cfg(test)]
mod tests;
