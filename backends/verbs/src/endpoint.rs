//! The endpoint, by which a peer reaches this rank. It crosses the bootstrap, so it comes from
//! another process: every field is checked.

use std::fmt;

use serde::{Deserialize, Serialize};
use tokenyard_core::wire::Wire;
use tokenyard_core::{Error, ErrorKind, Result, abi};

const WIRE: Wire = Wire { operation: "read endpoint", magic: *b"TYVB", version: 2 };
/// Most queues of a rank.
pub const MAX_QUEUES: u32 = 64;
/// Most windows of a rank.
pub const MAX_WINDOWS: u32 = 64;
/// Most signals of a rank.
pub const MAX_SIGNALS: u32 = 65_536;
/// Queue pair numbers and packet sequence numbers have 24 bits.
const BITS_24: u32 = 0x00ff_ffff;

/// The key of a memory region. A holder of the key may use the region, so the key is never printed.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key(pub u32);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// One queue's queue pair for the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteQp {
    /// Its number, 1 to 2^24 - 1.
    pub number: u32,
    /// The first packet sequence number that it sends, 24 bits.
    pub psn: u32,
}

/// The way in which signals reach the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteWindow {
    /// The address of the first byte, for the rank's device.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// Its region's key.
    pub key: Key,
}

impl RemoteWindow {
    /// The address of `bytes` at an offset, which core has checked.
    #[inline]
    pub fn at(&self, offset: u64, bytes: u64) -> u64 {
        debug_assert!(is_inside(offset, bytes, self.bytes));
        self.address + offset
    }
}

/// Whether a window of `room` bytes has `bytes` at `offset`.
pub(crate) fn is_inside(offset: u64, bytes: u64, room: u64) -> bool {
    offset.checked_add(bytes).is_some_and(|end| end <= room)
}

/// The data that a peer needs to reach a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Index of the rank in the team.
    pub sender: u32,
    /// Index of the peer for which the endpoint is made.
    pub receiver: u32,
    /// Ranks of the team.
    pub ranks: u32,
    /// 1 for InfiniBand, 2 for RoCE.
    pub link_layer: u8,
    /// Packet size that the rank requests, a code of 1 to 5.
    pub mtu: u8,
    /// Reads and atomics that the rank serves at once for one queue pair, 1 to 255.
    pub reads: u8,
    /// Local id of its port; 0 on RoCE.
    pub lid: u16,
    /// GID of its port, in network order.
    pub gid: [u8; 16],
    /// Signals of the rank, at most 65,536.
    pub signal_count: u32,
    /// The way in which they are raised.
    pub signals: SignalArea,
    /// One per queue, 1 to 64.
    pub queue_pairs: Vec<RemoteQp>,
    /// The windows in order of registration, at most 64.
    pub windows: Vec<RemoteWindow>,
}

impl Endpoint {
    /// The bytes; at most 4096.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.to_bytes_of(&WIRE)
    }

    /// The bytes for another transport over libibverbs.
    pub fn to_bytes_of(&self, wire: &Wire) -> Vec<u8> {
        let out = wire.write(self);
        debug_assert!(out.len() <= abi::TY_ENDPOINT_BYTES);
        out
    }

    /// Parses the bytes of a peer. This function checks the endpoint by itself; `connect` checks
    /// whether it fits this rank.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`], naming the field.
    pub fn parse(data: &[u8]) -> Result<Self> {
        Self::parse_of(&WIRE, data)
    }

    /// Parses the bytes of another transport over libibverbs.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn parse_of(wire: &Wire, data: &[u8]) -> Result<Self> {
        let it: Self = wire.read(data)?;
        let Self { sender, receiver, ranks, signal_count, .. } = it;
        wire.check(sender < ranks && receiver < ranks, || {
            format!("found sender {sender} and receiver {receiver}; expected below {ranks} ranks")
        })?;
        it.check_port(wire)?;
        wire.check(signal_count <= MAX_SIGNALS, || {
            format!("found {signal_count} signals; expected at most {MAX_SIGNALS}")
        })?;
        it.check_signals(wire)?;
        it.check_queue_pairs(wire)?;
        it.check_windows(wire)?;
        Ok(it)
    }

    fn check_port(&self, wire: &Wire) -> Result<()> {
        let Self { link_layer, mtu, reads, lid, gid, .. } = *self;
        wire.check(matches!(link_layer, 1 | 2), || {
            format!("found link layer {link_layer}; expected 1 (InfiniBand) or 2 (RoCE)")
        })?;
        wire.check((1..=5).contains(&mtu), || format!("found mtu code {mtu}; expected 1 to 5"))?;
        wire.check(reads > 0, || "found 0 reads at once; expected at least 1".into())?;
        wire.check(link_layer == 1 || lid == 0, || {
            format!("found local id {lid} on RoCE; expected 0")
        })?;
        wire.check(link_layer == 2 || lid != 0, || "found local id 0 on InfiniBand".into())?;
        wire.check(gid != [0; 16], || "found an empty GID".into())
    }

    fn check_signals(&self, wire: &Wire) -> Result<()> {
        let SignalArea::Atomic { address, .. } = self.signals else { return Ok(()) };
        let end = address.checked_add(u64::from(self.signal_count) * 8);
        wire.check(address != 0 && address % 8 == 0 && end.is_some(), || {
            format!("found a signal area at {address:#x}; expected a multiple of 8")
        })
    }

    fn check_queue_pairs(&self, wire: &Wire) -> Result<()> {
        let queues = self.queue_pairs.len();
        wire.check((1..=MAX_QUEUES as usize).contains(&queues), || {
            format!("found {queues} queues; expected 1 to {MAX_QUEUES}")
        })?;
        self.queue_pairs.iter().enumerate().try_for_each(|(queue, qp)| {
            wire.check((1..=BITS_24).contains(&qp.number) && qp.psn <= BITS_24, || {
                format!("queue {queue}: found {qp:?}; expected 24 bits each, no number 0")
            })
        })
    }

    fn check_windows(&self, wire: &Wire) -> Result<()> {
        let windows = self.windows.len();
        wire.check(windows <= MAX_WINDOWS as usize, || {
            format!("found {windows} windows; expected at most {MAX_WINDOWS}")
        })?;
        self.windows.iter().enumerate().try_for_each(|(id, window)| {
            let end = window.address.checked_add(window.bytes);
            wire.check(window.address != 0 && window.bytes != 0 && end.is_some(), || {
                format!("window {id}: found {} bytes that cannot be memory", window.bytes)
            })
        })
    }
}

/// The values of this rank with which an endpoint must agree.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'a> {
    /// This rank's index in the team.
    pub me: u32,
    /// The peer's.
    pub peer: u32,
    /// Ranks of the team.
    pub ranks: u32,
    /// Queue pairs for the peer.
    pub queues: usize,
    /// Signals.
    pub signals: u32,
    /// 1 for InfiniBand, 2 for RoCE.
    pub link_layer: u8,
    /// Sizes of this rank's windows.
    pub windows: &'a [u64],
}

impl Expected<'_> {
    /// Checks an endpoint against this rank.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`], naming the field.
    pub fn check(&self, endpoint: &Endpoint) -> Result<()> {
        let sizes: Vec<_> = endpoint.windows.iter().map(|window| window.bytes).collect();
        let numbers = [
            ("sender", u64::from(endpoint.sender), u64::from(self.peer)),
            ("receiver", u64::from(endpoint.receiver), u64::from(self.me)),
            ("ranks", u64::from(endpoint.ranks), u64::from(self.ranks)),
            ("queues", endpoint.queue_pairs.len() as u64, self.queues as u64),
            ("signals", u64::from(endpoint.signal_count), u64::from(self.signals)),
            ("link layer", u64::from(endpoint.link_layer), u64::from(self.link_layer)),
        ];
        for (name, found, expected) in numbers {
            if found != expected {
                return Err(refused(format!("{name}: found {found}; expected {expected}")));
            }
        }
        if sizes != self.windows {
            let expected = self.windows;
            return Err(refused(format!("windows: found {sizes:?} bytes; expected {expected:?}")));
        }
        Ok(())
    }
}

fn refused(message: String) -> Error {
    Error::new(ErrorKind::Protocol, "connect", message)
        .with_fix("exchange the endpoints of this run only, and use one link layer for all ranks")
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
    fn every_wrong_field_is_named() {
        type Change = fn(&mut Endpoint);
        let area = |address| SignalArea::Atomic { address, key: Key(9) };
        let changes: [(&str, Change); 18] = [
            ("sender 7", |it| it.sender = 7),
            ("receiver 7", |it| it.receiver = 7),
            ("below 1 ranks", |it| it.ranks = 1),
            ("link layer 0", |it| it.link_layer = 0),
            ("local id 0 on InfiniBand", |it| it.link_layer = 1),
            ("local id 1 on RoCE", |it| it.lid = 1),
            ("mtu code 0", |it| it.mtu = 0),
            ("mtu code 6", |it| it.mtu = 6),
            ("0 reads", |it| it.reads = 0),
            ("empty GID", |it| it.gid = [0; 16]),
            ("65537 signals", |it| it.signal_count = 65_537),
            ("0 queues", |it| it.queue_pairs.clear()),
            ("65 queues", |it| it.queue_pairs = vec![it.queue_pairs[0]; 65]),
            ("65 windows", |it| it.windows = vec![it.windows[0]; 65]),
            ("queue 1", |it| it.queue_pairs[1].number = 0),
            ("queue 0", |it| it.queue_pairs[0].psn = 1 << 24),
            ("window 0", |it| it.windows[0].address = u64::MAX),
            ("window 0", |it| it.windows[0].bytes = 0),
        ];
        let refusal = |it: &Endpoint| {
            let error = Endpoint::parse(&it.to_bytes()).unwrap_err();
            assert_eq!(error.kind(), tokenyard_core::ErrorKind::Protocol);
            error.to_string()
        };
        for (expected, change) in changes {
            let mut it = sample(2, 1);
            change(&mut it);
            let text = refusal(&it);
            assert!(text.contains(expected), "{text}; expected {expected}");
        }
        for address in [0, 4097, u64::MAX - 7] {
            let text = refusal(&Endpoint { signals: area(address), ..sample(2, 1) });
            assert!(text.contains(&format!("a signal area at {address:#x}")), "{text}");
        }
    }

    #[test]
    fn keys_are_never_printed() {
        let mut endpoint = sample(1, 1);
        endpoint.windows[0].key = Key(424_242);
        endpoint.signals = SignalArea::Atomic { address: 8, key: Key(424_242) };
        assert!(!format!("{endpoint:?}").contains("424242"));
    }

    fn fitting() -> Endpoint {
        Endpoint {
            signal_count: 4,
            signals: SignalArea::Immediate,
            queue_pairs: vec![RemoteQp { number: 17, psn: 1 }],
            windows: vec![RemoteWindow { address: 4096, bytes: 8192, key: Key(1) }],
            ..sample(1, 1)
        }
    }

    const EXPECTED: Expected<'static> = Expected {
        me: 0,
        peer: 1,
        ranks: 2,
        queues: 1,
        signals: 4,
        link_layer: 2,
        windows: &[8192],
    };

    #[test]
    fn an_endpoint_that_fits_is_taken() {
        EXPECTED.check(&fitting()).unwrap();
    }

    #[test]
    fn an_endpoint_of_other_ranks_sizes_or_fabrics_is_refused_by_name() {
        let good = fitting();
        let two = vec![RemoteQp { number: 17, psn: 1 }; 2];
        for (endpoint, expected) in [
            (Endpoint { sender: 0, ..good.clone() }, "sender: found 0; expected 1"),
            (Endpoint { receiver: 1, ..good.clone() }, "receiver: found 1; expected 0"),
            (Endpoint { ranks: 3, ..good.clone() }, "ranks: found 3; expected 2"),
            (Endpoint { queue_pairs: two, ..good.clone() }, "queues: found 2; expected 1"),
            (Endpoint { signal_count: 5, ..good.clone() }, "signals: found 5; expected 4"),
            (Endpoint { link_layer: 1, ..good.clone() }, "link layer: found 1; expected 2"),
            (Endpoint { windows: vec![], ..good }, "windows: found [] bytes; expected [8192]"),
        ] {
            let error = EXPECTED.check(&endpoint).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
