//! Calls that send nothing: copies and counts of outputs, counts of a routing.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tokenyard_core::Result;
use tokenyard_core::communicator::{Communicator, OnStream, Outputs, RoutingRoom, Statistics};
use tokenyard_core::moe::Layout;

use super::{CallStream, Inputs, Object, stream};
use crate::errors::{invalid, raise};
use crate::output::Received;
use crate::reader::Reader;
use crate::shared::Shared;
use crate::tensor::Tensor;

/// The arrays that can be copied out.
const COPIED: [&str; 15] = [
    "x",
    "scales",
    "scale_columns",
    "ids",
    "wide_ids",
    "weights",
    "source",
    "source_tokens",
    "slots",
    "expert_counts",
    "expert_starts",
    "expert_ends",
    "source_counts",
    "source_ends",
    "ranges",
];

pub(crate) fn release_after(py: Python<'_>, shared: &Shared, streams: &[usize]) -> PyResult<()> {
    let streams: Vec<_> = streams.iter().filter_map(|raw| stream(Some(*raw))).collect();
    shared.call(py, |comm| comm.release_after(&streams))
}

/// Tensors for counts of a routing: its ids, then the counts of ranks and of experts, and the map of ranks.
pub(crate) fn count_routing(
    py: Python<'_>,
    shared: &Shared,
    [ids, of_ranks, of_experts, is_in]: [Object<'_, '_>; 4],
    raw: usize,
) -> PyResult<bool> {
    let mut kept = Inputs::default();
    let mut read = || {
        let ids = kept.keep(Tensor::read("topk_idx", ids)?)?;
        let mut room = |name, object| kept.keep_mut(Tensor::read(name, object)?);
        let room = RoutingRoom {
            rank_tokens: room("rank_tokens", of_ranks)?,
            expert_tokens: room("expert_tokens", of_experts)?,
            is_token_in_rank: room("is_token_in_rank", is_in)?,
        };
        Ok((ids, room))
    };
    let (ids, mut room) = read().map_err(|error| raise(py, &error))?;
    let stream = CallStream { raw: Some(raw), without_sync: false };
    let counted = shared.call_if_free(py, |comm| match stream.on(comm, Statistics::default()) {
        Some(mut on) => on.count_routing(ids, &mut room),
        None => Err(invalid("stream: found none; expected one")),
    })?;
    Ok(counted.is_some())
}

pub(crate) fn expert_counts(
    py: Python<'_>,
    shared: &Shared,
    received: &Received,
) -> PyResult<Vec<u32>> {
    let received = received.core().map_err(|error| raise(py, &error))?;
    shared.call(py, |comm| comm.expert_counts(&received))
}

pub(crate) fn copy_out(
    py: Python<'_>,
    shared: &Shared,
    received: &Received,
    stream: Option<usize>,
    given: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let mut kept = Inputs::default();
    let stream = CallStream { raw: stream, without_sync: false };
    let received = received.core().map_err(|error| raise(py, &error))?;
    let read = read_outputs(given, received.layout(), &mut kept);
    let mut outputs = read.map_err(|error| raise(py, &error))?;
    shared.call(py, |comm| in_order!(comm, stream, copy_out(&received, &mut outputs)))
}

/// An output that is given to a caller: its arrays as tensors, and what its handle needs, in memory of the library.
pub(crate) struct Giving<'a, 'py> {
    pub(crate) reader: &'a Reader,
    pub(crate) received: &'a Bound<'py, Received>,
    /// Names of arrays that become tensors where they lie.
    pub(crate) names: &'a Bound<'py, PyTuple>,
    pub(crate) keeps_fp8: bool,
    /// int32: room for the source tokens of all rows, and behind it for the ends of the rows of each source.
    pub(crate) block: Object<'a, 'py>,
    /// Found by the address of the ends, of which each is a row of as many columns, if there are some.
    pub(crate) record: Py<PyAny>,
    pub(crate) columns: Option<i64>,
    pub(crate) has_counts: bool,
    pub(crate) stream: Option<usize>,
    pub(crate) outputs: Option<&'a Bound<'py, PyDict>>,
}

/// The arrays, the source tokens, the ends, and the counts of experts or nothing.
pub(crate) type Given<'py> =
    (Bound<'py, PyTuple>, Bound<'py, PyAny>, Bound<'py, PyAny>, Option<Vec<u32>>);

/// One call for all, because the code of each is cold when its turn comes.
pub(crate) fn give<'py>(shared: &Shared, giving: Giving<'_, 'py>) -> PyResult<Given<'py>> {
    let Giving { reader, received, names, keeps_fp8, block, record, columns, .. } = giving;
    let py = received.py();
    let ranks = i64::from(shared.shape().ranks);
    let mut kept = Inputs::default();
    let mut read = || {
        let core = received.get().core()?;
        let mut outputs = read_outputs(giving.outputs, core.layout(), &mut kept)?;
        let whole = Tensor::read("block", block)?;
        let room = (whole.length() - ranks).max(0);
        let cut = |name, first, count| whole.cut(block, name, first, count);
        let of_tokens = || cut("source_tokens", 0, room);
        let of_ends = || cut("source_ends", room, ranks);
        outputs.source_tokens = Some(kept.keep_mut(of_tokens()?)?);
        outputs.source_ends = Some(kept.keep_mut(of_ends()?)?);
        Ok((outputs, core, of_tokens()?, of_ends()?))
    };
    let (mut outputs, core, tokens, ends) = read().map_err(|error| raise(py, &error))?;
    let stream = CallStream { raw: giving.stream, without_sync: false };
    let counts = shared.call(py, |comm| {
        in_order!(comm, stream, copy_out(&core, &mut outputs))?;
        giving.has_counts.then(|| comm.expert_counts(&core)).transpose()
    })?;
    let arrays = reader.output(received, names, keeps_fp8, None)?;
    let tokens = reader.make(py, tokens.leaving(None, None))?;
    let ends = reader.make(py, ends.leaving(Some(record), columns))?;
    Ok((arrays, tokens, ends, counts))
}

/// The caller's arrays. Those with one value a row may have the shape that packed rows have: `[E / R, R * M]`.
fn read_outputs(
    given: Option<&Bound<'_, PyDict>>,
    layout: Layout,
    kept: &mut Inputs,
) -> Result<Outputs<'static>> {
    let mut outputs = Outputs::default();
    for (key, object) in given.into_iter().flatten() {
        let key = key.to_string();
        let Some(name) = COPIED.into_iter().find(|name| *name == key) else {
            let text = format!("{key}: found a name of no array; expected {}", COPIED.join(", "));
            return Err(invalid(text));
        };
        let Some(tensor) = Tensor::optional(name, &object)? else { continue };
        let place = match name {
            "x" => &mut outputs.x,
            "scales" => &mut outputs.scales,
            "scale_columns" => &mut outputs.scale_columns,
            "ids" => &mut outputs.ids,
            "wide_ids" => &mut outputs.wide_ids,
            "weights" => &mut outputs.weights,
            "source" => &mut outputs.source,
            "source_tokens" => &mut outputs.source_tokens,
            "slots" => &mut outputs.slots,
            "expert_counts" => &mut outputs.expert_counts,
            "expert_starts" => &mut outputs.expert_starts,
            "expert_ends" => &mut outputs.expert_ends,
            "source_counts" => &mut outputs.source_counts,
            "source_ends" => &mut outputs.source_ends,
            _ => &mut outputs.ranges,
        };
        let is_column = match name {
            "source" | "source_tokens" => true,
            "weights" => layout != Layout::Flat,
            _ => false,
        };
        let room = if is_column { kept.keep_column_mut(tensor) } else { kept.keep_mut(tensor) };
        *place = Some(room?);
    }
    Ok(outputs)
}
