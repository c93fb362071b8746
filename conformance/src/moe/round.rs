//! One exchange in the steps that tests combine: dispatch, then combine, each checked.

use anyhow::{Context, Result};
use tokenyard_core::communicator::{Communicator, Handle, Received};

use crate::moe::exchange::{self, Buffers, Got, InputTensors, Placed};
use crate::moe::oracle::{Case, Inputs, RankInputs};

/// A case with the inputs of all ranks, seen from one of them.
#[derive(Clone, Debug)]
pub struct Round {
    /// The case of the exchange.
    pub case: Case,
    /// The inputs of every rank.
    pub inputs: Inputs,
    /// The inputs of this rank, as the product takes them.
    pub tensors: InputTensors,
    rank: usize,
}

/// A dispatch that was received and is not combined yet.
#[derive(Debug)]
pub struct Live {
    /// Its output.
    pub received: Received,
    /// Its handle, for the combine.
    pub handle: Handle,
}

impl Round {
    /// The generated inputs of `case`, for `rank`.
    pub fn new(case: &Case, rank: u32) -> Self {
        Self::of(case.clone(), Inputs::all(case), rank as usize)
    }

    /// New rows, weights and biases, of `case`, with the routing of `self`.
    pub fn replayed(&self, case: &Case) -> Self {
        let ranks =
            self.inputs.ranks.iter().enumerate().map(|(rank, inputs)| {
                RankInputs::with_routing(case, rank, inputs.topk_idx.clone())
            });
        Self::of(case.clone(), Inputs { ranks: ranks.collect() }, self.rank)
    }

    fn of(case: Case, inputs: Inputs, rank: usize) -> Self {
        let tensors = InputTensors::new(&case, rank, inputs.ranks[rank].clone());
        Self { case, inputs, tensors, rank }
    }

    /// Dispatches, and checks the received rows.
    ///
    /// # Errors
    /// The communicator's error, or the first difference from the oracle.
    pub fn dispatch(&self, comm: &mut Communicator) -> Result<Live> {
        let (received, handle) =
            comm.dispatch(&self.tensors.dispatch_on(comm)?).context("dispatch")?;
        self.check_received(&received)?;
        Ok(Live { received, handle })
    }

    /// Checks the received rows.
    ///
    /// # Errors
    /// The first difference from the oracle.
    pub fn check_received(&self, received: &Received) -> Result<()> {
        exchange::check_received(&self.case, &self.inputs, self.rank, received)
            .context("after dispatch")
    }

    /// Runs the experts on the received rows and prepares the combine of their outputs.
    ///
    /// # Errors
    /// Arrays that contradict each other.
    pub fn experts(&self, received: &Received) -> Result<Buffers> {
        let output = exchange::run_experts(&self.case, self.rank, received).context("experts")?;
        Ok(Buffers::new(&self.tensors, &output))
    }

    /// Runs the experts, combines, and checks the combined rows.
    ///
    /// # Errors
    /// The communicator's error, or the first difference from the oracle.
    pub fn finish(&self, comm: &mut Communicator, live: &Live) -> Result<Got> {
        let output = exchange::run_experts(&self.case, self.rank, &live.received)?;
        let got = exchange::combine(comm, &self.tensors, &live.handle, &output, Placed::Outside)
            .context("combine")?;
        self.check_combined(&got)?;
        Ok(got)
    }

    /// Checks the combined rows.
    ///
    /// # Errors
    /// The first difference from the oracle.
    pub fn check_combined(&self, got: &Got) -> Result<()> {
        exchange::check_combined(&self.case, &self.inputs, self.rank, got).context("after combine")
    }

    /// One whole exchange.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch) and [`finish`](Self::finish).
    pub fn run(&self, comm: &mut Communicator) -> Result<Got> {
        let live = self.dispatch(comm)?;
        self.finish(comm, &live)
    }
}
