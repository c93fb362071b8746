//! The environment variables of launchers.

mod hydra;
mod mpirun;

use super::hostlist;
use super::identity::{BOOTSTRAP_VARIABLE, OPERATION, RankId, Rendezvous};
use super::other_hosts::OtherHosts;
use tokenyard_errors::{Error, ErrorKind, Result};

const PORT_VARIABLE: &str = "TOKENYARD_PORT";
/// tokenyard's own variables of rank, ranks and local rank.
const OWN: [&str; 3] = ["TOKENYARD_RANK", "TOKENYARD_RANKS", "TOKENYARD_LOCAL_RANK"];
/// Jobs of Slurm and of Open MPI get a port of this range unless a variable names one.
const JOB_PORTS: std::ops::Range<u64> = 20_000..60_000;

/// The environment of a process. Empty variables count as unset, because scripts often leave them
/// empty.
pub(super) struct Env<'a>(&'a dyn Fn(&str) -> Option<String>);

impl<'a> Env<'a> {
    pub(super) fn new(lookup: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self(lookup)
    }

    pub(super) fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    pub(super) fn is_set(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn require(&self, name: &str, expected: &str) -> Result<String> {
        self.get(name).ok_or_else(|| {
            refuse(format!("{name} is not set, expected {expected}"))
                .with_fix(format!("set {name}, or start the ranks with a launcher that sets it"))
        })
    }

    fn number<T: std::str::FromStr>(&self, name: &str, expected: &str) -> Result<T> {
        let value = self.require(name, expected)?;
        value.parse().map_err(|_| wrong(name, &value, expected))
    }

    fn port(&self, name: &str) -> Result<u16> {
        match self.number(name, "a port from 1 to 65535")? {
            0 => Err(wrong(name, "0", "a port from 1 to 65535")),
            port => Ok(port),
        }
    }
}

fn wrong(name: &str, value: &str, expected: &str) -> Error {
    refuse(format!("found {name}={value:?}, expected {expected}"))
        .with_fix(format!("correct {name}, or start with a launcher, which sets it"))
}

/// The launcher that started the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Launcher {
    Torchrun,
    OpenMpi,
    /// The launcher of MPICH, Intel MPI and MVAPICH.
    Hydra,
    Slurm,
}

impl Launcher {
    /// The innermost first: mpirun and torchrun run inside jobs of Slurm, and Slurm does not run inside
    /// their jobs.
    const ALL: [Self; 4] = [Self::Torchrun, Self::OpenMpi, Self::Hydra, Self::Slurm];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Hydra => "Hydra",
            Self::Slurm => "Slurm",
        }
    }

    /// The variables of rank, ranks and local rank.
    fn variables(self) -> [&'static str; 3] {
        match self {
            Self::Torchrun => ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
            Self::OpenMpi => {
                ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"]
            }
            Self::Hydra => ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],
            Self::Slurm => ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
        }
    }

    fn is_present(self, env: &Env<'_>) -> bool {
        let [rank, ranks, local_rank] = self.variables();
        match self {
            // RANK alone is a common name; only a launcher sets both.
            Self::Torchrun => env.is_set(rank) && (env.is_set(ranks) || env.is_set("MASTER_ADDR")),
            // Slurm sets the first two as well (`srun --mpi=pmi2`), but not the last.
            Self::Hydra => env.is_set(rank) && env.is_set(local_rank),
            Self::OpenMpi | Self::Slurm => env.is_set(rank),
        }
    }

    /// Rank and number of ranks, as far as they are numbers.
    fn claim(self, env: &Env<'_>) -> [Option<u32>; 2] {
        let [rank, ranks, _] = self.variables();
        [rank, ranks].map(|name| env.get(name)?.parse().ok())
    }

    /// The claim with its variables, as text for display.
    fn shown_claim(self, env: &Env<'_>) -> String {
        let [rank, ranks, _] = self.variables();
        let shown = |name| format!("{name}={}", env.get(name).unwrap_or_default());
        format!("{}, {} ({})", shown(rank), shown(ranks), self.name())
    }

    pub(super) fn place(self, env: &Env<'_>) -> Result<RankId> {
        place_from(self.variables(), env)
            .map_err(|error| error.with_context("launcher", self.name()))
    }

    /// The ranks on other hosts, as this launcher states them.
    pub(super) fn other_hosts(self, place: RankId, env: &Env<'_>) -> OtherHosts {
        let number = |name: &str| env.get(name)?.parse::<u32>().ok();
        let are_stated = match self {
            Self::Slurm => {
                let hosts = ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"].into_iter().find_map(number);
                hosts.is_some_and(|hosts| hosts > 1)
            }
            Self::Torchrun => number("LOCAL_WORLD_SIZE").is_some_and(|here| here < place.ranks),
            Self::OpenMpi | Self::Hydra => {
                number(mpirun::local_ranks(self)).is_some_and(|here| here < place.ranks)
            }
        };
        if are_stated { OtherHosts::Stated } else { OtherHosts::NotStated }
    }

    /// The address of rank 0, as far as this launcher gives it.
    pub(super) fn rendezvous(self, place: RankId, env: &Env<'_>) -> Result<Rendezvous> {
        let tcp = |(host, port)| Rendezvous::Tcp { host, port };
        let found = match self {
            Self::Torchrun => master(env, None).map(tcp),
            Self::OpenMpi | Self::Hydra => mpirun::rendezvous(self, place, env),
            Self::Slurm => first_host(env).map(tcp),
        };
        found.map_err(|error| {
            let fix = error.fix().map_or_else(String::new, |fix| format!("{fix}; or "));
            error.with_context("launcher", self.name()).with_fix(format!(
                "{fix}set {BOOTSTRAP_VARIABLE}=tcp://<host of rank 0>:<free port>, the same on all \
                 ranks"
            ))
        })
    }
}

/// The launcher of this process, if there is one.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] where two launchers left variables that contradict each other, and nothing
/// shows which of them started this process.
pub(super) fn detect(env: &Env<'_>) -> Result<Option<Launcher>> {
    let mut present = Launcher::ALL.into_iter().filter(|launcher| launcher.is_present(env));
    let Some(first) = present.next() else { return Ok(None) };
    // torchrun starts its processes itself, so variables of other launchers belong to torchrun's own
    // process.
    if first == Launcher::Torchrun && env.is_set("TORCHELASTIC_RUN_ID") {
        return Ok(Some(first));
    }
    let contradicts = |other: &Launcher| {
        let pairs = first.claim(env).into_iter().zip(other.claim(env));
        // Under mpirun and torchrun, Slurm's ids belong to the processes that started the ranks.
        *other != Launcher::Slurm
            && pairs.into_iter().any(|(a, b)| a.zip(b).is_some_and(|(a, b)| a != b))
    };
    match present.find(contradicts) {
        None => Ok(Some(first)),
        Some(other) => Err(ambiguous(first, other, env)),
    }
}

fn ambiguous(one: Launcher, other: Launcher, env: &Env<'_>) -> Error {
    let unset =
        |launcher: Launcher| launcher.variables().map(|name| format!("-u {name}")).join(" ");
    refuse(format!(
        "found two launchers that contradict each other: {}; {}; expected the variables of the one that \
         started this process",
        one.shown_claim(env),
        other.shown_claim(env)
    ))
    .with_fix(format!(
        "start the ranks with `env {}` before the command if they are {}'s, or with `env {}` if they are {}'s",
        unset(other),
        one.name(),
        unset(one),
        other.name()
    ))
}

/// True if mpirun started this process as one of several ranks. The same cannot be known for torchrun and
/// Slurm: their variables are also set in shells inside a job, and in containers.
pub fn is_rank_of_mpirun(env: &dyn Fn(&str) -> Option<String>) -> bool {
    let env = Env::new(env);
    let within_torchrun = env.is_set("TORCHELASTIC_RUN_ID");
    let several = |launcher: Launcher| {
        let [_, ranks] = launcher.claim(&env);
        launcher.is_present(&env) && ranks.is_some_and(|ranks| ranks > 1)
    };
    !within_torchrun && [Launcher::OpenMpi, Launcher::Hydra].into_iter().any(several)
}

/// The variables of a launcher that started this process as one of several ranks, as text for display:
/// `RANK=0, WORLD_SIZE=8 (torchrun)`. Shells inside a job of Slurm may have them too.
pub fn launched_world(env: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let env = Env::new(env);
    let several = |ranks: Option<u32>| ranks.is_some_and(|ranks| ranks > 1);
    let [rank, ranks, _] = OWN;
    if env.is_set(rank) && several(env.get(ranks).and_then(|ranks| ranks.parse().ok())) {
        let shown = |name| format!("{name}={}", env.get(name).unwrap_or_default());
        return Some(format!("{}, {}", shown(rank), shown(ranks)));
    }
    let mut launchers = Launcher::ALL.into_iter();
    let found =
        launchers.find(|launcher| launcher.is_present(&env) && several(launcher.claim(&env)[1]))?;
    Some(found.shown_claim(&env))
}

/// The index of this process on its machine, as its launcher states it, whatever the world that it joins. Slurm comes
/// last, because under the other launchers its index is that of the process that started the ranks.
pub fn local_rank_of_environment(env: &dyn Fn(&str) -> Option<String>) -> Option<u32> {
    let env = Env::new(env);
    let launchers = Launcher::ALL.into_iter().map(|launcher| launcher.variables()[2]);
    std::iter::once(OWN[2]).chain(launchers).find_map(|name| env.get(name)?.parse().ok())
}

/// The statement of the launchers that count as many ranks. Without one it is not known: tokenyard's own variables do
/// not say it.
pub(super) fn other_hosts(place: RankId, env: &Env<'_>) -> OtherHosts {
    let same = |launcher: &Launcher| {
        launcher.is_present(env) && launcher.claim(env)[1] == Some(place.ranks)
    };
    let launchers = Launcher::ALL.into_iter().filter(same);
    let stated: Vec<_> = launchers.map(|launcher| launcher.other_hosts(place, env)).collect();
    match stated.contains(&OtherHosts::Stated) {
        true => OtherHosts::Stated,
        false if stated.is_empty() => OtherHosts::Unknown,
        false => OtherHosts::NotStated,
    }
}

/// The rank's place, and the launcher that gave it; none where tokenyard's own variables did.
pub(super) fn place(env: &Env<'_>) -> Result<(RankId, Option<Launcher>)> {
    if OWN.iter().any(|name| env.is_set(name)) {
        return Ok((place_from(OWN, env)?, None));
    }
    let launcher = detect(env)?.ok_or_else(|| no_launcher(env, false))?;
    Ok((launcher.place(env)?, Some(launcher)))
}

/// The error when no launcher was found. `wanted_address` is true if rank 0's address is missing too.
pub(super) fn no_launcher(env: &Env<'_>, wanted_address: bool) -> Error {
    let seen: Vec<String> = Launcher::ALL
        .into_iter()
        .map(|launcher| {
            let state = |name| format!("{name} {}", if env.is_set(name) { "set" } else { "unset" });
            let [rank, ranks, _] = launcher.variables();
            format!("{} ({}, {})", launcher.name(), state(rank), state(ranks))
        })
        .collect();
    let own = if wanted_address { format!("{BOOTSTRAP_VARIABLE}, ") } else { String::new() };
    // Set by PRRTE's prun without Open MPI.
    let pmix = match env.is_set("PMIX_RANK") {
        true => "; PMIX_RANK is set, which does not say how many ranks there are",
        false => "",
    };
    refuse(format!(
        "found no launcher; looked for {own}TOKENYARD_RANK, {}; expected one of them{pmix}",
        seen.join(", ")
    ))
    .with_fix(format!(
        "start with torchrun, srun or mpirun, or set TOKENYARD_RANK, TOKENYARD_RANKS, \
         TOKENYARD_LOCAL_RANK{}",
        if wanted_address { format!(" and {BOOTSTRAP_VARIABLE}") } else { String::new() }
    ))
}

fn place_from([rank, ranks, local_rank]: [&str; 3], env: &Env<'_>) -> Result<RankId> {
    let place = RankId {
        rank: env.number(rank, "this process's rank")?,
        ranks: env.number(ranks, "the number of ranks")?,
        local_rank: env.number(local_rank, "the rank's index on its host")?,
    };
    place
        .new()
        .map_err(|error| error.with_context("variables", format!("{rank}, {ranks}, {local_rank}")))
        .map_err(|error| {
            error.with_fix(format!("correct {rank} and {ranks}: a launcher sets both"))
        })
}

/// `MASTER_ADDR` and the port after `MASTER_PORT`, because torch's own store holds `MASTER_PORT`; or else
/// the port of the job.
fn master(env: &Env<'_>, of_job: Option<u16>) -> Result<(String, u16)> {
    let host = unbracketed(&env.require("MASTER_ADDR", "the host of rank 0")?).to_owned();
    if env.is_set(PORT_VARIABLE) {
        return Ok((host, env.port(PORT_VARIABLE)?));
    }
    if let (Some(port), false) = (of_job, env.is_set("MASTER_PORT")) {
        return Ok((host, port));
    }
    match env.port("MASTER_PORT")?.checked_add(1) {
        Some(port) => Ok((host, port)),
        None => Err(refuse(format!(
            "found MASTER_PORT=\"65535\", expected at most 65534: rank 0 listens on the next port, \
             or on {PORT_VARIABLE}"
        ))),
    }
}

/// An IPv6 address without the brackets that it has in URLs.
pub fn unbracketed(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
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
    if env.is_set(PORT_VARIABLE) {
        return Ok((host, env.port(PORT_VARIABLE)?));
    }
    let job: u64 = env.number("SLURM_JOB_ID", "the id of the job")?;
    let step_name = match env.get("SLURM_STEPID") {
        Some(_) => "SLURM_STEPID",
        None => "SLURM_STEP_ID",
    };
    let step: u64 = env.number(step_name, "the id of the step, as srun sets it")?;
    Ok((host, job_port(job.rotate_left(20) ^ step)))
}

/// The port of a job, by its number. Neighbouring jobs and steps of a host land far apart (Fibonacci hashing).
fn job_port(number: u64) -> u16 {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    (JOB_PORTS.start + mixed % (JOB_PORTS.end - JOB_PORTS.start)) as u16
}

fn refuse(message: String) -> Error {
    Error::new(ErrorKind::InvalidInput, OPERATION, message)
}

#[cfg(test)]
mod tests;
