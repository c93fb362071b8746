//! What devices send each other. A message is one packet, whatever its length.

/// One end of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct End {
    /// Local id of the device.
    pub lid: u16,
    /// Number of the queue pair.
    pub qpn: u32,
}

/// A message, or an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Who sends it.
    pub from: End,
    /// Who gets it.
    pub to: End,
    /// Number of the message in its connection, modulo 2^24. An answer has that of its request.
    pub number: u32,
    /// What it says.
    pub body: Body,
}

/// What a packet says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// Write there; with immediate data, take a receive.
    Write {
        /// Key of the receiver.
        key: u32,
        /// By that key.
        address: u64,
        /// What.
        data: Vec<u8>,
        /// Immediate data in network order.
        imm: Option<[u8; 4]>,
    },
    /// A message for a receive.
    Send {
        /// What.
        data: Vec<u8>,
        /// Immediate data in network order.
        imm: Option<[u8; 4]>,
    },
    /// Read there.
    Read {
        /// Key of the receiver.
        key: u32,
        /// By that key.
        address: u64,
        /// Length.
        bytes: u64,
    },
    /// Change 8 bytes there.
    Atomic {
        /// Key of the receiver.
        key: u32,
        /// By that key; a multiple of 8.
        address: u64,
        /// Nothing: add. Else swap where this is there.
        compare: Option<u64>,
        /// What is added, or swapped in.
        value: u64,
    },
    /// Done.
    Ack,
    /// Done: what was read, or was there before.
    Data(Vec<u8>),
    /// There is no receive: come again after so many nanoseconds.
    NotReady {
        /// Nanoseconds.
        after: u64,
    },
    /// Refused.
    Refused {
        /// One of `tokenyard_sys_mlx5::cqe::syndrome`.
        syndrome: u8,
    },
}

impl Body {
    /// It asks for something.
    pub fn is_request(&self) -> bool {
        matches!(
            self,
            Self::Write { .. } | Self::Send { .. } | Self::Read { .. } | Self::Atomic { .. }
        )
    }
}
