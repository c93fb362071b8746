//! Eight floats at a time, in two versions with the same bits: for AVX2 and for any CPU.

use crate::element;

/// Eight f32 values.
pub(crate) trait Lanes: Copy {
    fn splat(value: f32) -> Self;
    fn from_array(array: &[f32; 8]) -> Self;
    fn to_array(self) -> [f32; 8];
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// `self * factor + addend`, rounded once.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// The larger of `self` and the magnitude of `x`, lane by lane; NaN in `x` is ignored.
    fn max_magnitude(self, x: Self) -> Self;

    fn load_bf16(from: &[[u8; 2]; 8]) -> Self;
    fn load_f16(from: &[[u8; 2]; 8]) -> Self;
    fn load_f32(from: &[[u8; 4]; 8]) -> Self;
    fn store_bf16(self, to: &mut [[u8; 2]; 8]);
    fn store_f16(self, to: &mut [[u8; 2]; 8]);
    fn store_f32(self, to: &mut [[u8; 4]; 8]);
    /// Encodes to FP8 e4m3 with the signs of `signs`.
    fn store_fp8(self, signs: Self, to: &mut [u8; 8]);
}

/// [`Lanes`] for any CPU, by the definitions in [`element`].
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; 8]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Lanes for Portable {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; 8])
    }

    #[inline(always)]
    fn from_array(array: &[f32; 8]) -> Self {
        Self(*array)
    }

    #[inline(always)]
    fn to_array(self) -> [f32; 8] {
        self.0
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(factor.0[i], addend.0[i])))
    }

    #[inline(always)]
    fn max_magnitude(self, x: Self) -> Self {
        self.zip(x, |max, x| if x.abs() > max { x.abs() } else { max })
    }

    #[inline(always)]
    fn load_bf16(from: &[[u8; 2]; 8]) -> Self {
        Self(from.map(|bytes| element::bf16_to_f32(u16::from_ne_bytes(bytes))))
    }

    #[inline(always)]
    fn load_f16(from: &[[u8; 2]; 8]) -> Self {
        Self(from.map(|bytes| element::f16_to_f32(u16::from_ne_bytes(bytes))))
    }

    #[inline(always)]
    fn load_f32(from: &[[u8; 4]; 8]) -> Self {
        Self(from.map(f32::from_ne_bytes))
    }

    #[inline(always)]
    fn store_bf16(self, to: &mut [[u8; 2]; 8]) {
        *to = self.0.map(|value| element::f32_to_bf16(value).to_ne_bytes());
    }

    #[inline(always)]
    fn store_f16(self, to: &mut [[u8; 2]; 8]) {
        *to = self.0.map(|value| element::f32_to_f16(value).to_ne_bytes());
    }

    #[inline(always)]
    fn store_f32(self, to: &mut [[u8; 4]; 8]) {
        *to = self.0.map(f32::to_ne_bytes);
    }

    #[inline(always)]
    fn store_fp8(self, signs: Self, to: &mut [u8; 8]) {
        *to = std::array::from_fn(|i| {
            element::f32_to_fp8(self.0[i]) & 0x7f | element::sign_of(signs.0[i])
        });
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::Lanes;
    use crate::element::{FP8_MAX, FP8_STEP, INFINITY, MAGNITUDE};

    /// [`Lanes`] by AVX2, FMA and F16C.
    ///
    /// Named by `multiversion!` only: in functions that are compiled for these features and run
    /// where the CPU has them. That is the contract of every unsafe block here.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(__m256);

    /// The low halves of eight 32-bit lanes, which must be below 2^16.
    ///
    /// # Safety
    /// The CPU has AVX2.
    #[inline(always)]
    unsafe fn narrow(lanes: __m256i) -> __m128i {
        // SAFETY: AVX2, per this function's contract.
        unsafe {
            let (low, high) = (_mm256_castsi256_si128(lanes), _mm256_extracti128_si256::<1>(lanes));
            _mm_packus_epi32(low, high)
        }
    }

    impl Lanes for Avx2 {
        #[inline(always)]
        fn splat(value: f32) -> Self {
            // SAFETY: see `Avx2`.
            Self(unsafe { _mm256_set1_ps(value) })
        }

        #[inline(always)]
        fn from_array(array: &[f32; 8]) -> Self {
            // SAFETY: see `Avx2`; the array has eight floats and needs no alignment.
            Self(unsafe { _mm256_loadu_ps(array.as_ptr()) })
        }

        #[inline(always)]
        fn to_array(self) -> [f32; 8] {
            let mut array = [0.0; 8];
            // SAFETY: see `Avx2`; the array has room for eight floats and needs no alignment.
            unsafe { _mm256_storeu_ps(array.as_mut_ptr(), self.0) };
            array
        }

        #[inline(always)]
        fn add(self, other: Self) -> Self {
            // SAFETY: see `Avx2`.
            Self(unsafe { _mm256_add_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            // SAFETY: see `Avx2`.
            Self(unsafe { _mm256_mul_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn mul_add(self, factor: Self, addend: Self) -> Self {
            // SAFETY: see `Avx2`.
            Self(unsafe { _mm256_fmadd_ps(self.0, factor.0, addend.0) })
        }

        #[inline(always)]
        fn max_magnitude(self, x: Self) -> Self {
            // SAFETY: see `Avx2`.
            unsafe {
                let magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0), x.0);
                // The second operand is the result if either is NaN.
                Self(_mm256_max_ps(magnitude, self.0))
            }
        }

        #[inline(always)]
        fn load_bf16(from: &[[u8; 2]; 8]) -> Self {
            // SAFETY: see `Avx2`; `from` has 16 bytes and needs no alignment.
            unsafe {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast()));
                Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)))
            }
        }

        #[inline(always)]
        fn load_f16(from: &[[u8; 2]; 8]) -> Self {
            // SAFETY: see `Avx2`; `from` has 16 bytes and needs no alignment.
            Self(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())) })
        }

        #[inline(always)]
        fn load_f32(from: &[[u8; 4]; 8]) -> Self {
            // SAFETY: see `Avx2`; `from` has 32 bytes and needs no alignment.
            Self(unsafe { _mm256_loadu_ps(from.as_ptr().cast()) })
        }

        #[inline(always)]
        fn store_bf16(self, to: &mut [[u8; 2]; 8]) {
            // SAFETY: see `Avx2`; `to` has 16 bytes and needs no alignment.
            unsafe {
                let bits = _mm256_castps_si256(self.0);
                let high = _mm256_srli_epi32::<16>(bits);
                let odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
                let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
                let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
                let quiet_nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
                let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0));
                let encoded = _mm256_blendv_epi8(rounded, quiet_nan, is_nan);
                _mm_storeu_si128(to.as_mut_ptr().cast(), narrow(encoded));
            }
        }

        #[inline(always)]
        fn store_f16(self, to: &mut [[u8; 2]; 8]) {
            // SAFETY: see `Avx2`; `to` has 16 bytes and needs no alignment.
            unsafe {
                let encoded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
                _mm_storeu_si128(to.as_mut_ptr().cast(), encoded);
            }
        }

        #[inline(always)]
        fn store_f32(self, to: &mut [[u8; 4]; 8]) {
            // SAFETY: see `Avx2`; `to` has 32 bytes and needs no alignment.
            unsafe { _mm256_storeu_ps(to.as_mut_ptr().cast(), self.0) };
        }

        #[inline(always)]
        fn store_fp8(self, signs: Self, to: &mut [u8; 8]) {
            // The steps of `f32_to_fp8`; magnitudes compare as signed integers.
            // SAFETY: see `Avx2`; `to` has 8 bytes and needs no alignment.
            unsafe {
                let splat = |bits: u32| _mm256_set1_epi32(bits as i32);
                let magnitude = _mm256_and_si256(_mm256_castps_si256(self.0), splat(MAGNITUDE));
                let bounded = _mm256_min_epi32(magnitude, splat(FP8_MAX.to_bits()));

                let sum = _mm256_add_ps(_mm256_castsi256_ps(bounded), _mm256_set1_ps(FP8_STEP));
                let subnormal =
                    _mm256_sub_epi32(_mm256_castps_si256(sum), splat(FP8_STEP.to_bits()));

                let odd = _mm256_and_si256(_mm256_srli_epi32::<20>(bounded), splat(1));
                let rounded = _mm256_add_epi32(_mm256_add_epi32(bounded, splat(0x7_ffff)), odd);
                let normal = _mm256_sub_epi32(_mm256_srli_epi32::<20>(rounded), splat(120 << 3));

                let is_small = _mm256_cmpgt_epi32(splat(121 << 23), bounded);
                let finite = _mm256_blendv_epi8(normal, subnormal, is_small);
                let is_nan = _mm256_cmpgt_epi32(magnitude, splat(INFINITY));
                let unsigned = _mm256_blendv_epi8(finite, splat(0x7f), is_nan);
                let sign = _mm256_and_si256(
                    _mm256_srli_epi32::<24>(_mm256_castps_si256(signs.0)),
                    splat(0x80),
                );
                let words = narrow(_mm256_or_si256(unsigned, sign));
                _mm_storel_epi64(to.as_mut_ptr().cast(), _mm_packus_epi16(words, words));
            }
        }
    }
}

/// Defines `$name`, which runs its body with the best [`Lanes`] that the CPU has, and `$generic`,
/// the body for any of them. The body must call nothing but `#[inline(always)]` functions in its
/// loops, so that all of it is compiled for the CPU features of its lanes.
macro_rules! multiversion {
    (
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident, $generic:ident<$lanes:ident>
        ($($argument:ident: $type:ty),* $(,)?) $body:block
    ) => {
        $(#[$attribute])*
        #[inline]
        $visibility fn $name($($argument: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c")]
                fn on_avx2($($argument: $type),*) {
                    $generic::<crate::lanes::Avx2>($($argument),*)
                }
                let found = is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c");
                if found {
                    // SAFETY: `on_avx2` is safe but for the CPU features it needs, which were just
                    // found to be there.
                    return unsafe { on_avx2($($argument),*) };
                }
            }
            $generic::<crate::lanes::Portable>($($argument),*)
        }

        #[inline(always)]
        fn $generic<$lanes: crate::lanes::Lanes>($($argument: $type),*) $body
    };
}

pub(crate) use multiversion;
