//! Places of bits in the big-endian structures of the device.

/// Some bits of a structure. Bits of a byte are counted from the most significant one, as the
/// device's reference does: `Field::new(0x71, 5, 3)` is the last three bits of byte 0x71.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Offset of the byte in which the field begins.
    pub byte: usize,
    /// The first bit in that byte, 0 to 7.
    pub bit: usize,
    /// The number of bits, 1 to 128.
    pub width: usize,
}

impl Field {
    /// Names a place.
    pub const fn new(byte: usize, bit: usize, width: usize) -> Self {
        assert!(bit < 8 && width >= 1 && width <= 128, "a field has 1 to 128 bits");
        Self { byte, bit, width }
    }

    /// The offset behind its last byte.
    pub const fn end(self) -> usize {
        self.byte + (self.bit + self.width).div_ceil(8)
    }

    /// The largest value that it can hold.
    pub const fn most(self) -> u128 {
        u128::MAX >> (128 - self.width)
    }

    fn bits(self) -> impl Iterator<Item = (usize, u8)> {
        let first = self.byte * 8 + self.bit;
        (first..first + self.width).map(|bit| (bit / 8, 0x80_u8 >> (bit % 8)))
    }

    /// Reads it. Bits behind the end of `bytes` are 0.
    pub fn get(self, bytes: &[u8]) -> u128 {
        self.bits().fold(0, |value, (byte, mask)| {
            let is_set = bytes.get(byte).is_some_and(|byte| byte & mask != 0);
            value << 1 | u128::from(is_set)
        })
    }

    /// Writes the lowest `width` bits of `value`. Bits behind the end of `bytes` are lost.
    pub fn set(self, bytes: &mut [u8], value: u128) {
        for (at, (byte, mask)) in self.bits().enumerate() {
            let Some(byte) = bytes.get_mut(byte) else { return };
            let is_set = value >> (self.width - 1 - at) & 1 == 1;
            *byte = if is_set { *byte | mask } else { *byte & !mask };
        }
    }
}

/// A type that a field can hold.
pub trait Value: Copy {
    /// As an integer.
    fn to_bits(self) -> u128;
    /// From an integer; bits that do not fit are dropped.
    fn from_bits(bits: u128) -> Self;
}

macro_rules! integers {
    ($($name:ident)*) => {$(
        impl Value for $name {
            fn to_bits(self) -> u128 {
                u128::from(self)
            }

            fn from_bits(bits: u128) -> Self {
                bits as $name
            }
        }
    )*};
}

integers! { u8 u16 u32 u64 }

impl Value for bool {
    fn to_bits(self) -> u128 {
        u128::from(self)
    }

    fn from_bits(bits: u128) -> Self {
        bits != 0
    }
}

/// Bytes in network order: a GID, a MAC address.
impl<const N: usize> Value for [u8; N] {
    fn to_bits(self) -> u128 {
        self.iter().fold(0, |bits, byte| bits << 8 | u128::from(*byte))
    }

    fn from_bits(bits: u128) -> Self {
        std::array::from_fn(|at| (bits >> (8 * (N - 1 - at))) as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_counted_from_the_most_significant_one() {
        let mut bytes = [0; 4];
        Field::new(1, 5, 3).set(&mut bytes, 5);
        assert_eq!(bytes, [0, 0b101, 0, 0]);
        Field::new(1, 0, 3).set(&mut bytes, 7);
        assert_eq!(bytes, [0, 0b1110_0101, 0, 0]);
        Field::new(0, 4, 10).set(&mut bytes, 0);
        assert_eq!(bytes, [0, 0b0000_0001, 0, 0], "the other bits stay");
    }

    #[test]
    fn integers_are_big_endian_and_come_back() {
        let mut bytes = [0xff; 20];
        for (field, value) in [
            (Field::new(0, 0, 24), 0x12_3456),
            (Field::new(3, 0, 64), 0x0102_0304_0506_0708),
            (Field::new(11, 3, 5), 0x1f),
        ] {
            field.set(&mut bytes, value);
            assert_eq!(field.get(&bytes), value);
        }
        assert_eq!(bytes[..12], [0x12, 0x34, 0x56, 1, 2, 3, 4, 5, 6, 7, 8, 0xff]);
    }

    #[test]
    fn a_field_beyond_the_end_reads_as_zero_and_writes_nothing() {
        let mut bytes = [0xff; 2];
        let field = Field::new(1, 4, 8);
        assert_eq!(field.get(&bytes), 0xf0);
        field.set(&mut bytes, 0);
        assert_eq!(bytes, [0xff, 0xf0]);
    }

    #[test]
    fn byte_arrays_are_in_network_order() {
        let gid: [u8; 16] = std::array::from_fn(|at| at as u8);
        assert_eq!(<[u8; 16]>::from_bits(gid.to_bits()), gid);
        let mut bytes = [0; 16];
        Field::new(0, 0, 128).set(&mut bytes, gid.to_bits());
        assert_eq!(bytes, gid);
    }
}
