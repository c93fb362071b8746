//! The inputs of a rank to an exchange.

use anyhow::Result;
use tokenyard_core::communicator::{Communicator, Dispatch, LateTopk, Replay, Sizes, TensorRef};
use tokenyard_core::moe::{DType, RowCap};

use super::{cast, dtype, layout, packed_forms, row_dtype};
use crate::device::Copies;
use crate::moe::oracle::{Case, RankInputs};

/// Bytes at an address that suits every element type.
#[derive(Clone, Debug)]
pub struct Aligned {
    words: Vec<u64>,
    bytes: usize,
}

impl Aligned {
    /// `bytes` bytes of `fill`.
    pub fn filled(bytes: usize, fill: u8) -> Self {
        Self { words: vec![u64::from_ne_bytes([fill; 8]); bytes.div_ceil(8)], bytes }
    }

    /// A copy of `from`.
    pub fn copy_of(from: &[u8]) -> Self {
        let mut new = Self::filled(from.len(), 0);
        new.bytes_mut().copy_from_slice(from);
        new
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the words are initialised and at least `bytes` long; any byte is a value.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.bytes) }
    }

    /// The bytes, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.bytes) }
    }
}

/// Weights and ids of all tokens, where a combine has its own.
fn late_topk(case: &Case, inputs: &RankInputs) -> (Vec<f32>, Vec<i64>) {
    let entry = |(at, id): (usize, &i64)| {
        let weight = inputs.late_weight(case, at / case.topk, at % case.topk);
        // An entry that is left out has a weight that would show in the result.
        (weight.unwrap_or(f32::NAN), if weight.is_some() { *id } else { -1 })
    };
    inputs.topk_idx.iter().enumerate().map(entry).unzip()
}

/// The inputs of one rank to a case, as the product takes them.
#[derive(Clone, Debug)]
pub struct InputTensors {
    pub(super) case: Case,
    rank: usize,
    inputs: RankInputs,
    x: Aligned,
    scales: Option<Aligned>,
    biases: Vec<Aligned>,
    /// The weights and the ids of the combine, where it has its own.
    late: Option<(Vec<f32>, Vec<i64>)>,
    copies: Copies,
}

impl InputTensors {
    /// Takes the inputs of `rank`.
    pub fn new(case: &Case, rank: usize, inputs: RankInputs) -> Self {
        Self {
            case: case.clone(),
            rank,
            x: Aligned::copy_of(&inputs.x),
            scales: inputs.scales.as_deref().map(Aligned::copy_of),
            biases: inputs.biases.iter().map(|b| Aligned::copy_of(b)).collect(),
            late: case.combine.sums.is_late().then(|| late_topk(case, &inputs)),
            copies: Copies::default(),
            inputs,
        }
    }

    /// T on this rank.
    pub fn tokens(&self) -> usize {
        self.case.tokens_of(self.rank)
    }

    /// The combine's own weights, where it has them.
    ///
    /// # Errors
    /// Sizes that contradict each other.
    pub(super) fn late_topk(&self) -> Result<Option<LateTopk<'_>>> {
        let Some((weights, ids)) = &self.late else { return Ok(None) };
        let (tokens, topk) = (self.tokens(), self.case.topk);
        let weights = TensorRef::from_slice(weights.as_slice(), tokens, topk)?;
        let ids = Some(TensorRef::from_slice(ids.as_slice(), tokens, topk)?);
        Ok(Some(LateTopk { weights, ids }))
    }

    fn x(&self) -> Result<TensorRef<'_>> {
        let (elem, hidden) = (dtype(self.case.sent_elem()), self.case.hidden);
        Ok(TensorRef::from_bytes(self.x.bytes(), elem, self.tokens(), hidden)?)
    }

    fn scales(&self) -> Result<Option<TensorRef<'_>>> {
        let columns = self.case.scales().map_or(0, |(_, n)| n);
        self.scales
            .as_ref()
            .map(|s| TensorRef::from_bytes(s.bytes(), DType::I32, self.tokens(), columns))
            .transpose()
            .map_err(Into::into)
    }

    fn weights(&self) -> Result<Option<TensorRef<'_>>> {
        self.inputs
            .topk_weights
            .as_ref()
            .map(|w| TensorRef::from_slice(w.as_slice(), self.tokens(), self.case.topk))
            .transpose()
            .map_err(Into::into)
    }

    /// The arguments of the dispatch, with tensors where `comm` works.
    ///
    /// # Errors
    /// The communicator's device refuses the memory or the copy.
    pub fn dispatch_on(&self, comm: &Communicator) -> Result<Dispatch<'_>> {
        self.copies.dispatch(comm, self.dispatch()?)
    }

    /// The arguments of the dispatch, in host memory.
    ///
    /// # Errors
    /// Sizes that contradict each other.
    pub fn dispatch(&self) -> Result<Dispatch<'_>> {
        let (scale_layout, source_index) = packed_forms(&self.case);
        Ok(Dispatch {
            x: self.x()?,
            scales: self.scales()?,
            topk_idx: TensorRef::from_slice(
                self.inputs.topk_idx.as_slice(),
                self.tokens(),
                self.case.topk,
            )?,
            topk_weights: self.weights()?,
            layout: layout(&self.case),
            cast: cast(self.case.input),
            sizes: if self.case.worst_case { Sizes::WorstCase } else { Sizes::Exact },
            max_tokens: Some(self.case.max_tokens as u32),
            cap: self.case.cap_of(self.rank).map(|rows| RowCap::dropping(rows as u64)),
            scale_layout,
            source_index,
        })
    }

    /// The arguments of a replay, with tensors where `comm` works.
    ///
    /// # Errors
    /// The communicator's device refuses the memory or the copy.
    pub fn replay_on(&self, comm: &Communicator) -> Result<Replay<'_>> {
        self.copies.replay(comm, self.replay()?)
    }

    /// The arguments of a replay, in host memory.
    ///
    /// # Errors
    /// Sizes that contradict each other.
    pub fn replay(&self) -> Result<Replay<'_>> {
        let (scale_layout, source_index) = packed_forms(&self.case);
        Ok(Replay {
            x: self.x()?,
            scales: self.scales()?,
            topk_weights: self.weights()?,
            cast: cast(self.case.input),
            scale_layout,
            source_index,
        })
    }

    /// The biases of the combine.
    pub fn biases(&self) -> Result<[Option<TensorRef<'_>>; 2]> {
        let mut out = [None, None];
        let (elem, hidden) = (row_dtype(self.case.combine.row), self.case.hidden);
        for (slot, bias) in out.iter_mut().zip(&self.biases) {
            *slot = Some(TensorRef::from_bytes(bias.bytes(), elem, self.tokens(), hidden)?);
        }
        Ok(out)
    }
}
