//! What an operation came to, in words.

use tokenyard_core::moe::Shape;
use tokenyard_core::{Error, ErrorKind, Result};

use super::args::{
    BAD_ROWS, FULL, GO, MISMATCH, ORIGIN, Outcome, REFUSE_FULL, REFUSE_ROUTE, REFUSED, TEXT,
};

/// The error that an outcome stands for. `rank` is the world rank that it is about.
pub(super) fn judge(outcome: &Outcome, rank: u32, shape: &Shape) -> Result<()> {
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
                "rank {rank} has no room: its arena has {} bytes in one piece; needed {}",
                outcome.capacity, outcome.needed
            ),
        ),
        MISMATCH => error(
            ErrorKind::Mismatch,
            format!("rank {rank} called something else, or the same with other sizes or types"),
        ),
        ORIGIN => {
            error(ErrorKind::Mismatch, format!("rank {rank} used the handle of another dispatch"))
        }
        BAD_ROWS => error(
            ErrorKind::Protocol,
            format!("rank {rank} has fewer rows than the routing of this rank names"),
        ),
        other => error(ErrorKind::Internal, format!("found outcome {other}; expected 1 to 6")),
    }
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
    let expert = i64::from(word(2)) | i64::from(word(3)) << 32;
    let place = format!("found expert {expert} in row {}, column {}", word(0), word(1) & 0xff);
    match word(1) >> 8 {
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
        text: [0; TEXT],
    };

    #[test]
    fn a_bad_routing_is_told_with_row_column_and_value() {
        let mut bad = Outcome { code: REFUSED, verdict: REFUSE_ROUTE, ..OUTCOME };
        for (i, word) in [7_u32, 1 << 8 | 2, 9, 0].into_iter().enumerate() {
            bad.text[4 * i..][..4].copy_from_slice(&word.to_le_bytes());
        }
        let error = judge(&bad, 3, &SHAPE).unwrap_err();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Refused, Some(3)));
        let text = error.to_string();
        assert!(text.contains("found expert 9 in row 7, column 2; expected less than"), "{text}");
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
        assert!(judge(&long, 0, &SHAPE).is_err());
        assert!(judge(&OUTCOME, 0, &SHAPE).is_ok());
        let unknown = Outcome { code: 99, ..OUTCOME };
        assert_eq!(judge(&unknown, 0, &SHAPE).unwrap_err().kind(), ErrorKind::Internal);
    }
}
