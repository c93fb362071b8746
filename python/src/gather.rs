//! The all-gather of a caller's library, through which ranks meet.

use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

/// How a caller's library gathers.
pub(crate) enum Gather {
    /// `f(bytes) -> list[bytes]`.
    Function(Py<PyAny>),
    /// A process group of torch, and the GPU that this thread has chosen.
    Torch { group: Py<PyAny>, gpu: Option<i64> },
    /// A communicator of mpi4py.
    Mpi(Py<PyAny>),
}

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

impl Gather {
    /// The bytes of all ranks. Not to be called with the GIL.
    pub(crate) fn call(
        &self,
        mine: &[u8],
        ranks: u32,
        late: Duration,
    ) -> Result<Vec<Vec<u8>>, Failure> {
        match self {
            Self::Function(function) => gather_by(function, mine),
            Self::Mpi(comm) => {
                let all = |name| Python::attach(|py| comm.getattr(py, name));
                meet(&all("Ibarrier").map_err(Failure::Raised)?, late)?;
                gather_by(&all("allgather").map_err(Failure::Raised)?, mine)
            }
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

/// Waits until all ranks have called `barrier`, which returns a request of MPI. MPI's collectives have no limit of
/// their own, and a thread for them needs an MPI that was started for threads.
fn meet(barrier: &Py<PyAny>, late: Duration) -> Result<(), Failure> {
    let request = Python::attach(|py| barrier.call0(py)).map_err(Failure::Raised)?;
    let start = Instant::now();
    loop {
        let tested = Python::attach(|py| request.call_method0(py, "Test")?.extract::<bool>(py));
        if tested.map_err(Failure::Raised)? {
            return Ok(());
        }
        if start.elapsed() > late {
            return Err(Failure::Late(format!(
                "MPI's Ibarrier did not end within {:.1} s (late_ms): a member of the communicator did not come to it",
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
