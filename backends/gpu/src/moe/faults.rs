//! The faults that the kernels of dispatch and combine find, in words: in a routing, and between the calls of ranks.

use tokenyard_core::ErrorKind;
use tokenyard_core::signature::Signature;

use crate::engine::args::Outcome;
use crate::engine::outcome::{Called, Faults, Refusal};
use crate::moe::args::{ANOTHER_M, BAD_ROWS, ORIGIN, TOO_MANY};

/// Faults of a routing to this many experts. A routing may be another rank's, which a forwarder passes on: its experts
/// are those of the world.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoutingFaults {
    pub(crate) experts: u32,
}

impl Faults for RoutingFaults {
    /// The error in the refusing rank's `topk_idx`: token, k and kind, and the expert.
    fn explain_input(&self, outcome: &Outcome) -> String {
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

    fn describe_call(&self, signature: u64) -> String {
        Signature::of_word(signature).describe()
    }

    fn refusal(&self, outcome: &Outcome, ours: &Called) -> Option<Refusal> {
        let rank = ours.team.rank(outcome.rank);
        let refusal = |kind, why| Some(Refusal::new(kind, rank, why));
        match outcome.code {
            // Ranks that differ in M alone do the same steps, so each finds it here and may go on.
            ANOTHER_M => refusal(ErrorKind::Refused, ours.calls(outcome, self)),
            ORIGIN => {
                let handles = [outcome.origin, outcome.own_origin]
                    .map(|epoch| format!("used {}", handle(ours, epoch)));
                refusal(ErrorKind::Mismatch, ours.mismatch(rank, handles))
            }
            BAD_ROWS => {
                let text =
                    format!("rank {rank} has fewer rows than the routing of this rank names");
                refusal(ErrorKind::Protocol, text)
            }
            _ => None,
        }
    }
}

/// The handle of the dispatch that the device has given this number.
fn handle(ours: &Called, epoch: u32) -> String {
    let number = epoch.wrapping_sub(1);
    if ours.graphs {
        return format!(
            "the handle of the dispatch that its device did as operation {number}, with every launch of a graph \
             counted"
        );
    }
    format!("the handle of dispatch {}", number / ours.steps)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::args::{GO, MISMATCH, REFUSE_INPUT, REFUSED};
    use crate::engine::outcome::tests::{OURS, OUTCOME};
    use tokenyard_core::domains::TeamRanks;

    const FAULTS: RoutingFaults = RoutingFaults { experts: 6 };

    fn judge(outcome: &Outcome) -> Option<tokenyard_core::Error> {
        Refusal::of(outcome, &OURS, &FAULTS).map(|refusal| refusal.error())
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

    #[test]
    fn a_mismatch_says_what_both_ranks_called() {
        let other = Outcome { code: MISMATCH, signature: 1 | 1 << 4 | 1 << 8, ..OUTCOME };
        let text = judge(&other).unwrap().to_string();
        assert!(text.contains("operation 4: rank 1 called a flat dispatch of bf16"), "{text}");
        assert!(text.contains("; rank 0 called a combine"), "{text}");
        let other = Outcome { code: ORIGIN, origin: 6, ..OUTCOME };
        let text = judge(&other).unwrap().to_string();
        assert!(text.contains("rank 1 used the handle of dispatch 5; rank 0 used"), "{text}");
    }

    #[test]
    fn ranks_that_name_different_m_refuse_the_call_and_go_on() {
        let word = 1 | 1 << 4 | 1 << 8;
        let of = |m| Signature { word, extent: m }.in_one_word().unwrap().word;
        let differs = |code, signature, own_signature| {
            judge(&Outcome { code, signature, own_signature, ..OUTCOME }).unwrap()
        };
        for (theirs, mine, found, expected) in [
            (of(13), of(12), "at most 13 tokens", "at most 12 tokens"),
            (of(13), word, "at most 13 tokens", "at most max_tokens of the communicator"),
        ] {
            let error = differs(ANOTHER_M, theirs, mine);
            assert_eq!((error.kind(), error.rank()), (ErrorKind::Refused, Some(1)));
            let text = error.to_string();
            let at = [found, expected].map(|words| text.find(words));
            assert!(at[0].is_some() && at[0] < at[1], "{text}");
        }
        // Another type beside another M ends the communicator.
        assert_eq!(differs(MISMATCH, of(13) ^ 3 << 8, of(12)).kind(), ErrorKind::Mismatch);
    }

    #[test]
    fn where_graphs_run_a_handle_is_not_named_by_a_number_of_the_caller() {
        let other = Outcome { code: ORIGIN, origin: 6, ..OUTCOME };
        let graphs = Called { graphs: true, ..OURS };
        let text = Refusal::of(&other, &graphs, &FAULTS).unwrap().error().to_string();
        assert!(
            text.contains("rank 1 used the handle of the dispatch that its device did"),
            "{text}"
        );
        assert!(text.contains("operation 5, with every launch") && !text.contains("dispatch 5"));
    }

    #[test]
    fn a_mismatch_on_a_rail_names_numbers_of_callers() {
        let rail = Called { rank: 1, team: TeamRanks { first: 1, step: 4 }, steps: 2, ..OURS };
        let other = Outcome { code: ORIGIN, origin: 7, ..OUTCOME };
        let text = Refusal::of(&other, &rail, &FAULTS).unwrap().error().to_string();
        assert!(text.contains("rank 5 used the handle of dispatch 3; rank 1 used"), "{text}");
    }

    #[test]
    fn a_rank_with_too_few_rows_violates_the_protocol_and_another_code_is_internal() {
        for (code, kind) in [(BAD_ROWS, ErrorKind::Protocol), (99, ErrorKind::Internal)] {
            assert_eq!(judge(&Outcome { code, ..OUTCOME }).unwrap().kind(), kind);
        }
        assert!(judge(&Outcome { code: GO, ..OUTCOME }).is_none());
    }
}
