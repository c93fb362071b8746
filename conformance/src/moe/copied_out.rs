//! An exchange whose received rows are copied to the caller's memory, after which their place in the arena
//! is free.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow, ensure};
use tokenyard_core::communicator::{
    Buffer, Communicator, Handle, Outputs, Received, TensorMut, TensorRef,
};
use tokenyard_core::moe::{DType, Layout, ScaleLayout};

use crate::moe::exchange::{self, Aligned, Placed, array};
use crate::moe::oracle::{self, Arrived};
use crate::moe::round::Round;

/// The content of room before a copy.
const POISON: u8 = 0xa5;

/// Room for an array, with one row more than it has.
struct Room {
    host: Aligned,
    /// The same room in device memory, where the communicator works on a device.
    device: Option<Buffer>,
    dtype: DType,
    shape: [usize; 2],
    /// The bytes of the row behind the array, after the copy.
    behind: u8,
    /// Its rows are the array's columns, with one element more.
    is_by_column: bool,
}

impl Room {
    fn new(comm: &Communicator, tensor: &TensorRef<'_>, behind: u8) -> Result<Self> {
        Self::of(comm, tensor, tensor.dtype().context("an array has no type")?, behind)
    }

    /// Room for the elements of an array in another type.
    fn of(comm: &Communicator, tensor: &TensorRef<'_>, dtype: DType, behind: u8) -> Result<Self> {
        let shape = [tensor.rows() + 1, tensor.cols()];
        let host = Aligned::filled(shape[0] * shape[1] * dtype.bytes(), POISON);
        let on_device = comm.works_on_device();
        let device = on_device.then(|| comm.buffer(host.bytes())).transpose()?;
        Ok(Self { host, device, dtype, shape, behind, is_by_column: false })
    }

    /// Room for the columns of an array, each with one element more than it has.
    fn by_columns(comm: &Communicator, tensor: &TensorRef<'_>) -> Result<Self> {
        let dtype = tensor.dtype().context("an array has no type")?;
        let mut room = Self::of(comm, tensor, dtype, POISON)?;
        (room.shape, room.is_by_column) = ([tensor.cols(), tensor.rows() + 1], true);
        Ok(room)
    }

    fn tensor_mut(&mut self) -> Result<TensorMut<'_>> {
        let [rows, columns] = self.shape;
        Ok(match &mut self.device {
            Some(buffer) => buffer.tensor_mut(self.dtype, self.shape)?,
            None => TensorMut::from_bytes(self.host.bytes_mut(), self.dtype, rows, columns)?,
        })
    }

    /// The array, after the copy. Checks the row behind it, or the element behind each column.
    fn fetch(&self) -> Result<Vec<u8>> {
        let mut bytes = match &self.device {
            Some(buffer) => buffer.tensor(self.dtype, self.shape, [self.shape[1], 1])?.to_vec()?,
            None => self.host.bytes().to_vec(),
        };
        let behind = if self.is_by_column {
            let columns = bytes.chunks(self.shape[1] * self.dtype.bytes());
            let split: Vec<_> = columns.filter_map(<[u8]>::split_last_chunk::<4>).collect();
            let behind = split.iter().flat_map(|(_, last)| last.iter().copied()).collect();
            bytes = split.iter().flat_map(|(column, _)| column.iter().copied()).collect();
            behind
        } else {
            bytes.split_off(bytes.len() - self.shape[1] * self.dtype.bytes())
        };
        ensure!(
            behind.iter().all(|b| *b == self.behind),
            "found {behind:02x?} behind an array; expected {:#04x} in each byte",
            self.behind
        );
        Ok(bytes)
    }
}

/// Room for every array of an output, by the oracle's names, and for what is made of two of them.
fn rooms(comm: &Communicator, received: &Received) -> Result<BTreeMap<&'static str, Room>> {
    // Rows behind flat ones name no expert and no source, and have no weight.
    let (none, zero) = match received.layout() {
        Layout::Flat => (0xff, 0),
        _ => (POISON, POISON),
    };
    let mut rooms = BTreeMap::new();
    for name in exchange::ARRAYS {
        let Some(tensor) = array(received, name) else { continue };
        let behind = match name {
            "ids" => none,
            "weights" => zero,
            _ => POISON,
        };
        rooms.insert(name, Room::new(comm, &tensor, behind)?);
    }
    if let Some(ids) = received.ids() {
        rooms.insert("wide_ids", Room::of(comm, &ids, DType::I64, none)?);
    }
    if let Some(scales) =
        received.scales().filter(|_| received.scale_layout() == ScaleLayout::RowMajor)
    {
        rooms.insert("scale_columns", Room::by_columns(comm, &scales)?);
    }
    if let Some(source) = received.source() {
        rooms.insert("source_tokens", Room::new(comm, &source, none)?);
    }
    Ok(rooms)
}

fn outputs<'a>(rooms: &'a mut BTreeMap<&'static str, Room>) -> Result<Outputs<'a>> {
    let mut outputs = Outputs::default();
    for (name, room) in rooms {
        let place = match *name {
            "x" => &mut outputs.x,
            "scales" => &mut outputs.scales,
            "scale_columns" => &mut outputs.scale_columns,
            "ids" => &mut outputs.ids,
            "wide_ids" => &mut outputs.wide_ids,
            "weights" => &mut outputs.weights,
            "source" => &mut outputs.source,
            "source_tokens" => &mut outputs.source_tokens,
            "slots" => &mut outputs.slots,
            "counts" => &mut outputs.expert_counts,
            "rank_rows" => &mut outputs.source_counts,
            "rank_ends" => &mut outputs.source_ends,
            "expert_ends" => &mut outputs.expert_ends,
            "dropped" => &mut outputs.dropped,
            "overflow" => &mut outputs.overflow,
            "ranges" => &mut outputs.ranges,
            other => return Err(anyhow!("no room for {other}")),
        };
        *place = Some(room.tensor_mut()?);
    }
    Ok(outputs)
}

/// The result of a dispatch.
struct Dispatched {
    rooms: BTreeMap<&'static str, Room>,
    /// The rows of each local expert, as the host gets them.
    counts: Vec<u32>,
    handle: Handle,
}

/// Dispatches, copies the received arrays, and frees their place in the arena. Where the kernel set has
/// streams, it does so on a stream, without waiting in between.
fn dispatch(comm: &mut Communicator, round: &Round) -> Result<Dispatched> {
    let arguments = round.tensors.dispatch_on(comm)?;
    if !comm.has_streams() {
        let (received, handle) = comm.dispatch(&arguments).context("dispatch")?;
        let mut rooms = rooms(comm, &received)?;
        comm.copy_out(&received, &mut outputs(&mut rooms)?).context("copy out")?;
        let counts = comm.expert_counts(&received).context("count")?;
        return Ok(Dispatched { rooms, counts, handle });
    }
    let tool = comm.tool_stream()?;
    // SAFETY: the stream outlives the calls below and their results, except the handle, which belongs to a
    // stream that has ended by then.
    let stream = unsafe { tool.stream() };
    let (received, handle) = comm.on(stream).dispatch(&arguments).context("dispatch")?;
    let mut rooms = rooms(comm, &received)?;
    comm.on(stream).copy_out(&received, &mut outputs(&mut rooms)?).context("copy out")?;
    let counts = comm.expert_counts(&received).context("count")?;
    drop(received);
    comm.flush()?;
    Ok(Dispatched { rooms, counts, handle })
}

/// Checks what is made of arrays that the oracle knows: `[T, K]` wide ids, source tokens, and scales by columns.
fn check_made(
    arrays: &BTreeMap<&'static str, Vec<u8>>,
    max_tokens: i32,
    row_bytes: usize,
) -> Result<()> {
    let words = |name: &str| {
        let bytes = arrays.get(name).map(|bytes| bytes.as_chunks::<4>().0).unwrap_or_default();
        bytes.iter().map(|word| i32::from_ne_bytes(*word)).collect::<Vec<_>>()
    };
    let wide = arrays.get("wide_ids").map(|bytes| bytes.as_chunks::<8>().0).unwrap_or_default();
    let wide: Vec<_> = wide.iter().map(|word| i64::from_ne_bytes(*word)).collect();
    let ids: Vec<_> = words("ids").into_iter().map(i64::from).collect();
    ensure!(wide == ids, "found wide ids {wide:?}; expected {ids:?}");
    let (scales, columns) = (words("scales"), words("scale_columns"));
    if arrays.contains_key("scale_columns") {
        let rows = arrays.get("x").map_or(0, Vec::len) / row_bytes.max(1);
        let width = scales.len().checked_div(rows).unwrap_or(0);
        ensure!(columns.len() == scales.len(), "found {} scales by columns", columns.len());
        let is_there = |at: usize| columns[at % width * rows + at / width] == scales[at];
        ensure!(
            (0..scales.len()).all(is_there),
            "found scales by columns {columns:?} of {scales:?}"
        );
    }
    // Places of blocks that have no row hold anything.
    let pairs = words("source").into_iter().zip(words("source_tokens"));
    for (source, token) in pairs.filter(|(source, _)| *source >= 0) {
        ensure!(token == source % max_tokens, "found token {token} of source {source}");
    }
    Ok(())
}

/// One exchange, every element checked. Another exchange runs between the copy and the comparison.
///
/// # Errors
/// The communicator's error, or the first difference from the oracle.
pub(crate) fn check(comm: &mut Communicator, round: &Round, between: &Round) -> Result<()> {
    let (case, rank) = (&round.case, comm.rank() as usize);
    let Dispatched { rooms, counts, handle } = dispatch(comm, round)?;
    drop(between.dispatch(comm)?);
    let arrays: BTreeMap<_, _> = rooms
        .iter()
        .map(|(name, room)| Ok((*name, exchange::by_row(case, name, room.fetch()?))))
        .collect::<Result<_>>()?;
    let find = |name: &str| arrays.get(name).map(Vec::as_slice);
    let expected = oracle::expected_dispatch(case, &round.inputs, rank);
    expected.compare(find).map_err(|e| anyhow!("after the copy: {e}"))?;
    let row_bytes = case.hidden * case.received_elem().bytes();
    check_made(&arrays, comm.shape().max_tokens as i32, row_bytes)?;
    let given: Vec<u8> = counts.iter().flat_map(|count| count.to_ne_bytes()).collect();
    ensure!(find("counts") == Some(&given), "found counts {counts:?} on the host");
    let arrived = Arrived {
        rows: expected.rows,
        x: find("x").unwrap_or_default(),
        scales: find("scales"),
        ids: find("ids"),
        weights: find("weights"),
        counts: find("counts").unwrap_or_default(),
    };
    let output = oracle::experts::run(case, rank, &arrived).map_err(|e| anyhow!("{e}"))?;
    let got = exchange::combine(comm, &round.tensors, &handle, &output, Placed::Outside)?;
    round.check_combined(&got)
}
