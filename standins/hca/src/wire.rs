//! The packets between devices. A message is one packet, whatever its length.

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
    /// The sender.
    pub from: End,
    /// The receiver.
    pub to: End,
    /// Number of the message in its connection, modulo 2^24. An answer has that of its request.
    pub number: u32,
    /// The content.
    pub body: Body,
}

/// The content of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// A write; with immediate data, it takes a receive.
    Write {
        /// Key of the receiver.
        key: u32,
        /// Address, as that key counts it.
        address: u64,
        /// The data.
        data: Vec<u8>,
        /// Immediate data in network order.
        imm: Option<[u8; 4]>,
    },
    /// A message for a receive.
    Send {
        /// The data.
        data: Vec<u8>,
        /// Immediate data in network order.
        imm: Option<[u8; 4]>,
    },
    /// A read.
    Read {
        /// Key of the receiver.
        key: u32,
        /// Address, as that key counts it.
        address: u64,
        /// Length.
        bytes: u64,
    },
    /// An atomic change of 8 bytes.
    Atomic {
        /// Key of the receiver.
        key: u32,
        /// Address, as that key counts it; a multiple of 8.
        address: u64,
        /// None: add. Else: swap if the memory holds this value.
        compare: Option<u64>,
        /// The value that is added, or swapped in.
        value: u64,
    },
    /// Done.
    Ack,
    /// Done: the data that was read, or the old value.
    Data(Vec<u8>),
    /// There is no receive: the sender repeats the request after this time.
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
    /// Whether it is a request.
    pub fn is_request(&self) -> bool {
        matches!(
            self,
            Self::Write { .. } | Self::Send { .. } | Self::Read { .. } | Self::Atomic { .. }
        )
    }
}

/// Appends integers of fixed size, little-endian.
struct Writer(Vec<u8>);

impl Writer {
    fn put(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn end(&mut self, end: End) {
        self.put(&end.lid.to_le_bytes());
        self.put(&end.qpn.to_le_bytes());
    }

    fn imm(&mut self, imm: Option<[u8; 4]>) {
        self.put(&[u8::from(imm.is_some())]);
        self.put(&imm.unwrap_or_default());
    }
}

/// Reads the bytes that a [`Writer`] wrote.
struct WireReader<'a>(&'a [u8]);

impl<'a> WireReader<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn end(&mut self) -> Option<End> {
        let lid = u16::from_le_bytes(self.take()?);
        Some(End { lid, qpn: u32::from_le_bytes(self.take()?) })
    }

    fn imm(&mut self) -> Option<Option<[u8; 4]>> {
        let [is] = self.take()?;
        let imm = self.take()?;
        Some((is != 0).then_some(imm))
    }

    fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0).to_vec()
    }
}

impl Packet {
    /// The bytes, for a wire between processes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Writer(Vec::with_capacity(64));
        out.end(self.from);
        out.end(self.to);
        out.put(&self.number.to_le_bytes());
        match &self.body {
            Body::Write { key, address, data, imm } => {
                out.put(&[0]);
                out.put(&key.to_le_bytes());
                out.put(&address.to_le_bytes());
                out.imm(*imm);
                out.put(data);
            }
            Body::Send { data, imm } => {
                out.put(&[1]);
                out.imm(*imm);
                out.put(data);
            }
            Body::Read { key, address, bytes } => {
                out.put(&[2]);
                out.put(&key.to_le_bytes());
                out.put(&address.to_le_bytes());
                out.put(&bytes.to_le_bytes());
            }
            Body::Atomic { key, address, compare, value } => {
                out.put(&[3]);
                out.put(&key.to_le_bytes());
                out.put(&address.to_le_bytes());
                out.put(&[u8::from(compare.is_some())]);
                out.put(&compare.unwrap_or_default().to_le_bytes());
                out.put(&value.to_le_bytes());
            }
            Body::Ack => out.put(&[4]),
            Body::Data(data) => {
                out.put(&[5]);
                out.put(data);
            }
            Body::NotReady { after } => {
                out.put(&[6]);
                out.put(&after.to_le_bytes());
            }
            Body::Refused { syndrome } => out.put(&[7, *syndrome]),
        }
        out.0
    }

    /// Reads the bytes of [`Packet::to_bytes`]; none for other bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut input = WireReader(bytes);
        let (from, to) = (input.end()?, input.end()?);
        let number = u32::from_le_bytes(input.take()?);
        let [kind] = input.take()?;
        let body = match kind {
            0 => {
                let key = u32::from_le_bytes(input.take()?);
                let address = u64::from_le_bytes(input.take()?);
                let imm = input.imm()?;
                Body::Write { key, address, imm, data: input.rest() }
            }
            1 => Body::Send { imm: input.imm()?, data: input.rest() },
            2 => Body::Read {
                key: u32::from_le_bytes(input.take()?),
                address: u64::from_le_bytes(input.take()?),
                bytes: u64::from_le_bytes(input.take()?),
            },
            3 => {
                let key = u32::from_le_bytes(input.take()?);
                let address = u64::from_le_bytes(input.take()?);
                let [is] = input.take()?;
                let compare = u64::from_le_bytes(input.take()?);
                let value = u64::from_le_bytes(input.take()?);
                Body::Atomic { key, address, compare: (is != 0).then_some(compare), value }
            }
            4 => Body::Ack,
            5 => Body::Data(input.rest()),
            6 => Body::NotReady { after: u64::from_le_bytes(input.take()?) },
            7 => Body::Refused { syndrome: input.take::<1>()?[0] },
            _ => return None,
        };
        input.0.is_empty().then_some(Self { from, to, number, body })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_cross_a_wire_and_shortened_ones_do_not() {
        let (key, address) = (7, 0x0102_0304_0506_0708);
        let data = vec![1, 2, 3];
        for body in [
            Body::Write { key, address, data: data.clone(), imm: Some([4, 5, 6, 7]) },
            Body::Write { key, address, data: data.clone(), imm: None },
            Body::Send { data: data.clone(), imm: None },
            Body::Read { key, address, bytes: 9 },
            Body::Atomic { key, address, compare: Some(3), value: 4 },
            Body::Ack,
            Body::Data(data),
            Body::NotReady { after: 5 },
            Body::Refused { syndrome: 0x13 },
        ] {
            let (from, to) = (End { lid: 1, qpn: 2 }, End { lid: 3, qpn: 4 });
            let packet = Packet { from, to, number: 0x12_3456, body };
            let bytes = packet.to_bytes();
            assert_eq!(Packet::from_bytes(&bytes), Some(packet));
            assert_eq!(Packet::from_bytes(&bytes[..16]), None);
        }
        assert_eq!(Packet::from_bytes(&[9; 64]), None);
    }
}
