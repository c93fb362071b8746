//! The rules of sums over ranks, stated once more without code of the product.

use anyhow::{Result, ensure};
use tokenyard_core::moe::DType;
use tokenyard_core::ops::gather::reduce::{Precision, Spread, Sum};

use crate::ops::drawn;

/// A call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    pub(crate) spread: Spread,
    pub(crate) precision: Precision,
    pub(crate) scale: f32,
    /// Type, and elements for each rank.
    pub(crate) tensors: &'static [(DType, usize)],
}

impl Form {
    pub(super) fn sum(&self) -> Sum {
        Sum { precision: self.precision, scale: self.scale }
    }
}

/// Element `at` of a tensor of a rank in a call: of either sign, and of sizes so far apart that another order of a sum
/// gives other bits.
fn bits(rank: u32, call: u64, tensor: usize, all: usize) -> Vec<u32> {
    let of = (u64::from(rank) << 8 | tensor as u64) << 16 | call;
    let word = |bytes: &[u8; 4]| {
        let word = u32::from_le_bytes(*bytes);
        word & 0x807f_ffff | (120 + (word >> 23 & 0xf)) << 23
    };
    drawn::bytes(of, 4 * all).as_chunks().0.iter().map(word).collect()
}

/// The tensors of a rank in a call, for so many ranks.
pub(super) fn tensors(rank: u32, ranks: u32, call: u64, form: &Form) -> Vec<Vec<u8>> {
    let tensor = |(at, (dtype, elements)): (usize, &(DType, usize))| {
        let bits = bits(rank, call, at, elements * ranks as usize).into_iter();
        match dtype {
            DType::Bf16 => bits.flat_map(|bits| ((bits >> 16) as u16).to_le_bytes()).collect(),
            _ => bits.flat_map(u32::to_le_bytes).collect(),
        }
    };
    form.tensors.iter().enumerate().map(tensor).collect()
}

/// A tensor of f32 as it travels in bf16: the four elements of a quad decide together how each is rounded.
fn narrowed(bits: &[u32]) -> Vec<u32> {
    const MOD: u64 = 1 << 32;
    let narrow = |(at, bits_at): (usize, &u32)| {
        let (quad, lane) = (at / 4, at % 4);
        let of = |k: usize| u64::from(bits.get(4 * quad + k).copied().unwrap_or(0));
        let mut h = (of(0) * 0x5671_d42b + quad as u64) % MOD;
        h = (h + of(1) * 0x9995_e499 % MOD) % MOD;
        h = (h + of(2) * 0xace1_b8a5 % MOD) % MOD;
        h = (h + of(3) * 0xe153_538d % MOD) % MOD;
        h ^= h / (1 << 23);
        h = h * 0x7feb_352d % MOD;
        h ^= h / (1 << 16);
        let factor = if lane < 2 { 0x846c_a68b } else { 0xd35a_2d97 };
        let word = h * factor % MOD;
        let word = word ^ (word / (1 << 11));
        let noise = if lane % 2 == 0 { word % (1 << 16) } else { word / (1 << 16) };
        let sum = u64::from(*bits_at) + noise;
        (sum / (1 << 16) * (1 << 16)) as u32
    };
    bits.iter().enumerate().map(narrow).collect()
}

/// To nearest, and where two are as near, to the even one.
fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let (upper, lower) = ((bits >> 16) as u16, bits & 0xffff);
    match lower.cmp(&0x8000) {
        std::cmp::Ordering::Less => upper,
        std::cmp::Ordering::Equal => upper + (upper & 1),
        std::cmp::Ordering::Greater => upper + 1,
    }
}

/// The sum of a tensor in a call: all of it.
fn summed(ranks: u32, call: u64, form: &Form, tensor: usize) -> Vec<u8> {
    let (dtype, part) = form.tensors[tensor];
    let mut sums = vec![0.0_f32; part * ranks as usize];
    for rank in 0..ranks {
        let mut own = bits(rank, call, tensor, sums.len());
        if dtype == DType::Bf16 {
            own.iter_mut().for_each(|bits| *bits &= 0xffff_0000);
        } else if form.precision == Precision::Bf16 {
            let stays = rank as usize * part..(rank as usize + 1) * part;
            let mut travels = narrowed(&own);
            travels[stays.clone()].copy_from_slice(&own[stays]);
            own = travels;
        }
        for (sum, bits) in sums.iter_mut().zip(own) {
            let term = f32::from_bits(bits);
            *sum = if rank == 0 { term } else { *sum + term };
        }
    }
    let scaled = sums.into_iter().map(|sum| sum * form.scale);
    match dtype {
        DType::Bf16 => scaled.flat_map(|sum| to_bf16(sum).to_le_bytes()).collect(),
        _ => scaled.flat_map(f32::to_le_bytes).collect(),
    }
}

/// The elements of an output of a rank, of type and number.
pub(super) fn out(spread: Spread, ranks: u32, tensor: (DType, usize)) -> (DType, usize) {
    let (dtype, part) = tensor;
    (dtype, if spread == Spread::All { part * ranks as usize } else { part })
}

/// Compares the outputs of a rank in a call with the sums.
///
/// # Errors
/// The first element that differs.
pub(super) fn check(
    [rank, ranks]: [u32; 2],
    call: u64,
    form: &Form,
    outs: &[Vec<u8>],
) -> Result<()> {
    for (tensor, out) in outs.iter().enumerate() {
        let (mut expected, (dtype, part)) =
            (summed(ranks, call, form, tensor), form.tensors[tensor]);
        let bytes = dtype.bytes();
        if form.spread == Spread::Scatter {
            expected = expected[rank as usize * part * bytes..][..part * bytes].to_vec();
        }
        ensure!(out.len() == expected.len(), "sum {tensor}: found {} bytes", out.len());
        let pairs = out.chunks(bytes).zip(expected.chunks(bytes)).enumerate();
        for (at, (found, expected)) in pairs {
            ensure!(
                found == expected,
                "call {call}: sum {tensor}: element {at}: found {found:02x?}; expected {expected:02x?}"
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORM: Form = Form {
        spread: Spread::Scatter,
        precision: Precision::Fp32,
        scale: 1.0,
        tensors: &[(DType::F32, 50)],
    };

    #[test]
    fn another_order_of_ranks_and_another_rounding_give_other_bits() {
        let [a, b, c] = [0, 1, 2].map(|rank| bits(rank, 3, 0, 150));
        let sum = |all: [&[u32]; 3]| -> Vec<u8> {
            let at = |i: usize| {
                let [a, b, c] = all.map(|one| f32::from_bits(one[i]));
                a + b + c
            };
            (50..100).flat_map(|i| at(i).to_le_bytes()).collect()
        };
        check([1, 3], 3, &FORM, &[sum([&a, &b, &c])]).unwrap();
        check([1, 3], 3, &FORM, &[sum([&a, &c, &b])]).unwrap_err();
        check([1, 3], 4, &FORM, &[sum([&a, &b, &c])]).unwrap_err();
        let narrow = Form { precision: Precision::Bf16, ..FORM };
        check([1, 3], 3, &narrow, &[sum([&a, &b, &c])]).unwrap_err();
        check([1, 3], 3, &narrow, &[sum([&narrowed(&a), &b, &narrowed(&c)])]).unwrap();
    }

    #[test]
    fn narrowed_elements_are_neighbours_of_the_exact_ones() {
        let exact = bits(0, 0, 0, 1001);
        let mut up = 0;
        for (narrow, exact) in narrowed(&exact).iter().zip(&exact) {
            let low = exact & 0xffff_0000;
            assert!(*narrow == low || *narrow == low + 0x1_0000);
            up += u32::from(*narrow != low);
        }
        assert!((400..600).contains(&up), "{up} of 1001 are rounded up");
    }

    #[test]
    fn halves_go_to_the_even_one() {
        let of = |bits| to_bf16(f32::from_bits(bits));
        let found = [0x3f80_8000, 0x3f81_8000, 0x3f80_8001, 0x3f80_7fff].map(of);
        assert_eq!(found, [0x3f80, 0x3f82, 0x3f81, 0x3f80]);
    }
}
