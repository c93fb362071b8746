//! LogFMT-10: partial rows of a combine in ten bits a value, on their way back.
//!
//! A row of bf16 has groups of 128 channels, blocks of 512 and chunks of 1024, or of 512 where H is no multiple of
//! 1024. A group has the exponent field `b` of its largest magnitude, and in f32, with log2 relative to 2^(b - 127):
//!
//! - `top = log2(amax)`, `bottom = max(log2(amin), top - 32)`, `range = top - bottom`
//! - `step = range * (1/510)`, `inverse = 510 / range`, `half = 1.5 - ln(2)/8 * step`
//! - code of x: `floor(max(log2(|x|) * inverse + (half - bottom * inverse), 0))`, which is 0 to 511
//! - value of a code: 0 for 0, else `2^((code - 1) * step + bottom)`, times 2^(b - 127) and the sign of x
//!
//! So boundaries between codes lie in the middle of their values. `half` is `2 - log2((1 + 2^step) / 2) / step` up
//! to its second term; the rest is below 5e-7 of a code. Each line is additions, products, quotients and fused
//! multiply-adds in f32, each rounded once, and log2 and 2^t are polynomials of such. So every kernel set has the
//! same bits.
//!
//! A chunk is encoded where each of its groups has `2^-90 <= amax < 1` and `amin < amax`. Otherwise it travels as it
//! is. So NaN, infinities and groups of one magnitude are never encoded, and all values of codes are normal numbers.
//!
//! **Bytes.** Each block has 4 words of 4 bytes, one for each group: bit 31 is set where the chunk is encoded, bits
//! 16 to 30 are `amax`, bits 0 to 14 `amin`. Behind these a block has its 512 values of bf16, or 512 low bytes of
//! codes and then 2 high bits of each: bit 8 of the code and the sign. Blocks of a row follow each other.

use super::Quant;

/// Channels of a block: H is a multiple of it.
pub const BLOCK: usize = 512;
/// Most bytes of a block.
pub const BLOCK_BYTES: usize = META + 2 * BLOCK;
/// Bytes of an encoded block.
pub(crate) const CODED_BYTES: usize = META + BLOCK + BLOCK / 4;

/// Channels of a group.
const GROUP: usize = Quant::LOGFMT_10.group as usize;
/// Bytes of a block's words.
const META: usize = 4 * BLOCK / GROUP;
/// Channels whose high bits share two bytes.
const PIECE: usize = 8;
const IS_CODED: u32 = 1 << 31;
/// Exponent fields of the largest magnitude of a group that is encoded.
const EXPONENTS: std::ops::Range<u32> = 37..127;

/// `log2(1 + f) / f` for f from 0 to 127/128, lowest power first: log2 is off by less than 2.1e-6.
const LOG2: [f32; 6] =
    [1.442_557_6, -0.718_357_26, 0.458_673_06, -0.280_458_1, 0.124_393_2, -0.026_812_049];
/// `(2^z - 1) / z` for z from -1/2 to 1/2: 2^z is off by less than 3e-6 of it.
const EXP2: [f32; 4] = [0.693_124_2, 0.240_241, 0.055_906_426, 0.009_582_853];
/// ln(2) / 8.
const HALF_SLOPE: f32 = 0.086_643_4;
/// f32 values from here on, below twice as much, are whole numbers. To add and subtract it rounds to the nearest one.
const WHOLE: f32 = 12_582_912.0;

/// Whether rows of `hidden` channels can be encoded.
pub fn takes(hidden: usize) -> bool {
    hidden > 0 && hidden.is_multiple_of(BLOCK)
}

/// Channels that are encoded together, or not at all.
pub fn chunk_channels(hidden: usize) -> usize {
    if hidden.is_multiple_of(2 * BLOCK) { 2 * BLOCK } else { BLOCK }
}

/// Most bytes of a row on its way.
pub const fn most_bytes(hidden: usize) -> usize {
    hidden / BLOCK * BLOCK_BYTES
}

/// Bytes of the row at the start of `bytes`, as its words say.
pub fn row_bytes(hidden: usize, bytes: &[u8]) -> usize {
    (0..hidden / BLOCK).fold(0, |at, _| at + block_bytes(&bytes[at..]))
}

fn block_bytes(block: &[u8]) -> usize {
    if word_of(block, 0) & IS_CODED != 0 { CODED_BYTES } else { BLOCK_BYTES }
}

fn word_of(block: &[u8], group: usize) -> u32 {
    block.as_chunks::<4>().0.get(group).map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

/// The numbers by which the values of a group are encoded.
#[derive(Clone, Copy)]
struct Scale {
    /// The exponent field of the largest magnitude.
    base: u32,
    bottom: f32,
    step: f32,
    inverse: f32,
    rounding: f32,
}

/// log2 of a magnitude of bf16 relative to 2^(base - 127). Zeros and subnormal numbers are below all codes: their
/// exponent field is 0.
#[inline(always)]
fn log2(magnitude: u32, base: u32) -> f32 {
    let f = f32::from_bits((magnitude & 0x7f) << 16 | 0x3f80_0000) - 1.0;
    let exponent = (magnitude >> 7) as f32 - base as f32;
    let [c0, c1, c2, c3, c4, c5] = LOG2;
    let ratio = c5.mul_add(f, c4).mul_add(f, c3).mul_add(f, c2).mul_add(f, c1).mul_add(f, c0);
    f.mul_add(ratio, exponent)
}

impl Scale {
    /// Of a group with this word.
    #[inline(always)]
    fn of(word: u32) -> Self {
        let (amax, amin) = (word >> 16 & 0x7fff, word & 0x7fff);
        let base = amax >> 7;
        let top = log2(amax, base);
        let bottom = log2(amin, base).max(top - 32.0);
        let range = top - bottom;
        let (step, inverse) = (range * (1.0 / 510.0), 510.0 / range);
        let half = (-HALF_SLOPE).mul_add(step, 1.5);
        Self { base, bottom, step, inverse, rounding: (-bottom).mul_add(inverse, half) }
    }

    /// The code of a number of bf16, with its sign in bit 9.
    #[inline(always)]
    fn code(&self, bits: u32) -> u32 {
        let at = log2(bits & 0x7fff, self.base).mul_add(self.inverse, self.rounding);
        at.max(0.0) as u32 | (bits >> 15) << 9
    }

    /// The value of a code.
    #[inline(always)]
    fn value(&self, code: u32) -> f32 {
        let (sign, code) = ((code >> 9) << 31, code & 0x1ff);
        let at = (code as f32 - 1.0).mul_add(self.step, self.bottom);
        let whole = (at + WHOLE) - WHOLE;
        let z = at - whole;
        let [c0, c1, c2, c3] = EXP2;
        let power = c3.mul_add(z, c2).mul_add(z, c1).mul_add(z, c0).mul_add(z, 1.0);
        let exponent = (whole as i32).wrapping_add(self.base as i32 - 127) as u32;
        let magnitude = if code == 0 { 0 } else { power.to_bits().wrapping_add(exponent << 23) };
        f32::from_bits(magnitude & !IS_CODED | sign)
    }
}

/// The word of a group, and whether the group may be encoded.
#[inline(always)]
fn group_word(group: &[[u8; 2]]) -> (u32, bool) {
    let (mut amax, mut amin) = (0, 0x7fff);
    for bytes in group {
        let magnitude = u32::from(u16::from_le_bytes(*bytes) & 0x7fff);
        (amax, amin) = (amax.max(magnitude), amin.min(magnitude));
    }
    (amax << 16 | amin, EXPONENTS.contains(&(amax >> 7)) && amin < amax)
}

/// Encodes a chunk of bf16 numbers, each two bytes in little-endian order. Returns the bytes that it takes in `out`.
///
/// # Panics
/// If the chunk is longer than one, or `out` is shorter than [`BLOCK_BYTES`] for each of its blocks.
#[inline(always)]
pub fn encode_chunk(chunk: &[u8], out: &mut [u8]) -> usize {
    let channels = chunk.as_chunks::<2>().0;
    let mut words = [0; 2 * BLOCK / GROUP];
    let mut is_coded = true;
    for (word, group) in words.iter_mut().zip(channels.chunks_exact(GROUP)) {
        let (found, fits) = group_word(group);
        *word = found;
        is_coded &= fits;
    }
    let mut at = 0;
    for (block, words) in channels.chunks_exact(BLOCK).zip(words.chunks_exact(BLOCK / GROUP)) {
        let (meta, body) = out[at..].split_at_mut(META);
        for (to, word) in meta.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *to = (word | if is_coded { IS_CODED } else { 0 }).to_le_bytes();
        }
        if is_coded {
            encode_block(block, words, body);
            at += CODED_BYTES;
        } else {
            body[..2 * BLOCK].copy_from_slice(block.as_flattened());
            at += BLOCK_BYTES;
        }
    }
    at
}

#[inline(always)]
fn encode_block(block: &[[u8; 2]], words: &[u32], body: &mut [u8]) {
    let (low, high) = body.split_at_mut(BLOCK);
    let low = low.chunks_exact_mut(GROUP);
    let high = high.chunks_exact_mut(GROUP / 4);
    for (((group, word), low), high) in block.chunks_exact(GROUP).zip(words).zip(low).zip(high) {
        let scale = Scale::of(*word);
        let (low, high) = (low.as_chunks_mut::<PIECE>().0, high.as_chunks_mut::<2>().0);
        for ((piece, low), high) in group.as_chunks::<PIECE>().0.iter().zip(low).zip(high) {
            let codes = piece.map(|bytes| scale.code(u16::from_le_bytes(bytes).into()));
            *low = codes.map(|code| code as u8);
            let bits = codes.into_iter().rev().fold(0, |bits, code| bits << 2 | code >> 8);
            *high = (bits as u16).to_le_bytes();
        }
    }
}

/// The values of a block of a row on its way. Returns the bytes that it takes. Bytes that no encoder writes give
/// values of no meaning.
///
/// # Panics
/// If there are fewer bytes than [`BLOCK_BYTES`].
#[inline(always)]
pub fn decode_block(bytes: &[u8], out: &mut [f32; BLOCK]) -> usize {
    let body = &bytes[META..BLOCK_BYTES];
    if block_bytes(bytes) == BLOCK_BYTES {
        for (to, from) in out.iter_mut().zip(body.as_chunks::<2>().0) {
            *to = f32::from_bits(u32::from(u16::from_le_bytes(*from)) << 16);
        }
        return BLOCK_BYTES;
    }
    let (low, high) = body.split_at(BLOCK);
    let (low, high) = (low.as_chunks::<PIECE>().0, high.as_chunks::<2>().0);
    let pieces = out.as_chunks_mut::<PIECE>().0.iter_mut().zip(low).zip(high);
    for (at, ((to, low), high)) in pieces.enumerate() {
        let scale = Scale::of(word_of(bytes, at * PIECE / GROUP));
        let high = u32::from(u16::from_le_bytes(*high));
        for (i, (to, low)) in to.iter_mut().zip(low).enumerate() {
            *to = scale.value(u32::from(*low) | (high >> (2 * i) & 3) << 8);
        }
    }
    CODED_BYTES
}

#[cfg(test)]
mod tests;
