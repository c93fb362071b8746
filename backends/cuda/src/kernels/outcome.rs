//! What an operation came to, in words.

use tokenyard_core::moe::Shape;
use tokenyard_core::signature::Signature;
use tokenyard_core::{Error, ErrorKind, Result};

use super::args::{
    BAD_ROWS, FULL, GO, MISMATCH, ORIGIN, Outcome, REFUSE_FULL, REFUSE_ROUTE, REFUSED, TEXT,
    TOO_MANY,
};

/// Which call it was.
#[derive(Clone, Copy, Debug)]
pub(super) struct Called {
    pub(super) rank: u32,
    pub(super) operation: u64,
}

/// The error that an outcome stands for. One domain: an index in the team is a world rank.
pub(super) fn judge(outcome: &Outcome, ours: &Called, shape: &Shape) -> Result<()> {
    let rank = outcome.rank;
    let error =
        |kind, message: String| Err(Error::new(kind, "enter operation", message).with_rank(rank));
    match outcome.code {
        GO => Ok(()),
        REFUSED if outcome.verdict == REFUSE_FULL => {
            error(ErrorKind::Full, format!("rank {rank} has no room: {}", text(outcome)))
        }
        REFUSED if outcome.verdict == REFUSE_ROUTE => {
            let why = route_problem(outcome, shape);
            error(ErrorKind::Refused, format!("rank {rank} refused its input: {why}"))
        }
        REFUSED => {
            error(ErrorKind::Refused, format!("rank {rank} refused its input: {}", text(outcome)))
        }
        FULL => error(
            ErrorKind::Full,
            format!(
                "rank {rank} has no room: its arena has {} bytes in one piece; needed {}; held by {}",
                outcome.capacity,
                outcome.needed,
                text(outcome)
            ),
        ),
        MISMATCH => {
            let call = |signature: Signature| format!("called a {}", signature.describe());
            mismatch(
                ours,
                rank,
                [outcome.signature, outcome.own_signature].map(Signature).map(call),
            )
        }
        ORIGIN => {
            let handle =
                |epoch: u32| format!("used the handle of dispatch {}", epoch.wrapping_sub(1));
            mismatch(ours, rank, [outcome.origin, outcome.own_origin].map(handle))
        }
        BAD_ROWS => error(
            ErrorKind::Protocol,
            format!("rank {rank} has fewer rows than the routing of this rank names"),
        ),
        other => error(ErrorKind::Internal, format!("found outcome {other}; expected 1 to 6")),
    }
}

/// The error of an operation that nobody waited for. Ranks may be several operations further, so the yard
/// cannot go on, whatever it was.
pub(super) fn told_late(error: &Error) -> Error {
    let kind = match error.kind() {
        ErrorKind::Refused | ErrorKind::Full => ErrorKind::Protocol,
        other => other,
    };
    let message = format!("an operation that nobody waited for failed: {}", error.message());
    let told = Error::new(kind, "enter operation", message)
        .with_fix("call it with synchronisation, which tells at once and leaves the yard usable");
    match error.rank() {
        Some(rank) => told.with_rank(rank),
        None => told,
    }
}

fn mismatch(ours: &Called, peer: u32, [theirs, mine]: [String; 2]) -> Result<()> {
    let message =
        format!("operation {}: rank {peer} {theirs}; rank {} {mine}", ours.operation, ours.rank);
    Err(Error::new(ErrorKind::Mismatch, "enter operation", message)
        .with_rank(peer)
        .with_fix("all ranks must call the same operations in the same order with the same types"))
}

fn text(outcome: &Outcome) -> String {
    let bytes = (outcome.text_bytes as usize).min(TEXT);
    String::from_utf8_lossy(&outcome.text[..bytes]).into_owned()
}

/// What is wrong with the refusing rank's `topk_idx`: token, k and kind, and the expert.
fn route_problem(outcome: &Outcome, shape: &Shape) -> String {
    let word = |i: usize| {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&outcome.text[4 * i..][..4]);
        u32::from_le_bytes(bytes)
    };
    if word(1) & 0xff == TOO_MANY {
        let (found, most) = (word(0), word(2));
        return format!("tokens: found {found} in device memory; expected at most {most}");
    }
    let expert = i64::from(word(2)) | i64::from(word(3)) << 32;
    let place = format!("found expert {expert} in row {}, column {}", word(0), word(1) >> 8 & 0xff);
    match word(1) & 0xff {
        1 => format!("topk_idx: {place}; expected less than experts = {}", shape.experts),
        _ => format!("topk_idx: {place} and in one before; expected distinct experts within a row"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { ranks: 2, experts: 6, topk: 3, hidden: 16, max_tokens: 2 };
    const OUTCOME: Outcome = Outcome {
        epoch: 1,
        code: GO,
        rank: 1,
        tokens: 0,
        rows: 0,
        needed: 0,
        capacity: 0,
        verdict: 0,
        text_bytes: 0,
        signature: 0,
        own_signature: 3,
        origin: 0,
        own_origin: 2,
        text: [0; TEXT],
    };
    const OURS: Called = Called { rank: 0, operation: 4 };

    #[test]
    fn a_bad_routing_is_told_with_row_column_and_value() {
        let mut bad = Outcome { code: REFUSED, verdict: REFUSE_ROUTE, ..OUTCOME };
        for (i, word) in [7_u32, 2 << 8 | 1, 9, 0].into_iter().enumerate() {
            bad.text[4 * i..][..4].copy_from_slice(&word.to_le_bytes());
        }
        let error = judge(&Outcome { rank: 3, ..bad }, &OURS, &SHAPE).unwrap_err();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Refused, Some(3)));
        let text = error.to_string();
        assert!(text.contains("found expert 9 in row 7, column 2; expected less than"), "{text}");
        for (i, word) in [70_u32, TOO_MANY, 64, 0].into_iter().enumerate() {
            bad.text[4 * i..][..4].copy_from_slice(&word.to_le_bytes());
        }
        let text = judge(&bad, &OURS, &SHAPE).unwrap_err().to_string();
        assert!(text.contains("tokens: found 70 in device memory; expected at most 64"), "{text}");
    }

    #[test]
    fn a_text_of_any_length_and_bytes_is_bounded() {
        let long = Outcome {
            code: REFUSED,
            verdict: 1,
            text_bytes: u32::MAX,
            text: [0xff; TEXT],
            ..OUTCOME
        };
        assert!(judge(&long, &OURS, &SHAPE).is_err());
        assert!(judge(&OUTCOME, &OURS, &SHAPE).is_ok());
        let unknown = Outcome { code: 99, ..OUTCOME };
        assert_eq!(judge(&unknown, &OURS, &SHAPE).unwrap_err().kind(), ErrorKind::Internal);
    }

    #[test]
    fn a_refusal_that_is_told_late_closes_the_yard_and_names_the_rank() {
        let refused = Error::new(ErrorKind::Refused, "enter", "rank 2 refused").with_rank(2);
        let late = told_late(&refused);
        assert_eq!((late.kind(), late.rank()), (ErrorKind::Protocol, Some(2)));
        assert!(late.to_string().contains("nobody waited for failed: rank 2 refused"), "{late}");
    }

    #[test]
    fn a_mismatch_says_what_both_ranks_called() {
        let other = Outcome { code: MISMATCH, signature: 1 | 1 << 4 | 1 << 8, ..OUTCOME };
        let text = judge(&other, &OURS, &SHAPE).unwrap_err().to_string();
        assert!(text.contains("operation 4: rank 1 called a flat dispatch of bf16"), "{text}");
        assert!(text.contains("; rank 0 called a combine"), "{text}");
        let other = Outcome { code: ORIGIN, origin: 6, ..OUTCOME };
        let text = judge(&other, &OURS, &SHAPE).unwrap_err().to_string();
        assert!(text.contains("rank 1 used the handle of dispatch 5; rank 0 used"), "{text}");
    }
}
