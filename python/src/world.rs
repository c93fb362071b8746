//! The world: who takes part.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokenyard_core::bootstrap::{
    Identity, Launched, RankId, Rendezvous, Secret, World as CoreWorld, WorldOptions, environment,
    local_rank_of_environment, unbracketed,
};
use tokenyard_core::config::{Config as CoreConfig, WorldConfig};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::argument::{Argument, Word};
use crate::config::Config;
use crate::errors::{invalid, raise};
use crate::gather::{Failure, Gatherer, gpu_of_torch};
use crate::log;
use crate::owned::Owned;

/// The world's settings where no config has them.
const DEFAULT_CONFIG: &str = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";

/// All ranks of a job, joined. One rank is one process, or one thread of it.
///
/// `World(rank, ranks, exchange=f)` joins through an all-gather that the caller has: `f(mine: bytes) ->
/// list[bytes]`, given this rank's bytes, returns those of all ranks, in order. It is called once, in the thread
/// that joins. Through it the ranks also tell each other on which machine each is. `local_rank` is the index of
/// this process on its machine, by which a config with `auto` chooses devices; without it the launcher's variables
/// say it, or else the index among these ranks. See also `from_env`, `from_torch` and `from_mpi`. `config` (a
/// Config or a path) gives the deadlines, the interface and what a loss leads to; it should be the one that
/// communicators are opened with. Without it the deadline is 30 s and a live rank may be late by 30 minutes.
///
/// Joining blocks until all ranks have joined. A world may be used from any thread. As a context manager it is left
/// at the end; after an exception the other ranks receive it, so that they do not wait for this one.
///
/// Raises InvalidInputError, MismatchError (the ranks differ in size or timing), DeadlineError (a rank did not come; it
/// is named), PeerLostError.
#[pyclass(frozen, module = "tokenyard", weakref)]
pub(crate) struct World {
    core: Mutex<Option<Arc<Owned<Arc<CoreWorld>>>>>,
    place: RankId,
}

/// This process among those that join, and the way in which they gather.
struct Joiner {
    rank: u32,
    ranks: u32,
    launched: Launched,
    gather: Gatherer,
}

impl Joiner {
    /// Reads `rank` and `ranks` of the library that gathers. `world_rank`: this rank among all of that library.
    fn of_library(
        rank: &Bound<'_, PyAny>,
        ranks: &Bound<'_, PyAny>,
        world_rank: Option<u32>,
        gather: Gatherer,
    ) -> Result<Self> {
        let number = |value: &Bound<'_, PyAny>| value.extract::<u32>().ok();
        let local_rank = local_rank_of_environment(&environment);
        let launched = Launched { rank: world_rank, local_rank };
        match (number(rank), number(ranks)) {
            (Some(rank), Some(ranks)) => Ok(Self { rank, ranks, launched, gather }),
            _ => {
                let this =
                    world_rank.map_or("this process".to_owned(), |r| format!("world rank {r}"));
                let text = format!(
                    "found rank {rank} of {ranks} ranks for {this}; expected a group that {this} is a member of"
                );
                Err(Error::new(ErrorKind::InvalidInput, "join world", text)
                    .with_fix("let only the members of a group join its world"))
            }
        }
    }
}

impl World {
    fn new(core: CoreWorld) -> Self {
        let (rank, ranks, local_rank) = (core.rank(), core.ranks(), core.local_rank());
        log::add_world(&core);
        let core = Arc::new(Owned::new(Arc::new(core)));
        Self { core: Mutex::new(Some(core)), place: RankId { rank, ranks, local_rank } }
    }

    /// The world, if it was not left.
    pub(crate) fn core(&self) -> Result<Arc<Owned<Arc<CoreWorld>>>> {
        // Held for a copy of a pointer: no thread waits inside.
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        let world = core.clone().ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidInput,
                "use world",
                "the world was left; expected one that is joined",
            )
        })?;
        world.get()?;
        Ok(world)
    }

    fn take(&self) -> Option<Arc<Owned<Arc<CoreWorld>>>> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Joins through an all-gather of the caller.
    fn join(py: Python<'_>, joiner: Joiner, config: &Option<Bound<'_, PyAny>>) -> PyResult<Self> {
        let Joiner { rank, ranks, launched, gather } = joiner;
        let config = world_config(py, config)?;
        let failed: Arc<Mutex<Option<Failure>>> = Arc::default();
        let failed_inside = Arc::clone(&failed);
        let is_torch = matches!(gather, Gatherer::Torch { .. });
        let late = config.late;
        let exchange = move |mine: &[u8]| {
            gather.call(mine, ranks, late).map_err(|failure| {
                let text = failure.to_string();
                *failed_inside.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
                text
            })
        };
        let joined = py.detach(|| {
            let rendezvous = Rendezvous::Exchange(Box::new(exchange));
            // The members find out who is local.
            let place = RankId { rank, ranks, local_rank: 0 };
            let mut options = WorldOptions::configured(&config, Identity::new(place, rendezvous)?);
            options.launched = launched;
            if is_torch && options.interface.is_none() {
                options.bind = address_towards_master();
            }
            CoreWorld::join(WorldOptions { secret: Secret::from_env(&environment)?, ..options })
        });
        joined.map(Self::new).map_err(|error| {
            match failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
                Some(Failure::Late(text)) => {
                    let world =
                        launched.rank.map_or(String::new(), |r| format!(", world rank {r}"));
                    let text = format!("rank {rank} of {ranks}{world}: {text}");
                    let fix =
                        "read the logs of the group's members: which did not reach this call?";
                    raise(py, &Error::new(ErrorKind::Deadline, "join world", text).with_fix(fix))
                }
                Some(Failure::Raised(cause)) => {
                    let exception = raise(py, &error);
                    exception.set_cause(py, Some(cause));
                    exception
                }
                None => raise(py, &error),
            }
        })
    }
}

fn world_config(py: Python<'_>, config: &Option<Bound<'_, PyAny>>) -> PyResult<WorldConfig> {
    match config {
        Some(config) => Config::read(config),
        None => CoreConfig::parse(DEFAULT_CONFIG, "default"),
    }
    .map(|config| config.world)
    .map_err(|error| raise(py, &error))
}

#[pymethods]
impl World {
    #[new]
    #[pyo3(signature = (rank, ranks, *, exchange, local_rank=None, config=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn py_new(
        py: Python<'_>,
        rank: Argument<u32>,
        ranks: Argument<u32>,
        exchange: Py<PyAny>,
        local_rank: Option<Argument<u32>>,
        config: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let read = || {
            let local_rank = local_rank.map(|given| given.get("local_rank")).transpose()?;
            let local_rank = local_rank.or_else(|| local_rank_of_environment(&environment));
            let launched = Launched { rank: None, local_rank };
            let (rank, ranks) = (rank.get("rank")?, ranks.get("ranks")?);
            Ok(Joiner { rank, ranks, launched, gather: Gatherer::Function(exchange) })
        };
        let joiner = read().map_err(|error| raise(py, &error))?;
        Self::join(py, joiner, &config)
    }

    /// Joins the world that the environment describes: the variables of torchrun, Slurm or Open MPI, or
    /// `TOKENYARD_BOOTSTRAP`; the secret is in `TOKENYARD_SECRET` or `TOKENYARD_SECRET_FILE`.
    ///
    /// Raises InvalidInputError, which names the variable, and what the class names.
    #[staticmethod]
    #[pyo3(signature = (config=None))]
    fn from_env(py: Python<'_>, config: Option<Bound<'_, PyAny>>) -> PyResult<Self> {
        let config = world_config(py, &config)?;
        let joined = py.detach(|| CoreWorld::from_config(&config));
        joined.map(Self::new).map_err(|error| raise(py, &error))
    }

    /// Joins the ranks of a process group of torch, the default group if none is given; a group of some ranks is a
    /// world of its own. It uses `torch.distributed.all_gather_object` of that group once, on a thread of its own: a
    /// member that does not come is a DeadlineError after `late_ms`. Ranks meet on the interface of the config or of
    /// `TOKENYARD_INTERFACE`, else where rank 0 reaches `MASTER_ADDR` from.
    #[staticmethod]
    #[pyo3(signature = (group=None, *, config=None))]
    fn from_torch(
        py: Python<'_>,
        group: Option<Bound<'_, PyAny>>,
        config: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let torch = py.import("torch.distributed")?;
        let group = group.unwrap_or_else(|| py.None().into_bound(py));
        let rank = torch.call_method1("get_rank", (&group,))?;
        let ranks = torch.call_method1("get_world_size", (&group,))?;
        let world_rank = torch.call_method0("get_rank")?.extract().ok();
        let gpu = gpu_of_torch(&group)?;
        let gather = Gatherer::Torch { group: group.unbind(), gpu };
        let joiner = Joiner::of_library(&rank, &ranks, world_rank, gather);
        Self::join(py, joiner.map_err(|error| raise(py, &error))?, &config)
    }

    /// Joins the ranks of a communicator of mpi4py. It uses `comm.Iallgather` once: a member that
    /// does not come is a DeadlineError after `late_ms`.
    #[staticmethod]
    #[pyo3(signature = (comm, *, config=None))]
    fn from_mpi(
        py: Python<'_>,
        comm: &Bound<'_, PyAny>,
        config: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let (rank, ranks) = (comm.call_method0("Get_rank")?, comm.call_method0("Get_size")?);
        let gather = Gatherer::Mpi(comm.clone().unbind());
        let joiner = Joiner::of_library(&rank, &ranks, world_rank_of_mpi(py), gather);
        Self::join(py, joiner.map_err(|error| raise(py, &error))?, &config)
    }

    /// This rank.
    #[getter]
    fn rank(&self) -> u32 {
        self.place.rank
    }

    /// R: ranks in the world.
    #[getter]
    fn ranks(&self) -> u32 {
        self.place.ranks
    }

    /// The index of this rank among the world's ranks on its machine.
    #[getter]
    fn local_rank(&self) -> u32 {
        self.place.local_rank
    }

    /// Gives `mine` to all ranks and returns those of all ranks, by rank. Collective; together at most 64 MiB.
    /// For set-up: no token should pass here. `topic` names the call in messages, and is the same on all ranks.
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        topic: Word<'_>,
        mine: Argument<Vec<u8>>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let world = self.core().map_err(|error| raise(py, &error))?;
        let read = || {
            let (topic, mine) = (topic.take("topic")?, mine.take("mine")?);
            CoreWorld::check_call("all_gather", &topic, mine.len())?;
            Ok((topic, mine))
        };
        let (topic, mine) = read().map_err(|why| refuse(py, &world, &why))?;
        let gathered = py.detach(|| world.get()?.all_gather(&topic, &mine));
        let items = gathered.map_err(|error| raise(py, &error))?;
        Ok(items.iter().map(|item| PyBytes::new(py, item)).collect())
    }

    /// Returns once all ranks have called it. Collective.
    fn barrier(&self, py: Python<'_>, topic: Word<'_>) -> PyResult<()> {
        let world = self.core().map_err(|error| raise(py, &error))?;
        let read = || {
            let topic = topic.take("topic")?;
            CoreWorld::check_call("barrier", &topic, 0)?;
            Ok(topic)
        };
        let topic = read().map_err(|why| refuse(py, &world, &why))?;
        py.detach(|| world.get()?.barrier(&topic)).map_err(|error| raise(py, &error))
    }

    /// For the drop-in: takes part in the collective that the other ranks call now, with a refusal, and raises `why`.
    fn _refuse(&self, py: Python<'_>, why: &str) -> PyResult<()> {
        let world = self.core().map_err(|error| raise(py, &error))?;
        Err(refuse(py, &world, &invalid(why)))
    }

    /// Leaves the world. Communicators that are open keep it until they are closed. Not collective; again is no error.
    fn close(&self, py: Python<'_>) {
        log::flush(py);
        let world = self.take();
        py.detach(|| drop(world));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (kind=None, value=None, traceback=None))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        value: Option<&Bound<'_, PyAny>>,
        traceback: Option<&Bound<'_, PyAny>>,
    ) {
        let _ = (kind, traceback);
        log::flush(py);
        let world = self.take();
        let why = value.map(|value| value.to_string());
        py.detach(|| {
            if let (Some(why), Some(Ok(world))) = (why, world.as_deref().map(Owned::get)) {
                world.report_failure(&why);
            }
            drop(world);
        });
    }

    fn __repr__(&self) -> String {
        format!("tokenyard.World(rank={}, ranks={})", self.place.rank, self.place.ranks)
    }
}

/// Takes part in a collective whose arguments cannot be read, so that the other ranks learn it, and returns what to
/// raise.
fn refuse(py: Python<'_>, world: &Owned<Arc<CoreWorld>>, why: &Error) -> PyErr {
    py.detach(|| {
        if let Ok(world) = world.get() {
            world.refuse("take part", why);
        }
    });
    raise(py, why)
}

impl Drop for World {
    fn drop(&mut self) {
        // To leave takes up to half a second.
        if let Some(world) = self.take() {
            crate::owned::drop_detached(world);
        }
    }
}

/// The address of this host on the network where torch's ranks meet, which others reach; with its scope, which a
/// link-local address needs.
fn address_towards_master() -> Option<SocketAddr> {
    let host = environment("MASTER_ADDR")?;
    // A datagram socket that is connected has an address, and sends nothing.
    let all = (unbracketed(host.trim()), 9).to_socket_addrs().ok()?;
    all.into_iter().find_map(|master| {
        let any: IpAddr = match master {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect(master).ok()?;
        socket.local_addr().ok()
    })
}

/// This rank among all ranks of MPI, where mpi4py is in use.
fn world_rank_of_mpi(py: Python<'_>) -> Option<u32> {
    let modules = py.import("sys").ok()?.getattr("modules").ok()?;
    let mpi = modules.get_item("mpi4py.MPI").ok()?;
    mpi.getattr("COMM_WORLD").ok()?.call_method0("Get_rank").ok()?.extract().ok()
}
