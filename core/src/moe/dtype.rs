use std::fmt;

/// The type of one element of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum DType {
    /// bfloat16: 8 exponent bits, 7 mantissa bits.
    Bf16 = 1,
    /// IEEE half precision.
    F16 = 2,
    /// IEEE single precision.
    F32 = 3,
    /// FP8 e4m3 (the "fn" variant: no infinities, largest value 448).
    Fp8E4m3 = 4,
    /// Unsigned bytes, for opaque data.
    U8 = 5,
    /// Signed 32-bit integers: received expert ids, packed UE8M0 scales.
    I32 = 6,
    /// Signed 64-bit integers: `topk_idx`.
    I64 = 7,
}

impl DType {
    /// Every type, in the order of their codes.
    pub(crate) const ALL: [Self; 7] =
        [Self::Bf16, Self::F16, Self::F32, Self::Fp8E4m3, Self::U8, Self::I32, Self::I64];

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Fp8E4m3 | Self::U8 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// The code that crosses the plugin ABI.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// The type with this ABI code, or `None` for an unknown code.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|d| d.code() == code)
    }

    /// The short name used in configs, tables and error messages.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "fp16",
            Self::F32 => "fp32",
            Self::Fp8E4m3 => "fp8_e4m3",
            Self::U8 => "u8",
            Self::I32 => "i32",
            Self::I64 => "i64",
        }
    }

    /// True if combine can sum rows of this type.
    pub(crate) const fn is_summable(self) -> bool {
        matches!(self, Self::Bf16 | Self::F16 | Self::F32)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
