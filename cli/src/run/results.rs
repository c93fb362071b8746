//! `--output`: the results of the ranks, as one safetensors file.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use tokenyard_conformance::moe::exchange::Got;
use tokenyard_conformance::moe::oracle::{Case, RowType};
use tokenyard_core::communicator::Received;
use tokenyard_core::files;

use crate::writable;

/// The rows that one rank received from dispatch and combine in one step.
#[derive(Debug)]
pub(crate) struct RankTally {
    rank: usize,
    arrays: Vec<Array>,
}

#[derive(Debug)]
struct Array {
    name: &'static str,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl RankTally {
    /// Stores the counts of received rows.
    pub(crate) fn new(rank: usize, received: &Received) -> Self {
        let counts = [
            ("expert_counts", received.expert_counts()),
            ("source_counts", received.source_counts()),
        ];
        let arrays = counts.into_iter().filter_map(|(name, tensor)| {
            let tensor = tensor?;
            let bytes = tensor.bytes().to_vec();
            Some(Array { name, dtype: Dtype::I32, shape: vec![tensor.rows()], bytes })
        });
        Self { rank, arrays: arrays.collect() }
    }

    /// Adds the rows that combine returned.
    pub(crate) fn add_combined(&mut self, case: &Case, got: Got) {
        let tokens = case.tokens_of(self.rank);
        self.arrays.push(Array {
            name: "x",
            dtype: match case.combine.row {
                RowType::Bf16 => Dtype::BF16,
                RowType::F16 => Dtype::F16,
                RowType::F32 => Dtype::F32,
            },
            shape: vec![tokens, case.hidden],
            bytes: got.x.bytes().to_vec(),
        });
        if let Some(weights) = got.weights {
            self.arrays.push(Array {
                name: "topk_weights",
                dtype: Dtype::F32,
                shape: vec![tokens, case.topk],
                bytes: weights.iter().flat_map(|w| w.to_le_bytes()).collect(),
            });
        }
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Writes a file with only this rank's part.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let views = self.arrays.iter().map(|array| {
            let view = TensorView::new(array.dtype, array.shape.clone(), &array.bytes)?;
            anyhow::Ok((format!("rank{}.{}", self.rank, array.name), view))
        });
        write(path, views.collect::<Result<Vec<_>>>()?, None)
    }
}

/// The largest part that is read back, in bytes. It is held in memory.
const MAX_PART: u64 = 1 << 40;

/// The file that a rank leaves in the launcher's folder.
pub(crate) fn part_path(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank{rank}.safetensors"))
}

/// The file of one rank where no launcher collects the parts: `out.rank3.safetensors` for
/// `out.safetensors`.
pub(crate) fn rank_path(output: &Path, rank: usize) -> PathBuf {
    output.with_extension(format!("rank{rank}.safetensors"))
}

/// Makes one file of the parts of these ranks, which are all that were not lost.
pub(crate) fn join(folder: &Path, case: &Case, ranks: &[u32], output: &Path) -> Result<()> {
    let read = |rank: &u32| {
        let path = part_path(folder, *rank as usize);
        files::read(&path, MAX_PART).context("read what a rank wrote")
    };
    let files = ranks.iter().map(read).collect::<Result<Vec<_>>>()?;
    let mut tensors = Vec::new();
    for file in &files {
        tensors.extend(SafeTensors::deserialize(file)?.tensors());
    }
    let about = HashMap::from([
        ("made_by".to_owned(), format!("tokenyard {}", env!("CARGO_PKG_VERSION"))),
        ("exchange".to_owned(), case.to_string()),
        ("num_experts".to_owned(), case.experts.to_string()),
    ]);
    write(output, tensors, Some(about))
}

fn write(
    path: &Path,
    tensors: Vec<(String, TensorView<'_>)>,
    about: Option<HashMap<String, String>>,
) -> Result<()> {
    writable::write(path, &safetensors::serialize(tensors, about)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_without_a_launcher_has_a_file_of_its_own_beside_the_output() {
        let path = rank_path(Path::new("/data/out.safetensors"), 3);
        assert_eq!(path, Path::new("/data/out.rank3.safetensors"));
    }
}
