//! Memory at fixed addresses for a graph, and the data that changes between its launches.

use anyhow::{Context, Result, ensure};
use tokenyard_core::communicator::{
    Buffer, Combine, Communicator, Dispatch, Handle, PendingDispatch, Received, Sizes, TensorRef,
};
use tokenyard_core::moe::DType;

use super::super::chains::nth;
use super::super::streams::{Plan, Track, WRONG, copy};
use crate::moe::exchange::{self, dtype, row_dtype};
use crate::moe::oracle::number::i64s;
use crate::moe::oracle::{self, Case};
use crate::moe::round::Round;

/// The data that changes from one launch to the next, in device memory, and room for its results.
pub(super) struct Variant {
    pub(super) plan: Plan,
    pub(super) x: Buffer,
    pub(super) topk_idx: Buffer,
    pub(super) tokens: Buffer,
    pub(super) rows: Buffer,
    /// Copies of the received rows, of the combined rows, and of their counts.
    pub(super) kept: [Buffer; 3],
}

/// Another case with the sizes of `base`.
pub(super) fn variant(base: &Case, n: u64) -> Case {
    Case { worst_case: true, ..nth(base, n) }
}

impl Variant {
    /// `most`: the most rows that a dispatch receives.
    pub(super) fn new(comm: &Communicator, plan: Plan, most: usize) -> Result<Self> {
        let me = comm.rank() as usize;
        let tokens = plan.case.tokens_of(me) as u32;
        let nothing = |array: &oracle::Array, rows| vec![WRONG; rows * array.row_bytes()];
        let (arrived, combined) = (&plan.arrived.x, &plan.combined.x);
        let kept = [nothing(arrived, most), nothing(combined, combined.rows), vec![WRONG; 16]];
        let [arrived, combined, totals] = &kept;
        Ok(Self {
            x: comm.buffer(&plan.x)?,
            topk_idx: comm.buffer(&plan.topk_idx)?,
            tokens: comm.buffer(&tokens.to_le_bytes())?,
            rows: comm.buffer(&plan.rows)?,
            kept: [comm.buffer(arrived)?, comm.buffer(combined)?, comm.buffer(totals)?],
            plan,
        })
    }

    pub(super) fn check(&self) -> Result<()> {
        let [arrived, combined, totals] = &self.kept;
        let found = totals.tensor(DType::I64, [2, 1], [1, 1])?.to_vec()?;
        let (found, expected) = (i64s(&found)[0], self.plan.arrived.rows as i64);
        ensure!(found == expected, "totals: found N = {found}; expected {expected}");
        for (what, array, kept) in [
            ("what arrived", &self.plan.arrived.x, arrived),
            ("what came back", &self.plan.combined.x, combined),
        ] {
            let shape = [array.rows, array.width];
            let kept = kept.tensor(dtype(array.elem), shape, [array.width, 1])?.to_vec()?;
            array.compare(&kept).map_err(|e| anyhow::anyhow!("{what}: {e}"))?;
        }
        Ok(())
    }
}

pub(super) fn variants(comm: &mut Communicator, base: &Case, count: u64) -> Result<Vec<Variant>> {
    let most = most_rows(comm, base)?;
    let plan = |n| Plan::new(comm, &variant(base, n));
    (0..count).map(|n| Variant::new(comm, plan(n)?, most)).collect()
}

/// Bytes in device memory, seen as rows of a type.
pub(super) struct GraphRoom {
    pub(super) memory: Buffer,
    pub(super) wrong: Buffer,
    pub(super) dtype: DType,
    pub(super) shape: [usize; 2],
}

impl GraphRoom {
    pub(super) fn new(comm: &Communicator, dtype: DType, shape: [usize; 2]) -> Result<Self> {
        let wrong = vec![WRONG; shape[0] * shape[1] * dtype.bytes()];
        Ok(Self { memory: comm.buffer(&wrong)?, wrong: comm.buffer(&wrong)?, dtype, shape })
    }

    pub(super) fn tensor(&self) -> Result<TensorRef<'_>> {
        Ok(self.memory.tensor(self.dtype, self.shape, [self.shape[1], 1])?)
    }

    /// Poisons the whole memory.
    pub(super) fn spoil(&mut self, track: &Track) -> Result<()> {
        let from = self.wrong.tensor(self.dtype, self.shape, [self.shape[1], 1])?;
        copy(&track.stream, &mut self.memory, self.dtype, self.shape, &from)
    }

    /// Copies the first `rows` of `from`; the rest is poison.
    pub(super) fn fill(&mut self, track: &Track, from: &Buffer, rows: usize) -> Result<()> {
        self.spoil(track)?;
        let shape = [rows, self.shape[1]];
        let from = from.tensor(self.dtype, shape, [shape[1], 1])?;
        copy(&track.stream, &mut self.memory, self.dtype, shape, &from)
    }

    /// Copies its first `rows` to `to`.
    pub(super) fn keep(&self, track: &Track, to: &mut Buffer, rows: usize) -> Result<()> {
        let shape = [rows, self.shape[1]];
        let from = self.memory.tensor(self.dtype, shape, [shape[1], 1])?;
        copy(&track.stream, to, self.dtype, shape, &from)
    }
}

/// Memory at fixed addresses for one dispatch and its combine, whatever their data.
pub(super) struct FixedMemory {
    pub(super) case: Case,
    pub(super) x: GraphRoom,
    pub(super) topk_idx: GraphRoom,
    pub(super) tokens: GraphRoom,
    /// Expert outputs; as many rows as may arrive, once a dispatch has reported how many.
    pub(super) rows: Option<GraphRoom>,
    pub(super) out: GraphRoom,
}

impl FixedMemory {
    pub(super) fn new(comm: &Communicator, case: &Case) -> Result<Self> {
        let Case { max_tokens, topk, hidden, .. } = *case;
        let row = row_dtype(case.combine.row);
        Ok(Self {
            x: GraphRoom::new(comm, dtype(case.sent_elem()), [max_tokens, hidden])?,
            topk_idx: GraphRoom::new(comm, DType::I64, [max_tokens, topk])?,
            tokens: GraphRoom::new(comm, DType::I32, [1, 1])?,
            rows: None,
            out: GraphRoom::new(comm, row, [max_tokens, hidden])?,
            case: case.clone(),
        })
    }

    /// Makes room for as many expert outputs as a worst-case dispatch has rows. Called before a capture.
    pub(super) fn make_room(&mut self, comm: &Communicator, rows: usize) -> Result<()> {
        let dtype = row_dtype(self.case.combine.row);
        self.rows = Some(GraphRoom::new(comm, dtype, [rows, self.case.hidden])?);
        Ok(())
    }

    pub(super) fn bring(&mut self, track: &Track, from: &Variant, me: usize) -> Result<()> {
        let tokens = from.plan.case.tokens_of(me);
        self.x.fill(track, &from.x, tokens)?;
        self.topk_idx.fill(track, &from.topk_idx, tokens)?;
        self.tokens.fill(track, &from.tokens, 1)?;
        let row_bytes = self.case.hidden * self.case.combine.row.bytes();
        let rows = self.rows.as_mut().context("room for rows")?;
        rows.fill(track, &from.rows, from.plan.rows.len() / row_bytes)?;
        self.out.spoil(track)
    }

    pub(super) fn call(&self) -> Result<Dispatch<'_>> {
        Ok(Dispatch {
            layout: exchange::layout(&self.case),
            sizes: Sizes::WorstCase,
            ..Dispatch::new(self.x.tensor()?, self.topk_idx.tensor()?)
        })
    }

    pub(super) fn send<'a>(
        &'a self,
        comm: &mut Communicator,
        track: &Track,
    ) -> Result<PendingDispatch<'a>> {
        let mut calls = comm.on(track.name).without_sync().with_tokens(self.tokens.tensor()?);
        calls.dispatch_send(&self.call()?).context("send a dispatch")
    }

    /// Sends and receives in one call.
    pub(super) fn dispatch(
        &self,
        comm: &mut Communicator,
        track: &Track,
    ) -> Result<(Received, Handle)> {
        let mut calls = comm.on(track.name).without_sync().with_tokens(self.tokens.tensor()?);
        calls.dispatch(&self.call()?).context("dispatch")
    }

    pub(super) fn combine(
        &mut self,
        comm: &mut Communicator,
        track: &Track,
        handle: &Handle,
    ) -> Result<()> {
        let (dtype, shape) = (self.out.dtype, self.out.shape);
        let x = self.rows.as_ref().context("room for rows")?.tensor()?;
        let combine = Combine::new(x, self.out.memory.tensor_mut(dtype, shape)?);
        comm.on(track.name).without_sync().combine(handle, combine).context("combine")
    }

    /// Copies the received and the combined rows into a variant.
    pub(super) fn keep(
        &self,
        track: &Track,
        to: &mut Variant,
        received: &Received,
        me: usize,
    ) -> Result<()> {
        let [arrived, combined, totals] = &mut to.kept;
        let dtype = dtype(self.case.received_elem());
        let shape = [received.rows(), self.case.hidden];
        copy(&track.stream, arrived, dtype, shape, &received.x())?;
        let found = received.totals().context("the output has no totals")?;
        copy(&track.stream, totals, DType::I64, [2, 1], &found)?;
        self.out.keep(track, combined, to.plan.case.tokens_of(me))
    }
}

/// Poisons the rows that the last launch received.
pub(super) fn spoil(track: &Track, received: &mut Received, wrong: &GraphRoom) -> Result<()> {
    // SAFETY: the room and the output are freed in stream order, after this copy.
    unsafe { track.stream.copy(&received.x_mut(), &wrong.tensor()?)? }
    Ok(())
}

/// The number of rows that a worst-case dispatch returns.
pub(super) fn most_rows(comm: &mut Communicator, case: &Case) -> Result<usize> {
    let round = Round::new(case, comm.rank());
    Ok(round.dispatch(comm).context("to know the most")?.received.rows())
}
