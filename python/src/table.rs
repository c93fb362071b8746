//! The table as Python sees it.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use tokenyard_core::Result;
use tokenyard_core::communicator::{BringUpReport, TensorMut, TensorRef};
use tokenyard_core::ops::table::{
    Entries, PendingFetch as CorePendingFetch, Table as CoreTable, TableOptions,
};

use crate::argument::Argument;
use crate::config::Config;
use crate::errors::{invalid, raise};
use crate::guarded::{Guarded, methods_of_opened, open};
use crate::operations::received_before;
use crate::tensor::Tensor;
use crate::tensors::items;
use crate::world::World;

/// A table that all ranks hold together, such as an embedding that is too large for one device: each rank reads entries
/// of any rank, which takes no part.
///
/// `Table(world, config, entry_bytes=..., max_entries=..., max_indices=...)` opens it on all ranks of `world`.
/// Collective. `config` is a Config or the path of a TOML file. An entry has `entry_bytes` of values, 1 to 2**30, and
/// `scale_bytes` of scales, 0 to 2**30. Each rank has at most `max_entries` of them, 1 to 2**32, in each of `layers`, 1
/// to 128. A fetch has at most `max_indices`, 1 to 2**31 - 1, and `in_flight` of them, 1 to 32, may be sent and not yet
/// received. All are equal on all ranks. Raises InvalidInputError, and RefusedError on the other ranks;
/// UnsupportedError where the kernel set has no tables over this transport, where no one link reaches every rank, where
/// the transport neither maps peers nor gets, and where losses are masked.
///
/// **Index** i names entry `i % max_entries` of rank `i // max_entries`. Ranks may have fewer entries, and another
/// number each.
///
/// **Tensors** may be of torch, numpy, JAX, CuPy, or anything with `__dlpack__`, of any shape, with elements that
/// follow each other. They lie in host memory with the kernel set `cpu`, and on the GPU with `cuda` and `rocm`.
/// Synchronise work that is queued on a tensor before the call; when a call returns, its work has ended. Types and
/// shapes of values do not matter, their bytes do.
///
/// **Threads**: calls release the GIL and wait for each other. Close it on all ranks, best as a context manager; to
/// drop it is never collective. After an exception in the body of `with` it is dropped and not closed.
#[pyclass(frozen, module = "tokenyard", weakref)]
pub(crate) struct Table {
    core: Arc<Guarded<CoreTable>>,
    options: TableOptions,
    report: BringUpReport,
}

/// Values and scales of each layer.
struct Layers {
    /// Held while core uses `given`.
    _kept: Vec<Tensor>,
    given: Vec<Entries<'static>>,
}

impl Layers {
    fn read(values: &Bound<'_, PyAny>, scales: Option<&Bound<'_, PyAny>>) -> Result<Self> {
        let (mut kept, mut given) = (Vec::new(), Vec::new());
        let values = items(values).0;
        let scales: Vec<_> = match scales {
            Some(scales) => items(scales).0.into_iter().map(Some).collect(),
            None => vec![None; values.len()],
        };
        if scales.len() != values.len() {
            let (found, expected) = (scales.len(), values.len());
            return Err(invalid(format!(
                "scales: found {found} tensors; expected {expected}, one for each of values"
            )));
        }
        for (values, scales) in values.iter().zip(&scales) {
            let mut read = |name, object| -> Result<TensorRef<'static>> {
                let tensor = Tensor::read(name, object)?;
                // SAFETY: the tensor is held during the call. That no thread writes its memory until then is asked of
                // the caller.
                let given = unsafe { tensor.get_message()? };
                kept.push(tensor);
                Ok(given)
            };
            let values = read("values", values)?;
            let scales = scales.as_ref().map(|scales| read("scales", scales)).transpose()?;
            given.push(Entries { values, scales });
        }
        Ok(Self { _kept: kept, given })
    }
}

/// The room for what a fetch gives.
struct EntryRoom {
    /// Held while core uses the others.
    _kept: Vec<Tensor>,
    values: TensorMut<'static>,
    scales: Option<TensorMut<'static>>,
}

impl EntryRoom {
    fn read(values: &Bound<'_, PyAny>, scales: Option<&Bound<'_, PyAny>>) -> Result<Self> {
        let mut kept = Vec::new();
        let mut read = |name, object| -> Result<TensorMut<'static>> {
            let tensor = Tensor::read(name, object)?;
            // SAFETY: the tensor is held during the call. That no thread uses its memory until then is asked of the
            // caller.
            let given = unsafe { tensor.get_message_mut()? };
            kept.push(tensor);
            Ok(given)
        };
        let values = read("values", values)?;
        let scales = scales.map(|scales| read("scales", scales)).transpose()?;
        Ok(Self { _kept: kept, values, scales })
    }
}

methods_of_opened!(Table, core, report);

#[pymethods]
impl Table {
    #[new]
    #[pyo3(signature = (world, config, *, entry_bytes, max_entries, max_indices, scale_bytes=Argument::Fits(0),
                        layers=Argument::Fits(1), in_flight=Argument::Fits(2)),
           text_signature = "(world, config, *, entry_bytes, max_entries, max_indices, scale_bytes=0, layers=1, \
                             in_flight=2)")]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn new(
        py: Python<'_>,
        world: &World,
        config: &Bound<'_, PyAny>,
        entry_bytes: Argument<u64>,
        max_entries: Argument<u64>,
        max_indices: Argument<u32>,
        scale_bytes: Argument<u64>,
        layers: Argument<u32>,
        in_flight: Argument<u32>,
    ) -> PyResult<Self> {
        let read = || {
            let options = TableOptions {
                entry_bytes: entry_bytes.get("entry_bytes")?,
                scale_bytes: scale_bytes.get("scale_bytes")?,
                max_entries: max_entries.get("max_entries")?,
                layers: layers.get("layers")?,
                max_indices: max_indices.get("max_indices")?,
                in_flight: in_flight.get("in_flight")?,
            };
            Ok((Config::read_to_open(config)?, options))
        };
        let (table, world) = open::<CoreTable>(py, world, read)?;
        let (options, report) = (table.options(), table.report().clone());
        Ok(Self { core: Guarded::new(table, world), options, report })
    }

    /// Writes this rank's entries of all layers, in place of those that it had. `values` is a tensor, or a list or
    /// tuple of one for each layer; so is `scales`, where entries have some. A tensor of n entries has n times the
    /// bytes of one. Collective: no rank may have a fetch that is sent and not received.
    ///
    /// Raises InvalidInputError: entries of this rank cannot be written; RefusedError on the other ranks. Nothing is
    /// written then on any rank, and the table goes on. DeadlineError, PeerLostError close it.
    #[pyo3(signature = (values, scales=None))]
    fn write(
        &self,
        py: Python<'_>,
        values: &Bound<'_, PyAny>,
        scales: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        // The tensors are dropped with the GIL.
        let (_kept, given) = match Layers::read(values, scales) {
            Ok(Layers { given, _kept }) => (Some(_kept), Ok(given)),
            Err(why) => (None, Err(why)),
        };
        self.core.call(py, |table| match given {
            Ok(layers) => table.write(&layers),
            Err(why) => Err(table.refuse_write(why)),
        })
    }

    /// Reads an entry for each of `indices`, int32 or int64, in their order, from a layer. `values` has room for the
    /// values of as many entries, and `scales` for their scales; both are written. This rank alone.
    ///
    /// Raises InvalidInputError: a tensor that cannot be used; an index without an entry; `in_flight` fetches that are
    /// not received. Nothing is written then, and the table goes on. DeadlineError, PeerLostError, TransportError close
    /// it.
    #[pyo3(signature = (indices, values, scales=None, *, layer=Argument::Fits(0)),
           text_signature = "($self, indices, values, scales=None, *, layer=0)")]
    fn fetch(
        &self,
        indices: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        scales: Option<&Bound<'_, PyAny>>,
        layer: Argument<u32>,
    ) -> PyResult<()> {
        let py = indices.py();
        let mut outs = EntryRoom::read(values, scales).map_err(|why| raise(py, &why))?;
        let (_kept, indices) = read_indices(indices).map_err(|why| raise(py, &why))?;
        self.core.call(py, |table| {
            let EntryRoom { values, scales, .. } = &mut outs;
            table.fetch(layer.get("layer")?, indices, values, scales.as_mut())
        })
    }

    /// The first half of `fetch`. The indices may be changed afterwards. `recv` of its result is the second half.
    /// Fetches are received in any order.
    ///
    /// Raises InvalidInputError as there, but for an index without an entry, which `recv` reports.
    #[pyo3(signature = (indices, *, layer=Argument::Fits(0)), text_signature = "($self, indices, *, layer=0)")]
    fn fetch_send(
        &self,
        py: Python<'_>,
        indices: &Bound<'_, PyAny>,
        layer: Argument<u32>,
    ) -> PyResult<PendingFetch> {
        let (_kept, indices) = read_indices(indices).map_err(|why| raise(py, &why))?;
        let pending = self.core.call(py, |table| table.fetch_send(layer.get("layer")?, indices))?;
        Ok(PendingFetch { core: Arc::clone(&self.core), pending: Mutex::new(Some(pending)) })
    }

    /// Bytes of the values of an entry.
    #[getter]
    fn entry_bytes(&self) -> u64 {
        self.options.entry_bytes
    }

    /// Bytes of the scales of an entry.
    #[getter]
    fn scale_bytes(&self) -> u64 {
        self.options.scale_bytes
    }

    /// Most entries of a rank in a layer.
    #[getter]
    fn max_entries(&self) -> u64 {
        self.options.max_entries
    }

    /// Most indices of a fetch.
    #[getter]
    fn max_indices(&self) -> u32 {
        self.options.max_indices
    }

    /// Layers.
    #[getter]
    fn layers(&self) -> u32 {
        self.options.layers
    }

    /// Fetches that may be sent and not yet received.
    #[getter]
    fn in_flight(&self) -> u32 {
        self.options.in_flight
    }

    /// Closes it on all ranks together. Collective; again is no error.
    ///
    /// Raises InvalidInputError for a fetch that was sent and not received, and what ended it before.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.core.close(py)
    }

    fn __repr__(&self) -> String {
        let TableOptions { entry_bytes, scale_bytes, max_entries, layers, max_indices, in_flight } =
            self.options;
        format!(
            "tokenyard.Table(entry_bytes={entry_bytes}, max_entries={max_entries}, max_indices={max_indices}, \
             scale_bytes={scale_bytes}, layers={layers}, in_flight={in_flight})"
        )
    }
}

/// The tensor is held while core uses the indices.
fn read_indices(object: &Bound<'_, PyAny>) -> Result<(Tensor, TensorRef<'static>)> {
    let tensor = Tensor::read("indices", object)?;
    // SAFETY: the tensor is held during the call. That no thread writes its memory until then is asked of the caller.
    let given = unsafe { tensor.get_message()? };
    Ok((tensor, given))
}

/// A fetch that was sent. `recv` finishes it; until then it counts as open.
#[pyclass(frozen, module = "tokenyard")]
pub(crate) struct PendingFetch {
    core: Arc<Guarded<CoreTable>>,
    pending: Mutex<Option<CorePendingFetch>>,
}

#[pymethods]
impl PendingFetch {
    /// The second half of `fetch`: waits for the entries, and writes them to `values` and `scales`. Once.
    ///
    /// Raises InvalidInputError: an index has no entry, or the tensors have another number of bytes; the fetch has
    /// ended then. Tensors that cannot be read raise it, too, and the fetch may be received again.
    #[pyo3(signature = (values, scales=None))]
    fn recv(
        &self,
        py: Python<'_>,
        values: &Bound<'_, PyAny>,
        scales: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let mut outs = EntryRoom::read(values, scales).map_err(|why| raise(py, &why))?;
        self.core.call(py, |table| {
            let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner).take();
            let pending = pending.ok_or_else(|| received_before("receive fetch"))?;
            let EntryRoom { values, scales, .. } = &mut outs;
            table.fetch_recv(pending, values, scales.as_mut())
        })
    }
}
