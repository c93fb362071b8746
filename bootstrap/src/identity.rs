//! The rank of this process, and the address of rank 0.

use std::fmt;
use std::path::PathBuf;

use super::launcher::{self, Env};
use super::other_hosts::OtherHosts;
use tokenyard_errors::{Error, ErrorKind, Result};

pub(super) const OPERATION: &str = "resolve identity";

/// Holds a `tcp://` or `file://` specification, for launchers that do not give the address of rank 0.
pub const BOOTSTRAP_VARIABLE: &str = "TOKENYARD_BOOTSTRAP";

/// The most ranks of a world.
pub const MAX_RANKS: u32 = 1 << 20;

/// One rank's place in the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RankId {
    /// This rank, `0..ranks`.
    pub rank: u32,
    /// R: ranks in the world, 1 to [`MAX_RANKS`].
    pub ranks: u32,
    /// Index among the ranks of this host. With an exchange, its members find it out and replace it.
    pub local_rank: u32,
}

/// This process as its launcher counts. A world may be a group of the launcher's ranks, so these numbers say
/// nothing about the world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Launched {
    /// Its rank in the launcher's world, for messages.
    pub rank: Option<u32>,
    /// Its index on its machine, by which a topology finds its devices. Without one it is the local rank.
    pub local_rank: Option<u32>,
}

impl RankId {
    /// Checks the relations between the fields.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] when `rank` or `local_rank` is not below `ranks`, or `ranks` is
    /// not in `1..=MAX_RANKS`.
    pub fn new(self) -> Result<Self> {
        let Self { rank, ranks, local_rank } = self;
        let refuse = |message| Err(Error::new(ErrorKind::InvalidInput, OPERATION, message));
        if !(1..=MAX_RANKS).contains(&ranks) {
            return refuse(format!("found {ranks} ranks, expected 1 to {MAX_RANKS}"));
        }
        if rank >= ranks {
            return refuse(format!(
                "found rank {rank} of {ranks} ranks, expected it below {ranks}"
            ));
        }
        if local_rank >= ranks {
            return refuse(format!(
                "found local rank {local_rank} of {ranks} ranks, expected it below {ranks}"
            ));
        }
        Ok(self)
    }
}

/// A caller's own all-gather: it takes this rank's bytes and returns those of all ranks, by rank. Ranks
/// may pass different numbers of bytes.
pub type ExchangeFn = dyn FnMut(&[u8]) -> std::result::Result<Vec<Vec<u8>>, String> + Send;

/// How the ranks find rank 0.
pub enum Rendezvous {
    /// Rank 0 listens at this host and port.
    Tcp {
        /// A host name or an address.
        host: String,
        /// A port, not 0.
        port: u16,
    },
    /// Rank 0 writes its address to this file, which all ranks see.
    File {
        /// An absolute path.
        path: PathBuf,
    },
    /// The caller's exchange distributes rank 0's address and, if no secret is set, a fresh secret; and each rank's
    /// host, from which the local ranks follow. Called once, on the thread that joins.
    Exchange(Box<ExchangeFn>),
}

impl Rendezvous {
    /// Reads `tcp://host:port` or `file:///absolute/path`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for anything else.
    pub fn parse(spec: &str) -> Result<Self> {
        Self::judge(spec).map_err(|why| {
            let message = format!(
                "found {spec:?}, which {why}; expected \"tcp://host:port\" or \"file:///path\""
            );
            Error::new(ErrorKind::InvalidInput, OPERATION, message)
        })
    }

    /// As [`Rendezvous::parse`]; the error is only the reason of the refusal.
    pub fn judge(spec: &str) -> std::result::Result<Self, String> {
        let refuse = |why: String| Err(why);
        if let Some(address) = spec.strip_prefix("tcp://") {
            let Some((host, port)) = address.rsplit_once(':') else {
                return refuse("has no port".into());
            };
            let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
            let host = match bracketed {
                Some(inside) => inside,
                None if host.contains(':') => {
                    return refuse("is an IPv6 address without its brackets".into());
                }
                None => host,
            };
            return match port.parse::<u16>() {
                _ if host.is_empty() => refuse("has no host".into()),
                Ok(port) if port != 0 => Ok(Self::Tcp { host: host.to_owned(), port }),
                _ => refuse(format!("has the port {port:?}, which is not in 1 to 65535")),
            };
        }
        match spec.strip_prefix("file://") {
            Some(path) if path.starts_with('/') && !path.ends_with('/') => {
                Ok(Self::File { path: path.into() })
            }
            Some(_) => refuse("has a path that is not that of a file, from the root".into()),
            None => refuse("is neither tcp:// nor file://".into()),
        }
    }
}

impl fmt::Debug for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
            Self::File { path } => write!(f, "file://{}", path.display()),
            Self::Exchange(_) => f.write_str("the caller's exchange"),
        }
    }
}

/// The rank of this process, the address of rank 0, and the source of both.
#[derive(Debug)]
pub struct Identity {
    /// This rank's place.
    pub place: RankId,
    /// How to find rank 0.
    pub rendezvous: Rendezvous,
    /// The source of both, as text for display: `"torchrun"`, `"tcp://a:1, ranks from Slurm"`.
    pub source: String,
    /// The ranks on other hosts, as far as the source knows it.
    pub others: OtherHosts,
}

impl Identity {
    /// An identity that the caller gives.
    ///
    /// # Errors
    /// See [`RankId::new`].
    pub fn new(place: RankId, rendezvous: Rendezvous) -> Result<Self> {
        let source = "the caller".to_owned();
        Ok(Self { place: place.new()?, rendezvous, source, others: OtherHosts::default() })
    }

    /// Resolves the identity from `spec` and the environment.
    ///
    /// `spec` is `"env"`, `"tcp://host:port"` or `"file:///absolute/path"`; `env` looks a variable up.
    /// An empty variable counts as unset. `"env"` uses, in this order: `TOKENYARD_BOOTSTRAP`, which
    /// holds one of the other two; torchrun; Open MPI; Hydra (MPICH, Intel MPI); Slurm. With `tcp://`
    /// and `file://` the ranks come from `TOKENYARD_RANK`, `TOKENYARD_RANKS` and
    /// `TOKENYARD_LOCAL_RANK`, else from the same launchers. Slurm's task ids count only where no
    /// variable of the other launchers is set: else they belong to the processes that started the
    /// ranks.
    ///
    /// Ranks of mpirun that are all on one host need no more variables. They meet through a file in the
    /// folder that Open MPI makes for the job, or in the temporary folder, named by Hydra's process.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] names the missing or malformed variable, its value, the expected value,
    /// and the launchers that were searched for. Or it names two launchers that contradict each other about
    /// the rank or the number of ranks.
    pub fn resolve(spec: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let env = Env::new(env);
        if spec != "env" {
            return Self::at(Rendezvous::parse(spec)?, &env);
        }
        if let Some(spec) = env.get(BOOTSTRAP_VARIABLE) {
            let rendezvous = Rendezvous::parse(&spec)
                .map_err(|error| error.with_context("variable", BOOTSTRAP_VARIABLE))?;
            return Self::at(rendezvous, &env);
        }
        let launcher = launcher::detect(&env)?.ok_or_else(|| launcher::no_launcher(&env, true))?;
        let place = launcher.place(&env)?;
        Ok(Self {
            place,
            rendezvous: launcher.rendezvous(place, &env)?,
            source: launcher.name().to_owned(),
            others: launcher.other_hosts(place, &env),
        })
    }

    fn at(rendezvous: Rendezvous, env: &Env<'_>) -> Result<Self> {
        let (place, launcher) = launcher::place(env)?;
        let ranks_from = launcher.map_or("TOKENYARD_RANK", launcher::Launcher::name);
        let source = format!("{rendezvous}, ranks from {ranks_from}");
        let others = match launcher {
            Some(launcher) => launcher.other_hosts(place, env),
            None => launcher::other_hosts(place, env),
        };
        Ok(Self { place, rendezvous, source, others })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specifications_are_read_and_shown_alike() {
        for spec in ["tcp://node-1:29600", "tcp://[::1]:80", "file:///scratch/job.7"] {
            assert_eq!(Rendezvous::parse(spec).unwrap().to_string(), spec);
        }
    }

    #[test]
    fn malformed_specifications_are_refused_with_the_reason() {
        for (spec, reason) in [
            ("tcp://host", "no port"),
            ("tcp://:80", "no host"),
            ("tcp://[]:80", "no host"),
            ("tcp://host:0", "1 to 65535"),
            ("tcp://host:70000", "1 to 65535"),
            ("tcp://::1:80", "without its brackets"),
            ("file://relative", "from the root"),
            ("file:///folder/", "not that of a file"),
            ("env", "neither"),
            ("etcd://x", "neither"),
            ("", "neither"),
        ] {
            let error = Rendezvous::parse(spec).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.message().contains(reason), "{spec}: {error}");
        }
    }

    #[test]
    fn a_place_outside_the_world_is_refused() {
        for (rank, ranks, local_rank) in [(0, 0, 0), (2, 2, 0), (0, 2, 2), (0, MAX_RANKS + 1, 0)] {
            assert!(RankId { rank, ranks, local_rank }.new().is_err());
        }
        assert!(RankId { rank: 1, ranks: 2, local_rank: 1 }.new().is_ok());
    }
}
