//! The outcome of an operation, in words.

use tokenyard_core::refusal;
use tokenyard_core::signature::Signature;
use tokenyard_core::{Error, ErrorKind};

use crate::engine::args::{
    ANOTHER_M, BAD_ROWS, FULL, GO, MISMATCH, ORIGIN, Outcome, REFUSE_BROKEN, REFUSE_FULL,
    REFUSE_INPUT, REFUSE_TEXT, REFUSED, TEXT,
};
use crate::engine::member::Team;

/// The words for the faults that a rank's own kernel finds in the input of its call.
pub(crate) trait InputFaults: std::fmt::Debug + Send + Sync {
    /// Explains the words that the kernel has written into an outcome as a text.
    fn explain(&self, outcome: &Outcome) -> String;
}

/// The identity of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Called {
    /// World number of this rank.
    pub(crate) rank: u32,
    pub(crate) team: Team,
    /// The caller's number.
    pub(crate) operation: u64,
    /// Numbers of the exchange that one operation of the caller takes.
    pub(crate) steps: u32,
    /// Whether a graph was captured: the device counts launches, and the caller counts captures.
    pub(crate) graphs: bool,
}

impl Called {
    /// The dispatch that the device has given this number, in words.
    fn dispatch(&self, epoch: u32) -> String {
        let number = epoch.wrapping_sub(1);
        if self.graphs {
            return format!(
                "the handle of the dispatch that its device did as operation {number}, \
                            with every launch of a graph counted"
            );
        }
        format!("the handle of dispatch {}", number / self.steps)
    }
}

/// The number that the host waits for in an outcome: never 0, the initial value of memory. Kernels
/// have numbers of their own, because graphs launch operations that no host counts.
pub(crate) fn ticket(operation: u64) -> u32 {
    (operation % u64::from(u32::MAX)) as u32 + 1
}

/// The operation with this ticket, which is not long before the latest.
pub(crate) fn numbered(epoch: u64, latest: u64) -> u64 {
    let round = u64::from(u32::MAX);
    let ago = (u64::from(ticket(latest)) + round - epoch.min(round)) % round;
    latest.saturating_sub(ago)
}

/// A bit of an objector's order. It sorts an objection behind those that ranks made when they
/// entered.
const LATE: u32 = 1 << 31;

/// The reason why an operation does not continue, and the rank that objects.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) kind: ErrorKind,
    /// World rank, below the bit [`LATE`]. If several ranks object, the lowest number counts.
    pub(crate) objector: u32,
    pub(crate) why: String,
}

impl Refusal {
    /// An objection of this rank itself.
    pub(crate) fn new(kind: ErrorKind, rank: u32, why: impl Into<String>) -> Self {
        Self { kind, objector: rank, why: why.into() }
    }

    /// A refusal that this rank received from its caller: of this rank itself, or of another rank.
    pub(crate) fn passed_on(refusal: &refusal::CallRefusal<'_>) -> Self {
        let (kind, late) = match refusal.is_full {
            true => (ErrorKind::Full, LATE),
            false => (ErrorKind::Refused, 0),
        };
        Self { kind, objector: refusal.rank | late, why: refusal.why.to_owned() }
    }

    pub(crate) fn rank(&self) -> u32 {
        self.objector & !LATE
    }

    /// How a rank enters that has received this refusal.
    pub(crate) fn verdict(&self) -> u32 {
        match self.kind {
            ErrorKind::Full => REFUSE_FULL,
            ErrorKind::Refused => REFUSE_TEXT,
            _ => REFUSE_BROKEN,
        }
    }

    /// The refusal of an outcome, if not all ranks continue.
    pub(crate) fn of(outcome: &Outcome, ours: &Called, faults: &dyn InputFaults) -> Option<Self> {
        let rank = ours.team.rank(outcome.rank);
        let refused = |kind, why| Some(Self { kind, objector: outcome.objector, why });
        let broken = |kind, why| Some(Self { kind, objector: rank, why });
        match outcome.code {
            GO => None,
            REFUSED => match outcome.verdict {
                REFUSE_FULL => refused(ErrorKind::Full, text(outcome)),
                REFUSE_INPUT => refused(ErrorKind::Refused, faults.explain(outcome)),
                REFUSE_BROKEN => refused(ErrorKind::Mismatch, text(outcome)),
                _ => refused(ErrorKind::Refused, text(outcome)),
            },
            FULL => Some(Self {
                kind: ErrorKind::Full,
                objector: rank | LATE,
                why: format!(
                    "its arena has {} bytes in one piece; needed {}; held by {}",
                    outcome.capacity,
                    outcome.needed,
                    text(outcome)
                ),
            }),
            MISMATCH | ANOTHER_M => {
                let calls = [outcome.signature, outcome.own_signature]
                    .map(|word| format!("called a {}", Signature::of_word(word).describe()));
                // Ranks that differ in M alone do the same steps, so each finds it here and may go on.
                let kind = match outcome.code {
                    ANOTHER_M => ErrorKind::Refused,
                    _ => ErrorKind::Mismatch,
                };
                broken(kind, mismatch(ours, rank, calls))
            }
            ORIGIN => {
                let handle = |epoch: u32| format!("used {}", ours.dispatch(epoch));
                let handles = [outcome.origin, outcome.own_origin].map(handle);
                broken(ErrorKind::Mismatch, mismatch(ours, rank, handles))
            }
            BAD_ROWS => broken(
                ErrorKind::Protocol,
                format!("rank {rank} has fewer rows than the routing of this rank names"),
            ),
            other => broken(ErrorKind::Internal, format!("found outcome {other}; expected 1 to 7")),
        }
    }

    /// The error that callers receive.
    pub(crate) fn error(&self) -> Error {
        let Self { kind, why, .. } = self;
        let rank = self.rank();
        let text = match kind {
            ErrorKind::Full => format!("rank {rank} has no room: {why}"),
            ErrorKind::Refused => format!("rank {rank} refused its input: {why}"),
            _ => why.clone(),
        };
        let error = Error::new(*kind, "enter operation", text).with_rank(rank);
        match kind {
            ErrorKind::Mismatch => error.with_fix(
                "all ranks must call the same operations in the same order with the same types",
            ),
            _ => error,
        }
    }
}

/// The error of an operation that no caller waited for. Ranks may be several operations further, so the
/// communicator cannot continue, whatever the error was.
pub(crate) fn reported_late(error: &Error) -> Error {
    let kind = match error.kind() {
        ErrorKind::Refused | ErrorKind::Full => ErrorKind::Protocol,
        other => other,
    };
    let message = format!("an operation that no call waited for failed: {}", error.message());
    let late = Error::new(kind, "enter operation", message).with_fix(
        "call it with synchronisation, which tells at once and leaves the communicator usable",
    );
    match error.rank() {
        Some(rank) => late.with_rank(rank),
        None => late,
    }
}

fn mismatch(ours: &Called, peer: u32, [theirs, mine]: [String; 2]) -> String {
    format!("operation {}: rank {peer} {theirs}; rank {} {mine}", ours.operation, ours.rank)
}

fn text(outcome: &Outcome) -> String {
    let bytes = (outcome.text_bytes as usize).min(TEXT);
    String::from_utf8_lossy(&outcome.text[..bytes]).into_owned()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An operation whose input has no faults of its own.
    #[derive(Debug)]
    struct NoFaults;

    impl InputFaults for NoFaults {
        fn explain(&self, _: &Outcome) -> String {
            String::new()
        }
    }

    pub(crate) const OUTCOME: Outcome = Outcome {
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
        objector: 1,
        reserved: 0,
        text: [0; TEXT],
    };
    pub(crate) const OURS: Called =
        Called { rank: 0, team: Team { first: 0, step: 1 }, operation: 4, steps: 1, graphs: false };

    fn judge(outcome: &Outcome) -> Option<Error> {
        Refusal::of(outcome, &OURS, &NoFaults).map(|refusal| refusal.error())
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
        assert!(judge(&long).is_some());
        assert!(judge(&OUTCOME).is_none());
        let unknown = Outcome { code: 99, ..OUTCOME };
        assert_eq!(judge(&unknown).unwrap().kind(), ErrorKind::Internal);
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
        let text = Refusal::of(&other, &graphs, &NoFaults).unwrap().error().to_string();
        assert!(
            text.contains("rank 1 used the handle of the dispatch that its device did"),
            "{text}"
        );
        assert!(text.contains("operation 5, with every launch") && !text.contains("dispatch 5"));
    }

    #[test]
    fn what_failed_late_has_the_number_that_its_caller_gave_it() {
        for (latest, operation) in [(9, 9), (9, 4), (1 << 40, (1 << 40) - 7)] {
            assert_eq!(numbered(ticket(operation).into(), latest), operation);
        }
        // Where numbers wrap around.
        let round = u64::from(u32::MAX);
        assert_eq!(numbered(ticket(round - 2).into(), round + 3), round - 2);
        assert_eq!(numbered(1, 0), 0);
    }

    #[test]
    fn a_rank_without_room_on_a_rail_is_named_by_its_world_rank_and_comes_after_refusals() {
        let rail = Called { rank: 1, team: Team { first: 1, step: 4 }, steps: 2, ..OURS };
        let full = Outcome { code: FULL, rank: 2, needed: 9, capacity: 8, ..OUTCOME };
        let refusal = Refusal::of(&full, &rail, &NoFaults).unwrap();
        assert_eq!((refusal.rank(), refusal.verdict()), (9, REFUSE_FULL));
        assert!(refusal.objector > Refusal::new(ErrorKind::Refused, 11, "").objector);
        // Others receive it from a forwarder, with the same words.
        let mut passed_on = Outcome { code: REFUSED, verdict: REFUSE_FULL, ..OUTCOME };
        passed_on.objector = refusal.objector;
        passed_on.text_bytes = refusal.why.len() as u32;
        passed_on.text[..refusal.why.len()].copy_from_slice(refusal.why.as_bytes());
        let [first, second] =
            [&refusal, &Refusal::of(&passed_on, &OURS, &NoFaults).unwrap()].map(Refusal::error);
        assert_eq!(first.to_string(), second.to_string());
        assert_eq!((second.kind(), second.rank()), (ErrorKind::Full, Some(9)));
    }

    #[test]
    fn a_mismatch_on_a_rail_names_numbers_of_callers() {
        let rail = Called { rank: 1, team: Team { first: 1, step: 4 }, steps: 2, ..OURS };
        let other = Outcome { code: ORIGIN, origin: 7, ..OUTCOME };
        let text = Refusal::of(&other, &rail, &NoFaults).unwrap().error().to_string();
        assert!(text.contains("rank 5 used the handle of dispatch 3; rank 1 used"), "{text}");
    }

    #[test]
    fn a_refusal_that_is_reported_late_closes_the_communicator_and_names_the_rank() {
        let refused = Error::new(ErrorKind::Refused, "enter", "rank 2 refused").with_rank(2);
        let late = reported_late(&refused);
        assert_eq!((late.kind(), late.rank()), (ErrorKind::Protocol, Some(2)));
        assert!(late.to_string().contains("no call waited for failed: rank 2 refused"), "{late}");
    }
}
