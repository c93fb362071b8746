//! The faults that the kernel of a dispatch finds in a routing, in words.

use crate::engine::args::Outcome;
use crate::engine::outcome::InputFaults;
use crate::moe::args::TOO_MANY;

/// Faults of a routing to this many experts. A routing may be another rank's, which a forwarder passes on: its experts
/// are those of the world.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoutingFaults {
    pub(crate) experts: u32,
}

impl InputFaults for RoutingFaults {
    /// The error in the refusing rank's `topk_idx`: token, k and kind, and the expert.
    fn explain(&self, outcome: &Outcome) -> String {
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
        let place =
            format!("found expert {expert} in row {}, column {}", word(0), word(1) >> 8 & 0xff);
        match word(1) & 0xff {
            1 => format!("topk_idx: {place}; expected less than experts = {}", self.experts),
            _ => format!(
                "topk_idx: {place} and in one before; expected distinct experts within a row"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokenyard_core::ErrorKind;

    use super::*;
    use crate::engine::args::{REFUSE_INPUT, REFUSED};
    use crate::engine::outcome::Refusal;
    use crate::engine::outcome::tests::{OURS, OUTCOME};

    fn judge(outcome: &Outcome) -> Option<tokenyard_core::Error> {
        let refusal = Refusal::of(outcome, &OURS, &RoutingFaults { experts: 6 });
        refusal.map(|refusal| refusal.error())
    }

    #[test]
    fn a_bad_routing_is_reported_with_row_column_and_value() {
        let mut bad = Outcome { code: REFUSED, verdict: REFUSE_INPUT, ..OUTCOME };
        for (i, word) in [7_u32, 2 << 8 | 1, 9, 0].into_iter().enumerate() {
            bad.text[4 * i..][..4].copy_from_slice(&word.to_le_bytes());
        }
        let error = judge(&Outcome { objector: 3, ..bad }).unwrap();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Refused, Some(3)));
        let text = error.to_string();
        assert!(text.contains("found expert 9 in row 7, column 2; expected less than"), "{text}");
        for (i, word) in [70_u32, TOO_MANY, 64, 0].into_iter().enumerate() {
            bad.text[4 * i..][..4].copy_from_slice(&word.to_le_bytes());
        }
        let text = judge(&bad).unwrap().to_string();
        assert!(text.contains("tokens: found 70 in device memory; expected at most 64"), "{text}");
    }
}
