//! The input of one rank: generated rows, and a routing that is generated or recorded.

use anyhow::{Context, Result, ensure};
use tokenyard_conformance::moe::input::InputFile;
use tokenyard_core::communicator::{
    Buffer, Cast, Communicator, Dispatch, Outputs, Received, Replay, Sizes, TensorMut, TensorRef,
};
use tokenyard_core::moe::{DType, Layout as MoeLayout, Quant};

use super::case::{Calls, Fixed, Layout, Routing, Rows};
use crate::workload::{Random, pairs, routing};

/// The alignment of an expert's group, in rows.
const ALIGNMENT: u32 = 128;

/// The experts that the tokens of a rank select: `[T, K]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Routed {
    topk_idx: Vec<i64>,
    fixed: Fixed,
}

impl Routed {
    /// The generated routing of a rank with this number of tokens.
    pub(super) fn generated(fixed: Fixed, routing_of: &Routing, rank: u32, tokens: u32) -> Self {
        let Fixed { topk, experts, .. } = fixed;
        let mut topk_idx = routing(&fixed.sizes(tokens), rank);
        if *routing_of == Routing::Skewed {
            let (busiest, mut random) = (i64::from(experts / 3), Random::new(u64::from(rank)));
            for token in topk_idx.chunks_mut(topk as usize) {
                if !token.contains(&busiest) {
                    token[random.below(u64::from(topk)) as usize] = busiest;
                }
            }
        }
        Self { topk_idx, fixed }
    }

    /// The recorded routing of one of `ranks` ranks, and the most tokens of any of them.
    pub(super) fn recorded(
        fixed: Fixed,
        file: &InputFile,
        rank: u32,
        ranks: u32,
    ) -> Result<(Self, u32)> {
        let case = file.case(ranks as usize, Some(fixed.experts as usize))?;
        ensure!(
            case.topk == fixed.topk as usize,
            "found topk = {0} in the file; expected {1}. Fix: give --topk {0}",
            case.topk,
            fixed.topk
        );
        let mut inputs = file.inputs(&case)?;
        let topk_idx = inputs.ranks.swap_remove(rank as usize).topk_idx;
        Ok((Self { topk_idx, fixed }, case.max_tokens as u32))
    }

    pub(super) fn tokens(&self) -> u32 {
        self.topk_idx.len() as u32 / self.fixed.topk
    }

    /// The number of rows for each of `ranks` ranks.
    pub(super) fn sends(&self, ranks: u32) -> Vec<u64> {
        pairs(&self.fixed.sizes(self.tokens()), ranks, &self.topk_idx)
    }
}

/// The tensors of a rank, on its device.
#[derive(Debug)]
pub(super) struct InputTensors {
    x: Buffer,
    scales: Option<Buffer>,
    topk_idx: Buffer,
    weights: Buffer,
    rows: Rows,
    tokens: usize,
    fixed: Fixed,
}

impl InputTensors {
    pub(super) fn new(comm: &Communicator, rows: Rows, routed: &Routed) -> Result<Self> {
        let fixed = routed.fixed;
        let tokens = routed.tokens() as usize;
        let element = if rows == Rows::Fp8 { 1 } else { 2 };
        let x = values(tokens * fixed.hidden as usize * element, rows);
        let scales = vec![1.0_f32; tokens * groups(&fixed)];
        let weights = vec![1.0 / fixed.topk as f32; routed.topk_idx.len()];
        let scaled = (rows == Rows::Fp8).then(|| comm.buffer(&f32_bytes(&scales))).transpose()?;
        let idx: Vec<u8> = routed.topk_idx.iter().flat_map(|i| i.to_ne_bytes()).collect();
        Ok(Self {
            x: comm.buffer(&x).context("bring rows")?,
            scales: scaled,
            topk_idx: comm.buffer(&idx)?,
            weights: comm.buffer(&f32_bytes(&weights))?,
            rows,
            tokens,
            fixed,
        })
    }

    fn x(&self) -> Result<TensorRef<'_>> {
        let dtype = if self.rows == Rows::Fp8 { DType::Fp8E4m3 } else { DType::Bf16 };
        tensor(&self.x, dtype, [self.tokens, self.fixed.hidden as usize])
    }

    fn scales(&self) -> Result<Option<TensorRef<'_>>> {
        let shape = [self.tokens, groups(&self.fixed)];
        self.scales.as_ref().map(|scales| tensor(scales, DType::F32, shape)).transpose()
    }

    fn weights(&self) -> Result<Option<TensorRef<'_>>> {
        tensor(&self.weights, DType::F32, [self.tokens, self.fixed.topk as usize]).map(Some)
    }

    fn cast(&self) -> Cast {
        if self.rows == Rows::Cast { Cast::Fp8 } else { Cast::None }
    }

    pub(super) fn dispatch(&self, layout: Layout, calls: Calls) -> Result<Dispatch<'_>> {
        let layout = match layout {
            Layout::Flat => MoeLayout::Flat,
            Layout::ExpertMajor => {
                MoeLayout::ExpertMajor { alignment: ALIGNMENT, zero_padding: false }
            }
            Layout::Packed => MoeLayout::Packed,
            Layout::RankMajor => MoeLayout::RankMajor { zero_padding: false },
        };
        let shape = [self.tokens, self.fixed.topk as usize];
        Ok(Dispatch {
            scales: self.scales()?,
            topk_weights: self.weights()?,
            layout,
            cast: self.cast(),
            sizes: if calls.wait() { Sizes::Exact } else { Sizes::WorstCase },
            ..Dispatch::new(self.x()?, tensor(&self.topk_idx, DType::I64, shape)?)
        })
    }

    pub(super) fn replay(&self) -> Result<Replay<'_>> {
        Ok(Replay {
            scales: self.scales()?,
            topk_weights: self.weights()?,
            cast: self.cast(),
            ..Replay::new(self.x()?)
        })
    }
}

/// Memory of the caller for received rows, scales, ids and weights.
#[derive(Debug)]
pub(super) struct Rooms([Option<Room>; 4]);

#[derive(Debug)]
struct Room {
    buffer: Buffer,
    dtype: DType,
    shape: [usize; 2],
}

impl Room {
    fn new(comm: &Communicator, tensor: &TensorRef<'_>) -> Result<Self> {
        let dtype = tensor.dtype().context("found an output of no known type")?;
        let shape = [tensor.rows(), tensor.cols()];
        let buffer = comm.buffer(&vec![0; shape[0] * shape[1] * dtype.bytes()])?;
        Ok(Self { buffer, dtype, shape })
    }

    fn tensor(&mut self) -> Result<TensorMut<'_>> {
        Ok(self.buffer.tensor_mut(self.dtype, self.shape)?)
    }
}

impl Rooms {
    /// Room for outputs of the same sizes as `received`.
    pub(super) fn new(comm: &Communicator, received: &Received) -> Result<Self> {
        let of = |tensor: Option<TensorRef<'_>>| {
            tensor.map(|tensor| Room::new(comm, &tensor)).transpose()
        };
        Ok(Self([
            of(Some(received.x()))?,
            of(received.scales())?,
            of(received.ids())?,
            of(received.weights())?,
        ]))
    }

    pub(super) fn outputs(&mut self) -> Result<Outputs<'_>> {
        let [x, scales, ids, weights] = &mut self.0;
        Ok(Outputs {
            x: x.as_mut().map(Room::tensor).transpose()?,
            scales: scales.as_mut().map(Room::tensor).transpose()?,
            ids: ids.as_mut().map(Room::tensor).transpose()?,
            weights: weights.as_mut().map(Room::tensor).transpose()?,
            ..Outputs::default()
        })
    }
}

fn groups(fixed: &Fixed) -> usize {
    Quant::FP8.groups(fixed.hidden) as usize
}

fn tensor(buffer: &Buffer, dtype: DType, shape: [usize; 2]) -> Result<TensorRef<'_>> {
    Ok(buffer.tensor(dtype, shape, [shape[1], 1])?)
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

/// Rows: one block of random numbers, repeated, so that a large case is ready fast. None of them is
/// a NaN: e4m3 without 0x7f, bf16 between -2 and 2.
fn values(bytes: usize, rows: Rows) -> Vec<u8> {
    let mut random = Random::new(1);
    let block: Vec<u8> = (0..1 << 15)
        .flat_map(|_| {
            let bits = random.next() as u16;
            match rows {
                Rows::Fp8 => (bits & 0xbfbf).to_ne_bytes(),
                Rows::Bf16 | Rows::Cast => (bits & 0x807f | 0x3f80).to_ne_bytes(),
            }
        })
        .collect();
    block.iter().copied().cycle().take(bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIXED: Fixed = Fixed { hidden: 256, topk: 4, experts: 16 };

    #[test]
    fn skewed_tokens_all_select_one_expert_and_no_expert_twice() {
        let routed = Routed::generated(FIXED, &Routing::Skewed, 1, 50);
        for token in routed.topk_idx.chunks(4) {
            assert!(token.contains(&5), "{token:?}");
            assert!((0..4).all(|k| !token[..k].contains(&token[k])), "{token:?}");
        }
        assert_eq!(routed.sends(2)[0], 50, "expert 5 lives on rank 0");
        assert_eq!(routed.tokens(), 50);
    }

    #[test]
    fn selections_of_nothing_are_sent_nowhere() {
        let routed = Routed { topk_idx: vec![-1, -2, -1, -1, 9, -1, 8, 0], fixed: FIXED };
        assert_eq!(routed.sends(2), [1, 1]);
        assert_eq!(routed.sends(4), [1, 0, 1, 0]);
    }

    #[test]
    fn generated_rows_are_numbers() {
        let fp8 = values(1000, Rows::Fp8);
        assert!(fp8.iter().all(|byte| byte & 0x7f != 0x7f) && fp8.len() == 1000);
        for pair in values(1 << 17, Rows::Bf16).chunks(2) {
            let value = half::bf16::from_ne_bytes([pair[0], pair[1]]).to_f32();
            assert!((1.0..2.0).contains(&value.abs()), "{value}");
        }
    }
}
