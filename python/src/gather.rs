//! The all-gather of a caller's library, through which ranks meet.

use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyList};

/// How a caller's library gathers.
pub(crate) enum Gatherer {
    /// `f(bytes) -> list[bytes]`.
    Function(Py<PyAny>),
    /// A process group of torch, and the GPU that this thread has chosen.
    Torch { group: Py<PyAny>, gpu: Option<i64> },
    /// A communicator of mpi4py.
    Mpi(Py<PyAny>),
}

/// The bytes of a rank in a gather of MPI: those of the rank, about a hundred and some names, behind their number.
const MPI_PART: usize = 8192;
/// The interval at which ranks look whether all have come to a gather of MPI.
const LOOK: Duration = Duration::from_millis(1);

/// The reason why ranks did not gather.
pub(crate) enum Failure {
    /// The library raised an exception.
    Raised(PyErr),
    /// The others did not come in time.
    Late(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Raised(error) => error.fmt(f),
            Self::Late(text) => f.write_str(text),
        }
    }
}

impl Gatherer {
    /// The bytes of all ranks. Not to be called with the GIL.
    pub(crate) fn call(
        &self,
        mine: &[u8],
        ranks: u32,
        late: Duration,
    ) -> Result<Vec<Vec<u8>>, Failure> {
        match self {
            Self::Function(function) => gather_by(function, mine),
            Self::Mpi(comm) => gather_by_mpi(comm, mine, ranks, late),
            Self::Torch { group, gpu } => {
                let (group, gpu) = (Python::attach(|py| group.clone_ref(py)), *gpu);
                let mine = mine.to_vec();
                within(late, move || {
                    Python::attach(|py| gather_by_torch(&group.into_bound(py), gpu, &mine, ranks))
                })
            }
        }
    }
}

fn gather_by(function: &Py<PyAny>, mine: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
    Python::attach(|py| {
        let all = function.bind(py).call1((PyBytes::new(py, mine),));
        all.and_then(|all| all.extract()).map_err(Failure::Raised)
    })
}

/// MPI's collectives have no limit of their own, and a thread for them needs an MPI that was started for threads. So
/// one `Iallgather` is all: a second call would wait for a rank that has given up behind the first. Its parts are
/// equal, so that the calls of ranks that try again match, too.
fn gather_by_mpi(
    comm: &Py<PyAny>,
    mine: &[u8],
    ranks: u32,
    late: Duration,
) -> Result<Vec<Vec<u8>>, Failure> {
    let mut part = (mine.len() as u32).to_le_bytes().to_vec();
    part.extend_from_slice(mine);
    if part.len() > MPI_PART {
        let text = format!("found {} bytes to gather; expected at most {MPI_PART}", part.len());
        return Err(Failure::Raised(PyValueError::new_err(text)));
    }
    part.resize(MPI_PART, 0);
    let own = |part: &[u8]| {
        let (length, bytes) = part.split_first_chunk()?;
        bytes.get(..u32::from_le_bytes(*length) as usize).map(<[u8]>::to_vec)
    };
    let all = all_gather(comm, &part, ranks, late)?;
    Ok(all.chunks_exact(MPI_PART).map(|part| own(part).unwrap_or_default()).collect())
}

/// `Iallgather` of equal parts, for `late` at most.
fn all_gather(
    comm: &Py<PyAny>,
    mine: &[u8],
    ranks: u32,
    late: Duration,
) -> Result<Vec<u8>, Failure> {
    let begun = Python::attach(|py| {
        let own = PyByteArray::new(py, mine).unbind();
        let all = PyByteArray::new(py, &vec![0; mine.len() * ranks as usize]).unbind();
        let request = comm.call_method1(py, "Iallgather", (&own, &all))?;
        PyResult::Ok((own, all, request))
    });
    let (own, all, request) = begun.map_err(Failure::Raised)?;
    let start = Instant::now();
    loop {
        let tested = Python::attach(|py| request.call_method0(py, "Test")?.extract::<bool>(py));
        if tested.map_err(Failure::Raised)? {
            return Ok(Python::attach(|py| all.bind(py).to_vec()));
        }
        if start.elapsed() > late {
            // MPI may still write here.
            std::mem::forget((own, all, request));
            return Err(Failure::Late(format!(
                "MPI's Iallgather did not end within {:.1} s (late_ms): a member of the communicator did not \
                 come to it",
                late.as_secs_f64()
            )));
        }
        std::thread::sleep(LOOK);
    }
}

/// Runs a call that has no limit of its own on another thread, which stays behind where the call does not end.
fn within<T: Send + 'static>(
    late: Duration,
    call: impl FnOnce() -> PyResult<T> + Send + 'static,
) -> Result<T, Failure> {
    let (send, gathered) = sync_channel(1);
    let thread = std::thread::Builder::new().name("tokenyard-gather".into());
    // The receiver is gone where the call was too late.
    let started = thread.spawn(move || drop(send.send(call())));
    started.map_err(|error| Failure::Late(format!("cannot start a thread for it: {error}")))?;
    match gathered.recv_timeout(late) {
        Ok(result) => result.map_err(Failure::Raised),
        Err(RecvTimeoutError::Timeout) => Err(Failure::Late(format!(
            "torch's all_gather_object did not end within {:.1} s (late_ms): a member of the group did not come to it",
            late.as_secs_f64()
        ))),
        Err(RecvTimeoutError::Disconnected) => {
            Err(Failure::Late("the thread of torch's all_gather_object ended".to_owned()))
        }
    }
}

fn gather_by_torch(
    group: &Bound<'_, PyAny>,
    gpu: Option<i64>,
    mine: &[u8],
    ranks: u32,
) -> PyResult<Vec<Vec<u8>>> {
    let py = group.py();
    if let Some(gpu) = gpu {
        // Each thread has a current GPU of its own, and NCCL gathers on it.
        py.import("torch.cuda")?.call_method1("set_device", (gpu,))?;
    }
    let all = PyList::new(py, (0..ranks).map(|_| py.None()))?;
    let options = PyDict::new(py);
    options.set_item("group", group)?;
    let torch = py.import("torch.distributed")?;
    torch.call_method("all_gather_object", (&all, PyBytes::new(py, mine)), Some(&options))?;
    all.extract()
}

/// The GPU that torch uses on this thread; none where it uses none yet and the group's gather needs none.
pub(crate) fn gpu_of_torch(group: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
    let cuda = group.py().import("torch.cuda")?;
    // A process that is not a member has no backend of the group.
    let backend = group.py().import("torch.distributed")?.call_method1("get_backend", (group,));
    let is_nccl =
        backend.and_then(|name| name.extract::<String>()).is_ok_and(|name| name == "nccl");
    if !is_nccl && !cuda.call_method0("is_initialized")?.extract::<bool>()? {
        return Ok(None);
    }
    cuda.call_method0("current_device")?.extract().map(Some)
}
