//! The jobs, and the verdicts expected of them.

/// The act of rank 1 after some successful exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// It goes on.
    Nothing,
    /// It is killed.
    Killed,
    /// It is stopped.
    Stopped,
    /// It sleeps in its own code, between two operations.
    Sleeps,
    /// It sleeps in its own code, between the send and the receive of a dispatch.
    SleepsInside,
    /// It reports its failure to the others, and ends.
    Fails,
    /// It replays where the others dispatch.
    Replays,
    /// It calls a barrier of the world where the others dispatch.
    Meets,
}

/// The act of rank 2 once it goes on without rank 1, where losses are masked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// It goes on.
    GoesOn,
    /// It sleeps in its own code.
    Sleeps,
}

/// The occasion of reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// An error causes them.
    Never,
    /// The ranks get SIGUSR1 some time after the act of rank 1.
    Once,
    /// A masked loss causes them.
    Loss,
}

/// One job of three ranks; or of four, in two domains.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Play {
    pub(crate) name: &'static str,
    pub(crate) act: Act,
    pub(crate) asked: Asked,
    /// The fault of the faulty transport: the only transport, or that between domains; none for
    /// `shm`.
    pub(crate) faulty: Option<&'static str>,
    /// Whether the ranks are in two domains.
    pub(crate) among_domains: bool,
    /// The act of rank 2 after a masked loss; `None` where losses are not masked.
    pub(crate) masks: Option<Then>,
    /// The ranks that have written a report.
    pub(crate) reports: &'static [u32],
    /// The kind of the verdict, the culprits, and words of the sentence.
    pub(crate) verdict: (&'static str, &'static [u32], &'static str),
}

const PLAY: Play = Play {
    name: "",
    act: Act::Nothing,
    asked: Asked::Never,
    faulty: None,
    among_domains: false,
    masks: None,
    reports: &[0, 1, 2],
    verdict: ("", &[], ""),
};

const SILENT_LINK: &str = "kind = \"link_silent\"\nrank = 1\npeer = 0\nat = 60\n";
const SILENT_RAIL: &str = "kind = \"link_silent\"\nrank = 1\npeer = 3\nat = 20\n";
const LINK_ERROR: &str = "kind = \"link_error\"\nrank = 1\npeer = 0\nat = 60\n";
const NOTHING_MOVES: &str = "kind = \"stop\"\nrank = 1\nat = 60\n";
const HANGS: &str = "kind = \"hang\"\nrank = 1\nat = 60\n";

pub(crate) fn all() -> Vec<Play> {
    let once = Play { asked: Asked::Once, ..PLAY };
    vec![
        Play {
            name: "a_rank_that_was_killed_is_named",
            act: Act::Killed,
            reports: &[0, 2],
            verdict: ("dead", &[1], "ended without a message"),
            ..PLAY
        },
        Play {
            name: "a_rank_that_was_stopped_is_named",
            act: Act::Stopped,
            reports: &[0, 2],
            verdict: ("stopped", &[1], "was stopped, starved or cut off"),
            ..PLAY
        },
        Play {
            name: "a_rank_that_is_stopped_is_named_before_the_deadline",
            act: Act::Stopped,
            reports: &[0, 2],
            verdict: ("stopped", &[1], "sent no heartbeat for"),
            ..once
        },
        Play {
            name: "a_rank_that_sleeps_in_its_own_code_is_named",
            act: Act::Sleeps,
            verdict: ("late", &[1], "in the caller's code, after a call of combine"),
            ..PLAY
        },
        Play {
            name: "a_rank_that_sleeps_in_its_own_code_is_named_before_the_deadline",
            act: Act::Sleeps,
            verdict: ("late", &[1], "ranks 0, 2 wait for it"),
            ..once
        },
        Play {
            name: "a_rank_that_sleeps_between_send_and_receive_is_named",
            act: Act::SleepsInside,
            verdict: ("late", &[1], "in the caller's code, after a call of dispatch"),
            ..PLAY
        },
        Play {
            name: "a_link_that_carries_nothing_is_named_with_both_ends",
            faulty: Some(SILENT_LINK),
            verdict: ("broken_link", &[1, 0], "The link from rank 1 to rank 0"),
            ..PLAY
        },
        Play {
            name: "a_link_that_carries_nothing_is_named_before_the_deadline",
            faulty: Some(SILENT_LINK),
            verdict: ("broken_link", &[1, 0], "both ends live"),
            ..once
        },
        Play {
            name: "a_rank_whose_commands_stop_is_named_with_those_that_miss_them",
            faulty: Some(NOTHING_MOVES),
            verdict: ("broken_link", &[1], "The link from rank 1 to"),
            ..PLAY
        },
        Play {
            name: "a_link_between_domains_that_carries_nothing_is_named",
            faulty: Some(SILENT_RAIL),
            among_domains: true,
            reports: &[0, 1, 2, 3],
            verdict: ("broken_link", &[1, 3], "(scale-out, faulty: over shm)"),
            ..PLAY
        },
        Play {
            name: "a_rank_that_sleeps_is_named_among_domains",
            act: Act::Sleeps,
            among_domains: true,
            reports: &[0, 1, 2, 3],
            verdict: ("late", &[1], "in the caller's code"),
            ..PLAY
        },
        Play {
            name: "an_error_of_a_transport_is_named_with_both_ends",
            faulty: Some(LINK_ERROR),
            verdict: ("transport_error", &[1, 0], "link is down on purpose"),
            ..PLAY
        },
        Play {
            name: "a_transport_that_hangs_is_named",
            faulty: Some(HANGS),
            verdict: ("transport_error", &[1], "Transport faulty (scale-up) of rank 1"),
            ..PLAY
        },
        Play {
            name: "a_transport_that_hangs_is_named_before_the_deadline",
            faulty: Some(HANGS),
            verdict: ("transport_error", &[1], "hangs: it does not answer"),
            ..once
        },
        Play {
            name: "ranks_that_call_different_operations_are_named",
            act: Act::Replays,
            verdict: ("different_calls", &[1], "rank 1 called replay"),
            ..PLAY
        },
        Play {
            name: "ranks_that_wait_for_each_other_are_named",
            act: Act::Meets,
            verdict: ("cycle", &[0, 1], "wait for each other"),
            ..once
        },
        Play {
            name: "a_rank_that_failed_by_itself_is_named_with_its_words",
            act: Act::Fails,
            // Rank 1 may end before it has written its own report.
            reports: &[0, 2],
            verdict: ("failed", &[1], "out of memory"),
            ..PLAY
        },
        Play {
            name: "a_job_that_goes_on_is_healthy",
            verdict: ("healthy", &[], "no rank waits for long"),
            ..once
        },
        Play {
            name: "a_rank_that_others_go_on_without_is_named",
            act: Act::Killed,
            masks: Some(Then::GoesOn),
            reports: &[0, 2],
            verdict: ("dead", &[1], "ended without a message"),
            ..once
        },
        Play {
            name: "a_loss_that_is_masked_makes_each_of_the_others_report_once",
            act: Act::Killed,
            masks: Some(Then::GoesOn),
            asked: Asked::Loss,
            reports: &[0, 2],
            verdict: ("dead", &[1], "ended without a message"),
            ..PLAY
        },
        Play {
            name: "a_rank_that_is_late_after_a_masked_loss_is_named",
            act: Act::Killed,
            masks: Some(Then::Sleeps),
            reports: &[0, 2],
            verdict: ("late", &[2], "in the caller's code"),
            ..PLAY
        },
    ]
}
