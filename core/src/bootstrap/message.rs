//! What the payloads say, and how they are laid out. Little-endian, fixed order, no padding.
//!
//! A payload comes from a peer: every length is checked against the bytes that are there, and text
//! is cleaned before anybody prints it.

mod joining;

use super::fields::{Fields, malformed, put_text};
use super::headway::Begun;
use crate::{ErrorKind, Result};
pub(super) use joining::{Hello, Proof, Refusal};

/// The most bytes of a reason that crosses the wire.
pub const MAX_REASON: usize = 512;
/// The most bytes of a verdict that crosses the wire.
pub(super) const MAX_VERDICT: usize = 4096;
/// The most bytes of a collective's topic.
pub const MAX_TOPIC: usize = 128;
/// The most quiet ranks that one heartbeat names.
pub(super) const MAX_QUIET: usize = 512;
/// The most yards that one heartbeat names. Waits of others are bounded by `late_ms` alone.
pub(super) const MAX_YARDS: usize = 64;

/// The collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Op {
    AllGather = 1,
    Exchange = 2,
    Barrier = 3,
    Agree = 4,
    /// Says who is in the world from here on, those included that come back.
    Admit = 5,
}

impl Op {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::Exchange => "exchange",
            Self::Barrier => "barrier",
            Self::Agree => "agree",
            Self::Admit => "admit",
        }
    }

    fn from_code(code: u8) -> Result<Self> {
        [Self::AllGather, Self::Exchange, Self::Barrier, Self::Agree, Self::Admit]
            .into_iter()
            .find(|op| *op as u8 == code)
            .ok_or_else(|| malformed(format!("found collective {code}, expected 1 to 5")))
    }
}

/// What a heartbeat says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Beat {
    /// What its sender has begun; from rank 0, what all ranks have.
    pub(super) begun: Begun,
    /// From rank 0: the ranks that it has not heard for a while, with their silence in milliseconds.
    pub(super) quiet: Vec<(u32, u32)>,
}

impl Beat {
    pub(super) fn encode(&self) -> Vec<u8> {
        let begun = &self.begun[..self.begun.len().min(MAX_YARDS)];
        let mut out = (begun.len() as u32).to_le_bytes().to_vec();
        for (yard, operations) in begun {
            out.extend(yard.to_le_bytes());
            out.extend(operations.to_le_bytes());
        }
        for (rank, ms) in self.quiet.iter().take(MAX_QUIET) {
            out.extend(rank.to_le_bytes());
            out.extend(ms.to_le_bytes());
        }
        out
    }

    pub(super) fn decode(payload: &[u8]) -> Result<Self> {
        let mut fields = Fields(payload);
        let yards = fields.u32()? as usize;
        if yards > MAX_YARDS {
            return Err(malformed(format!("found {yards} yards, expected at most {MAX_YARDS}")));
        }
        let mut beat = Self::default();
        for _ in 0..yards {
            beat.begun.push((fields.u64()?, fields.u64()?));
        }
        while !fields.0.is_empty() {
            beat.quiet.push((fields.u32()?, fields.u32()?));
        }
        Ok(beat)
    }
}

/// Where the collectives of a rank that comes in begin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Start {
    /// Number of the next collective.
    pub(super) round: u64,
    /// Ranks that are not there, in order.
    pub(super) absent: Vec<u32>,
}

impl Start {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = self.round.to_le_bytes().to_vec();
        out.extend(encode_ranks(&self.absent));
        out
    }

    pub(super) fn decode(payload: &[u8]) -> Result<Self> {
        let mut fields = Fields(payload);
        let round = fields.u64()?;
        Ok(Self { round, absent: decode_ranks(fields.0)? })
    }
}

/// Why a rank asks who is there: its part of an admit round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// A bring-up begins.
    First,
    /// It begins anew.
    Again,
    /// It begins anew without those who came back since it began: it failed with them, and why.
    Without(String),
}

impl Ask {
    pub(super) fn encode(&self) -> Vec<u8> {
        match self {
            Self::First => vec![0],
            Self::Again => vec![1],
            Self::Without(why) => {
                let mut out = vec![2];
                put_text(&mut out, why, MAX_REASON);
                out
            }
        }
    }

    pub(super) fn decode(payload: &[u8]) -> Result<Self> {
        let mut fields = Fields(payload);
        let ask = match fields.array::<1>()?[0] {
            0 => Self::First,
            1 => Self::Again,
            2 => Self::Without(fields.text(MAX_REASON)?),
            code => return Err(malformed(format!("found ask {code}, expected 0 to 2"))),
        };
        fields.end().map(|()| ask)
    }
}

/// What an admit round says, each list in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Admitted {
    /// Ranks that come back with this round.
    pub(super) back: Vec<u32>,
    /// Ranks that are not there.
    pub(super) absent: Vec<u32>,
    /// Ranks that came back since the bring-up began, with this round or one before it.
    pub(super) on_trial: Vec<u32>,
}

impl Admitted {
    /// Items of the outcome.
    pub(super) const ITEMS: usize = 3;

    pub(super) fn encode(&self) -> [Vec<u8>; Self::ITEMS] {
        [&self.back, &self.absent, &self.on_trial].map(|ranks| encode_ranks(ranks))
    }

    pub(super) fn decode(items: &[Vec<u8>]) -> Result<Self> {
        let ranks = |at: usize| decode_ranks(items.get(at).map_or(&[], Vec::as_slice));
        Ok(Self { back: ranks(0)?, absent: ranks(1)?, on_trial: ranks(2)? })
    }
}

/// A list of ranks.
fn encode_ranks(ranks: &[u32]) -> Vec<u8> {
    ranks.iter().flat_map(|rank| rank.to_le_bytes()).collect()
}

fn decode_ranks(payload: &[u8]) -> Result<Vec<u32>> {
    let mut fields = Fields(payload);
    let mut ranks = Vec::new();
    while !fields.0.is_empty() {
        ranks.push(fields.u32()?);
    }
    Ok(ranks)
}

/// Whether a process waits to come back as `rank`.
pub(super) fn encode_returning(rank: u32, waits: bool) -> Vec<u8> {
    [rank, u32::from(waits)].iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(super) fn decode_returning(payload: &[u8]) -> Result<(u32, bool)> {
    let mut fields = Fields(payload);
    let (rank, waits) = (fields.u32()?, fields.u32()?);
    fields.end().map(|()| (rank, waits != 0))
}

/// One rank's part of a collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Contribution {
    /// Collectives of this world before this one.
    pub(super) round: u64,
    pub(super) op: Op,
    pub(super) topic: String,
    pub(super) data: Vec<u8>,
}

impl Contribution {
    /// Bytes around `data` at most.
    pub(super) const OVERHEAD: usize = 8 + 1 + 2 + MAX_TOPIC;

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::OVERHEAD + self.data.len());
        out.extend(self.round.to_le_bytes());
        out.push(self.op as u8);
        put_text(&mut out, &self.topic, MAX_TOPIC);
        out.extend(&self.data);
        out
    }

    pub(super) fn decode(mut payload: Vec<u8>) -> Result<Self> {
        let mut fields = Fields(&payload);
        let round = fields.u64()?;
        let op = Op::from_code(fields.array::<1>()?[0])?;
        let topic = fields.text(MAX_TOPIC)?;
        let data_at = payload.len() - fields.0.len();
        payload.drain(..data_at);
        Ok(Self { round, op, topic, data: payload })
    }
}

/// The result of a collective: the round and one item per rank, or none.
pub(super) fn decode_outcome(payload: &[u8], items: usize) -> Result<(u64, Vec<Vec<u8>>)> {
    let mut fields = Fields(payload);
    let round = fields.u64()?;
    let list = (0..items).map(|_| fields.item().map(<[u8]>::to_vec)).collect::<Result<_>>()?;
    fields.end().map(|()| (round, list))
}

/// The same failure of a collective on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) kind: ErrorKind,
    pub(super) text: String,
}

impl Verdict {
    pub(super) fn encode(&self, round: u64) -> Vec<u8> {
        let mut out = round.to_le_bytes().to_vec();
        out.push(match self.kind {
            ErrorKind::Deadline => 1,
            ErrorKind::InvalidInput => 2,
            ErrorKind::PeerLost => 4,
            _ => 3,
        });
        put_text(&mut out, &self.text, MAX_VERDICT);
        out
    }

    pub(super) fn decode(payload: &[u8]) -> Result<(u64, Self)> {
        let mut fields = Fields(payload);
        let round = fields.u64()?;
        let kind = match fields.array::<1>()?[0] {
            1 => ErrorKind::Deadline,
            2 => ErrorKind::InvalidInput,
            3 => ErrorKind::Mismatch,
            4 => ErrorKind::PeerLost,
            code => return Err(malformed(format!("found verdict {code}, expected 1 to 4"))),
        };
        let text = fields.text(MAX_VERDICT)?;
        fields.end().map(|()| (round, Self { kind, text }))
    }
}

/// How a rank ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    Left,
    Lost(String),
}

impl End {
    pub(super) fn encode(&self, rank: u32) -> Vec<u8> {
        let mut out = rank.to_le_bytes().to_vec();
        match self {
            Self::Left => out.push(0),
            Self::Lost(why) => {
                out.push(1);
                put_text(&mut out, why, MAX_REASON);
            }
        }
        out
    }

    pub(super) fn decode(payload: &[u8]) -> Result<(u32, Self)> {
        let mut fields = Fields(payload);
        let rank = fields.u32()?;
        let end = match fields.array::<1>()?[0] {
            0 => Self::Left,
            1 => Self::Lost(fields.text(MAX_REASON)?),
            code => return Err(malformed(format!("found departure {code}, expected 0 or 1"))),
        };
        fields.end().map(|()| (rank, end))
    }
}

/// The reason in a [`super::frame::Kind::Failed`] frame.
pub(super) fn encode_reason(why: &str) -> Vec<u8> {
    let mut out = Vec::new();
    put_text(&mut out, why, MAX_REASON);
    out
}

pub(super) fn decode_reason(payload: &[u8]) -> Result<String> {
    let mut fields = Fields(payload);
    let why = fields.text(MAX_REASON)?;
    fields.end().map(|()| why)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::fields::List;
    use super::super::identity::MAX_RANKS;
    use super::*;
    use crate::config::OnFailure;

    #[test]
    fn every_payload_survives_the_round_trip() {
        let hello = Hello { job: [1; 16], nonce: [2; 32], rank: 3, ranks: 4 };
        assert_eq!(Hello::decode(&hello.encode()).unwrap(), hello);
        for on_failure in [OnFailure::Stop, OnFailure::Mask] {
            let host = "node-1".to_owned();
            let proof = Proof { deadline_ms: 1, late_ms: 2, on_failure, pid: 3, host };
            assert_eq!(Proof::decode(&proof.encode()).unwrap(), proof);
        }
        let start = Start { round: 9, absent: vec![1, 7] };
        assert_eq!(Start::decode(&start.encode()).unwrap(), start);
        for ask in [Ask::First, Ask::Again, Ask::Without("too late".into())] {
            assert_eq!(Ask::decode(&ask.encode()).unwrap(), ask);
        }
        let admitted = Admitted { back: vec![1], absent: vec![], on_trial: vec![1, 3] };
        assert_eq!(Admitted::decode(&admitted.encode()).unwrap(), admitted);
        for waits in [false, true] {
            assert_eq!(decode_returning(&encode_returning(3, waits)).unwrap(), (3, waits));
        }
        for refusal in [
            Refusal::Job,
            Refusal::Secret,
            Refusal::Claim,
            Refusal::Late,
            Refusal::Differ,
            Refusal::Busy,
        ] {
            let decoded = Refusal::decode(&refusal.encode("why")).unwrap();
            assert_eq!(decoded, (refusal, "why".to_owned()));
        }
        for op in [Op::AllGather, Op::Exchange, Op::Barrier, Op::Agree, Op::Admit] {
            let part = Contribution { round: 7, op, topic: "shape".into(), data: vec![1, 2] };
            assert_eq!(Contribution::decode(part.encode()).unwrap(), part);
        }
        for kind in
            [ErrorKind::Deadline, ErrorKind::InvalidInput, ErrorKind::Mismatch, ErrorKind::PeerLost]
        {
            let verdict = Verdict { kind, text: "ranks differ".into() };
            assert_eq!(Verdict::decode(&verdict.encode(5)).unwrap(), (5, verdict));
        }
        for end in [End::Left, End::Lost("killed".into())] {
            assert_eq!(End::decode(&end.encode(2)).unwrap(), (2, end));
        }
        assert_eq!(decode_reason(&encode_reason("out of memory")).unwrap(), "out of memory");
        let beat = Beat { begun: vec![(0, 1 << 40), (2, 7)], quiet: vec![(1, 2), (3, 4)] };
        assert_eq!(Beat::decode(&beat.encode()).unwrap(), beat);
        assert_eq!(Beat::decode(&Beat::default().encode()).unwrap(), Beat::default());
        let many = Beat::decode(&65_u32.to_le_bytes()).unwrap_err().to_string();
        assert!(many.contains("found 65 yards, expected at most 64"), "{many}");
    }

    #[test]
    fn the_largest_payload_of_each_kind_fits_its_frame() {
        use super::super::frame::Kind;
        let long = "x".repeat(10_000);
        let beat = Beat { begun: vec![(0, 0); 10_000], quiet: vec![(0, 0); 10_000] };
        let on_failure = OnFailure::Mask;
        let host = Proof { deadline_ms: 0, late_ms: 0, on_failure, pid: 0, host: long.clone() };
        let start = Start { round: 0, absent: vec![0; MAX_RANKS as usize] };
        let verdict = Verdict { kind: ErrorKind::Mismatch, text: long.clone() };
        for (kind, payload) in [
            (Kind::Proof, host.encode()),
            (Kind::Refused, Refusal::Late.encode(&long)),
            (Kind::Heartbeat, beat.encode()),
            (Kind::Verdict, verdict.encode(1)),
            (Kind::Departure, End::Lost(long.clone()).encode(1)),
            (Kind::Failed, encode_reason(&long)),
            (Kind::Start, start.encode()),
            (Kind::Returning, encode_returning(1, true)),
        ] {
            assert!(payload.len() <= kind.payload_limit(), "{kind:?}: {}", payload.len());
        }
    }

    proptest! {
        #[test]
        fn decoding_any_bytes_never_panics(
            bytes in prop::collection::vec(any::<u8>(), 0..200), count in 0usize..10,
        ) {
            let _ = Hello::decode(&bytes);
            let _ = Proof::decode(&bytes);
            let _ = Refusal::decode(&bytes);
            let _ = Contribution::decode(bytes.clone());
            let _ = Verdict::decode(&bytes);
            let _ = End::decode(&bytes);
            let _ = decode_reason(&bytes);
            let _ = Beat::decode(&bytes);
            let _ = Start::decode(&bytes);
            let _ = decode_returning(&bytes);
            let _ = decode_outcome(&bytes, count);
            let _ = Ask::decode(&bytes);
            let _ = List::parse(bytes, count);
        }
    }
}
