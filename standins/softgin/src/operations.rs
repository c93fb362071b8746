//! Operations between their post and their end: delayed, reordered, failed or never executed, as the config says.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use tokenyard_faulty::Rng;

use crate::abi;
use crate::config::Config;
use crate::cuda::{Cuda, Slot};
use crate::failure::{Failure, Result};
use crate::inbox::{Inbox, SignalMessage};
use crate::region::{End, copy_on_host};

/// A copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    pub(crate) to: End,
    pub(crate) from: End,
    pub(crate) bytes: usize,
    /// The source's value when the operation was posted, where it is a value of the host for a device.
    pub(crate) value: Option<[u8; 8]>,
}

/// An operation that NCCL asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    pub(crate) peer: usize,
    /// None where nothing is copied.
    pub(crate) transfer: Option<Transfer>,
    pub(crate) signal: Option<SignalMessage>,
    /// The signal settles all earlier puts to the peer, not its own alone.
    pub(crate) is_strong: bool,
}

#[derive(Debug)]
enum State {
    Held(Instant),
    Flying(Slot),
    /// The bytes are copied; the signal is not sent yet.
    Landed,
    Done,
}

/// The parts of the team that operations use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Means<'a> {
    pub(crate) me: usize,
    pub(crate) inboxes: &'a [Arc<Inbox>],
    pub(crate) cuda: Option<&'a Arc<Cuda>>,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Operations {
    config: Config,
    rng: Rng,
    /// Operations ever posted. The first has number 1, so no request is null.
    posted: u64,
    /// Operations by number, and so in the order in which they were posted.
    open: BTreeMap<u64, (Operation, State)>,
    /// Operations that have begun and are not done, in the order in which they began.
    begun: Vec<u64>,
    failed: bool,
}

impl Operations {
    pub(crate) fn new(config: Config, rank: u32) -> Self {
        let rng = Rng::new(config.seed, [rank, 0]);
        Self { config, rng, posted: 0, open: BTreeMap::new(), begun: Vec::new(), failed: false }
    }

    /// Takes an operation, and returns its number.
    pub(crate) fn post(&mut self, operation: Operation) -> u64 {
        self.posted += 1;
        let most = self.config.delay.as_micros() as u64;
        let held = std::time::Duration::from_micros(self.rng.below(most + 1));
        self.open.insert(self.posted, (operation, State::Held(Instant::now() + held)));
        self.posted
    }

    /// Whether operation `number` has ended. The caller asks until it has.
    ///
    /// # Errors
    /// The call that failed; from `fail_at` on, always the planted failure.
    pub(crate) fn test(&mut self, number: u64, means: Means<'_>) -> Result<bool> {
        self.advance(means)?;
        match self.open.get(&number) {
            Some((_, State::Done)) => {
                self.open.remove(&number);
                Ok(true)
            }
            Some(_) => Ok(false),
            None => {
                let text = format!("found request {number}; expected one that has not ended");
                Err(Failure::new(abi::INVALID_ARGUMENT, text))
            }
        }
    }

    /// Advances every operation as far as is possible now.
    pub(crate) fn advance(&mut self, means: Means<'_>) -> Result<()> {
        if self.failed {
            let text = format!("fail_at={}: a planted failure", self.config.fail_at);
            return Err(Failure::new(abi::REMOTE_ERROR, text));
        }
        while let Some(number) = self.draw() {
            if number == self.config.fail_at {
                self.failed = true;
                return self.advance(means);
            }
            if !self.start(number, means)? {
                break;
            }
            self.begun.push(number);
        }
        self.land(means)?;
        self.signal(means);
        Ok(())
    }

    /// Draws one of the operations that are due.
    fn draw(&mut self) -> Option<u64> {
        let now = Instant::now();
        let stop = self.config.stop_at;
        let due = self.open.iter().filter(|(number, (_, state))| {
            let runs = stop == 0 || **number < stop;
            runs && matches!(state, State::Held(due) if *due <= now)
        });
        let most = self.config.reorder as usize + 1;
        let due: Vec<u64> = due.map(|(number, _)| *number).take(most).collect();
        due.get(self.rng.below(due.len() as u64) as usize).copied()
    }

    /// Begins an operation; false where the operation has to wait for a slot.
    fn start(&mut self, number: u64, means: Means<'_>) -> Result<bool> {
        let Some((operation, state)) = self.open.get_mut(&number) else { return Ok(true) };
        *state = match operation.transfer {
            None => State::Landed,
            Some(transfer) => {
                let Some(cuda) = means.cuda.filter(|_| is_for_device(&transfer)) else {
                    copy_on_host(transfer.to, transfer.from, transfer.bytes)?;
                    *state = State::Landed;
                    return Ok(true);
                };
                let Some(slot) = cuda.take_slot() else { return Ok(false) };
                let from = match transfer.value {
                    Some(value) => cuda.place(&slot, value),
                    None => address(transfer.from),
                };
                cuda.copy(&slot, operation.peer, [address(transfer.to), from], transfer.bytes)?;
                State::Flying(slot)
            }
        };
        Ok(true)
    }

    fn land(&mut self, means: Means<'_>) -> Result<()> {
        let Some(cuda) = means.cuda else { return Ok(()) };
        for (_, state) in self.open.values_mut() {
            let State::Flying(slot) = state else { continue };
            if cuda.is_over(slot)?
                && let State::Flying(slot) = std::mem::replace(state, State::Landed)
            {
                cuda.free_slot(slot);
            }
        }
        Ok(())
    }

    /// Sends the signals of operations that have landed. An operation is done once its signal is sent.
    fn signal(&mut self, means: Means<'_>) {
        let mut begun = std::mem::take(&mut self.begun);
        begun.retain(|number| !self.is_done(*number, means));
        self.begun = begun;
    }

    fn is_done(&mut self, number: u64, means: Means<'_>) -> bool {
        let Some((operation, State::Landed)) = self.open.get(&number) else { return false };
        let (peer, signal) = (operation.peer, operation.signal);
        let mut before = self.open.range(..number).map(|(_, other)| other);
        let unsettled =
            before.any(|(other, state)| other.peer == peer && !matches!(state, State::Done));
        if operation.is_strong && unsettled {
            return false;
        }
        if !signal.is_none_or(|signal| means.inboxes[peer].put(means.me, signal)) {
            return false;
        }
        if let Some((_, state)) = self.open.get_mut(&number) {
            *state = State::Done;
        }
        true
    }
}

fn is_for_device(transfer: &Transfer) -> bool {
    matches!(transfer.to, End::Device(_)) || matches!(transfer.from, End::Device(_))
}

fn address(end: End) -> u64 {
    match end {
        End::Host(at) | End::Device(at) | End::Process(_, at) => at,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests fail by panic")]
mod tests {
    use std::time::Duration;

    use super::*;

    /// The order in which the signals of `count` puts reach the peer, once `done` of them are done.
    fn order(config: Config, count: u64, strong_at: u64, done: u64) -> Vec<u64> {
        let inboxes = [Arc::new(Inbox::new().unwrap())];
        let means = Means { me: 0, inboxes: &inboxes, cuda: None };
        let mut operations = Operations::new(config, 0);
        let mut requests: Vec<u64> = (1..=count)
            .map(|add| {
                let signal = Some(SignalMessage { region: 0, offset: 0, add });
                let is_strong = add == strong_at;
                operations.post(Operation { peer: 0, transfer: None, signal, is_strong })
            })
            .collect();
        while requests.len() as u64 > count - done {
            requests.retain(|request| !operations.test(*request, means).unwrap());
        }
        // The other operations stay open.
        for _ in 0..100 {
            assert!(requests.iter().all(|request| !operations.test(*request, means).unwrap()));
        }
        std::iter::from_fn(|| inboxes[0].take(0)).map(|message| message.add).collect()
    }

    #[test]
    fn a_good_day_keeps_the_order_and_a_seed_gives_one_of_its_own() {
        let numbers: Vec<u64> = (1..=32).collect();
        assert_eq!(order(Config::default(), 32, 0, 32), numbers);
        let bad = |seed| order(Config { seed, reorder: 8, ..Config::default() }, 32, 0, 32);
        assert_eq!(bad(1), bad(1));
        assert_ne!(bad(1), bad(2));
        assert_ne!(bad(1), numbers);
        let mut sorted = bad(1);
        sorted.sort_unstable();
        assert_eq!(sorted, numbers);
    }

    #[test]
    fn a_strong_signal_comes_behind_all_before_it_whatever_the_order() {
        for seed in 0..20 {
            let delay = Duration::from_millis(2);
            let config = Config { seed, reorder: 16, delay, ..Config::default() };
            let found = order(config, 16, 9, 16);
            let place = |add| found.iter().position(|it| *it == add).unwrap();
            assert!((1..9).all(|before| place(before) < place(9)), "{found:?}");
        }
    }

    #[test]
    fn what_stops_is_never_done_and_no_error() {
        let config = Config { stop_at: 4, ..Config::default() };
        assert_eq!(order(config, 6, 0, 3), [1, 2, 3]);
    }

    #[test]
    fn a_failure_stays() {
        let inboxes = [Arc::new(Inbox::new().unwrap())];
        let means = Means { me: 0, inboxes: &inboxes, cuda: None };
        let mut operations = Operations::new(Config { fail_at: 2, ..Config::default() }, 0);
        let blank = Operation { peer: 0, transfer: None, signal: None, is_strong: false };
        let first = operations.post(blank);
        assert!(operations.test(first, means).unwrap());
        let second = operations.post(blank);
        for _ in 0..2 {
            let error = operations.test(second, means).unwrap_err();
            assert_eq!(error.code, abi::REMOTE_ERROR);
        }
        assert!(operations.test(99, means).is_err());
    }
}
