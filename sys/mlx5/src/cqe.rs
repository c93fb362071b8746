//! Completions of 64 bytes, in the form that the device calls version 1.

/// A completion's size.
pub const BYTES: usize = 64;
/// The byte that a buffer is filled with before its queue is made: [`Word::kind`] is then
/// [`Kind::None`].
pub const FILL: u8 = 0xff;

/// Offsets of the fields of a completion.
pub mod layout {
    /// User index of the queue pair, 24 bits in a word.
    pub const USER_INDEX: usize = 32;
    /// Immediate data, in network order.
    pub const IMM: usize = 36;
    /// Bytes that were received or read.
    pub const BYTE_COUNT: usize = 44;
    /// Error code of the vendor, in an error completion.
    pub const VENDOR: usize = 54;
    /// Syndrome of an error completion: one of [`super::syndrome`].
    pub const SYNDROME: usize = 55;
    /// Opcode of the request (8 bits), number of the queue pair (24 bits).
    pub const OPCODE_QPN: usize = 56;
    /// Index of the request, 16 bits.
    pub const COUNTER: usize = 60;
    /// Kind (4 bits), form (2 bits), solicited, owner.
    pub const KIND_OWNER: usize = 63;
}

/// Why a request failed.
pub mod syndrome {
    /// A message is too long for its destination.
    pub const LOCAL_LENGTH: u8 = 0x01;
    /// The queue pair cannot do this.
    pub const LOCAL_QP_OPERATION: u8 = 0x02;
    /// A key of this side does not cover the access for which it is used.
    pub const LOCAL_PROTECTION: u8 = 0x04;
    /// The queue pair broke before.
    pub const FLUSHED: u8 = 0x05;
    /// The peer's answer is invalid.
    pub const BAD_RESPONSE: u8 = 0x10;
    /// The receiving side may not write there.
    pub const LOCAL_ACCESS: u8 = 0x11;
    /// The peer does not accept such a request.
    pub const REMOTE_INVALID_REQUEST: u8 = 0x12;
    /// A key of the peer does not cover the access for which it is used.
    pub const REMOTE_ACCESS: u8 = 0x13;
    /// The peer could not execute the request.
    pub const REMOTE_OPERATION: u8 = 0x14;
    /// The peer does not answer.
    pub const RETRIES: u8 = 0x15;
    /// The peer has no receive.
    pub const RNR_RETRIES: u8 = 0x16;
    /// The peer aborted the request.
    pub const REMOTE_ABORTED: u8 = 0x22;

    /// A syndrome as text.
    pub fn words(syndrome: u8) -> &'static str {
        match syndrome {
            LOCAL_LENGTH => "a message is longer than its memory",
            LOCAL_QP_OPERATION => "the queue pair cannot do this",
            LOCAL_PROTECTION => "a local key does not cover the memory",
            FLUSHED => "the queue pair broke before",
            BAD_RESPONSE => "the peer's answer makes no sense",
            LOCAL_ACCESS => "the receiving side may not write there",
            REMOTE_INVALID_REQUEST => "the peer takes no such request",
            REMOTE_ACCESS => "a remote key does not cover the memory",
            REMOTE_OPERATION => "the peer could not do it",
            RETRIES => "the peer does not answer",
            RNR_RETRIES => "the peer has no receive",
            REMOTE_ABORTED => "the peer gave it up",
            _ => "unknown",
        }
    }
}

/// The kind of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A request is done.
    Request,
    /// A write with immediate data of 32 bits used a receive.
    WriteImm,
    /// A receive got a message.
    Receive,
    /// A receive got a message and 32 bits.
    ReceiveImm,
    /// A request failed.
    RequestError,
    /// A receive failed.
    ReceiveError,
    /// Nothing has completed yet.
    None,
    /// A kind that is not known here.
    Other(u8),
}

impl Kind {
    /// Reads its 4 bits.
    pub fn from_bits(bits: u8) -> Self {
        match bits {
            0 => Self::Request,
            1 => Self::WriteImm,
            2 => Self::Receive,
            3 => Self::ReceiveImm,
            13 => Self::RequestError,
            14 => Self::ReceiveError,
            15 => Self::None,
            other => Self::Other(other),
        }
    }

    /// Its 4 bits.
    pub fn to_bits(self) -> u8 {
        match self {
            Self::Request => 0,
            Self::WriteImm => 1,
            Self::Receive => 2,
            Self::ReceiveImm => 3,
            Self::RequestError => 13,
            Self::ReceiveError => 14,
            Self::None => 15,
            Self::Other(bits) => bits & 15,
        }
    }
}

/// The last four bytes: a thread that waits on a collapsed queue reads these at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word {
    /// The kind of the completion.
    pub kind: Kind,
    /// Index of the request.
    pub counter: u16,
    /// Flips with each turn of the queue.
    pub owner: bool,
}

impl Word {
    /// Reads it; look at the kind first.
    pub fn from_bytes(bytes: [u8; 4]) -> Self {
        let [high, low, _, last] = bytes;
        Self {
            kind: Kind::from_bits(last >> 4),
            counter: u16::from_be_bytes([high, low]),
            owner: last & 1 == 1,
        }
    }

    /// The bytes, with signature 0.
    pub fn to_bytes(self) -> [u8; 4] {
        let [high, low] = self.counter.to_be_bytes();
        [high, low, 0, self.kind.to_bits() << 4 | u8::from(self.owner)]
    }
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cqe {
    /// The last four bytes.
    pub word: Word,
    /// Number of the queue pair.
    pub qpn: u32,
    /// The request's opcode; 0 for receives.
    pub opcode: u8,
    /// User index of the queue pair; of a shared receive queue if the receive came from one.
    pub user_index: u32,
    /// The immediate data of the message, in network order.
    pub imm: [u8; 4],
    /// Bytes that were received or read.
    pub byte_count: u32,
    /// Syndrome of an error completion: one of [`syndrome`].
    pub syndrome: u8,
    /// Error code of the vendor, in an error completion.
    pub vendor: u8,
}

impl Cqe {
    /// Reads a completion. Fields that its kind does not have are 0.
    pub fn from_bytes(bytes: &[u8; BYTES]) -> Self {
        let word = Word::from_bytes(array(bytes, layout::COUNTER));
        let failed = matches!(word.kind, Kind::RequestError | Kind::ReceiveError);
        let opcode_qpn = u32::from_be_bytes(array(bytes, layout::OPCODE_QPN));
        let only = |is: bool, value: u8| if is { value } else { 0 };
        Self {
            word,
            qpn: opcode_qpn & 0x00ff_ffff,
            opcode: (opcode_qpn >> 24) as u8,
            user_index: u32::from_be_bytes(array(bytes, layout::USER_INDEX)) & 0x00ff_ffff,
            imm: if failed { [0; 4] } else { array(bytes, layout::IMM) },
            byte_count: if failed {
                0
            } else {
                u32::from_be_bytes(array(bytes, layout::BYTE_COUNT))
            },
            syndrome: only(failed, bytes[layout::SYNDROME]),
            vendor: only(failed, bytes[layout::VENDOR]),
        }
    }

    /// The bytes.
    pub fn to_bytes(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        let mut put = |at: usize, value: [u8; 4]| bytes[at..at + 4].copy_from_slice(&value);
        put(layout::USER_INDEX, self.user_index.to_be_bytes());
        put(layout::OPCODE_QPN, (u32::from(self.opcode) << 24 | self.qpn).to_be_bytes());
        put(layout::COUNTER, self.word.to_bytes());
        if matches!(self.word.kind, Kind::RequestError | Kind::ReceiveError) {
            bytes[layout::SYNDROME] = self.syndrome;
            bytes[layout::VENDOR] = self.vendor;
        } else {
            put(layout::IMM, self.imm);
            put(layout::BYTE_COUNT, self.byte_count.to_be_bytes());
        }
        bytes
    }
}

fn array<const N: usize>(bytes: &[u8; BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filled_buffer_says_that_nothing_has_completed() {
        let word = Word::from_bytes([FILL; 4]);
        assert_eq!((word.kind, word.counter), (Kind::None, 0xffff));
    }

    #[test]
    fn the_last_word_is_counter_signature_kind_and_owner() {
        let word = Word { kind: Kind::RequestError, counter: 0x1234, owner: true };
        assert_eq!(word.to_bytes(), [0x12, 0x34, 0, 0xd1]);
        for bits in 0..16 {
            let word = Word::from_bytes([0xfe, 0xdc, 0, bits << 4]);
            assert_eq!(Word::from_bytes(word.to_bytes()), word, "kind {bits}");
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let good = Cqe {
            word: Word { kind: Kind::WriteImm, counter: 7, owner: false },
            qpn: 0x12_3456,
            opcode: 0,
            user_index: 3,
            imm: [1, 2, 3, 4],
            byte_count: 4096,
            syndrome: 0,
            vendor: 0,
        };
        let word = Word { kind: Kind::RequestError, counter: 7, owner: false };
        let bad = Cqe {
            word,
            opcode: 8,
            imm: [0; 4],
            byte_count: 0,
            syndrome: syndrome::RETRIES,
            vendor: 0x81,
            ..good
        };
        for cqe in [good, bad] {
            assert_eq!(Cqe::from_bytes(&cqe.to_bytes()), cqe);
        }
        assert_eq!(bad.to_bytes()[54..], [0x81, 0x15, 8, 0x12, 0x34, 0x56, 0, 7, 0, 0xd0]);
    }
}
