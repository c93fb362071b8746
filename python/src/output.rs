//! Outputs and handles of operations.

use std::sync::Arc;

use pyo3::prelude::*;
use smallvec::smallvec;
use tokenyard_core::Result;
use tokenyard_core::communicator::{
    Arriving, CallerMemory, Handle as CoreHandle, Received as CoreReceived, TensorRef,
};
use tokenyard_core::moe::{Layout, ScaleLayout, Shape};

use crate::array::{Array, Claim, Held};
use crate::dlpack::Dims;
use crate::errors::{invalid, raise};
use crate::options;
use crate::owned::Owned;
use crate::shared::Shared;

/// The output of a dispatch or a replay on this rank.
///
/// Its arrays lie in the arena of the communicator, without a copy, until the last tensor over any of them is gone;
/// a full arena refuses the next dispatch. N is the number of tokens received. `rows` is N for flat rows, and the
/// number of expert rows, padding included, for expert-major ones. Packed arrays have a block of R * M rows for each of
/// the E / R local experts, of which the first `expert_counts` are filled; rank-major ones have a block of M rows for
/// each source rank, of which the first `source_counts` are filled.
#[pyclass(frozen, module = "tokenyard")]
pub(crate) struct Received {
    core: Source,
    layout: Layout,
    scale_layout: ScaleLayout,
    claim: Arc<Owned<Claim>>,
    shape: Shape,
    stream: Option<usize>,
}

/// An output, received or not.
enum Source {
    Received(Arc<CoreReceived>),
    Arriving(Arc<Arriving>),
}

macro_rules! arrays {
    ($($name:ident),+ $(,)?) => {
        impl Source {$(
            fn $name(&self) -> Option<TensorRef<'_>> {
                match self {
                    Self::Received(received) => received.$name(),
                    Self::Arriving(place) => place.$name().and_then(|memory| self.named(&memory)),
                }
            }
        )+}
    };
}

arrays! {
    scales, ids, weights, source, slots, expert_counts, expert_starts, expert_ends, source_counts, source_ends, ranges,
    totals, lost, dropped, overflow,
}

impl Source {
    fn x(&self) -> Option<TensorRef<'_>> {
        match self {
            Self::Received(received) => Some(received.x()),
            Self::Arriving(place) => place.x().and_then(|memory| self.named(&memory)),
        }
    }

    fn named(&self, memory: &CallerMemory) -> Option<TensorRef<'_>> {
        // SAFETY: a name for memory that `self` claims; it is only passed on as an address.
        unsafe { TensorRef::from_memory(memory).ok() }
    }
}

impl Received {
    pub(crate) fn new(received: CoreReceived, shared: &Shared, stream: Option<usize>) -> Self {
        let (layout, scale_layout) = (received.layout(), received.scale_layout());
        let core = Arc::new(received);
        let x = core.x();
        let bytes = x.rows() * x.cols() * x.dtype().map_or(1, tokenyard_core::moe::DType::bytes);
        let held = Held::new(shared.held(), bytes as u64);
        let claim = Arc::new(Owned::new(Claim::Received(Arc::clone(&core), held)));
        let (core, shape) = (Source::Received(core), shared.shape());
        Self { core, layout, scale_layout, claim, shape, stream }
    }

    /// The places of an output that was not received.
    pub(crate) fn arriving(
        place: Arriving,
        layout: Layout,
        shared: &Shared,
        stream: Option<usize>,
    ) -> Self {
        let scale_layout = place.scale_layout();
        let place = Arc::new(place);
        let claim = Arc::new(Owned::new(Claim::Arriving(Arc::clone(&place))));
        let (core, shape) = (Source::Arriving(place), shared.shape());
        Self { core, layout, scale_layout, claim, shape, stream }
    }

    /// The output, if it was received.
    pub(crate) fn core(&self) -> Result<Arc<CoreReceived>> {
        match &self.core {
            Source::Received(received) => Ok(Arc::clone(received)),
            Source::Arriving(_) => Err(invalid(
                "received: found one that is not received yet; expected what recv() returns",
            )),
        }
    }

    /// An array with the rows and columns that core gave it.
    fn plain(&self, tensor: Option<TensorRef<'_>>) -> Option<Array> {
        let tensor = tensor?;
        let shape = smallvec![tensor.rows() as i64, tensor.cols() as i64];
        Array::of_arena(&tensor, shape, self.stream, &self.claim)
    }

    /// An array of one value per entry.
    fn list(&self, tensor: Option<TensorRef<'_>>) -> Option<Array> {
        let tensor = tensor?;
        let shape = smallvec![(tensor.rows() * tensor.cols()) as i64];
        Array::of_arena(&tensor, shape, self.stream, &self.claim)
    }

    /// An array with something for each row: by blocks where the layout has blocks.
    fn by_row(&self, tensor: Option<TensorRef<'_>>, is_list: bool) -> Option<Array> {
        let tensor = tensor?;
        let mut shape: Dims = match self.layout {
            Layout::Packed => {
                let blocks = i64::from(self.shape.experts / self.shape.ranks);
                smallvec![blocks, tensor.rows() as i64 / blocks]
            }
            Layout::RankMajor { .. } => {
                let ranks = i64::from(self.shape.ranks);
                smallvec![ranks, tensor.rows() as i64 / ranks]
            }
            Layout::Flat | Layout::ExpertMajor { .. } => smallvec![tensor.rows() as i64],
        };
        if !is_list {
            shape.push(tensor.cols() as i64);
        }
        Array::of_arena(&tensor, shape, self.stream, &self.claim)
    }

    /// The array of a name, or nothing where it is not there. Another name is an error.
    pub(crate) fn array(&self, name: &str) -> Result<Option<Array>> {
        Ok(match name {
            "x" => self.x(),
            "scales" => self.scales(),
            "weights" => self.weights(),
            "source" => self.source(),
            "expert_counts" => self.expert_counts(),
            "ranges" => self.ranges(),
            _ => return Err(invalid(format!("names: found {name}, which no array has here"))),
        })
    }
}

#[pymethods]
impl Received {
    /// How the rows are arranged: `"flat"`, `"expert_major"`, `"packed"` or `"rank_major"`.
    #[getter]
    fn layout(&self) -> &'static str {
        options::layout_name(self.layout)
    }

    /// N: tokens received; with worst-case sizes the most that can arrive.
    #[getter]
    fn tokens(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.core().map_err(|error| raise(py, &error))?.tokens())
    }

    /// Rows of `x`, all blocks together; with worst-case sizes the most.
    #[getter]
    fn rows(&self) -> usize {
        self.core.x().map_or(0, |x| x.rows())
    }

    /// `[rows, H]`, packed `[E / R, R * M, H]`, rank-major `[R, M, H]`: the rows. They may be changed in place.
    #[getter]
    fn x(&self) -> Option<Array> {
        self.by_row(self.core.x(), false)
    }

    /// `[rows, S]`, in blocks as `x`: float32, or int32 of four UE8M0 exponents; as the sender gave them
    /// where nothing was cast. None without scales. With `scale_layout="column_major"`, the columns of a block lie one
    /// after the other: the strides are `(S * R * M, 1, R * M)`.
    #[getter]
    fn scales(&self) -> Option<Array> {
        let scales = self.by_row(self.core.scales(), false)?;
        Some(match self.scale_layout {
            ScaleLayout::RowMajor => scales,
            ScaleLayout::ColumnMajor => scales.transposed(),
        })
    }

    /// int32: local expert ids, or -1. `[N, K]` for flat rows, `[R, M, K]` for rank-major ones, where a place without
    /// a token has -1 alone.
    #[getter]
    fn ids(&self) -> Option<Array> {
        self.by_row(self.core.ids(), false)
    }

    /// float32, where the sender gave some: K for each row of flat and rank-major rows, else one.
    #[getter]
    fn weights(&self) -> Option<Array> {
        let weights = self.core.weights();
        self.by_row(weights, !self.layout.has_a_row_per_token())
    }

    /// int32, source rank * M + source token, M that of the call: `[N]`, packed `[E / R, R * M]`, rank-major `[R, M]`
    /// with -1 where no token is. The token alone with `source_index="token"`.
    #[getter]
    fn source(&self) -> Option<Array> {
        let source = self.core.source();
        match self.layout {
            Layout::Packed | Layout::RankMajor { .. } => self.by_row(source, true),
            Layout::Flat | Layout::ExpertMajor { .. } => self.list(source),
        }
    }

    /// `[N, K]` int32: the row of each expert's copy, or -1. Expert-major rows only.
    #[getter]
    fn slots(&self) -> Option<Array> {
        self.plain(self.core.slots())
    }

    /// `[E / R]` int32: rows for each local expert, without padding.
    #[getter]
    fn expert_counts(&self) -> Option<Array> {
        self.list(self.core.expert_counts())
    }

    /// `[E / R]` int32: the first row of each local expert. Expert-major rows only.
    #[getter]
    fn expert_starts(&self) -> Option<Array> {
        self.list(self.core.expert_starts())
    }

    /// `[E / R]` int32: behind the last row of each local expert, padding left out. Expert-major rows only.
    #[getter]
    fn expert_ends(&self) -> Option<Array> {
        self.list(self.core.expert_ends())
    }

    /// `[R]` int32: tokens from each source rank and from all before it.
    #[getter]
    fn source_ends(&self) -> Option<Array> {
        self.list(self.core.source_ends())
    }

    /// `[R]` int32: tokens from each source rank.
    #[getter]
    fn source_counts(&self) -> Option<Array> {
        self.list(self.core.source_counts())
    }

    /// `[E / R, R]` int64, `count | begin << 32` of each source rank. Packed rows only.
    #[getter]
    fn ranges(&self) -> Option<Array> {
        self.plain(self.core.ranges())
    }

    /// `[2]` int64: the true N and the true number of rows.
    #[getter]
    fn totals(&self) -> Option<Array> {
        self.list(self.core.totals())
    }

    /// `[E / R]` int32: rows of each local expert that were dropped. With `max_rows` only.
    #[getter]
    fn dropped(&self) -> Option<Array> {
        self.list(self.core.dropped())
    }

    /// `[1]` int32: 1 where any row was dropped, else 0. With `max_rows` only.
    #[getter]
    fn overflow(&self) -> Option<Array> {
        self.list(self.core.overflow())
    }

    /// `[R]` uint8: 1 where rows of a source rank are left out, because it was lost or masked. Each replay of a graph
    /// with the dispatch writes it.
    #[getter]
    fn lost(&self) -> Option<Array> {
        self.list(self.core.lost())
    }

    /// The source ranks that `lost` marks, in order.
    fn lost_ranks(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        Ok(self.core().map_err(|error| raise(py, &error))?.lost_ranks())
    }

    fn __repr__(&self) -> String {
        let (layout, rows) = (self.layout(), self.rows());
        match &self.core {
            Source::Received(core) => {
                let tokens = core.tokens();
                format!("tokenyard.Received(layout={layout}, tokens={tokens}, rows={rows})")
            }
            Source::Arriving(_) => {
                format!("tokenyard.Received(layout={layout}, rows={rows}, arriving)")
            }
        }
    }
}

/// The routing of a dispatch, for its combine, or for a replay with the same routing.
///
/// A communicator has room for as many as its `handles`; a handle goes when the last reference to it is dropped, on any
/// thread. On GPUs, handles of expert-major and packed rows keep the arena's memory of their dispatch.
#[pyclass(frozen, module = "tokenyard")]
pub(crate) struct Handle {
    core: Arc<Owned<CoreHandle>>,
}

impl Handle {
    pub(crate) fn new(handle: CoreHandle) -> Self {
        Self { core: Arc::new(Owned::new(handle)) }
    }

    pub(crate) fn core(&self) -> Arc<Owned<CoreHandle>> {
        Arc::clone(&self.core)
    }
}

#[pymethods]
impl Handle {
    /// How the rows of the dispatch are arranged.
    #[getter]
    fn layout(&self, py: Python<'_>) -> PyResult<&'static str> {
        let core = self.core.get().map_err(|e| crate::errors::raise(py, &e))?;
        Ok(options::layout_name(core.layout()))
    }

    /// T of the dispatch on this rank: combine gives as many rows.
    #[getter]
    fn tokens(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.core.get().map_err(|e| crate::errors::raise(py, &e))?.tokens())
    }

    /// Rows that combine takes on this rank.
    #[getter]
    fn rows(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.core.get().map_err(|e| crate::errors::raise(py, &e))?.rows())
    }
}
