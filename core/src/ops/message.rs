//! The records of a message of a pipe: the sender's beside its bytes, and the credit, which is the receiver's answer.

use super::record::{ExpectedRecord, RecordWords, bad_record, bytes_of, text_in};
use crate::{Error, ErrorKind, Result};

/// Verdicts in word 1 of a record.
const TAKEN: u64 = 0;
const REFUSED: u64 = 1;
const OTHER_LENGTH: u64 = 2;

/// A message, as the record of its sender says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentMessage {
    /// The sender's world rank.
    pub rank: u32,
    /// Its number among those from that rank to another one.
    pub number: u64,
    /// Its length; 0 where its sender refuses it.
    pub bytes: u64,
    /// Pieces that the bytes come in.
    pub pieces: u64,
    /// Why its sender refuses it, if it does.
    pub refusal: Option<Vec<u8>>,
}

/// A message, and what its receiver expects.
#[derive(Clone, Copy, Debug)]
pub struct JudgedMessage<'a> {
    /// The message.
    pub sent: &'a SentMessage,
    /// The length of the receiver's tensor.
    pub expected: u64,
    /// Why the receiver refuses it; no bytes where it does not.
    pub refusal: &'a [u8],
}

impl SentMessage {
    /// The header of its record.
    pub fn words(&self) -> RecordWords {
        let Self { rank, number, bytes, pieces, refusal } = self;
        let verdict = if refusal.is_none() { TAKEN } else { REFUSED };
        let text = refusal.as_ref().map_or(0, Vec::len) as u64;
        [*number, verdict, *bytes, 0, *pieces, (*rank).into(), text, 0]
    }

    /// Reads a record: its header, and the room of its text.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] for a record that is not of this message, or cannot be.
    pub fn read(words: RecordWords, text: &[u8], expected: ExpectedRecord) -> Result<Self> {
        let ExpectedRecord { rank, number, room } = expected;
        let [found, verdict, _, _, _, _, text_bytes, _] = words;
        check_number(rank, found, number)?;
        let (bytes, pieces) = bytes_of(words, rank, room)?;
        let refusal = match verdict {
            TAKEN => None,
            REFUSED if bytes == 0 => Some(text_in(text, text_bytes).to_vec()),
            _ => return Err(bad_record(rank, format!("verdict {verdict} and {bytes} bytes"))),
        };
        Ok(Self { rank, number, bytes, pieces, refusal })
    }
}

impl JudgedMessage<'_> {
    /// Whether its bytes are to be written to the receiver's tensor.
    pub fn fits(&self) -> bool {
        let Self { sent, expected, refusal } = self;
        sent.refusal.is_none() && sent.bytes == *expected && refusal.is_empty()
    }

    /// The header of the credit, and its text. `own`: the receiver's world rank.
    pub fn credit(&self, own: u32) -> (RecordWords, &[u8]) {
        let Self { sent, expected, refusal } = *self;
        let (answer, text) = match (&sent.refusal, refusal.is_empty()) {
            (None, true) if !self.fits() => (OTHER_LENGTH, &[][..]),
            (None, false) => (REFUSED, refusal),
            _ => (TAKEN, &[][..]),
        };
        let text_bytes = text.len() as u64;
        ([sent.number, answer, expected, sent.bytes, 0, own.into(), text_bytes, 0], text)
    }

    /// The end of the message for its receiver, whose own refusal is known there.
    ///
    /// # Errors
    /// [`ErrorKind::Refused`], [`ErrorKind::Mismatch`].
    pub fn end(&self) -> Result<()> {
        let SentMessage { rank, number, bytes, .. } = *self.sent;
        match &self.sent.refusal {
            Some(why) => Err(refused(rank, number, why)),
            None if self.refusal.is_empty() && !self.fits() => {
                Err(other_length(rank, number, [bytes, self.expected]))
            }
            None => Ok(()),
        }
    }
}

/// The end of a message for its sender, from the credit.
///
/// # Errors
/// [`ErrorKind::Refused`], [`ErrorKind::Mismatch`]; [`ErrorKind::Protocol`] for a record that is not of this message,
/// or cannot be.
pub fn read_credit(words: RecordWords, text: &[u8], rank: u32, number: u64) -> Result<()> {
    let [found, verdict, expected, sent, _, _, text_bytes, _] = words;
    check_number(rank, found, number)?;
    match verdict {
        TAKEN => Ok(()),
        REFUSED => Err(refused(rank, number, text_in(text, text_bytes))),
        OTHER_LENGTH => Err(other_length(rank, number, [sent, expected])),
        _ => Err(bad_record(rank, format!("verdict {verdict} on a message"))),
    }
}

fn check_number(rank: u32, found: u64, expected: u64) -> Result<()> {
    match found == expected {
        true => Ok(()),
        false => Err(bad_record(rank, format!("number {found}; expected {expected}"))),
    }
}

#[cold]
fn refused(rank: u32, number: u64, why: &[u8]) -> Error {
    let why = String::from_utf8_lossy(why);
    let text = format!("rank {rank} refused message {number}: {why}");
    Error::new(ErrorKind::Refused, "pass message", text)
        .with_rank(rank)
        .with_fix("mend the call of that rank; what this rank was about to send was not sent")
}

/// `lengths`: the one that was sent, and the one that was expected.
#[cold]
fn other_length(rank: u32, number: u64, lengths: [u64; 2]) -> Error {
    let text = format!(
        "message {number} between this rank and rank {rank}: {} bytes were sent; {} were expected",
        lengths[0], lengths[1]
    );
    Error::new(ErrorKind::Mismatch, "pass message", text)
        .with_rank(rank)
        .with_fix("pass tensors of one length to both sides of a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENT: SentMessage =
        SentMessage { rank: 1, number: 5, bytes: 24, pieces: 2, refusal: None };
    const EXPECTED: ExpectedRecord = ExpectedRecord { rank: 1, number: 5, room: 64 };

    /// The ends of a message for its receiver, which is rank 3, and for its sender.
    fn ends(sent: &SentMessage, expected: u64, refusal: &[u8]) -> [Result<()>; 2] {
        let text = sent.refusal.clone().unwrap_or_default();
        let read = SentMessage::read(sent.words(), &text, EXPECTED).unwrap();
        assert_eq!(read, *sent);
        let judged = JudgedMessage { sent: &read, expected, refusal };
        let (words, text) = judged.credit(3);
        [judged.end(), read_credit(words, text, 3, 5)]
    }

    #[test]
    fn both_ends_of_a_message_learn_how_it_was_taken() {
        let kinds = |ends: [Result<()>; 2]| {
            ends.map(|end| end.err().map(|error| (error.kind(), error.rank())))
        };
        assert_eq!(kinds(ends(&SENT, 24, b"")), [None, None]);
        let other = |rank| Some((ErrorKind::Mismatch, Some(rank)));
        assert_eq!(kinds(ends(&SENT, 23, b"")), [other(1), other(3)]);
        let refused = |rank| Some((ErrorKind::Refused, Some(rank)));
        assert_eq!(kinds(ends(&SENT, 0, b"no tensor")), [None, refused(3)]);
        let none = SentMessage { bytes: 0, pieces: 0, refusal: Some(b"gaps".to_vec()), ..SENT };
        assert_eq!(kinds(ends(&none, 24, b"")), [refused(1), None]);
        assert!(ends(&none, 24, b"")[0].as_ref().unwrap_err().to_string().contains("gaps"));
    }

    #[test]
    fn a_record_that_cannot_be_is_an_error_about_its_rank() {
        let changed = |at: usize, value: u64| {
            let mut words = SENT.words();
            words[at] = value;
            words
        };
        for bad in [changed(0, 6), changed(1, 1), changed(1, 2), changed(2, 65), changed(4, 25)] {
            let error = SentMessage::read(bad, &[], EXPECTED).unwrap_err();
            assert_eq!((error.kind(), error.rank()), (ErrorKind::Protocol, Some(1)), "{bad:?}");
        }
        for bad in [changed(0, 6), changed(1, 3)] {
            let error = read_credit(bad, &[], 3, 5).unwrap_err();
            assert_eq!((error.kind(), error.rank()), (ErrorKind::Protocol, Some(3)), "{bad:?}");
        }
    }
}
