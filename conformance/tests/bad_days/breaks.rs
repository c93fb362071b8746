//! Every fault of a link, after every number of commands and so in every phase: the ranks end in time, and
//! their errors name the rank, the phase and the link.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokenyard_conformance::moe::exchange;
use tokenyard_conformance::moe::oracle::Case;
use tokenyard_conformance::moe::round::Round;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::communicator::Communicator;
use tokenyard_core::{Error, ErrorKind};

use crate::{DEADLINE, config, meeting, small};

/// The time beyond the deadline that an error may take: no busy machine makes it ten deadlines, and a wait
/// without a deadline takes more.
const GRACE: Duration = Duration::from_secs(10);
/// Exchanges that go on for so long show that nothing broke, or that no rank noticed.
const PATIENCE: Duration = Duration::from_secs(60);
/// Runs at the same time: the ranks mostly wait.
const AT_ONCE: usize = 6;
/// More than the commands of an exchange of two ranks.
const COMMANDS: u64 = 44;

/// How one run ended.
struct Ended {
    /// The error of each rank, by rank.
    errors: Vec<Error>,
    /// The time from the last step that any rank completed to the last error.
    took: Duration,
}

fn transport(fault: &str) -> String {
    format!(
        "use = \"faulty\"\n[transport.scale_up.faulty]\ninner = \"shm\"\nreorder = 4\nquiet = 2\n\
         fault = {{ {fault} }}\nshm = {{ load_store = false }}"
    )
}

/// Holds a rank's world open until the other rank has ended too, so that the other rank ends by the fault
/// and not because this rank has left.
fn meet_again(ended: &AtomicUsize) {
    ended.fetch_add(1, Ordering::AcqRel);
    let start = Instant::now();
    while ended.load(Ordering::Acquire) < 2 && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Two ranks exchange until both have an error.
fn run(fault: &str) -> Ended {
    let broken = config(&transport(fault), DEADLINE);
    let steps = Mutex::new(Instant::now());
    let ended = AtomicUsize::new(0);
    let results = in_threads(2, &meeting(), |world| -> anyhow::Result<(Error, Instant)> {
        let case = small(2);
        let mut comm = Communicator::open(world, &broken, exchange::options(&case))?;
        let start = Instant::now();
        for seed in 0.. {
            let round = Round::new(&Case { seed, ..case.clone() }, comm.rank());
            *steps.lock().unwrap() = Instant::now();
            if let Err(error) = round.run(&mut comm) {
                let now = Instant::now();
                meet_again(&ended);
                return Ok((error.downcast()?, now));
            }
            assert!(start.elapsed() < PATIENCE, "{fault}: nothing broke in {PATIENCE:?}");
        }
        unreachable!("the loop returns")
    });
    let results: Vec<_> = results.unwrap().into_iter().map(Result::unwrap).collect();
    let last = results.iter().map(|(_, at)| *at).max().unwrap();
    let took = last.saturating_duration_since(*steps.lock().unwrap());
    Ended { errors: results.into_iter().map(|(error, _)| error).collect(), took }
}

/// Runs `fault` after every number of commands, judges each end, and returns the phases that rank 0 was in.
fn sweep(kind: &str, judge: impl Fn(&Ended) -> Result<(), String> + Sync) -> BTreeSet<String> {
    let peer = if kind.starts_with("link") { ", peer = 0" } else { "" };
    let next = AtomicUsize::new(0);
    let phases = Mutex::new(BTreeSet::new());
    let took = Mutex::new(Duration::ZERO);
    let one = |at: usize| {
        let ended = run(&format!("kind = \"{kind}\", rank = 1, at = {at}{peer}"));
        if let Err(wrong) = judge(&ended) {
            let errors = &ended.errors;
            panic!("{kind} at command {at}: {wrong}\nrank 0: {}\nrank 1: {}", errors[0], errors[1]);
        }
        phases.lock().unwrap().extend(phase_of(&ended.errors[0]));
        let mut most = took.lock().unwrap();
        *most = most.max(ended.took);
    };
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= COMMANDS as usize {
                        return;
                    }
                    one(at);
                }
            });
        }
    });
    let (took, limit) = (took.into_inner().unwrap(), DEADLINE + GRACE);
    assert!(took <= limit, "{kind}: an end took {took:?}; expected at most {limit:?}");
    phases.into_inner().unwrap()
}

/// The phase of the rank that has the error. A report that it quotes from another rank comes before it in
/// the text.
fn phase_of(error: &Error) -> Option<String> {
    let text = error.to_string();
    Some(text.rsplit_once("phase `")?.1.split_once('`')?.0.to_owned())
}

fn says(error: &Error, words: &[&str]) -> Result<(), String> {
    let text = error.to_string();
    match words.iter().find(|word| !text.contains(**word)) {
        Some(word) => Err(format!("the error `{text}` does not say `{word}`")),
        None => Ok(()),
    }
}

const PHASES: [&str; 4] = ["combine rows", "dispatch rows", "entry", "grant"];

/// Rank 0 waits for commands that never arrive; rank 1 waits for commands that rank 0 does not send because
/// of it, or for its own.
fn silence(ended: &Ended) -> Result<(), String> {
    for (rank, error) in ended.errors.iter().enumerate() {
        if !matches!(error.kind(), ErrorKind::Deadline | ErrorKind::PeerLost) {
            return Err(format!("rank {rank}: found {:?}", error.kind()));
        }
        says(error, &["phase `", "expected", "operation"])?;
    }
    if ended.errors[0].rank() != Some(1) {
        return Err(format!("rank 0's error is about {:?}", ended.errors[0].rank()));
    }
    says(&ended.errors[0], &["rank 1", "the scale-up link to rank 1 is faulty: over shm"])
}

#[test]
fn a_rank_whose_commands_stop_is_named_in_every_phase() {
    let phases = sweep("stop", silence);
    assert!(PHASES.iter().all(|phase| phases.contains(*phase)), "{phases:?}");
}

#[test]
fn a_link_that_goes_silent_is_named_in_every_phase() {
    let phases = sweep("link_silent", silence);
    assert!(PHASES.iter().all(|phase| phases.contains(*phase)), "{phases:?}");
}

/// Rank 1 sees the error; rank 0 receives its report.
fn failure(ended: &Ended) -> Result<(), String> {
    let [heard, own] = &ended.errors[..] else { return Err("two ranks".into()) };
    if own.kind() != ErrorKind::Transport {
        return Err(format!("rank 1: found {:?}; expected a transport's error", own.kind()));
    }
    says(own, &["on purpose", "to rank"])?;
    if (heard.kind(), heard.rank()) != (ErrorKind::PeerLost, Some(1)) {
        return Err(format!("rank 0: found {:?} about {:?}", heard.kind(), heard.rank()));
    }
    says(heard, &["on purpose", "the scale-up link to rank 1 is faulty: over shm"])
}

#[test]
fn a_command_that_fails_ends_the_operation_on_all_ranks_in_every_phase() {
    sweep("fail", failure);
}

#[test]
fn a_link_that_reports_errors_ends_the_operation_on_all_ranks_in_every_phase() {
    sweep("link_error", failure);
}

/// A regression test: a rank that could not flush blocked the others in the barrier until it left the
/// world.
#[test]
fn a_close_that_cannot_flush_ends_on_every_rank_with_the_reason() {
    let case = small(2);
    // The last command of the exchange. The test finds it by trial, because only the rank itself would
    // notice its loss.
    let closed_late = (1..COMMANDS).rev().find_map(|at| {
        let fault = format!("kind = \"stop\", rank = 1, at = {at}");
        let broken = config(&transport(&fault), DEADLINE);
        let ended = AtomicUsize::new(0);
        let results = in_threads(2, &meeting(), |world| -> anyhow::Result<_> {
            let mut comm = Communicator::open(world, &broken, exchange::options(&case))?;
            let exchanged = Round::new(&case, comm.rank()).run(&mut comm);
            let closed = exchanged.and_then(|_| Ok(comm.close()?));
            meet_again(&ended);
            Ok(closed)
        });
        let ended: Vec<_> = results.unwrap().into_iter().map(Result::unwrap).collect();
        ended.iter().any(|result| result.is_err()).then_some(ended)
    });
    let ended = closed_late.unwrap();
    for (rank, result) in ended.into_iter().enumerate() {
        let text = format!("{:#}", result.unwrap_err());
        assert!(text.contains("queue room"), "rank {rank}: {text}");
    }
}
