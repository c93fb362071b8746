//! The world: who takes part.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use tokenyard_core::bootstrap::{
    Identity, RankId, Rendezvous, Secret, World as CoreWorld, WorldOptions, environment,
};
use tokenyard_core::config::{Config as CoreConfig, WorldConfig};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::config::Config;
use crate::errors::raise;
use crate::integer::Integer;
use crate::owned::Owned;

/// The world's settings where no config has them.
const DEFAULT_CONFIG: &str = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";

/// All ranks of a job, joined. One rank is one process, or one thread of it.
///
/// `World(rank, ranks, exchange=f)` joins through an all-gather that the caller has: `f(mine: bytes) -> list[bytes]`,
/// given this rank's bytes, returns those of all ranks, in order. It is called once, in the thread that joins. See
/// also `from_env`, `from_torch` and `from_mpi`. `config` (a Config or a path) gives the deadlines, the interface and
/// what a loss leads to; it should be the one that communicators are opened with. Without it the deadline is 30 s and a
/// live rank may be late by 30 minutes.
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

/// How a caller's library gathers.
enum Gather {
    /// `f(bytes) -> list[bytes]`.
    Function(Py<PyAny>),
    /// A process group of torch.
    Torch(Py<PyAny>),
}

impl Gather {
    fn call(&self, py: Python<'_>, mine: &[u8], ranks: u32) -> PyResult<Vec<Vec<u8>>> {
        let mine = PyBytes::new(py, mine);
        match self {
            Self::Function(function) => function.bind(py).call1((mine,))?.extract(),
            Self::Torch(group) => {
                let all = PyList::new(py, (0..ranks).map(|_| py.None()))?;
                let group = group.bind(py);
                let options = PyDict::new(py);
                options.set_item("group", group)?;
                let torch = py.import("torch.distributed")?;
                torch.call_method("all_gather_object", (&all, mine), Some(&options))?;
                all.extract()
            }
        }
    }
}

impl World {
    fn new(core: CoreWorld) -> Self {
        let (rank, ranks, local_rank) = (core.rank(), core.ranks(), core.local_rank());
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
    fn join(
        py: Python<'_>,
        place: RankId,
        gather: Gather,
        config: &Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let config = world_config(py, config)?;
        let raised: Arc<Mutex<Option<PyErr>>> = Arc::default();
        let raised_inside = Arc::clone(&raised);
        let ranks = place.ranks;
        let is_torch = matches!(gather, Gather::Torch(_));
        let exchange = move |mine: &[u8]| {
            Python::attach(|py| {
                gather.call(py, mine, ranks).map_err(|error| {
                    let text = error.to_string();
                    *raised_inside.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                    text
                })
            })
        };
        let joined = py.detach(|| {
            let rendezvous = Rendezvous::Exchange(Box::new(exchange));
            let mut options = WorldOptions::configured(&config, Identity::new(place, rendezvous)?);
            if is_torch && options.interface.is_none() {
                options.bind = address_towards_master();
            }
            CoreWorld::join(WorldOptions { secret: Secret::from_env(&environment)?, ..options })
        });
        joined.map(Self::new).map_err(|error| {
            let exception = raise(py, &error);
            let cause = raised.lock().unwrap_or_else(PoisonError::into_inner).take();
            exception.set_cause(py, cause);
            exception
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
    #[pyo3(signature = (rank, ranks, *, exchange, local_rank=Integer::Fits(0), config=None),
           text_signature = "(rank, ranks, *, exchange, local_rank=0, config=None)")]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn py_new(
        py: Python<'_>,
        rank: Integer<u32>,
        ranks: Integer<u32>,
        exchange: Py<PyAny>,
        local_rank: Integer<u32>,
        config: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let read = || {
            let (rank, ranks) = (rank.get("rank")?, ranks.get("ranks")?);
            Ok(RankId { rank, ranks, local_rank: local_rank.get("local_rank")? })
        };
        let place = read().map_err(|error| raise(py, &error))?;
        Self::join(py, place, Gather::Function(exchange), &config)
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

    /// Joins the ranks of a process group of torch, the default group if none is given. It uses
    /// `torch.distributed.all_gather_object` of that group once. Ranks meet on the interface of the config or of
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
        let place = RankId {
            rank: torch.call_method1("get_rank", (&group,))?.extract()?,
            ranks: torch.call_method1("get_world_size", (&group,))?.extract()?,
            local_rank: local_rank_of_environment(),
        };
        Self::join(py, place, Gather::Torch(group.unbind()), &config)
    }

    /// Joins the ranks of a communicator of mpi4py. It uses `comm.allgather` once.
    #[staticmethod]
    #[pyo3(signature = (comm, *, config=None))]
    fn from_mpi(
        py: Python<'_>,
        comm: &Bound<'_, PyAny>,
        config: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let place = RankId {
            rank: comm.call_method0("Get_rank")?.extract()?,
            ranks: comm.call_method0("Get_size")?.extract()?,
            local_rank: local_rank_of_environment(),
        };
        let gather = Gather::Function(comm.getattr("allgather")?.unbind());
        Self::join(py, place, gather, &config)
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

    /// The index of this rank among those of its host.
    #[getter]
    fn local_rank(&self) -> u32 {
        self.place.local_rank
    }

    /// Gives `mine` to all ranks and returns those of all ranks, by rank. Collective; together at most 64 MiB.
    /// For set-up: no token should pass here. `topic` names the call in messages, and is the same on all ranks.
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        topic: &str,
        mine: Vec<u8>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let world = self.core().map_err(|error| raise(py, &error))?;
        let gathered = py.detach(|| world.get()?.all_gather(topic, &mine));
        let items = gathered.map_err(|error| raise(py, &error))?;
        Ok(items.iter().map(|item| PyBytes::new(py, item)).collect())
    }

    /// Returns once all ranks have called it. Collective.
    fn barrier(&self, py: Python<'_>, topic: &str) -> PyResult<()> {
        let world = self.core().map_err(|error| raise(py, &error))?;
        py.detach(|| world.get()?.barrier(topic)).map_err(|error| raise(py, &error))
    }

    /// Leaves the world. Communicators that are open keep it until they are closed. Not collective; again is no error.
    fn close(&self, py: Python<'_>) {
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

impl Drop for World {
    fn drop(&mut self) {
        // To leave takes up to half a second.
        if let Some(world) = self.take() {
            crate::owned::drop_detached(world);
        }
    }
}

/// The address of this host on the network where torch's ranks meet, which others reach.
fn address_towards_master() -> Option<IpAddr> {
    let host = environment("MASTER_ADDR")?;
    // A datagram socket that is connected has an address, and sends nothing.
    let all = (host.as_str(), 9).to_socket_addrs().ok()?;
    all.into_iter().find_map(|master| {
        let any: IpAddr = match master {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect(master).ok()?;
        socket.local_addr().ok().map(|address| address.ip())
    })
}

/// The launcher's facts about this process. It decides on devices where a config says `auto`.
fn local_rank_of_environment() -> u32 {
    let value = ["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"]
        .iter()
        .find_map(|name| environment(name));
    value.and_then(|text| text.parse().ok()).unwrap_or(0)
}
