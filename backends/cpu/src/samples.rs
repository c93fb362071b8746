//! Floats for tests: random ones of every magnitude, and those where rounding goes wrong first.

/// A small generator (splitmix64), so that a failure repeats.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Any bit pattern: mostly normal numbers, now and then a NaN or a subnormal.
    pub(crate) fn any_f32(&mut self) -> f32 {
        f32::from_bits(self.next() as u32)
    }

    /// A number of moderate size.
    pub(crate) fn plain_f32(&mut self) -> f32 {
        (self.next() as i32) as f32 / (1u32 << (self.next() % 31)) as f32
    }
}

/// Zeros, infinities, NaN, subnormals, extremes, and the neighbourhood of every rounding boundary
/// of bf16, fp16 and FP8.
pub(crate) fn special_f32s() -> Vec<f32> {
    let mut values = vec![
        0.0,
        f32::INFINITY,
        f32::NAN,
        f32::from_bits(0x7f80_0001),
        f32::from_bits(0x7fff_ffff),
        f32::from_bits(1),
        f32::from_bits(0x7f_ffff),
        f32::MIN_POSITIVE,
        f32::MAX,
        1e-4,
        448.0,
        464.0,
    ];
    // Every value with a mantissa of few bits, with its neighbours: all codes of the narrow types
    // and the middles between them.
    for exponent in 0..255u32 {
        for mantissa in 0..64u32 {
            let bits = exponent << 23 | mantissa << 17;
            values.extend([bits.saturating_sub(1), bits, bits + 1].map(f32::from_bits));
        }
    }
    let negative: Vec<f32> = values.iter().map(|x| -x).collect();
    values.extend(negative);
    values
}

/// [`special_f32s`], random bit patterns, and where fp16 has its values and ties.
pub(crate) fn many_f32s() -> Vec<f32> {
    let mut random = Random(1);
    let mut values = special_f32s();
    values.extend((0..100_000).map(|_| random.any_f32()));
    for bits in 0..=0xffffu16 {
        let half = half::f16::from_bits(bits).to_f32();
        let next = half::f16::from_bits(bits.wrapping_add(1)).to_f32();
        let middle = (half + next) / 2.0;
        values.extend([half, middle, middle.next_up(), middle.next_down()]);
    }
    values
}

/// Whether two numbers have the same bits, or both are NaN.
pub(crate) fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}
