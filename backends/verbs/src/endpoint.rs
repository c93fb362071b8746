//! The bytes that tell a peer how to reach this rank. They cross the bootstrap, so they come from
//! another process: every field is checked. Little-endian, but for the GID.

use std::fmt;

use tokenyard_core::{Error, ErrorKind, Result, abi};

/// First bytes.
const MAGIC: u32 = u32::from_le_bytes(*b"TYVB");
/// Version of the form.
const VERSION: u32 = 1;
/// Most queues of a rank.
pub const MAX_QUEUES: u32 = 64;
/// Most windows of a rank.
pub const MAX_WINDOWS: u32 = 64;
/// Most signals of a rank.
pub const MAX_SIGNALS: u32 = 65_536;
/// Numbers of queue pairs and packets have 24 bits.
const BITS_24: u32 = 0x00ff_ffff;

/// The key of a memory region: who has it may use the region, so it is never printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key(pub u32);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// One queue's queue pair for the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteQp {
    /// Its number, 1 to 2^24 - 1.
    pub number: u32,
    /// The first packet number that it sends, 24 bits.
    pub psn: u32,
}

/// How signals reach the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalArea {
    /// As immediate data.
    Immediate,
    /// By atomic additions to totals of 8 bytes each.
    Atomic {
        /// The first total; a multiple of 8.
        address: u64,
        /// Its region's key.
        key: Key,
    },
}

/// One window of the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteWindow {
    /// The first byte, as the rank's device knows it.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// Its region's key.
    pub key: Key,
}

/// What a peer needs to reach a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Index of the rank in the team.
    pub sender: u32,
    /// Index of the peer that it is for.
    pub receiver: u32,
    /// Ranks of the team.
    pub ranks: u32,
    /// 1 for InfiniBand, 2 for RoCE.
    pub link_layer: u8,
    /// Packet size that the rank asks for, a code of 1 to 5.
    pub mtu: u8,
    /// Reads and atomics that it serves at once for one queue pair, 1 to 255.
    pub reads: u8,
    /// Local id of its port; 0 on RoCE.
    pub lid: u16,
    /// GID of its port, in network order.
    pub gid: [u8; 16],
    /// Signals of the rank, at most 65,536.
    pub signal_count: u32,
    /// How they are raised.
    pub signals: SignalArea,
    /// One per queue, 1 to 64.
    pub queue_pairs: Vec<RemoteQp>,
    /// In order of registration, at most 64.
    pub windows: Vec<RemoteWindow>,
}

impl Endpoint {
    /// The bytes; at most 4096.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (kind, address, key) = match self.signals {
            SignalArea::Immediate => (0_u8, 0, Key(0)),
            SignalArea::Atomic { address, key } => (1, address, key),
        };
        let mut out = Vec::with_capacity(1024);
        for word in [MAGIC, VERSION, self.sender, self.receiver, self.ranks] {
            out.extend(word.to_le_bytes());
        }
        out.extend([self.link_layer, self.mtu, self.reads, kind]);
        out.extend(self.lid.to_le_bytes());
        out.extend((self.queue_pairs.len() as u8).to_le_bytes());
        out.extend((self.windows.len() as u8).to_le_bytes());
        out.extend(self.gid);
        out.extend(self.signal_count.to_le_bytes());
        out.extend(address.to_le_bytes());
        out.extend(key.0.to_le_bytes());
        for remote_qp in &self.queue_pairs {
            out.extend(remote_qp.number.to_le_bytes());
            out.extend(remote_qp.psn.to_le_bytes());
        }
        for window in &self.windows {
            out.extend(window.address.to_le_bytes());
            out.extend(window.bytes.to_le_bytes());
            out.extend(window.key.0.to_le_bytes());
        }
        debug_assert!(out.len() <= abi::TY_ENDPOINT_BYTES);
        out
    }

    /// Reads bytes of a peer. What a single endpoint can be judged by is checked here; whether it
    /// fits this rank is checked by `connect`.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`], naming the field.
    pub fn parse(data: &[u8]) -> Result<Self> {
        let mut reader = Reader { rest: data };
        let magic = reader.u32()?;
        check(magic == MAGIC, || format!("found magic {magic:#x}; expected {MAGIC:#x}"))?;
        let version = reader.u32()?;
        check(version == VERSION, || format!("found version {version}; expected {VERSION}"))?;
        let (sender, receiver, ranks) = (reader.u32()?, reader.u32()?, reader.u32()?);
        check(sender < ranks && receiver < ranks, || {
            format!("found sender {sender} and receiver {receiver}; expected below {ranks} ranks")
        })?;
        let [link_layer, mtu, reads, kind] = reader.array()?;
        let lid = u16::from_le_bytes(reader.array()?);
        let [queues, windows] = reader.array()?;
        let gid = reader.array()?;
        check_port(link_layer, mtu, reads, lid, gid)?;
        let signal_count = reader.u32()?;
        check(signal_count <= MAX_SIGNALS, || {
            format!("found {signal_count} signals; expected at most {MAX_SIGNALS}")
        })?;
        let signals = reader.signal_area(kind, signal_count)?;
        let queue_pairs = reader.queue_pairs(queues)?;
        let windows = reader.windows(windows)?;
        check(reader.rest.is_empty(), || format!("found {} bytes too many", reader.rest.len()))?;
        Ok(Self {
            sender,
            receiver,
            ranks,
            link_layer,
            mtu,
            reads,
            lid,
            gid,
            signal_count,
            signals,
            queue_pairs,
            windows,
        })
    }
}

fn check_port(link_layer: u8, mtu: u8, reads: u8, lid: u16, gid: [u8; 16]) -> Result<()> {
    check(matches!(link_layer, 1 | 2), || {
        format!("found link layer {link_layer}; expected 1 (InfiniBand) or 2 (RoCE)")
    })?;
    check((1..=5).contains(&mtu), || format!("found mtu code {mtu}; expected 1 to 5"))?;
    check(reads > 0, || "found 0 reads at once; expected at least 1".into())?;
    check(link_layer == 1 || lid == 0, || format!("found local id {lid} on RoCE; expected 0"))?;
    check(link_layer == 2 || lid != 0, || "found local id 0 on InfiniBand".into())?;
    check(gid != [0; 16], || "found an empty GID".into())
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or_else(|| {
            refused(format!("found {} bytes; expected {N} more", self.rest.len()))
        })?;
        self.rest = rest;
        Ok(*head)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn signal_area(&mut self, kind: u8, count: u32) -> Result<SignalArea> {
        let (address, key) = (self.u64()?, Key(self.u32()?));
        match kind {
            0 => {
                check((address, key) == (0, Key(0)), || {
                    "found a signal area with immediate signals; expected none".into()
                })?;
                Ok(SignalArea::Immediate)
            }
            1 => {
                let end = address.checked_add(u64::from(count) * 8);
                check(address != 0 && address % 8 == 0 && end.is_some(), || {
                    format!("found a signal area at {address:#x}; expected a multiple of 8")
                })?;
                Ok(SignalArea::Atomic { address, key })
            }
            _ => Err(refused(format!("found signals of kind {kind}; expected 0 or 1"))),
        }
    }

    fn queue_pairs(&mut self, queues: u8) -> Result<Vec<RemoteQp>> {
        check((1..=MAX_QUEUES).contains(&u32::from(queues)), || {
            format!("found {queues} queues; expected 1 to {MAX_QUEUES}")
        })?;
        (0..queues)
            .map(|queue| {
                let remote_qp = RemoteQp { number: self.u32()?, psn: self.u32()? };
                check(
                    (1..=BITS_24).contains(&remote_qp.number) && remote_qp.psn <= BITS_24,
                    || {
                        format!(
                            "queue {queue}: found {remote_qp:?}; expected 24 bits each, no number 0"
                        )
                    },
                )?;
                Ok(remote_qp)
            })
            .collect()
    }

    fn windows(&mut self, windows: u8) -> Result<Vec<RemoteWindow>> {
        check(u32::from(windows) <= MAX_WINDOWS, || {
            format!("found {windows} windows; expected at most {MAX_WINDOWS}")
        })?;
        (0..windows)
            .map(|id| {
                let window = RemoteWindow {
                    address: self.u64()?,
                    bytes: self.u64()?,
                    key: Key(self.u32()?),
                };
                let end = window.address.checked_add(window.bytes);
                check(window.address != 0 && window.bytes != 0 && end.is_some(), || {
                    format!("window {id}: found {} bytes that cannot be memory", window.bytes)
                })?;
                Ok(window)
            })
            .collect()
    }
}

fn check(holds: bool, message: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(refused(message())) }
}

fn refused(message: String) -> Error {
    Error::new(ErrorKind::Protocol, "read endpoint", message)
        .with_fix("run the same version of tokenyard on all ranks")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(queues: usize, windows: usize) -> Endpoint {
        Endpoint {
            sender: 1,
            receiver: 0,
            ranks: 2,
            link_layer: 2,
            mtu: 3,
            reads: 16,
            lid: 0,
            gid: [7; 16],
            signal_count: 100,
            signals: SignalArea::Atomic { address: 4096, key: Key(9) },
            queue_pairs: vec![RemoteQp { number: 17, psn: 0x00ff_ffff }; queues],
            windows: vec![RemoteWindow { address: 4096, bytes: 8192, key: Key(5) }; windows],
        }
    }

    #[test]
    fn endpoints_survive_the_trip_and_fit() {
        for (queues, windows) in [(1, 0), (1, 1), (64, 64)] {
            let endpoint = sample(queues, windows);
            let bytes = endpoint.to_bytes();
            assert!(bytes.len() <= abi::TY_ENDPOINT_BYTES);
            assert_eq!(Endpoint::parse(&bytes).unwrap(), endpoint);
        }
        let immediate = Endpoint { signals: SignalArea::Immediate, ..sample(2, 2) };
        assert_eq!(Endpoint::parse(&immediate.to_bytes()).unwrap(), immediate);
    }

    #[test]
    fn every_truncation_and_every_extension_is_refused() {
        let bytes = sample(2, 2).to_bytes();
        for end in 0..bytes.len() {
            assert!(Endpoint::parse(&bytes[..end]).is_err(), "{end} bytes");
        }
        assert!(Endpoint::parse(&[bytes.as_slice(), &[0]].concat()).is_err());
    }

    /// The refusal of the sample with bytes at `at` replaced.
    fn refusal(at: usize, bytes: &[u8]) -> String {
        let mut data = sample(2, 1).to_bytes();
        data[at..at + bytes.len()].copy_from_slice(bytes);
        let error = Endpoint::parse(&data).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
        error.to_string()
    }

    #[test]
    fn every_wrong_field_is_named() {
        let max = u32::MAX.to_le_bytes();
        let far = u64::MAX.to_le_bytes();
        for (at, bytes, expected) in [
            (0, max.as_slice(), "magic 0xffffffff"),
            (4, &max, "version 4294967295"),
            (8, &max, "sender 4294967295"),
            (12, &max, "receiver 4294967295"),
            (16, &[1, 0, 0, 0], "below 1 ranks"),
            (20, &[0], "link layer 0"),
            (20, &[1], "local id 0 on InfiniBand"),
            (21, &[0], "mtu code 0"),
            (21, &[6], "mtu code 6"),
            (22, &[0], "0 reads"),
            (23, &[2], "kind 2"),
            (23, &[0], "a signal area with immediate signals"),
            (24, &[1, 0], "local id 1 on RoCE"),
            (26, &[0], "0 queues"),
            (26, &[65], "65 queues"),
            (27, &[65], "65 windows"),
            (28, &[0; 16], "empty GID"),
            (44, &max, "4294967295 signals"),
            (48, &[1], "a signal area at 0x1001"),
            (48, &[0; 8], "a signal area at 0x0"),
            (48, &far, "a signal area at"),
            (60, &[0; 4], "queue 0"),
            (60, &max, "queue 0"),
            (64, &max, "queue 0"),
            (68, &[0; 4], "queue 1"),
            (76, &[0; 8], "window 0"),
            (76, &far, "window 0"),
            (84, &[0; 8], "window 0"),
        ] {
            let text = refusal(at, bytes);
            assert!(text.contains(expected), "byte {at}: {text}; expected {expected}");
        }
    }

    #[test]
    fn keys_are_never_printed() {
        let mut endpoint = sample(1, 1);
        endpoint.windows[0].key = Key(424_242);
        endpoint.signals = SignalArea::Atomic { address: 8, key: Key(424_242) };
        assert!(!format!("{endpoint:?}").contains("424242"));
    }
}
