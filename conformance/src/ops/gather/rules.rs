//! The rules of an all-gather, stated once more without code of the product.

use anyhow::{Result, ensure};

use crate::ops::drawn;

/// The number of the bytes of a shard: of a rank, in a call, of a tensor.
fn of(rank: u32, call: u64, tensor: usize) -> u64 {
    (u64::from(rank) << 8 | tensor as u64) << 16 | call
}

/// The shards of a rank in a call.
pub(super) fn shards(rank: u32, call: u64, lengths: &[usize]) -> Vec<Vec<u8>> {
    let shard = |(tensor, length): (usize, &usize)| drawn::bytes(of(rank, call, tensor), *length);
    lengths.iter().enumerate().map(shard).collect()
}

/// Compares the outputs of a call with the shards of all ranks, in order of ranks.
///
/// # Errors
/// The first output of another length, or the first byte that differs.
pub(super) fn check(ranks: u32, call: u64, lengths: &[usize], outs: &[Vec<u8>]) -> Result<()> {
    for (tensor, (out, length)) in outs.iter().zip(lengths).enumerate() {
        let (found, expected) = (out.len(), ranks as usize * length);
        ensure!(found == expected, "out {tensor}: found {found} bytes; expected {expected}");
        for rank in 0..ranks {
            let at = rank as usize * length;
            drawn::check(of(rank, call, tensor), &out[at..at + length], || {
                format!("call {call}: shard {tensor} of {length} bytes of rank {rank}")
            })?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_of_all_ranks_in_order_are_right_and_others_are_found() {
        let lengths = [64, 0, 3];
        let of_ranks = [0, 1].map(|rank| shards(rank, 5, &lengths));
        let outs = |order: [usize; 2]| -> Vec<Vec<u8>> {
            let of_tensor = |tensor: usize| {
                let of_rank = |rank: &usize| of_ranks[*rank][tensor].as_slice();
                order.iter().map(of_rank).collect::<Vec<_>>().concat()
            };
            (0..lengths.len()).map(of_tensor).collect()
        };
        check(2, 5, &lengths, &outs([0, 1])).unwrap();
        let error = check(2, 5, &lengths, &outs([1, 0])).unwrap_err().to_string();
        assert!(error.starts_with("call 5: shard 0 of 64 bytes of rank 0: byte 0:"), "{error}");
        check(2, 6, &lengths, &outs([0, 1])).unwrap_err();
        let mut short = outs([0, 1]);
        short[2].pop();
        let error = check(2, 5, &lengths, &short).unwrap_err().to_string();
        assert!(error.contains("found 5 bytes; expected 6"), "{error}");
    }
}
