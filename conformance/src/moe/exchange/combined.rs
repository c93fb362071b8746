//! The combined rows that a rank gets back.

use anyhow::{Context, Result, anyhow, ensure};
use tokenyard_core::communicator::{
    Combine, CombineInput, Communicator, Handle, LateTopk, Received, TensorMut, TensorRef,
};
use tokenyard_core::moe::Compression;

use super::{Aligned, InputTensors, row_dtype};
use crate::device::Copied;
use crate::moe::oracle::{self, Case, ExpertOutput, Inputs, RankInputs, Sums};

/// Where combine finds the expert outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// In memory of the caller.
    Outside,
    /// In the arena, in the combine input of the communicator.
    CombineInput,
}

/// The results of a combine on one rank.
#[derive(Clone, Debug)]
pub struct Got {
    /// `[T, H]`.
    pub x: Aligned,
    /// `[T, K]`, if weights travelled.
    pub weights: Option<Vec<f32>>,
    /// `[T]`: experts that are left out of each token's sum.
    pub missing: Vec<u8>,
}

/// The caller's memory for one combine: inputs and outputs.
#[derive(Debug)]
pub struct Buffers {
    rows: Aligned,
    weights: Option<Vec<f32>>,
    got: Got,
    /// Where the communicator works on a device: copies of the weights and ids of the call, x, weights,
    /// both biases, out, out_weights, missing.
    copies: [Option<Copied>; 9],
}

impl Buffers {
    /// Copies `output`, and poisons the outputs, so that rows that the combine does not write show.
    pub fn new(tensors: &InputTensors, output: &ExpertOutput) -> Self {
        let (tokens, case) = (tensors.tokens(), &tensors.case);
        let x = Aligned::filled(tokens * case.hidden * case.combine.row.bytes(), 0x7f);
        let weights = output.weights.as_ref().map(|_| vec![f32::NAN; tokens * case.topk]);
        Self {
            rows: Aligned::copy_of(&output.rows),
            weights: output.weights.clone(),
            got: Got { x, weights, missing: vec![0xff; tokens] },
            copies: Default::default(),
        }
    }

    /// The arguments of the combine, with tensors where the handle's communicator works.
    ///
    /// # Errors
    /// Sizes that contradict each other; the communicator's device refuses the memory or the copy.
    pub fn arguments<'a>(
        &'a mut self,
        tensors: &'a InputTensors,
        handle: &Handle,
    ) -> Result<Combine<'a>> {
        self.arguments_but(tensors, handle, |_| Ok(()))
    }

    /// The arguments, changed by `change` while they are in host memory.
    ///
    /// # Errors
    /// As [`arguments`](Self::arguments), and the error of `change`.
    pub fn arguments_but<'a>(
        &'a mut self,
        tensors: &'a InputTensors,
        handle: &Handle,
        change: impl FnOnce(&mut Combine<'a>) -> Result<()>,
    ) -> Result<Combine<'a>> {
        let case = &tensors.case;
        let (elem, hidden, tokens) = (row_dtype(case.combine.row), case.hidden, tensors.tokens());
        let columns = if case.layout.has_a_row_per_token() { case.topk } else { 1 };
        let weights = self.weights.as_deref();
        let out_weights = self.got.weights.as_mut();
        let mut host = Combine {
            x: TensorRef::from_bytes(self.rows.bytes(), elem, handle.rows(), hidden)?,
            weights: weights
                .map(|w| TensorRef::from_slice(w, w.len() / columns, columns))
                .transpose()?,
            bias: tensors.biases()?,
            weighted: case.combine.weighted,
            round_once: !case.combine.sums.rounds_by_rank(),
            compression: match case.combine.sums.is_coded() {
                true => Compression::LogFmt10,
                false => Compression::None,
            },
            topk: tensors.late_topk()?,
            sum_weights: case.combine.sums == Sums::WeightsOfAllRanks,
            out: TensorMut::from_bytes(self.got.x.bytes_mut(), elem, tokens, hidden)?,
            out_weights: out_weights
                .map(|w| TensorMut::from_slice(w.as_mut_slice(), tokens, case.topk))
                .transpose()?,
            missing: Some(TensorMut::from_slice(&mut self.got.missing, tokens, 1)?),
        };
        change(&mut host)?;
        if handle.is_on_device() { on_device(host, handle, &mut self.copies) } else { Ok(host) }
    }

    /// The results of the combine.
    ///
    /// # Errors
    /// The communicator's device refuses the copy.
    pub fn into_got(mut self) -> Result<Got> {
        let [.., out, out_weights, missing] = &self.copies;
        if let Some(out) = out {
            self.got.x.bytes_mut().copy_from_slice(&out.tensor()?.to_vec()?);
        }
        if let Some(missing) = missing {
            self.got.missing.copy_from_slice(&missing.tensor()?.to_vec()?);
        }
        if let (Some(out), Some(weights)) = (out_weights, &mut self.got.weights) {
            weights.copy_from_slice(&oracle::number::f32s(&out.tensor()?.to_vec()?));
        }
        Ok(self.got)
    }
}

/// The same arguments over copies on the device.
fn on_device<'a>(
    host: Combine<'a>,
    handle: &Handle,
    copies: &'a mut [Option<Copied>; 9],
) -> Result<Combine<'a>> {
    let tensors = [
        host.topk.map(|topk| topk.weights),
        host.topk.and_then(|topk| topk.ids),
        Some(host.x),
        host.weights,
        host.bias[0],
        host.bias[1],
        Some(host.out.as_ref()),
        host.out_weights.as_ref().map(TensorMut::as_ref),
        host.missing.as_ref().map(TensorMut::as_ref),
    ];
    for (copy, tensor) in copies.iter_mut().zip(tensors) {
        *copy = tensor.map(|tensor| Copied::beside(handle, &tensor)).transpose()?;
    }
    let [late_weights, late_ids, x, weights, bias0, bias1, out, out_weights, missing] = copies;
    let there = |copy: &'a Option<Copied>| copy.as_ref().map(Copied::tensor).transpose();
    let out = out.as_mut().context("the output has a copy")?.tensor_mut()?;
    Ok(Combine {
        x: there(x)?.context("the rows have a copy")?,
        weights: there(weights)?,
        bias: [there(bias0)?, there(bias1)?],
        weighted: host.weighted,
        round_once: host.round_once,
        compression: host.compression,
        topk: match there(late_weights)? {
            Some(weights) => Some(LateTopk { weights, ids: there(late_ids)? }),
            None => None,
        },
        sum_weights: host.sum_weights,
        out,
        out_weights: out_weights.as_mut().map(Copied::tensor_mut).transpose()?,
        missing: missing.as_mut().map(Copied::tensor_mut).transpose()?,
    })
}

/// All that a combine needs: expert outputs in their place, and room for the results.
#[derive(Debug)]
pub struct Staged {
    room: Option<CombineInput>,
    buffers: Buffers,
}

impl Staged {
    /// Puts the expert outputs into their place for the combine of `handle`.
    ///
    /// # Errors
    /// The communicator's error.
    pub fn new(
        comm: &mut Communicator,
        tensors: &InputTensors,
        output: &ExpertOutput,
        handle: &Handle,
        placed: Placed,
    ) -> Result<Self> {
        let mut room = None;
        if placed == Placed::CombineInput {
            let dtype = row_dtype(tensors.case.combine.row);
            let taken = room.insert(comm.combine_input(handle, dtype)?);
            taken.tensor_mut().write(&output.rows)?;
        }
        Ok(Self { room, buffers: Buffers::new(tensors, output) })
    }

    /// Combines, and returns the results.
    ///
    /// # Errors
    /// The communicator's error.
    pub fn combine(
        self,
        comm: &mut Communicator,
        tensors: &InputTensors,
        handle: &Handle,
    ) -> Result<Got> {
        self.combine_by(tensors, handle, |combine| Ok(comm.combine(handle, combine)?))
    }

    /// As [`combine`](Self::combine), by a call that `run` makes. Inputs are copied to the device before
    /// that call, and results are fetched after it, so the call can be timed alone.
    ///
    /// # Errors
    /// The error of the communicator or of `run`.
    pub fn combine_by(
        mut self,
        tensors: &InputTensors,
        handle: &Handle,
        run: impl FnOnce(Combine<'_>) -> Result<()>,
    ) -> Result<Got> {
        let mut arguments = self.buffers.arguments(tensors, handle)?;
        if let Some(room) = &self.room {
            arguments.x = room.tensor();
        }
        run(arguments)?;
        self.buffers.into_got()
    }
}

/// Combines `output` and returns the results.
///
/// # Errors
/// The communicator's error.
pub fn combine(
    comm: &mut Communicator,
    tensors: &InputTensors,
    handle: &Handle,
    output: &ExpertOutput,
    placed: Placed,
) -> Result<Got> {
    Staged::new(comm, tensors, output, handle, placed)?.combine(comm, tensors, handle)
}

/// As [`combine`], with the expert outputs written over the received rows. The rows of the case
/// arrive in the type that combine sums.
///
/// # Errors
/// The communicator's error.
pub fn combine_in_place(
    comm: &mut Communicator,
    tensors: &InputTensors,
    handle: &Handle,
    output: &ExpertOutput,
    received: &mut Received,
) -> Result<Got> {
    received.x_mut().write(&output.rows)?;
    let mut buffers = Buffers::new(tensors, output);
    let mut arguments = buffers.arguments(tensors, handle)?;
    arguments.x = received.x();
    comm.combine(handle, arguments)?;
    buffers.into_got()
}

/// Compares the results with the oracle's for the whole round trip.
///
/// # Errors
/// The first difference.
pub fn check_combined(case: &Case, inputs: &Inputs, rank: usize, got: &Got) -> Result<()> {
    check_combined_without(case, inputs, &[], rank, got)
}

/// As [`check_combined`], where the experts of `lost` ranks are left out.
///
/// # Errors
/// The first difference.
pub fn check_combined_without(
    case: &Case,
    inputs: &Inputs,
    lost: &[usize],
    rank: usize,
    got: &Got,
) -> Result<()> {
    check_missing(case, &inputs.ranks[rank], lost, got)?;
    let inputs = inputs.without(case, lost);
    let expected = match case.max_rows.is_empty() {
        true => oracle::expected_round_trip(case, &inputs.ranks[rank], rank),
        false => oracle::expected_capped_round_trip(case, &inputs, rank),
    };
    expected.x.compare(got.x.bytes()).map_err(|e| anyhow!("combined {e}"))?;
    if let (Some(expected), Some(found)) = (&expected.weights, &got.weights) {
        let found: Vec<u8> = found.iter().flat_map(|w| w.to_le_bytes()).collect();
        expected.compare(&found).map_err(|e| anyhow!("combined {e}"))?;
    }
    Ok(())
}

/// Checks that exactly the experts of `lost` ranks are left out of the sums of this rank's tokens.
fn check_missing(case: &Case, inputs: &RankInputs, lost: &[usize], got: &Got) -> Result<()> {
    let is_lost = |e: &&i64| usize::try_from(**e).is_ok_and(|e| lost.contains(&case.rank_of(e)));
    for (token, row) in inputs.topk_idx.chunks(case.topk).enumerate() {
        let (found, expected) = (got.missing[token], row.iter().filter(is_lost).count() as u8);
        ensure!(
            found == expected,
            "token {token} lacks {found} experts; expected {expected} with {lost:?} lost"
        );
    }
    Ok(())
}
