//! Work requests that fit one block of 64 bytes: segments of 16 bytes, integers big-endian.
//!
//! | request | segments |
//! |---|---|
//! | write, write with immediate data, read | control, remote address, data |
//! | inline write | control, remote address, inline data |
//! | fetch-and-add | control, remote address, atomic, data |
//! | nothing | control |

/// A block: the unit of a send queue.
pub const BLOCK: usize = 64;
/// A segment: the unit of a request's size.
pub const SEGMENT: usize = 16;
/// Most bytes of inline data in a request of three segments.
pub const MOST_INLINE: usize = 12;
/// Most bytes of a message.
pub const MOST_BYTES: u32 = 1 << 30;
/// Marks inline data in the word that has their size.
pub const INLINE: u32 = 0x8000_0000;

/// Opcodes: the operations of requests.
pub mod opcode {
    /// Nothing.
    pub const NOP: u8 = 0x00;
    /// Writes.
    pub const RDMA_WRITE: u8 = 0x08;
    /// Writes, and takes a receive at the peer, which gets 32 bits.
    pub const RDMA_WRITE_IMM: u8 = 0x09;
    /// Sends to a receive of the peer.
    pub const SEND: u8 = 0x0a;
    /// Sends to a receive of the peer, which gets 32 bits too.
    pub const SEND_IMM: u8 = 0x0b;
    /// Reads.
    pub const RDMA_READ: u8 = 0x10;
    /// Compares, and swaps 8 bytes where they are equal.
    pub const ATOMIC_CS: u8 = 0x11;
    /// Adds to 8 bytes.
    pub const ATOMIC_FA: u8 = 0x12;
}

/// Offsets of the parts of segments, in bytes from the beginning of the segment.
pub mod layout {
    /// Control: modifier (8 bits), index (16 bits), opcode (8 bits).
    pub const CTRL_OPCODE: usize = 0;
    /// Control: number of the queue pair (24 bits), segments (8 bits).
    pub const CTRL_QPN_DS: usize = 4;
    /// Control: signature, 0.
    pub const CTRL_SIGNATURE: usize = 8;
    /// Control: stream id of 16 bits, 0 except for dynamic connections.
    pub const CTRL_STREAM: usize = 9;
    /// Control: fence, completion, solicited event.
    pub const CTRL_FLAGS: usize = 11;
    /// Control: immediate data.
    pub const CTRL_IMM: usize = 12;
    /// Remote address: 64 bits.
    pub const REMOTE_ADDRESS: usize = 0;
    /// Remote address: key.
    pub const REMOTE_KEY: usize = 8;
    /// Remote address: 0.
    pub const REMOTE_RESERVED: usize = 12;
    /// Data: size, or [`super::INLINE`] and size.
    pub const DATA_BYTES: usize = 0;
    /// Data: key.
    pub const DATA_KEY: usize = 4;
    /// Data: 64 bits.
    pub const DATA_ADDRESS: usize = 8;
    /// Inline data begin here.
    pub const DATA_INLINE: usize = 4;
    /// Atomic: the value that is added, or swapped in.
    pub const ATOMIC_ADD: usize = 0;
    /// Atomic: the value that is compared.
    pub const ATOMIC_COMPARE: usize = 8;
}

/// Bits of [`layout::CTRL_FLAGS`].
pub mod flags {
    /// The request asks for a completion; without this bit only a failure completes.
    pub const COMPLETION: u8 = 2 << 2;
    /// Both bits of the completion mode.
    pub const COMPLETION_MASK: u8 = 3 << 2;
    /// Offset of the fence's three bits.
    pub const FENCE_SHIFT: u32 = 5;
    /// Waits for earlier reads and atomics, as `IBV_SEND_FENCE` does.
    pub const FENCE: u8 = 4 << FENCE_SHIFT;
}

/// Memory of the peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remote {
    /// The address, as the peer's key counts it.
    pub address: u64,
    /// The peer's key.
    pub key: u32,
}

/// Memory of this side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Local {
    /// The address, as the key counts it.
    pub address: u64,
    /// Key of this side.
    pub key: u32,
    /// 1 to [`MOST_BYTES`].
    pub bytes: u32,
}

/// Bytes that travel in the request itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InlineData {
    bytes: [u8; MOST_INLINE],
    length: u8,
}

impl InlineData {
    /// Copies 1 to [`MOST_INLINE`] bytes; none for another number.
    pub fn new(data: &[u8]) -> Option<Self> {
        let mut bytes = [0; MOST_INLINE];
        bytes.get_mut(..data.len()).filter(|room| !room.is_empty())?.copy_from_slice(data);
        Some(Self { bytes, length: data.len() as u8 })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }
}

/// A request of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Does nothing; it completes in order.
    Nop,
    /// Writes memory of this side to the peer.
    Write {
        /// The destination.
        to: Remote,
        /// The source.
        from: Local,
    },
    /// Writes a few bytes to the peer.
    WriteInline {
        /// The destination.
        to: Remote,
        /// The bytes.
        data: InlineData,
    },
    /// Writes, and takes a receive of the peer.
    WriteImm {
        /// The destination.
        to: Remote,
        /// The source.
        from: Local,
        /// The immediate data for the receive, in network order.
        imm: [u8; 4],
    },
    /// Adds to 8 bytes of the peer.
    FetchAdd {
        /// The place; a multiple of 8.
        to: Remote,
        /// The addend.
        add: u64,
        /// The place for the old value: 8 bytes.
        sink: Local,
    },
    /// Reads memory of the peer.
    Read {
        /// The source.
        from: Remote,
        /// The destination.
        to: Local,
    },
}

/// The place of a request, and its options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// Its place: blocks of the queue since the beginning, modulo 2^16.
    pub index: u16,
    /// Number of the queue pair, 24 bits.
    pub qpn: u32,
    /// It asks for a completion.
    pub signaled: bool,
    /// It waits for earlier reads and atomics of the queue.
    pub fence: bool,
}

impl Request {
    /// Its operation: one of [`opcode`].
    pub fn opcode(&self) -> u8 {
        match self {
            Self::Nop => opcode::NOP,
            Self::Write { .. } | Self::WriteInline { .. } => opcode::RDMA_WRITE,
            Self::WriteImm { .. } => opcode::RDMA_WRITE_IMM,
            Self::FetchAdd { .. } => opcode::ATOMIC_FA,
            Self::Read { .. } => opcode::RDMA_READ,
        }
    }

    /// Its size.
    pub fn segments(&self) -> u8 {
        match self {
            Self::Nop => 1,
            Self::FetchAdd { .. } => 4,
            _ => 3,
        }
    }

    /// The block. Bytes that the request does not need are 0.
    pub fn to_block(&self, control: Control) -> [u8; BLOCK] {
        let mut block = [0; BLOCK];
        self.control(control, &mut block);
        match self {
            Self::Nop => {}
            Self::Write { to, from } | Self::WriteImm { to, from, .. } => {
                remote(&mut block, *to);
                data(&mut block, 2, *from);
            }
            Self::WriteInline { to, data } => {
                remote(&mut block, *to);
                let at = 2 * SEGMENT + layout::DATA_INLINE;
                let bytes = data.as_slice();
                be32(&mut block, 2 * SEGMENT + layout::DATA_BYTES, INLINE | bytes.len() as u32);
                block[at..at + bytes.len()].copy_from_slice(bytes);
            }
            Self::FetchAdd { to, add, sink } => {
                remote(&mut block, *to);
                be64(&mut block, 2 * SEGMENT + layout::ATOMIC_ADD, *add);
                data(&mut block, 3, *sink);
            }
            Self::Read { from, to } => {
                remote(&mut block, *from);
                data(&mut block, 2, *to);
            }
        }
        block
    }

    fn control(&self, control: Control, block: &mut [u8; BLOCK]) {
        debug_assert!(control.qpn < 1 << 24);
        let first = u32::from(control.index) << 8 | u32::from(self.opcode());
        be32(block, layout::CTRL_OPCODE, first);
        be32(block, layout::CTRL_QPN_DS, control.qpn << 8 | u32::from(self.segments()));
        let completion = if control.signaled { flags::COMPLETION } else { 0 };
        let fence = if control.fence { flags::FENCE } else { 0 };
        block[layout::CTRL_FLAGS] = completion | fence;
        if let Self::WriteImm { imm, .. } = self {
            block[layout::CTRL_IMM..layout::CTRL_IMM + 4].copy_from_slice(imm);
        }
    }
}

fn remote(block: &mut [u8; BLOCK], remote: Remote) {
    be64(block, SEGMENT + layout::REMOTE_ADDRESS, remote.address);
    be32(block, SEGMENT + layout::REMOTE_KEY, remote.key);
}

fn data(block: &mut [u8; BLOCK], segment: usize, local: Local) {
    debug_assert!((1..=MOST_BYTES).contains(&local.bytes));
    be32(block, segment * SEGMENT + layout::DATA_BYTES, local.bytes);
    be32(block, segment * SEGMENT + layout::DATA_KEY, local.key);
    be64(block, segment * SEGMENT + layout::DATA_ADDRESS, local.address);
}

fn be32(block: &mut [u8; BLOCK], at: usize, value: u32) {
    block[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

fn be64(block: &mut [u8; BLOCK], at: usize, value: u64) {
    block[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO: Remote = Remote { address: 0x8899_aabb_ccdd_eeff, key: 0x0012_3456 };
    const FROM: Local = Local { address: 0x0011_2233_4455_6677, key: 0x00ab_cd02, bytes: 7168 };
    const RADDR: &str = "8899aabb ccddeeff 00123456 00000000";
    const DATA: &str = "00001c00 00abcd02 00112233 44556677";
    const NONE: &str = "00000000 00000000 00000000 00000000";

    fn block(lines: [&str; 4]) -> [u8; BLOCK] {
        let words = lines.iter().flat_map(|line| line.split(' '));
        let bytes = words.flat_map(|word| u32::from_str_radix(word, 16).unwrap().to_be_bytes());
        bytes.collect::<Vec<_>>().try_into().unwrap()
    }

    fn control(index: u16) -> Control {
        Control { index, qpn: 0x1234, signaled: true, fence: false }
    }

    /// The bytes that `ibv_post_send` of Debian's libmlx5 (rdma-core 44) wrote, under a stand-in of the kernel.
    #[test]
    fn blocks_equal_those_of_libmlx5() {
        let value = InlineData::new(&0x0102_0304_0506_0708_u64.to_le_bytes()).unwrap();
        let inline = Request::WriteInline { to: TO, data: value };
        let inlined = "80000008 08070605 04030201 00000000";
        let write = Request::Write { to: TO, from: FROM };
        let imm = Request::WriteImm { to: TO, from: FROM, imm: [0xaa, 0xbb, 0xcc, 0xdd] };
        let sink = Local { address: 0x1000, key: 0x00ab_cd02, bytes: 8 };
        let add = Request::FetchAdd { to: Remote { address: 0x7000, key: 0x99 }, add: 5, sink };
        let read = Request::Read { from: TO, to: FROM };
        for (request, control, lines) in [
            (write, control(0), ["00000008 00123403 00000008 00000000", RADDR, DATA, NONE]),
            (
                write,
                Control { signaled: false, ..control(1) },
                ["00000108 00123403 00000000 00000000", RADDR, DATA, NONE],
            ),
            (inline, control(2), ["00000208 00123403 00000008 00000000", RADDR, inlined, NONE]),
            (
                inline,
                Control { fence: true, ..control(3) },
                ["00000308 00123403 00000088 00000000", RADDR, inlined, NONE],
            ),
            (imm, control(4), ["00000409 00123403 00000008 aabbccdd", RADDR, DATA, NONE]),
            (
                add,
                control(5),
                [
                    "00000512 00123404 00000008 00000000",
                    "00000000 00007000 00000099 00000000",
                    "00000000 00000005 00000000 00000000",
                    "00000008 00abcd02 00000000 00001000",
                ],
            ),
            (read, control(6), ["00000610 00123403 00000008 00000000", RADDR, DATA, NONE]),
        ] {
            assert_eq!(request.to_block(control), block(lines), "{request:?}");
        }
    }

    #[test]
    fn nothing_is_one_segment() {
        let nop = Request::Nop.to_block(control(0xffff));
        assert_eq!(nop, block(["00ffff00 00123401 00000008 00000000", NONE, NONE, NONE]));
    }

    #[test]
    fn inline_data_are_1_to_12_bytes() {
        assert!(InlineData::new(&[]).is_none());
        assert!(InlineData::new(&[0; 13]).is_none());
        assert_eq!(InlineData::new(&[7; 12]).unwrap().as_slice(), [7; 12]);
    }
}
