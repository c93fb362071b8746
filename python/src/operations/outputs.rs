//! Calls that send nothing: copies and counts of outputs, counts of a routing.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tokenyard_core::Result;
use tokenyard_core::communicator::{
    Communicator, OnStream, Outputs, Received as CoreReceived, RoutingRoom, Statistics, TensorMut,
};
use tokenyard_core::moe::Layout;

use super::{CallStream, Inputs, Object, StreamArguments, stream};
use crate::argument::Argument;
use crate::errors::{invalid, raise};
use crate::output::Received;
use crate::reader::Reader;
use crate::shared::Shared;
use crate::tensor::Tensor;

/// The arrays that can be copied out.
const COPIED: [&str; 17] = [
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
    "dropped",
    "overflow",
    "ranges",
];

pub(crate) fn release_after(
    py: Python<'_>,
    shared: &Shared,
    streams: &[Argument<usize>],
) -> PyResult<()> {
    let streams: Result<Vec<_>> = streams.iter().map(|raw| raw.get("streams")).collect();
    let streams = streams.map_err(|error| raise(py, &error))?;
    let streams: Vec<_> = streams.into_iter().filter_map(|raw| stream(Some(raw))).collect();
    shared.comm.call(py, |comm| comm.release_after(&streams))
}

/// Tensors for counts of a routing: its ids, then the counts of ranks and of experts, and the map of ranks.
pub(crate) fn count_routing(
    py: Python<'_>,
    shared: &Shared,
    [ids, of_ranks, of_experts, is_in]: [Object<'_, '_>; 4],
    raw: Argument<usize>,
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
        Ok((ids, room, CallStream::of(raw.get("stream")?)))
    };
    let (ids, mut room, stream) = read().map_err(|error| raise(py, &error))?;
    let counted =
        shared.comm.call_if_free(py, |comm| match stream.on(comm, Statistics::default()) {
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
    shared.comm.call(py, |comm| comm.expert_counts(&received))
}

pub(crate) fn copy_out(
    py: Python<'_>,
    shared: &Shared,
    received: &Received,
    stream: Option<Argument<usize>>,
    given: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let mut kept = Inputs::default();
    let read = || {
        let stream = StreamArguments::alone(stream).read()?;
        let received = received.core()?;
        let outputs = read_outputs(given, received.layout(), &mut kept)?;
        Ok((stream, received, outputs))
    };
    let (stream, received, mut outputs) = read().map_err(|error| raise(py, &error))?;
    shared.comm.call(py, |comm| in_order!(comm, stream, copy_out(&received, &mut outputs)))
}

/// An output that is given to a caller: its arrays as tensors, and what its handle needs, in memory of the library.
pub(crate) struct Giving<'a, 'py> {
    pub(crate) reader: &'a Reader,
    pub(crate) received: &'a Bound<'py, Received>,
    /// Names of arrays that become tensors where they lie.
    pub(crate) names: &'a Bound<'py, PyTuple>,
    pub(crate) keeps_fp8: bool,
    /// A list of int32, and the arrays of which it gets copies, one behind the other. The first has what the others
    /// leave of it.
    pub(crate) block: Object<'a, 'py>,
    pub(crate) parts: &'a Bound<'py, PyTuple>,
    /// Found by the address of the last part, of which each element is a row of as many columns, if there are some.
    pub(crate) record: Option<Py<PyAny>>,
    pub(crate) columns: Option<i64>,
    /// Ids of the caller, and room for a copy.
    pub(crate) copied: Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
    pub(crate) has_counts: bool,
    pub(crate) stream: Option<usize>,
    pub(crate) outputs: Option<&'a Bound<'py, PyDict>>,
}

/// The arrays; where there is a record, tensors over the parts; the counts of experts, or nothing.
pub(crate) type Given<'py> = (Bound<'py, PyTuple>, Bound<'py, PyTuple>, Option<Vec<u32>>);

/// One call for all, because the code of each is cold when its turn comes.
pub(crate) fn give<'py>(shared: &Shared, giving: Giving<'_, 'py>) -> PyResult<Given<'py>> {
    let Giving { reader, received, names, keeps_fp8, .. } = giving;
    let py = received.py();
    let mut kept = Inputs::default();
    let mut read = || {
        let core = received.get().core()?;
        let mut outputs = read_outputs(giving.outputs, core.layout(), &mut kept)?;
        let names: Vec<&'static str> = giving
            .parts
            .iter_borrowed()
            .map(|name| name_of(&name.to_string()))
            .collect::<Result<_>>()?;
        let shapes = part_shapes(&core, &names)?;
        if let Some((from, to)) = &giving.copied {
            let from = kept.keep(Tensor::read("topk_idx", from)?)?;
            outputs.topk_idx = Some((from, kept.keep_mut(Tensor::read("topk_idx", to)?)?));
        }
        if names.is_empty() {
            return Ok((outputs, core, Vec::new()));
        }
        let whole = Tensor::read("block", giving.block)?;
        let cut = || cut_parts(&whole, giving.block, &names, &shapes);
        for (part, name) in cut()?.into_iter().zip(&names) {
            *place_of(&mut outputs, name) = Some(kept.keep_mut(part)?);
        }
        let to_leave = if giving.record.is_some() { cut()? } else { Vec::new() };
        Ok((outputs, core, to_leave))
    };
    let (mut outputs, core, parts) = read().map_err(|error| raise(py, &error))?;
    let stream = giving.stream.map_or(CallStream::NONE, CallStream::of);
    let counts = shared.comm.call(py, |comm| {
        in_order!(comm, stream, copy_out(&core, &mut outputs))?;
        giving.has_counts.then(|| comm.expert_counts(&core)).transpose()
    })?;
    let arrays = reader.output(received, names, keeps_fp8, None)?;
    let mut tensors = Vec::new();
    if let Some(record) = giving.record {
        let (mut record, last) = (Some(record), parts.len().saturating_sub(1));
        for (number, part) in parts.into_iter().enumerate() {
            let record = record.take_if(|_| number == last);
            let columns = giving.columns.filter(|_| number == last);
            tensors.push(reader.make(py, part.leaving(record, columns))?);
        }
    }
    Ok((arrays, PyTuple::new(py, tensors)?, counts))
}

/// Rows and columns of arrays of 32 bits, by their names.
fn part_shapes(received: &CoreReceived, names: &[&str]) -> Result<Vec<[i64; 2]>> {
    let shape = |name: &&str| {
        let array = match *name {
            "ids" => received.ids(),
            "slots" => received.slots(),
            "source" | "source_tokens" => received.source(),
            "expert_counts" => received.expert_counts(),
            "expert_ends" => received.expert_ends(),
            "source_ends" => received.source_ends(),
            "dropped" => received.dropped(),
            "overflow" => received.overflow(),
            _ => {
                let text =
                    format!("parts: found {name}; expected ids, slots, source, source_tokens");
                return Err(invalid(
                    text + ", expert_counts, expert_ends, source_ends, dropped or overflow",
                ));
            }
        };
        let array = array.ok_or_else(|| {
            invalid(format!("parts: found {name}, which the output does not have"))
        })?;
        Ok([array.rows() as i64, array.cols() as i64])
    };
    names.iter().map(shape).collect()
}

/// The parts of a list, which was read of `block`. The first has what the others leave of it.
fn cut_parts(
    whole: &Tensor,
    block: Object<'_, '_>,
    names: &[&'static str],
    shapes: &[[i64; 2]],
) -> Result<Vec<Tensor>> {
    let sizes = shapes.iter().map(|[rows, cols]| rows * cols);
    let others: i64 = sizes.skip(1).sum();
    let mut first = 0;
    let mut parts = Vec::with_capacity(names.len());
    for (number, (name, [rows, cols])) in names.iter().zip(shapes).enumerate() {
        let rows =
            if number == 0 { (whole.length() - others).max(0) / (*cols).max(1) } else { *rows };
        parts.push(whole.cut(block, name, first, [rows, *cols])?);
        first += rows * cols;
    }
    Ok(parts)
}

/// The caller's arrays. Those with one value a row may have the shape that packed rows have: `[E / R, R * M]`.
fn read_outputs(
    given: Option<&Bound<'_, PyDict>>,
    layout: Layout,
    kept: &mut Inputs,
) -> Result<Outputs<'static>> {
    let mut outputs = Outputs::default();
    for (key, object) in given.into_iter().flatten() {
        let name = name_of(&key.to_string())?;
        let Some(tensor) = Tensor::optional(name, &object)? else { continue };
        let is_column = match name {
            "source" | "source_tokens" => true,
            "weights" => !layout.has_a_row_per_token(),
            _ => false,
        };
        let room = if is_column { kept.keep_column_mut(tensor) } else { kept.keep_mut(tensor) };
        *place_of(&mut outputs, name) = Some(room?);
    }
    Ok(outputs)
}

fn name_of(key: &str) -> Result<&'static str> {
    COPIED.into_iter().find(|name| *name == key).ok_or_else(|| {
        invalid(format!("{key}: found a name of no array; expected {}", COPIED.join(", ")))
    })
}

/// The place of an array of `COPIED`.
fn place_of<'a>(
    outputs: &'a mut Outputs<'static>,
    name: &str,
) -> &'a mut Option<TensorMut<'static>> {
    match name {
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
        "dropped" => &mut outputs.dropped,
        "overflow" => &mut outputs.overflow,
        _ => &mut outputs.ranges,
    }
}
