//! The contents of payloads: plain values, laid out by serde and postcard.
//!
//! A payload comes from a peer: a length is checked before memory is allocated for it, and text is
//! cleaned before it is printed. A change of a type here requires a new
//! [`VERSION`](super::noise::VERSION).

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_bytes::Bytes;

use super::frame::FrameKind;
use super::headway::Begun;
use super::text::{Text, name_ranks};
use crate::config::OnFailure;
use tokenyard_errors::{Error, ErrorKind, Result};

/// The most bytes of a reason that crosses the wire.
pub const MAX_REASON: usize = 512;
/// The most bytes of a warning that crosses the wire.
pub(super) const MAX_WARNING: usize = 2000;
/// The most bytes of a verdict that crosses the wire, and of a refusal, which becomes one.
pub(super) const MAX_VERDICT: usize = 4096;
/// The most bytes of a collective's topic.
pub const MAX_TOPIC: usize = 128;
/// The most bytes of a host's name.
pub(super) const MAX_HOST: usize = 255;
/// The most quiet ranks that one heartbeat names.
pub(super) const MAX_QUIET: usize = 512;
/// The most ranks that a report of missing ranks names.
const MAX_MISSING: usize = 256;
/// The most communicators that one heartbeat names. Waits of further communicators are bounded by
/// `late_ms` alone.
pub(super) const MAX_COMMUNICATORS: usize = 64;
/// The most names with values that one rank may agree on.
pub(super) const MAX_AGREED: usize = 1 << 16;

/// The bytes of `value`.
pub(super) fn encode<T: Serialize + ?Sized>(value: &T) -> Vec<u8> {
    // A write to memory cannot fail, and no type here fails to serialize. A receiver would refuse the
    // empty payload.
    postcard::to_stdvec(value).unwrap_or_default()
}

/// The value that `payload` holds; further bytes are an error.
pub(super) fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T> {
    let (value, rest) = postcard::take_from_bytes(payload).map_err(unreadable)?;
    match rest.len() {
        0 => Ok(value),
        more => Err(malformed(format!("found {more} bytes behind the payload, expected none"))),
    }
}

/// The bytes of a list of byte strings.
pub(super) fn encode_items<I: AsRef<[u8]>>(items: &[I]) -> Vec<u8> {
    encode(&items.iter().map(|item| Bytes::new(item.as_ref())).collect::<Vec<_>>())
}

/// The most bytes that [`encode_items`] makes of items of these lengths.
pub(super) fn items_bytes(lengths: impl Iterator<Item = usize>) -> usize {
    const LENGTH: usize = 5;
    lengths.fold(LENGTH, |sum, bytes| sum.saturating_add(LENGTH + bytes))
}

/// A list of exactly `count` byte strings.
pub(super) fn decode_items(payload: &[u8], count: usize) -> Result<Vec<&[u8]>> {
    // The count first: an empty item takes one byte here and many in memory.
    let (found, _): (usize, _) = postcard::take_from_bytes(payload).map_err(unreadable)?;
    if found != count {
        return Err(malformed(format!("found {found} items, expected {count}")));
    }
    let (items, rest): (Vec<&[u8]>, _) = postcard::take_from_bytes(payload).map_err(unreadable)?;
    match rest.len() {
        0 => Ok(items),
        more => Err(malformed(format!("found {more} bytes behind the items, expected none"))),
    }
}

/// Names and values that ranks agree on.
pub(super) fn decode_pairs(payload: &[u8]) -> Result<Vec<(String, String)>> {
    let (found, _): (usize, _) = postcard::take_from_bytes(payload).map_err(unreadable)?;
    if found > MAX_AGREED {
        return Err(malformed(format!("found {found} values, expected at most {MAX_AGREED}")));
    }
    decode(payload)
}

/// Reads `payload` as the receiver of a frame of this kind does, and forgets it.
///
/// # Errors
/// [`ErrorKind::Protocol`] when it is no payload of such a frame.
pub fn check(kind: FrameKind, payload: &[u8]) -> Result<()> {
    match kind {
        FrameKind::Confirm | FrameKind::Welcome | FrameKind::Goodbye => decode::<()>(payload),
        FrameKind::Refused => decode::<(Refusal, Reason)>(payload).map(drop),
        FrameKind::Start => decode::<Start>(payload).map(drop),
        FrameKind::Heartbeat => Beat::decode(payload).map(drop),
        FrameKind::Contribution => decode::<Contribution>(payload).map(drop),
        FrameKind::Outcome => decode_outcome(payload, 3).map(drop),
        FrameKind::Verdict => decode::<(u64, CollectiveFailure)>(payload).map(drop),
        FrameKind::Departure => decode::<(u32, End)>(payload).map(drop),
        FrameKind::Failed | FrameKind::GaveUp | FrameKind::Calling => {
            decode_reason(payload).map(drop)
        }
        FrameKind::Returning => decode::<(u32, bool)>(payload).map(drop),
        FrameKind::Missing => decode::<Missing>(payload).map(drop),
        FrameKind::Warning => decode::<Warning>(payload).map(drop),
    }
}

/// The collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Op {
    AllGather,
    Exchange,
    Barrier,
    Agree,
    /// Fixes the ranks of the world from here on, returning ranks included.
    Admit,
    /// Its rank cannot take part in the collective that the others call: it fails on all ranks, and the world goes on.
    Refuse,
}

impl Op {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::Exchange => "exchange",
            Self::Barrier => "barrier",
            Self::Agree => "agree",
            Self::Admit => "admit",
            Self::Refuse => "refuse",
        }
    }
}

/// A joiner's description of itself, in its first message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Proof {
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) deadline_ms: u64,
    pub(super) late_ms: u64,
    pub(super) on_failure: OnFailure,
    pub(super) pid: u32,
    #[serde(with = "Text::<MAX_HOST>")]
    pub(super) host: String,
}

/// The reason why a joiner is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Refusal {
    /// Rank, size or timing is invalid.
    Claim,
    /// Not all ranks joined in time.
    Late,
    /// A rank expects a different world than rank 0. All ranks are refused because of it.
    Differ,
    /// The rank is alive, as far as rank 0 knows, or another process waits to come back as this rank.
    Busy,
}

impl Refusal {
    pub(super) fn encode(self, why: &str) -> Vec<u8> {
        encode(&(self, Reason(why.to_owned())))
    }

    pub(super) fn decode(payload: &[u8]) -> Result<(Self, String)> {
        decode(payload).map(|(refusal, Reason(why))| (refusal, why))
    }
}

/// The contents of a heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Beat {
    /// The operations that its sender has begun; from rank 0, those that all ranks have begun.
    pub(super) begun: Begun,
    /// From rank 0: the ranks that have been silent for a while, with their silence in milliseconds.
    pub(super) quiet: Vec<(u32, u32)>,
}

impl Beat {
    pub(super) fn encode(mut self) -> Vec<u8> {
        self.begun.truncate(MAX_COMMUNICATORS);
        self.quiet.truncate(MAX_QUIET);
        encode(&self)
    }

    pub(super) fn decode(payload: &[u8]) -> Result<Self> {
        let beat: Self = decode(payload)?;
        match beat.begun.len() {
            0..=MAX_COMMUNICATORS => Ok(beat),
            comms => Err(malformed(format!(
                "found {comms} communicators, expected at most {MAX_COMMUNICATORS}"
            ))),
        }
    }
}

/// The first collective of a rank that is let in.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Start {
    /// Number of the next collective.
    pub(super) round: u64,
    /// Absent ranks, in order.
    pub(super) absent: Vec<u32>,
}

/// The ranks that have not joined.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Missing {
    /// The first of them, in order.
    ranks: Vec<u32>,
    /// The number of further ranks.
    more: u32,
}

impl Missing {
    pub(super) fn new(missing: &[u32]) -> Self {
        let (ranks, more) = missing.split_at(missing.len().min(MAX_MISSING));
        Self { ranks: ranks.to_vec(), more: more.len() as u32 }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        encode(self)
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name_ranks(&self.ranks))?;
        if self.more > 0 {
            write!(f, " and {} beyond them", self.more)?;
        }
        Ok(())
    }
}

/// The reason for a rank's admit round: its contribution to the round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// A bring-up begins.
    First,
    /// It starts again.
    Again,
    /// It starts again without the ranks that came back since it began: it failed with them, for this
    /// reason.
    Without(#[serde(with = "Text::<MAX_REASON>")] String),
}

/// The result of an admit round, each list in order. The only item of its outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Admitted {
    /// Ranks that come back with this round.
    pub(super) back: Vec<u32>,
    /// Absent ranks.
    pub(super) absent: Vec<u32>,
    /// Ranks that came back since the bring-up began, with this round or one before it.
    pub(super) on_trial: Vec<u32>,
}

impl Admitted {
    /// Decodes the items of an outcome.
    pub(super) fn decode(items: &[Vec<u8>]) -> Result<Self> {
        decode(items.first().map_or(&[], Vec::as_slice))
    }
}

/// One rank's part of a collective.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Contribution {
    /// Collectives of this world before this one.
    pub(super) round: u64,
    pub(super) op: Op,
    #[serde(with = "Text::<MAX_TOPIC>")]
    pub(super) topic: String,
    #[serde(with = "serde_bytes")]
    pub(super) data: Vec<u8>,
}

impl Contribution {
    /// Bytes around `data` at most.
    pub(super) const OVERHEAD: usize = 10 + 1 + 2 + MAX_TOPIC + 5;
}

/// The result of a collective: the round and one item per rank, or none.
pub(super) fn encode_outcome<I: AsRef<[u8]>>(round: u64, items: &[I]) -> Vec<u8> {
    let mut out = encode(&round);
    out.append(&mut encode_items(items));
    out
}

pub(super) fn decode_outcome(payload: &[u8], items: usize) -> Result<(u64, Vec<Vec<u8>>)> {
    let (round, rest) = postcard::take_from_bytes(payload).map_err(unreadable)?;
    let items = decode_items(rest, items)?;
    Ok((round, items.into_iter().map(<[u8]>::to_vec).collect()))
}

/// The same failure of a collective on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CollectiveFailure {
    pub(super) kind: ErrorKind,
    /// The rank that refused, where one did.
    pub(super) rank: Option<u32>,
    #[serde(with = "Text::<MAX_VERDICT>")]
    pub(super) text: String,
}

/// The end of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum End {
    Left,
    Lost(#[serde(with = "Text::<MAX_REASON>")] String),
}

#[derive(Serialize, Deserialize)]
struct Reason(#[serde(with = "Text::<MAX_REASON>")] String);

/// The reason in a [`FrameKind::Failed`] or a [`FrameKind::GaveUp`] frame.
pub(super) fn encode_reason(why: &str) -> Vec<u8> {
    encode(&Reason(why.to_owned()))
}

pub(super) fn decode_reason(payload: &[u8]) -> Result<String> {
    decode(payload).map(|Reason(why)| why)
}

/// A warning of a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Warning(#[serde(with = "Text::<MAX_WARNING>")] pub(super) String);

fn unreadable(error: postcard::Error) -> Error {
    malformed("found bytes that are no such message".into()).with_source(error)
}

/// The error for a payload that does not fit its kind.
pub(super) fn malformed(message: String) -> Error {
    Error::new(ErrorKind::Protocol, "read payload", message)
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use proptest::prelude::*;

    use super::super::identity::MAX_RANKS;
    use super::*;

    fn survives<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: T) {
        assert_eq!(decode::<T>(&encode(&value)).unwrap(), value);
    }

    fn proof(host: &str) -> Proof {
        let (on_failure, host) = (OnFailure::Mask, host.to_owned());
        Proof { rank: 3, ranks: 4, deadline_ms: 1, late_ms: 2, on_failure, pid: 3, host }
    }

    #[test]
    fn every_payload_survives_the_round_trip() {
        survives(proof("node-1"));
        survives(Start { round: 9, absent: vec![1, 7] });
        survives(Missing::new(&[1, 7]));
        assert_eq!(Missing::new(&[1, 2]).to_string(), "ranks 1-2");
        for ask in [Ask::First, Ask::Again, Ask::Without("too late".into())] {
            survives(ask);
        }
        let admitted = Admitted { back: vec![1], absent: vec![], on_trial: vec![1, 3] };
        assert_eq!(Admitted::decode(&[encode(&admitted)]).unwrap(), admitted);
        for refusal in [Refusal::Claim, Refusal::Late, Refusal::Differ, Refusal::Busy] {
            let decoded = Refusal::decode(&refusal.encode("why")).unwrap();
            assert_eq!(decoded, (refusal, "why".to_owned()));
        }
        for op in [Op::AllGather, Op::Exchange, Op::Barrier, Op::Agree, Op::Admit, Op::Refuse] {
            survives(Contribution { round: 7, op, topic: "shape".into(), data: vec![1, 2] });
        }
        for kind in
            [ErrorKind::Deadline, ErrorKind::InvalidInput, ErrorKind::Mismatch, ErrorKind::PeerLost]
        {
            let text = "ranks differ".to_owned();
            survives((5_u64, CollectiveFailure { kind, rank: Some(3), text }));
        }
        for end in [End::Left, End::Lost("killed".into())] {
            survives((2_u32, end));
        }
        assert_eq!(decode_reason(&encode_reason("out of memory")).unwrap(), "out of memory");
        let beat = Beat { begun: vec![(0, 1 << 40), (2, 7)], quiet: vec![(1, 2), (3, 4)] };
        assert_eq!(Beat::decode(&beat.clone().encode()).unwrap(), beat);
        let items = [&b"a"[..], b"", b"ccc"];
        assert_eq!(decode_items(&encode_items(&items), 3).unwrap(), items);
        let (round, outcome) = decode_outcome(&encode_outcome(9, &items), 3).unwrap();
        assert_eq!((round, outcome), (9, items.map(<[u8]>::to_vec).to_vec()));
    }

    #[test]
    fn counts_and_texts_beyond_their_limit_are_refused_and_so_is_what_is_left_over() {
        let says = |result: Result<()>, what: &str| {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            assert!(error.to_string().contains(what), "{error}");
        };
        let comms = encode(&Beat { begun: vec![(0, 0); 65], quiet: vec![] });
        says(check(FrameKind::Heartbeat, &comms), "found 65 communicators, expected at most 64");
        says(check(FrameKind::Failed, &encode(&"x".repeat(513))), "no such message");
        says(check(FrameKind::Start, &[0, 0, 7]), "found 1 bytes behind the payload");
        says(check(FrameKind::Welcome, &[7]), "found 1 bytes behind the payload");
        says(check(FrameKind::Outcome, &[1, 2, 0, 0]), "found 2 items, expected 3");
        // A count is announced without items: no memory is allocated for it.
        let many = encode(&u32::MAX);
        says(decode_items(&many, 3).map(drop), "found 4294967295 items, expected 3");
        says(decode_pairs(&many).map(drop), "found 4294967295 values");
        says(decode::<Start>(&[&[0], &many[..]].concat()).map(drop), "no such message");
    }

    #[test]
    fn texts_of_a_peer_carry_no_control_characters() {
        assert_eq!(decode_reason(&encode(&"a\u{1b}[31m\n")).unwrap(), "a?[31m?");
    }

    #[test]
    fn the_largest_payload_of_each_kind_fits_its_frame() {
        let long = "x".repeat(10_000);
        let most = (u64::MAX, u32::MAX);
        let beat = Beat { begun: vec![(most.0, most.0); 99], quiet: vec![(most.1, most.1); 999] };
        let all = vec![u32::MAX; MAX_RANKS as usize];
        let (kind, rank) = (ErrorKind::Mismatch, Some(most.1));
        let verdict = CollectiveFailure { kind, rank, text: long.clone() };
        for (kind, payload) in [
            (FrameKind::Refused, Refusal::Late.encode(&long)),
            (FrameKind::Heartbeat, beat.encode()),
            (FrameKind::Verdict, encode(&(most.0, verdict))),
            (FrameKind::Departure, encode(&(most.1, End::Lost(long.clone())))),
            (FrameKind::Failed, encode_reason(&long)),
            (FrameKind::Start, encode(&Start { round: most.0, absent: all.clone() })),
            (FrameKind::Missing, Missing::new(&all).encode()),
            (FrameKind::Returning, encode(&(most.1, true))),
            (FrameKind::Warning, encode(&Warning(long.clone()))),
        ] {
            assert!(payload.len() <= kind.payload_limit(), "{kind:?}: {}", payload.len());
        }
        let hello = encode(&Proof { deadline_ms: most.0, late_ms: most.0, ..proof(&long) });
        assert!(hello.len() <= super::super::noise::MAX_GREETING - 48, "{}", hello.len());
        let data = vec![7; 1000];
        let part = Contribution { round: most.0, op: Op::Agree, topic: long, data };
        assert!(encode(&part).len() <= 1000 + Contribution::OVERHEAD);
    }

    proptest! {
        #[test]
        fn decoding_any_bytes_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for kind in FrameKind::ALL {
                let _ = check(kind, &bytes);
            }
            let _ = decode::<Proof>(&bytes);
            let _ = decode::<Ask>(&bytes);
            let _ = Admitted::decode(std::slice::from_ref(&bytes));
            let _ = decode_pairs(&bytes);
        }
    }
}
