//! What the launchers put into the environment.

use super::hostlist;
use super::identity::{BOOTSTRAP_VARIABLE, OPERATION, RankId, Rendezvous};
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

    pub(super) fn place(self, env: &Env<'_>) -> Result<RankId> {
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
pub(super) fn place(env: &Env<'_>) -> Result<(RankId, &'static str)> {
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

fn place_from([rank, ranks, local_rank]: [&str; 3], env: &Env<'_>) -> Result<RankId> {
    let place = RankId {
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
mod tests {
    use super::super::identity::Identity;
    use super::*;

    const TORCHRUN: &[(&str, &str)] = &[
        ("RANK", "5"),
        ("WORLD_SIZE", "16"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node-7"),
        ("MASTER_PORT", "29500"),
    ];
    const SLURM: &[(&str, &str)] = &[
        ("SLURM_PROCID", "3"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_LOCALID", "3"),
        ("SLURM_STEP_NODELIST", "gpu[003-007,9],login1"),
        ("SLURM_JOB_NODELIST", "other[1-9]"),
        ("SLURM_JOB_ID", "123456"),
        ("SLURM_STEP_ID", "0"),
    ];
    const OPEN_MPI: &[(&str, &str)] = &[
        ("OMPI_COMM_WORLD_RANK", "2"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
    ];
    const OWN: &[(&str, &str)] =
        &[("TOKENYARD_RANK", "1"), ("TOKENYARD_RANKS", "2"), ("TOKENYARD_LOCAL_RANK", "1")];

    /// Resolves with the variables of `sets`; a later one wins, an empty one is unset.
    fn resolve(spec: &str, sets: &[&[(&str, &str)]]) -> Result<Identity> {
        let lookup = |name: &str| {
            let all = sets.iter().rev().flat_map(|set| set.iter().rev());
            all.into_iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        };
        Identity::resolve(spec, &lookup)
    }

    fn resolved(spec: &str, sets: &[&[(&str, &str)]]) -> ((u32, u32, u32), String, String) {
        let Identity { place, rendezvous, source } = resolve(spec, sets).unwrap();
        ((place.rank, place.ranks, place.local_rank), rendezvous.to_string(), source)
    }

    fn refused(spec: &str, sets: &[&[(&str, &str)]]) -> String {
        let error = resolve(spec, sets).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        error.to_string()
    }

    #[test]
    fn torchrun_gives_all_and_the_port_after_its_own() {
        let (place, at, source) = resolved("env", &[TORCHRUN]);
        assert_eq!((place, at.as_str()), ((5, 16, 1), "tcp://node-7:29501"));
        assert_eq!(source, "torchrun");
        let (_, at, _) = resolved("env", &[TORCHRUN, &[("TOKENYARD_PORT", "7000")]]);
        assert_eq!(at, "tcp://node-7:7000");
    }

    #[test]
    fn slurm_gives_the_first_host_of_the_step_and_a_port_of_the_job() {
        let (place, at, source) = resolved("env", &[SLURM]);
        assert_eq!((place, source.as_str()), ((3, 8, 3), "Slurm"));
        let port: u64 = at.strip_prefix("tcp://gpu003:").unwrap().parse().unwrap();
        assert!(SLURM_PORTS.contains(&port));
        assert_eq!(resolved("env", &[SLURM]).1, at);
        assert_ne!(resolved("env", &[SLURM, &[("SLURM_STEP_ID", "1")]]).1, at);
        assert_ne!(resolved("env", &[SLURM, &[("SLURM_JOB_ID", "123457")]]).1, at);
        let told = resolved("env", &[SLURM, &[("TOKENYARD_PORT", "7000")]]);
        assert_eq!(told.1, "tcp://gpu003:7000");
        let of_job = resolved("env", &[SLURM, &[("SLURM_STEP_NODELIST", "")]]);
        assert!(of_job.1.starts_with("tcp://other1:"));
    }

    #[test]
    fn open_mpi_needs_to_be_told_where_rank_0_is() {
        let text = refused("env", &[OPEN_MPI]);
        assert!(text.contains("MASTER_ADDR is not set") && text.contains("Open MPI"), "{text}");
        assert!(text.contains("set TOKENYARD_BOOTSTRAP=tcp://"), "{text}");
        let master = &[("MASTER_ADDR", "n0"), ("TOKENYARD_PORT", "7000")];
        let (place, at, source) = resolved("env", &[OPEN_MPI, master]);
        assert_eq!((place, at.as_str()), ((2, 4, 0), "tcp://n0:7000"));
        assert_eq!(source, "Open MPI");
        let told = resolved("env", &[OPEN_MPI, &[("TOKENYARD_BOOTSTRAP", "file:///s/job")]]);
        assert_eq!((told.0, told.1.as_str()), ((2, 4, 0), "file:///s/job"));
    }

    #[test]
    fn the_launchers_are_asked_in_order() {
        assert_eq!(resolved("env", &[SLURM, TORCHRUN, OPEN_MPI]).2, "torchrun");
        let bootstrap = &[("TOKENYARD_BOOTSTRAP", "tcp://h:1")];
        let (place, at, source) = resolved("env", &[TORCHRUN, bootstrap]);
        assert_eq!((place.0, at.as_str()), (5, "tcp://h:1"));
        assert_eq!(source, "tcp://h:1, ranks from torchrun");
        assert_eq!(resolved("env", &[TORCHRUN, OWN, bootstrap]).0, (1, 2, 1));
    }

    #[test]
    fn under_mpirun_the_ids_of_slurm_are_those_of_its_daemons() {
        let master = &[("MASTER_ADDR", "n0"), ("TOKENYARD_PORT", "7000")];
        assert_eq!(resolved("env", &[SLURM, OPEN_MPI, master]).2, "Open MPI");
        let same = &[
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "8"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "3"),
        ];
        assert_eq!(resolved("env", &[SLURM, same]).2, "Slurm");
    }

    #[test]
    fn a_given_address_takes_the_ranks_from_the_first_who_knows() {
        for (sets, rank, from) in [
            (&[OWN][..], 1, "TOKENYARD_RANK"),
            (&[TORCHRUN, OWN], 1, "TOKENYARD_RANK"),
            (&[TORCHRUN], 5, "torchrun"),
            (&[SLURM], 3, "Slurm"),
            (&[OPEN_MPI], 2, "Open MPI"),
        ] {
            let (place, at, source) = resolved("tcp://h:1", sets);
            assert_eq!((place.0, at.as_str()), (rank, "tcp://h:1"));
            assert_eq!(source, format!("tcp://h:1, ranks from {from}"));
        }
    }

    #[test]
    fn every_missing_variable_is_named_with_what_it_should_hold() {
        for (set, names) in [
            (TORCHRUN, &["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"][..]),
            (SLURM, &["SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"]),
            (OPEN_MPI, &["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"]),
        ] {
            for name in names {
                let text = refused("env", &[set, &[(name, "")]]);
                assert!(
                    text.contains(&format!("{name} is not set, expected the"))
                        || *name == "MASTER_PORT",
                    "{text}"
                );
                assert!(text.contains(name), "{text}");
            }
        }
        for name in ["TOKENYARD_RANK", "TOKENYARD_RANKS", "TOKENYARD_LOCAL_RANK"] {
            let text = refused("tcp://h:1", &[OWN, &[(name, "")]]);
            assert!(text.contains(&format!("{name} is not set")), "{text}");
        }
        let no_hosts: &[(&str, &str)] = &[("SLURM_STEP_NODELIST", ""), ("SLURM_JOB_NODELIST", "")];
        assert!(refused("env", &[SLURM, no_hosts]).contains("SLURM_JOB_NODELIST is not set"));
        assert!(
            refused("env", &[SLURM, &[("SLURM_STEP_ID", "")]]).contains("SLURM_STEP_ID is not set")
        );
    }

    #[test]
    fn every_malformed_variable_is_named_with_its_value() {
        for (set, name, value) in [
            (TORCHRUN, "RANK", "one"),
            (TORCHRUN, "WORLD_SIZE", "-4"),
            (TORCHRUN, "MASTER_PORT", "99999"),
            (TORCHRUN, "TOKENYARD_PORT", "0"),
            (SLURM, "SLURM_PROCID", "0x1"),
            (SLURM, "SLURM_JOB_ID", "12_1"),
            (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "2.0"),
        ] {
            let text = refused("env", &[set, &[(name, value)]]);
            assert!(text.contains(&format!("found {name}={value:?}, expected")), "{text}");
        }
        let list = refused("env", &[SLURM, &[("SLURM_STEP_NODELIST", "gpu[3-")]]);
        assert!(list.contains("unclosed") && list.contains("SLURM_STEP_NODELIST"), "{list}");
        let spec = refused("env", &[OWN, &[("TOKENYARD_BOOTSTRAP", "env")]]);
        assert!(spec.contains("TOKENYARD_BOOTSTRAP") && spec.contains("neither"), "{spec}");
        let outside = refused("env", &[TORCHRUN, &[("RANK", "16")]]);
        assert!(outside.contains("rank 16 of 16") && outside.contains("WORLD_SIZE"), "{outside}");
        assert!(refused("env", &[TORCHRUN, &[("MASTER_PORT", "65535")]]).contains("65534"));
    }

    #[test]
    fn without_a_launcher_all_that_were_looked_for_are_named() {
        let text = refused("env", &[]);
        for name in ["TOKENYARD_BOOTSTRAP", "torchrun", "Slurm", "Open MPI", "RANK unset"] {
            assert!(text.contains(name), "{name}: {text}");
        }
        assert!(refused("tcp://h:1", &[]).contains("TOKENYARD_RANKS"));
    }
}
