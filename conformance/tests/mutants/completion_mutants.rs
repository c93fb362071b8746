//! Transports whose signals, events or errors are wrong, and the case that catches each.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokenyard_core::Result;
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event, Transport as _};

use crate::faulty_shm::{Below, Fault, Hot};
use crate::l0::{Turn, caught, is_put, run_within};

fn raises(command: &Command) -> bool {
    matches!(command.op, abi::TY_OP_SIGNAL | abi::TY_OP_PUT_SIGNAL)
}

/// A caller that reads a signal again sees the signal of the last round as that of this one.
#[derive(Default)]
pub(crate) struct StaleSignal {
    seen: Mutex<BTreeMap<u32, u64>>,
}
impl Fault for StaleSignal {
    const NAME: &'static str = "stale_signal";

    fn read_signal(&self, below: &Below, queue: u32, id: u32) -> u64 {
        let total = below.shm.read_signal(queue, id);
        let again = self.seen.lock().unwrap().insert(id, total) == Some(total);
        total + u64::from(total > 0 && again)
    }
}

#[test]
fn a_stale_signal_of_the_last_round_is_caught() {
    caught::<StaleSignal>("l0/payload_before_signal/r2", "signal");
}

/// Raises every 100th signal twice, as a retry does whose first try did arrive.
#[derive(Default)]
pub(crate) struct DoubledSignal(Turn);
impl Fault for DoubledSignal {
    const NAME: &'static str = "doubled_signal";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        if raises(command) && self.0.of(100) {
            // SAFETY: by this function's contract.
            unsafe { below.post(queue, Command { op: abi::TY_OP_SIGNAL, flags: 0, ..*command })? };
        }
        // SAFETY: by this function's contract.
        unsafe { below.post(queue, *command) }
    }
}

#[test]
fn a_doubled_signal_is_caught() {
    caught::<DoubledSignal>("l0/signals_count_exactly/r2", "no more");
}

/// 15 bits of immediate data for an add that may have 16.
#[derive(Default)]
pub(crate) struct NarrowAdd;
impl Fault for NarrowAdd {
    const NAME: &'static str = "narrow_add";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        // SAFETY: by this function's contract.
        unsafe { below.post(queue, Command { add: command.add & 0x7fff, ..*command }) }
    }
}

#[test]
fn a_narrow_add_is_caught() {
    caught::<NarrowAdd>("l0/signals_count_exactly/r4", "found total");
}

/// 12 bits of immediate data for the id of a signal.
#[derive(Default)]
pub(crate) struct NarrowId;
impl Fault for NarrowId {
    const NAME: &'static str = "narrow_id";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        // SAFETY: by this function's contract; a smaller id is in range as well.
        unsafe { below.post(queue, Command { signal: command.signal & 0xfff, ..*command }) }
    }
}

#[test]
fn signals_that_share_a_total_are_caught() {
    caught::<NarrowId>("l0/signals_of_many_ids/r2", "no more");
}

/// Reads an error completion as "not yet".
#[derive(Default)]
pub(crate) struct ErrorIsNotYet;
impl Fault for ErrorIsNotYet {
    const NAME: &'static str = "error_is_not_yet";

    fn poll(&self, below: &Below, queue: u32, events: &mut [Event]) -> Hot {
        let count = below.shm.poll(queue, events)?;
        let mut kept = 0;
        for at in 0..count {
            if events[at].kind == abi::TY_EVENT_DONE {
                events[kept] = events[at];
                kept += 1;
            }
        }
        Ok(kept)
    }

    fn health(&self, _: &Below) -> Result<()> {
        Ok(())
    }
}

#[test]
fn an_error_completion_read_as_not_yet_is_caught() {
    caught::<ErrorIsNotYet>("l0/errors_are_reported/r2", "found 2 events; expected 3");
}

/// Gives the error event, but reports itself healthy.
#[derive(Default)]
pub(crate) struct ForgivenError;
impl Fault for ForgivenError {
    const NAME: &'static str = "forgiven_error";

    fn health(&self, _: &Below) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_forgiven_error_is_caught() {
    caught::<ForgivenError>("l0/errors_are_reported/r2", "health is good");
}

/// Commands that are reported as done when they are picked up, and executed later.
#[derive(Default)]
struct PickedUp {
    early: Mutex<VecDeque<Event>>,
    waiting: Mutex<VecDeque<Command>>,
}

impl PickedUp {
    fn pick_up(&self, queue: u32, command: &Command) -> Hot {
        let Command { peer, tag, .. } = *command;
        let done = Event { kind: abi::TY_EVENT_DONE, queue, peer, status: abi::TY_OK, tag };
        self.early.lock().unwrap().push_back(done);
        self.waiting.lock().unwrap().push_back(Command { flags: 0, ..*command });
        Ok(1)
    }

    fn poll(&self, below: &Below, queue: u32, events: &mut [Event]) -> Hot {
        if let (Some(done), Some(room)) =
            (self.early.lock().unwrap().pop_front(), events.first_mut())
        {
            *room = done;
            return Ok(1);
        }
        if let Some(command) = self.waiting.lock().unwrap().pop_front() {
            // SAFETY: a posted command; its bytes may have changed, or may be in use, which is the fault, but they are
            // still memory of the window.
            unsafe { below.post(queue, command)? };
        }
        below.shm.poll(queue, events)
    }
}

/// Reports puts as done too early.
#[derive(Default)]
pub(crate) struct DoneAtPickUp(PickedUp);
impl Fault for DoneAtPickUp {
    const NAME: &'static str = "done_at_pick_up";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        if is_put(command) && command.flags & abi::TY_FLAG_NOTIFY != 0 {
            return self.0.pick_up(queue, command);
        }
        // SAFETY: by this function's contract.
        unsafe { below.post(queue, *command) }
    }

    fn poll(&self, below: &Below, queue: u32, events: &mut [Event]) -> Hot {
        self.0.poll(below, queue, events)
    }
}

/// Reports gets as done before their bytes have come.
#[derive(Default)]
pub(crate) struct EarlyGet(PickedUp);
impl Fault for EarlyGet {
    const NAME: &'static str = "early_get";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        if command.op == abi::TY_OP_GET && command.flags & abi::TY_FLAG_NOTIFY != 0 {
            return self.0.pick_up(queue, command);
        }
        // SAFETY: by this function's contract.
        unsafe { below.post(queue, *command) }
    }

    fn poll(&self, below: &Below, queue: u32, events: &mut [Event]) -> Hot {
        self.0.poll(below, queue, events)
    }
}

/// Gets never end.
#[derive(Default)]
pub(crate) struct StalledGet;
impl Fault for StalledGet {
    const NAME: &'static str = "stalled_get";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        if command.op == abi::TY_OP_GET {
            return Ok(1);
        }
        // SAFETY: by this function's contract.
        unsafe { below.post(queue, *command) }
    }
}

#[test]
fn a_slot_reused_at_pick_up_is_caught() {
    caught::<DoneAtPickUp>(
        "l0/done_means_source_reusable/r2",
        "when its source was overwritten (INV-4)",
    );
}

/// Reports every 50th done event again.
#[derive(Default)]
pub(crate) struct DoneTwice(Turn, Mutex<Option<Event>>);
impl Fault for DoneTwice {
    const NAME: &'static str = "done_twice";

    fn poll(&self, below: &Below, queue: u32, events: &mut [Event]) -> Hot {
        if let (Some(again), Some(room)) = (self.1.lock().unwrap().take(), events.first_mut()) {
            *room = again;
            return Ok(1);
        }
        let count = below.shm.poll(queue, events)?;
        let twice = events[..count].iter().find(|_| self.0.of(50));
        *self.1.lock().unwrap() = twice.copied();
        Ok(count)
    }
}

#[test]
fn a_second_done_event_is_caught() {
    caught::<DoneTwice>("l0/every_notified_command_completes_once/r2", "found a second event");
}

/// Tags of 32 bits.
#[derive(Default)]
pub(crate) struct NarrowTag;
impl Fault for NarrowTag {
    const NAME: &'static str = "narrow_tag";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        // SAFETY: by this function's contract.
        unsafe { below.post(queue, Command { tag: command.tag & 0xffff_ffff, ..*command }) }
    }
}

#[test]
fn a_narrow_tag_is_caught() {
    caught::<NarrowTag>("l0/every_notified_command_completes_once/r2", "unknown tag");
}

/// Accepts commands that do not fit, and drops them.
#[derive(Default)]
pub(crate) struct Overrun;
impl Fault for Overrun {
    const NAME: &'static str = "overrun";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        // SAFETY: by this function's contract.
        unsafe { below.post(queue, *command)? };
        Ok(1)
    }
}

#[test]
fn an_overrun_queue_is_caught() {
    caught::<Overrun>("l0/queue_full_is_back_pressure/r2", "found 4 events; expected 1000");
}

/// The unbroken transport on a machine that is busy: an event at a time, each after 4 ms.
#[derive(Default)]
pub(crate) struct Slow;
impl Fault for Slow {
    const NAME: &'static str = "slow";

    fn poll(&self, below: &Below, queue: u32, events: &mut [Event]) -> Hot {
        std::thread::sleep(Duration::from_millis(4));
        below.shm.poll(queue, &mut events[..1])
    }
}

#[test]
fn a_full_queue_that_goes_on_may_take_longer_than_the_deadline() {
    let start = Instant::now();
    let found = run_within(3000, Slow::NAME, "l0/queue_full_is_back_pressure/r2");
    assert!(found.is_empty(), "{found:#?}");
    assert!(start.elapsed() > Duration::from_secs(3), "the case took less than the deadline");
}

/// All queues are one queue.
#[derive(Default)]
pub(crate) struct OneQueueForAll;
impl Fault for OneQueueForAll {
    const NAME: &'static str = "one_queue_for_all_queues";

    unsafe fn post(&self, below: &Below, _: u32, command: &Command) -> Hot {
        // SAFETY: by this function's contract; the case uses one thread until it fails.
        unsafe { below.post(0, *command) }
    }

    fn poll(&self, below: &Below, _: u32, events: &mut [Event]) -> Hot {
        below.shm.poll(0, events)
    }
}

#[test]
fn queues_that_are_one_are_caught() {
    caught::<OneQueueForAll>(
        "l0/queues_are_independent/r2",
        "expected the queue on which its command was posted",
    );
}
