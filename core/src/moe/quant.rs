//! Formats of quantised rows: the one description of what their numbers and scales are.

use super::{Cast, DType};

/// Channels that share a scale, in every format.
const GROUP: u32 = 128;

/// How the numbers of a quantised row are stored, and the scales beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quant {
    /// Bits of a number.
    pub bits: u32,
    /// Channels that share a scale. The last group of a row may have fewer.
    pub group: u32,
    /// The scale of a group.
    pub scale: ScaleType,
    /// How scales lie in words.
    pub packing: Packing,
}

/// The scale of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleType {
    /// A factor. To dequantise: x = q · scale.
    F32,
    /// As `F32`, rounded up to a power of two.
    PowerOfTwo,
    /// The largest and the smallest magnitude, each as bits of bf16.
    Bf16Range,
}

/// How the scales of a row lie in words of four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// One in a word.
    Words,
    /// The exponent byte of each, four in a word: the first group has the lowest byte.
    Exponents,
}

impl Quant {
    /// FP8 e4m3 with scales in f32: the format of [`Cast::Fp8`].
    pub const FP8: Self =
        Self { bits: 8, group: GROUP, scale: ScaleType::F32, packing: Packing::Words };
    /// The format of [`Cast::Fp8Round`].
    pub const FP8_ROUND: Self = Self { scale: ScaleType::PowerOfTwo, ..Self::FP8 };
    /// The format of [`Cast::Fp8Ue8m0`].
    pub const FP8_UE8M0: Self = Self { packing: Packing::Exponents, ..Self::FP8_ROUND };
    /// Nine bits of a logarithm and a sign: the format of [`logfmt`](super::logfmt).
    pub const LOGFMT_10: Self =
        Self { bits: 10, group: GROUP, scale: ScaleType::Bf16Range, packing: Packing::Words };

    /// Groups of a row of `channels`.
    pub const fn groups(&self, channels: u32) -> u32 {
        channels.div_ceil(self.group)
    }

    /// Words of a row's scales: the columns of a tensor of scales.
    pub const fn scale_words(&self, channels: u32) -> u32 {
        let per_word = match self.packing {
            Packing::Words => 1,
            Packing::Exponents => 4,
        };
        self.groups(channels).div_ceil(per_word)
    }

    /// The type of a tensor of scales: that of its words.
    pub(crate) const fn scale_dtype(&self) -> DType {
        match (self.packing, self.scale) {
            (Packing::Words, ScaleType::F32 | ScaleType::PowerOfTwo) => DType::F32,
            (Packing::Words, ScaleType::Bf16Range) | (Packing::Exponents, _) => DType::I32,
        }
    }

    /// Bytes of a row's scales.
    pub const fn scale_bytes(&self, channels: u32) -> u32 {
        4 * self.scale_words(channels)
    }

    /// Bytes of a row's numbers.
    pub(crate) const fn value_bytes(&self, channels: u32) -> u64 {
        (channels as u64 * self.bits as u64).div_ceil(8)
    }
}

impl Cast {
    /// The format of the rows that it makes.
    pub const fn quant(self) -> Option<Quant> {
        match self {
            Self::None => None,
            Self::Fp8 => Some(Quant::FP8),
            Self::Fp8Round => Some(Quant::FP8_ROUND),
            Self::Fp8Ue8m0 => Some(Quant::FP8_UE8M0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partial_group_has_a_scale_and_four_exponents_share_a_word() {
        for (channels, groups, words) in [(128, 1, 1), (129, 2, 1), (512, 4, 1), (520, 5, 2)] {
            assert_eq!(Quant::FP8.groups(channels), groups);
            assert_eq!(Quant::FP8.scale_bytes(channels), 4 * groups);
            assert_eq!(Quant::FP8_ROUND.scale_words(channels), groups);
            assert_eq!(Quant::FP8_UE8M0.scale_words(channels), words);
        }
    }

    #[test]
    fn numbers_of_ten_bits_and_the_ranges_of_their_groups_are_the_bytes_of_coded_blocks() {
        let (quant, channels) = (Quant::LOGFMT_10, 512);
        let bytes = quant.value_bytes(channels) + u64::from(quant.scale_bytes(channels));
        assert_eq!(bytes, crate::moe::logfmt::CODED_BYTES as u64);
        assert_eq!(Quant::FP8.value_bytes(u32::MAX), u64::from(u32::MAX));
    }
}
