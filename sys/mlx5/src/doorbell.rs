//! Doorbells, by which a queue pair announces work: a record in memory, and eight bytes to a register.

/// Bytes of a page of doorbell registers.
pub const PAGE: usize = 4096;
/// Offset of the first register of a page. A page has [`REGISTERS`], one after another.
pub const FIRST_REGISTER: usize = 0x800;
/// Bytes of a register. libmlx5 alternates between the halves of two of them.
pub const REGISTER: usize = 256;
/// Registers of a page.
pub const REGISTERS: usize = (PAGE - FIRST_REGISTER) / REGISTER;
/// Bytes of a doorbell record.
pub const RECORD: usize = 8;
/// Offset of the receive queue's word in the record.
pub const RECEIVE: usize = 0;
/// Offset of the send queue's word in the record.
pub const SEND: usize = 4;

/// A word of the record: blocks, or receives, that were posted since the beginning, modulo 2^16.
pub fn record_word(next: u16) -> [u8; 4] {
    u32::from(next).to_be_bytes()
}

/// Eight bytes for the register. Hardware takes both forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// The index behind the last block, and the queue pair. NVSHMEM, DOCA and this project use this form.
    NextIndex {
        /// The value of the record.
        next: u16,
        /// Number of the queue pair.
        qpn: u32,
    },
    /// The first eight bytes of the last request. libmlx5 uses this form.
    LastRequest {
        /// Modifier of the opcode.
        modifier: u8,
        /// Its own index.
        index: u16,
        /// Its opcode.
        opcode: u8,
        /// Number of the queue pair.
        qpn: u32,
        /// Its segments.
        segments: u8,
    },
}

impl Ring {
    /// The bytes.
    pub fn to_bytes(self) -> [u8; 8] {
        let (first, second) = match self {
            Self::NextIndex { next, qpn } => (u32::from(next) << 8, qpn << 8),
            Self::LastRequest { modifier, index, opcode, qpn, segments } => {
                let index = u32::from(index) << 8;
                let first = u32::from(modifier) << 24 | index | u32::from(opcode);
                (first, qpn << 8 | u32::from(segments))
            }
        };
        let words = u64::from(first) << 32 | u64::from(second);
        words.to_be_bytes()
    }

    /// Reads the bytes that were stored to a register; none if they have neither form.
    pub fn from_bytes(bytes: [u8; 8]) -> Option<Self> {
        let [modifier, high, low, opcode, q2, q1, q0, segments] = bytes;
        let qpn = u32::from_be_bytes([0, q2, q1, q0]);
        let index = u16::from_be_bytes([high, low]);
        match (segments, modifier, opcode) {
            (0, 0, 0) => Some(Self::NextIndex { next: index, qpn }),
            (0, ..) => None,
            _ => Some(Self::LastRequest { modifier, index, opcode, qpn, segments }),
        }
    }

    /// The queue pair.
    pub fn qpn(self) -> u32 {
        match self {
            Self::NextIndex { qpn, .. } | Self::LastRequest { qpn, .. } => qpn,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_read_back_and_distinguished() {
        let last =
            Ring::LastRequest { modifier: 0, index: 6, opcode: 0x10, qpn: 0x1234, segments: 3 };
        let next = Ring::NextIndex { next: 7, qpn: 0x1234 };
        assert_eq!(last.to_bytes(), [0, 0, 6, 0x10, 0, 0x12, 0x34, 3], "libmlx5's golden bytes");
        assert_eq!(next.to_bytes(), [0, 0, 7, 0, 0, 0x12, 0x34, 0]);
        for ring in [last, next] {
            assert_eq!(Ring::from_bytes(ring.to_bytes()), Some(ring));
        }
    }

    #[test]
    fn other_bytes_are_no_ring() {
        assert_eq!(Ring::from_bytes([0, 0, 7, 8, 0, 0x12, 0x34, 0]), None);
        assert_eq!(Ring::from_bytes([1, 0, 7, 0, 0, 0x12, 0x34, 0]), None);
    }

    #[test]
    fn a_record_counts_modulo_two_to_the_sixteenth() {
        assert_eq!(record_word(0xffff), [0, 0, 0xff, 0xff]);
        assert_eq!(REGISTERS, 8);
    }
}
