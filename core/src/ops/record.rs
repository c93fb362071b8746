//! Records of gathers and pipes, as kernel sets write them beside bytes.
//!
//! Each rank reads the records of the shards of all ranks, so that all end a gather alike without another round.

use crate::moe::{RECORD_HEADER, RECORD_TEXT};
use crate::{Error, ErrorKind, Result, abi};

/// Bytes of a record: its header, and the text of a refusal.
pub const RECORD: u64 = (RECORD_HEADER + RECORD_TEXT).next_multiple_of(64);

/// The header of a record.
pub type RecordWords = [u64; 8];

/// Verdicts in word 1 of a record.
const GOES: u64 = 0;
const REFUSED: u64 = 1;

/// The shards of a rank, as their record says.
#[derive(Clone, Debug)]
pub struct Shards {
    /// World rank.
    pub rank: u32,
    /// Number of the gather.
    pub number: u64,
    /// Bytes of all shards together.
    pub bytes: u64,
    /// See [`lengths`].
    pub lengths: u64,
    /// Why their rank refuses, at most [`RECORD_TEXT`] bytes; no bytes where it does not.
    pub refusal: Vec<u8>,
}

/// The record that a rank must find.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedRecord {
    /// World rank of its writer.
    pub rank: u32,
    /// Number of the gather, or of the message.
    pub number: u64,
    /// Most bytes beside it.
    pub room: u64,
}

impl Shards {
    /// The shards of this rank in a call.
    ///
    /// # Safety
    /// The parts and the text of the call are valid.
    pub unsafe fn of(rank: u32, gather: &abi::TyGather) -> Self {
        // SAFETY: by this function's contract.
        let (text, parts) = unsafe { (text_of(&gather.refusal), parts_of(gather)) };
        let refusal = text[..text.len().min(RECORD_TEXT as usize)].to_vec();
        let goes = refusal.is_empty();
        let bytes = parts.iter().filter(|_| goes).map(|part| part.bytes).sum();
        let lengths = lengths(parts.iter().map(|part| part.bytes));
        Self { rank, number: gather.operation, bytes, lengths, refusal }
    }

    /// The refusal of the kernel set, in place of the shards.
    #[must_use]
    pub fn refused(self, why: &str) -> Self {
        let text = &why.as_bytes()[..why.len().min(RECORD_TEXT as usize)];
        Self { bytes: 0, refusal: text.to_vec(), ..self }
    }

    /// The header of their record, for a peer that they reach in so many pieces.
    pub fn words(&self, pieces: u64) -> RecordWords {
        let Self { rank, number, bytes, lengths, refusal } = self;
        let verdict = if refusal.is_empty() { GOES } else { REFUSED };
        let text = refusal.len() as u64;
        [*number, verdict, *bytes, *lengths, pieces, (*rank).into(), text, 0]
    }

    /// Reads a record: its header, and the room of its text. Returns the pieces in which the shards come, too.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] for a record that is not of this gather, or cannot be.
    pub fn read(words: RecordWords, text: &[u8], expected: ExpectedRecord) -> Result<(Self, u64)> {
        let ExpectedRecord { rank, number, room } = expected;
        let [found, verdict, _, lengths, _, _, text_bytes, _] = words;
        if found != number {
            return Err(bad_record(rank, format!("number {found}; expected {number}")));
        }
        let (bytes, pieces) = bytes_of(words, rank, room)?;
        let refusal = match verdict {
            GOES => Vec::new(),
            REFUSED if bytes == 0 => text_in(text, text_bytes).to_vec(),
            _ => return Err(bad_record(rank, format!("verdict {verdict} and {bytes} bytes"))),
        };
        Ok((Self { rank, number, bytes, lengths, refusal }, pieces))
    }
}

/// The text of a record: so many bytes, within its room.
pub(super) fn text_in(room: &[u8], bytes: u64) -> &[u8] {
    let most = room.len().min(RECORD_TEXT as usize) as u64;
    &room[..bytes.min(most) as usize]
}

/// The bytes beside a record, and the pieces that they come in, if there is room for them.
///
/// # Errors
/// [`ErrorKind::Protocol`] where there is not.
pub(super) fn bytes_of(words: RecordWords, rank: u32, room: u64) -> Result<(u64, u64)> {
    let [_, _, bytes, _, pieces, ..] = words;
    if bytes <= room && pieces <= bytes {
        return Ok((bytes, pieces));
    }
    Err(bad_record(rank, format!("{bytes} bytes in {pieces} pieces; expected at most {room}")))
}

/// The tensors of a gather: shards, or outputs.
///
/// # Safety
/// The parts are valid for the life of the call.
pub unsafe fn parts_of(gather: &abi::TyGather) -> &[abi::TyPart] {
    match gather.count {
        0 => &[],
        // SAFETY: by this function's contract.
        count => unsafe { std::slice::from_raw_parts(gather.parts, count) },
    }
}

/// The text of a call.
///
/// # Safety
/// The text is valid for the life of the call.
pub unsafe fn text_of(text: &abi::TyStr) -> &[u8] {
    match text.data.is_null() {
        true => &[],
        // SAFETY: by this function's contract.
        false => unsafe { std::slice::from_raw_parts(text.data.cast(), text.bytes) },
    }
}

/// The end of a gather, from the shards of all ranks, in order of ranks: the same on all of them.
///
/// # Errors
/// [`ErrorKind::Refused`], [`ErrorKind::Mismatch`].
pub fn verdict(all: &[Shards]) -> Result<()> {
    if let Some(one) = all.iter().find(|shards| !shards.refusal.is_empty()) {
        return Err(refused(one.rank, &one.refusal));
    }
    let Some(first) = all.first() else { return Ok(()) };
    let differs = |other: &&Shards| [other.bytes, other.lengths] != [first.bytes, first.lengths];
    match all.iter().find(differs) {
        None => Ok(()),
        Some(other) => Err(other_lengths([first.rank, other.rank], [first.bytes, other.bytes])),
    }
}

/// A number for the lengths of shards, which differs where they differ (FNV-1a).
pub fn lengths(all: impl Iterator<Item = u64>) -> u64 {
    let bytes = all.flat_map(u64::to_le_bytes);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[cold]
pub(super) fn bad_record(rank: u32, found: String) -> Error {
    let text = format!("rank {rank} sent a record with {found}");
    Error::new(ErrorKind::Protocol, "read record", text).with_rank(rank)
}

#[cold]
fn refused(rank: u32, why: &[u8]) -> Error {
    let text = format!("rank {rank} refused the gather: {}", String::from_utf8_lossy(why));
    Error::new(ErrorKind::Refused, "gather", text).with_rank(rank)
}

#[cold]
fn other_lengths(ranks: [u32; 2], bytes: [u64; 2]) -> Error {
    let text = format!(
        "the shards of rank {} have {} bytes, and those of rank {} have {}, or are divided otherwise; expected the \
         same call on all ranks, shards of the same lengths, and for sums the same types, precision and scale",
        ranks[0], bytes[0], ranks[1], bytes[1]
    );
    Error::new(ErrorKind::Mismatch, "gather", text).with_rank(ranks[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: ExpectedRecord = ExpectedRecord { rank: 3, number: 7, room: 64 };

    fn shards(rank: u32, parts: &[u64]) -> Shards {
        let bytes = parts.iter().sum();
        let lengths = lengths(parts.iter().copied());
        Shards { rank, number: 7, bytes, lengths, refusal: Vec::new() }
    }

    #[test]
    fn shards_that_are_divided_otherwise_have_another_number() {
        let of = |all: &[u64]| lengths(all.iter().copied());
        assert_eq!(of(&[8, 16]), of(&[8, 16]));
        assert_ne!(of(&[8, 16]), of(&[16, 8]));
        assert_ne!(of(&[24]), of(&[8, 16]));
        assert_ne!(of(&[]), of(&[0]));
    }

    #[test]
    fn a_record_says_what_its_writer_sends_and_why_it_refuses() {
        let sent = shards(3, &[8, 16]);
        let (read, pieces) = Shards::read(sent.words(2), &[], EXPECTED).unwrap();
        assert_eq!((read.rank, read.number, read.bytes, pieces), (3, 7, 24, 2));
        assert!(verdict(&[sent, read]).is_ok());
        let refusal = Shards { bytes: 0, refusal: b"no tensor".to_vec(), ..shards(3, &[]) };
        let room = [&refusal.refusal[..], &[0; 183]].concat();
        let (read, _) = Shards::read(refusal.words(0), &room, EXPECTED).unwrap();
        let error = verdict(&[shards(2, &[]), read]).unwrap_err();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Refused, Some(3)));
        assert!(error.to_string().contains("rank 3 refused the gather: no tensor"), "{error}");
    }

    #[test]
    fn other_lengths_are_an_error_about_the_first_rank_that_differs() {
        let all = [shards(0, &[8]), shards(1, &[8]), shards(2, &[9]), shards(3, &[4])];
        let error = verdict(&all).unwrap_err();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Mismatch, Some(2)));
    }

    #[test]
    fn a_record_that_cannot_be_is_an_error_about_its_rank() {
        let words = shards(3, &[24]).words(0);
        let changed = |at: usize, value: u64| {
            let mut words = words;
            words[at] = value;
            words
        };
        // Another gather; a verdict that is none; bytes beside a refusal; no room; pieces without bytes.
        for bad in [changed(0, 8), changed(1, 2), changed(1, 1), changed(2, 65), changed(4, 25)] {
            let error = Shards::read(bad, &[], EXPECTED).unwrap_err();
            assert_eq!((error.kind(), error.rank()), (ErrorKind::Protocol, Some(3)), "{bad:?}");
        }
        // A length of the text beyond its room reads the room.
        let mut long = Shards { refusal: b"x".to_vec(), ..shards(3, &[]) }.words(0);
        long[6] = u64::MAX;
        let (read, _) = Shards::read(long, &[b'y'; 192], EXPECTED).unwrap();
        assert_eq!(read.refusal, [b'y'; 192]);
    }
}
