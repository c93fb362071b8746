//! An exchange whose received rows are copied to the caller's memory, after which their place in the arena
//! is free.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow, ensure};
use tokenyard_core::communicator::{
    Buffer, Communicator, Handle, Outputs, Received, TensorMut, TensorRef,
};
use tokenyard_core::moe::DType;

use crate::exchange::{self, Aligned, Placed, array};
use crate::oracle::{self, Arrived};
use crate::round::Round;

/// The content of room before a copy.
const POISON: u8 = 0xa5;

/// Room for an array, with one row more than it has.
struct Room {
    host: Aligned,
    /// The same room in device memory, where the communicator works on a device.
    device: Option<Buffer>,
    dtype: DType,
    shape: [usize; 2],
}

impl Room {
    fn new(comm: &Communicator, tensor: &TensorRef<'_>) -> Result<Self> {
        let dtype = tensor.dtype().context("an array has no type")?;
        let shape = [tensor.rows() + 1, tensor.cols()];
        let host = Aligned::filled(shape[0] * shape[1] * dtype.bytes(), POISON);
        let on_device = comm.works_on_device();
        let device = on_device.then(|| comm.buffer(host.bytes())).transpose()?;
        Ok(Self { host, device, dtype, shape })
    }

    fn tensor_mut(&mut self) -> Result<TensorMut<'_>> {
        let [rows, columns] = self.shape;
        Ok(match &mut self.device {
            Some(buffer) => buffer.tensor_mut(self.dtype, self.shape)?,
            None => TensorMut::from_bytes(self.host.bytes_mut(), self.dtype, rows, columns)?,
        })
    }

    /// The array, after the copy. Checks that the row behind it is unchanged.
    fn fetch(&self) -> Result<Vec<u8>> {
        let mut bytes = match &self.device {
            Some(buffer) => buffer.tensor(self.dtype, self.shape, [self.shape[1], 1])?.to_vec()?,
            None => self.host.bytes().to_vec(),
        };
        let behind = bytes.split_off(bytes.len() - self.shape[1] * self.dtype.bytes());
        ensure!(behind.iter().all(|b| *b == POISON), "a copy wrote behind its array");
        Ok(bytes)
    }
}

/// Room for every array of an output, by the oracle's names.
fn rooms(comm: &Communicator, received: &Received) -> Result<BTreeMap<&'static str, Room>> {
    let there =
        exchange::ARRAYS.into_iter().filter_map(|name| Some((name, array(received, name)?)));
    there.map(|(name, tensor)| Ok((name, Room::new(comm, &tensor)?))).collect()
}

fn outputs<'a>(rooms: &'a mut BTreeMap<&'static str, Room>) -> Result<Outputs<'a>> {
    let mut outputs = Outputs::default();
    for (name, room) in rooms {
        let place = match *name {
            "x" => &mut outputs.x,
            "scales" => &mut outputs.scales,
            "ids" => &mut outputs.ids,
            "weights" => &mut outputs.weights,
            "source" => &mut outputs.source,
            "slots" => &mut outputs.slots,
            "counts" => &mut outputs.expert_counts,
            "rank_rows" => &mut outputs.source_counts,
            "rank_ends" => &mut outputs.source_ends,
            "expert_ends" => &mut outputs.expert_ends,
            "ranges" => &mut outputs.ranges,
            other => return Err(anyhow!("no room for {other}")),
        };
        *place = Some(room.tensor_mut()?);
    }
    Ok(outputs)
}

/// Dispatches, copies the received arrays, and frees their place in the arena. Where the kernel set has
/// streams, it does so on a stream, without waiting in between.
fn dispatch(
    comm: &mut Communicator,
    round: &Round,
) -> Result<(BTreeMap<&'static str, Room>, Handle)> {
    let arguments = round.tensors.dispatch_on(comm)?;
    if !comm.has_streams() {
        let (received, handle) = comm.dispatch(&arguments).context("dispatch")?;
        let mut rooms = rooms(comm, &received)?;
        comm.copy_out(&received, &mut outputs(&mut rooms)?).context("copy out")?;
        return Ok((rooms, handle));
    }
    let tool = comm.tool_stream()?;
    // SAFETY: the stream outlives the calls below and their results, except the handle, which belongs to a
    // stream that has ended by then.
    let stream = unsafe { tool.stream() };
    let (received, handle) = comm.on(stream).dispatch(&arguments).context("dispatch")?;
    let mut rooms = rooms(comm, &received)?;
    comm.on(stream).copy_out(&received, &mut outputs(&mut rooms)?).context("copy out")?;
    drop(received);
    comm.flush()?;
    Ok((rooms, handle))
}

/// One exchange, every element checked. Another exchange runs between the copy and the comparison.
///
/// # Errors
/// The communicator's error, or the first difference from the oracle.
pub(crate) fn check(comm: &mut Communicator, round: &Round, between: &Round) -> Result<()> {
    let (case, rank) = (&round.case, comm.rank() as usize);
    let (rooms, handle) = dispatch(comm, round)?;
    drop(between.dispatch(comm)?);
    let arrays: BTreeMap<_, _> =
        rooms.iter().map(|(name, room)| Ok((*name, room.fetch()?))).collect::<Result<_>>()?;
    let find = |name: &str| arrays.get(name).map(Vec::as_slice);
    let expected = oracle::expected_dispatch(case, &round.inputs, rank);
    expected.compare(find).map_err(|e| anyhow!("after the copy: {e}"))?;
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
