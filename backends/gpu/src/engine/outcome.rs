//! The outcome of an operation, in words.

use tokenyard_core::domains::TeamRanks;
use tokenyard_core::refusal;
use tokenyard_core::{Error, ErrorKind};

use crate::engine::args::{
    FULL, GO, MISMATCH, Outcome, REFUSE_BROKEN, REFUSE_FULL, REFUSE_INPUT, REFUSE_TEXT, REFUSED,
    TEXT,
};

/// The words of the operations over an engine for what their kernels find: the engine knows neither their input nor
/// their calls.
pub(crate) trait Faults: std::fmt::Debug + Send + Sync {
    /// Explains the words that the kernel of a rank has written into an outcome as a text, about the input of its call.
    fn explain_input(&self, outcome: &Outcome) -> String;

    /// The call with this signature.
    fn describe_call(&self, signature: u64) -> String;

    /// The refusal of an outcome whose code is an operation's own; none if no operation has this code.
    fn refusal(&self, outcome: &Outcome, ours: &Called) -> Option<Refusal>;
}

/// The identity of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Called {
    /// World number of this rank.
    pub(crate) rank: u32,
    pub(crate) team: TeamRanks,
    /// The caller's number.
    pub(crate) operation: u64,
    /// Numbers of the exchange that one operation of the caller takes.
    pub(crate) steps: u32,
    /// Whether a graph was captured: the device counts launches, and the caller counts captures.
    pub(crate) graphs: bool,
}

impl Called {
    /// The error of a rank whose call is not this rank's: what each of them did.
    pub(crate) fn mismatch(&self, peer: u32, [theirs, mine]: [String; 2]) -> String {
        format!("operation {}: rank {peer} {theirs}; rank {} {mine}", self.operation, self.rank)
    }

    /// Both calls of an outcome with signatures that differ.
    pub(crate) fn calls(&self, outcome: &Outcome, faults: &dyn Faults) -> String {
        let calls = [outcome.signature, outcome.own_signature]
            .map(|word| format!("called a {}", faults.describe_call(word)));
        self.mismatch(self.team.rank(outcome.rank), calls)
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
    pub(crate) fn of(outcome: &Outcome, ours: &Called, faults: &dyn Faults) -> Option<Self> {
        let rank = ours.team.rank(outcome.rank);
        let refused = |kind, why| Some(Self { kind, objector: outcome.objector, why });
        let broken = |kind, why| Some(Self { kind, objector: rank, why });
        match outcome.code {
            GO => None,
            REFUSED => match outcome.verdict {
                REFUSE_FULL => refused(ErrorKind::Full, text(outcome)),
                REFUSE_INPUT => refused(ErrorKind::Refused, faults.explain_input(outcome)),
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
            MISMATCH => broken(ErrorKind::Mismatch, ours.calls(outcome, faults)),
            other => faults.refusal(outcome, ours).or_else(|| {
                let text = format!("found outcome {other}; expected one that an operation has");
                broken(ErrorKind::Internal, text)
            }),
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

fn text(outcome: &Outcome) -> String {
    let bytes = (outcome.text_bytes as usize).min(TEXT);
    String::from_utf8_lossy(&outcome.text[..bytes]).into_owned()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An operation without faults of its own.
    #[derive(Debug)]
    struct NoFaults;

    impl Faults for NoFaults {
        fn explain_input(&self, _: &Outcome) -> String {
            String::new()
        }

        fn describe_call(&self, signature: u64) -> String {
            format!("call {signature}")
        }

        fn refusal(&self, _: &Outcome, _: &Called) -> Option<Refusal> {
            None
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
    pub(crate) const OURS: Called = Called {
        rank: 0,
        team: TeamRanks { first: 0, step: 1 },
        operation: 4,
        steps: 1,
        graphs: false,
    };

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
        let other = Outcome { code: MISMATCH, signature: 5, ..OUTCOME };
        let error = judge(&other).unwrap();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Mismatch, Some(1)));
        let text = error.to_string();
        assert!(text.contains("operation 4: rank 1 called a call 5; rank 0 called a call 3"));
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
        let rail = Called { rank: 1, team: TeamRanks { first: 1, step: 4 }, steps: 2, ..OURS };
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
    fn a_refusal_that_is_reported_late_closes_the_communicator_and_names_the_rank() {
        let refused = Error::new(ErrorKind::Refused, "enter", "rank 2 refused").with_rank(2);
        let late = reported_late(&refused);
        assert_eq!((late.kind(), late.rank()), (ErrorKind::Protocol, Some(2)));
        assert!(late.to_string().contains("no call waited for failed: rank 2 refused"), "{late}");
    }
}
