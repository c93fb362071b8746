use crate::abi;

/// The conversion of rows on their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Cast {
    /// Rows are sent unchanged. Rows that are quantised already come with scales.
    #[default]
    None,
    /// FP8 e4m3 with one f32 scale per group of channels: [`Quant::FP8`](super::Quant::FP8).
    Fp8,
    /// As `Fp8`, with scales rounded up to powers of two.
    Fp8Round,
    /// As `Fp8Round`, with the scales' exponent bytes packed by four (UE8M0).
    Fp8Ue8m0,
}

/// The format of a combine's partial rows on their way back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Compression {
    /// Their own type, or f32 where sums are rounded once.
    #[default]
    None,
    /// Ten bits a value, where a chunk of the row allows it: [`logfmt`](super::logfmt).
    LogFmt10,
}

impl Cast {
    /// The code that crosses the plugin ABI, one of `TY_CAST_*`.
    pub fn code(self) -> u32 {
        match self {
            Self::None => abi::TY_CAST_NONE,
            Self::Fp8 => abi::TY_CAST_FP8,
            Self::Fp8Round => abi::TY_CAST_FP8_ROUND,
            Self::Fp8Ue8m0 => abi::TY_CAST_FP8_UE8M0,
        }
    }
}
