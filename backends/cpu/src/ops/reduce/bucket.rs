//! The tensors of a reduce-scatter: their parts, how these travel, and their sums.

use tokenyard_core::moe::DType;
use tokenyard_core::ops::record::lengths;
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::round::round_part;
use crate::convert::{decode_row, encode_row};
use crate::element::FloatType;

/// Elements that are summed before the next ones: their sums stay in the fastest cache.
const BLOCK: usize = 1024;

/// The tensors of a call: of each a part for every rank.
#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    /// Type and number of elements of a part of each tensor.
    parts: Vec<(FloatType, usize)>,
    /// Whether parts travel as bf16.
    narrow: bool,
    scale: f32,
    /// Bits `TY_REDUCE_*`.
    flags: u64,
}

impl Bucket {
    pub(crate) fn new(
        reduce: &abi::TyReduce,
        tensors: &[abi::TyTensor],
        ranks: u32,
    ) -> Result<Self> {
        let part = |tensor: &abi::TyTensor| match DType::from_code(tensor.dtype)
            .map(FloatType::try_from)
        {
            Some(Ok(float @ (FloatType::Bf16 | FloatType::F32))) => {
                Ok((float, (tensor.shape[0] * tensor.shape[1] / u64::from(ranks)) as usize))
            }
            _ => Err(unknown(format!("a tensor of type {}", tensor.dtype))),
        };
        let narrow = match reduce.precision {
            abi::TY_PRECISION_FP32 => false,
            abi::TY_PRECISION_BF16 => true,
            other => return Err(unknown(format!("precision {other}"))),
        };
        let flags = reduce.flags;
        if flags & !abi::TY_REDUCE_GATHERED != 0 {
            return Err(unknown(format!("flags {flags:#x}")));
        }
        let parts = tensors.iter().map(part).collect::<Result<_>>()?;
        Ok(Self { parts, narrow, scale: reduce.scale, flags })
    }

    /// Bytes of a part of all tensors on its way.
    pub(crate) fn bytes(&self) -> u64 {
        self.parts
            .iter()
            .map(|(float, elements)| elements * self.wire(*float).bytes())
            .sum::<usize>() as u64
    }

    /// The type of a part on its way.
    fn wire(&self, float: FloatType) -> FloatType {
        if self.narrow { FloatType::Bf16 } else { float }
    }

    /// A number that differs where calls cannot be summed, and from that of any gather.
    pub(crate) fn number(&self) -> u64 {
        let head = [u64::MAX, self.narrow.into(), self.scale.to_bits().into(), self.flags];
        let parts = self.parts.iter();
        let parts = parts.flat_map(|(float, elements)| [float.bytes() as u64, *elements as u64]);
        lengths(head.into_iter().chain(parts))
    }

    /// Writes the parts for a rank as they travel.
    ///
    /// # Safety
    /// The tensors are valid; there is room for [`bytes`](Self::bytes), which no other code uses.
    pub(crate) unsafe fn write(&self, tensors: &[abi::TyTensor], rank: u32, to: *mut u8) {
        let mut behind = 0;
        for (tensor, &(float, elements)) in tensors.iter().zip(&self.parts) {
            let (first, wire) = (rank as usize * elements, self.wire(float));
            let bytes = elements * wire.bytes();
            if elements > 0 {
                // SAFETY: by this function's contract.
                unsafe {
                    let to = to.add(behind);
                    if wire == float {
                        let from = tensor.data.add(first * float.bytes());
                        std::ptr::copy_nonoverlapping(from, to, bytes);
                    } else {
                        let all = (tensor.shape[0] * tensor.shape[1]) as usize;
                        let from = std::slice::from_raw_parts(tensor.data.cast(), all);
                        let to = std::slice::from_raw_parts_mut(to.cast(), elements);
                        round_part(from, first..first + elements, to);
                    }
                }
            }
            behind += bytes;
        }
    }

    /// Writes this rank's own parts, which do not travel.
    ///
    /// # Safety
    /// As [`write`](Self::write); there is room for the parts as they are.
    pub(crate) unsafe fn write_own(&self, tensors: &[abi::TyTensor], rank: u32, to: *mut u8) {
        let as_they_are = Self { narrow: false, ..self.clone() };
        // SAFETY: by this function's contract.
        unsafe { as_they_are.write(tensors, rank, to) }
    }

    /// Sums the parts that lie at `parts`, in order of ranks; those of rank `own` did not travel.
    ///
    /// # Safety
    /// The parts and the outputs are valid, and no other code uses them.
    pub(crate) unsafe fn sum(&self, parts: &[*const u8], own: usize, outs: &[abi::TyTensor]) {
        let (mut behind, mut own_behind) = (0, 0);
        for (out, &(float, elements)) in outs.iter().zip(&self.parts) {
            let (wire, bytes) = (self.wire(float), elements * float.bytes());
            let term = |(rank, part): (usize, &*const u8)| {
                let (float, behind) =
                    if rank == own { (float, own_behind) } else { (wire, behind) };
                // SAFETY: by this function's contract.
                let row = unsafe {
                    std::slice::from_raw_parts(part.add(behind), elements * float.bytes())
                };
                Term { float, row }
            };
            let terms: Vec<_> = parts.iter().enumerate().map(term).collect();
            if elements > 0 {
                // SAFETY: by this function's contract.
                let to = unsafe { std::slice::from_raw_parts_mut(out.data, bytes) };
                sum_terms(&terms, self.scale, float, to);
            }
            behind += elements * wire.bytes();
            own_behind += bytes;
        }
    }
}

/// A row of a type.
struct Term<'a> {
    float: FloatType,
    row: &'a [u8],
}

/// Adds terms in f32, in order, and writes the product with `scale`, rounded once.
fn sum_terms(terms: &[Term<'_>], scale: f32, float: FloatType, out: &mut [u8]) {
    let (mut sums, mut values) = ([0.0_f32; BLOCK], [0.0_f32; BLOCK]);
    for (block, out) in out.chunks_mut(BLOCK * float.bytes()).enumerate() {
        let count = out.len() / float.bytes();
        let row = |term: &Term<'_>| {
            let bytes = term.float.bytes();
            block * BLOCK * bytes..(block * BLOCK + count) * bytes
        };
        let (sums, values) = (&mut sums[..count], &mut values[..count]);
        sums.fill(0.0);
        for (at, term) in terms.iter().enumerate() {
            if at == 0 {
                // Not added to 0, which would lose the sign of -0.
                decode_row(term.float, &term.row[row(term)], sums);
                continue;
            }
            decode_row(term.float, &term.row[row(term)], values);
            sums.iter_mut().zip(&*values).for_each(|(sum, value)| *sum += value);
        }
        sums.iter_mut().for_each(|sum| *sum *= scale);
        encode_row(float, sums, out);
    }
}

#[cold]
fn unknown(found: String) -> Error {
    let text = format!(
        "found {found}; expected tensors of bf16 or fp32, and a precision and flags of the header"
    );
    Error::new(ErrorKind::Unsupported, "reduce", text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn terms_are_added_in_order_and_scaled_once() {
        // 2^24 + 1 is no f32, so the order shows.
        let large = 16_777_216.0_f32;
        let rows = [vec![large; 1500], vec![1.0; 1500], vec![1.0; 1500], vec![-large; 1500]]
            .map(|row| bytes(&row));
        let sum = |order: [usize; 4]| {
            let terms = order.map(|at| Term { float: FloatType::F32, row: &rows[at] });
            let mut out = vec![0; 6000];
            sum_terms(&terms, 0.5, FloatType::F32, &mut out);
            out
        };
        assert_eq!(sum([0, 1, 2, 3]), bytes(&[0.0; 1500]));
        assert_eq!(sum([1, 2, 0, 3]), bytes(&[1.0; 1500]));
    }

    #[test]
    fn terms_of_two_types_are_rounded_once() {
        let narrow = [0x3f80_u16.to_le_bytes(), 0x3b80_u16.to_le_bytes()].concat();
        let wide = bytes(&[1.0 / 512.0, 1.0]);
        let terms = [
            Term { float: FloatType::F32, row: &wide },
            Term { float: FloatType::Bf16, row: &narrow },
        ];
        let mut out = vec![0; 8];
        sum_terms(&terms, 2.0, FloatType::F32, &mut out);
        assert_eq!(out, bytes(&[2.0 + 1.0 / 256.0, 2.0 + 1.0 / 128.0]));
        let mut out = vec![0; 4];
        sum_terms(&terms, 1.0, FloatType::Bf16, &mut out);
        // 1 + 2^-9 is 1 in bf16; 1 + 2^-8 is half way, and goes to the even 1.
        assert_eq!(out, [0x3f80_u16.to_le_bytes(), 0x3f80_u16.to_le_bytes()].concat());
    }

    #[test]
    fn numbers_of_calls_that_cannot_be_summed_differ() {
        let parts = vec![(FloatType::F32, 8)];
        let bucket = Bucket { parts, narrow: false, scale: 1.0, flags: 0 };
        let others = [
            Bucket { parts: vec![(FloatType::Bf16, 16)], ..bucket.clone() },
            Bucket { parts: vec![(FloatType::F32, 4); 2], ..bucket.clone() },
            Bucket { narrow: true, ..bucket.clone() },
            Bucket { scale: 0.5, ..bucket.clone() },
            Bucket { flags: abi::TY_REDUCE_GATHERED, ..bucket.clone() },
        ];
        assert_eq!(bucket.number(), bucket.clone().number());
        for other in others {
            assert_ne!(other.number(), bucket.number(), "{other:?}");
        }
        assert_ne!(bucket.number(), lengths([32].into_iter()));
    }
}
