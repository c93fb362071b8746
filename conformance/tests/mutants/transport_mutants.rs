//! Broken transports, and the case of level L0 that catches each.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_conformance::suite::{Outcome, Rank};
use tokenyard_conformance::transport;
use tokenyard_core::Result;
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event, Transport as _};

use crate::faulty_shm::{Below, Fault, Hot};
use crate::{assert_caught, config, failures};

/// Runs the test `name` of L0 on the transport `part`.
fn run(part: &str, name: &str) -> Vec<String> {
    tokenyard_cpu::link();
    let config = config("cpu", part);
    let capabilities = transport::probe(&config).unwrap();
    let tests = transport::tests(&capabilities);
    let test = tests.iter().find(|test| test.name == name).unwrap();
    failures(test.ranks, &config, |world| {
        let rank = Rank { world, config: &config, capabilities: &capabilities };
        let outcome = (test.body)(&rank)?;
        anyhow::ensure!(outcome == Outcome::Pass, "{name} did not run: {outcome:?}");
        Ok(())
    })
}

fn caught<F: Fault>(case: &str, why: &str) {
    let loads = F::KEEPS & abi::TY_CAP_LOAD_STORE != 0;
    let intact = if loads { IntactLoadStore::NAME } else { Intact::NAME };
    assert_caught(F::NAME, case, why, |broken| run(if broken { F::NAME } else { intact }, case));
}

#[test]
fn an_unbroken_transport_passes_every_case() {
    tokenyard_cpu::link();
    for part in [IntactLoadStore::NAME, Intact::NAME] {
        let capabilities = transport::probe(&config("cpu", part)).unwrap();
        for test in transport::tests(&capabilities) {
            let lacks = part == Intact::NAME
                && ["l0/peer_addresses", "l0/stored_payload"]
                    .iter()
                    .any(|n| test.name.starts_with(n));
            let found = run(part, &test.name);
            let right = if lacks {
                found.iter().all(|e| e.contains("NotSupported(\"TY_CAP_LOAD_STORE\")"))
                    && !found.is_empty()
            } else {
                found.is_empty()
            };
            assert!(right, "{} on {part}: {found:#?}", test.name);
        }
    }
}

/// Counts calls; says when it is the turn of every `n`-th.
#[derive(Default)]
struct Turn(AtomicU64);

impl Turn {
    fn of(&self, n: u64) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) % n == n - 1
    }
}

/// Commands that carry a payload.
fn is_put(command: &Command) -> bool {
    matches!(command.op, abi::TY_OP_PUT | abi::TY_OP_PUT_SIGNAL) && command.bytes > 0
}

fn raises(command: &Command) -> bool {
    matches!(command.op, abi::TY_OP_SIGNAL | abi::TY_OP_PUT_SIGNAL)
}

/// The unbroken transport, without load and store.
#[derive(Default)]
pub(crate) struct Intact;
impl Fault for Intact {
    const NAME: &'static str = "intact";
}

/// The unbroken transport.
#[derive(Default)]
pub(crate) struct IntactLoadStore;
impl Fault for IntactLoadStore {
    const NAME: &'static str = "intact_load_store";
    const KEEPS: u64 = abi::TY_CAP_GET | abi::TY_CAP_LOAD_STORE;
}

/// The signal overtakes the payload, as on a fabric that reorders and a transport that does not wait.
#[derive(Default)]
pub(crate) struct SignalBeforePayload;
impl Fault for SignalBeforePayload {
    const NAME: &'static str = "signal_before_payload";

    unsafe fn post(&self, below: &Below, lane: u32, command: &Command) -> Hot {
        if command.op != abi::TY_OP_PUT_SIGNAL || !is_put(command) {
            // SAFETY: by this function's contract.
            return unsafe { below.post(lane, *command) };
        }
        // SAFETY: two halves of a command that is valid by this function's contract.
        unsafe {
            below.post(lane, Command { op: abi::TY_OP_SIGNAL, flags: 0, ..*command })?;
            std::thread::yield_now();
            below.post(lane, Command { op: abi::TY_OP_PUT, ..*command })
        }
    }
}

#[test]
fn a_signal_before_its_payload_is_caught() {
    caught::<SignalBeforePayload>("l0/payload_before_signal/r2", "seen with its signal");
}

/// Every 30th put is dropped on the floor, its signal too, and reported as done.
#[derive(Default)]
pub(crate) struct LostPut(Turn);
impl Fault for LostPut {
    const NAME: &'static str = "lost_put";

    unsafe fn post(&self, below: &Below, lane: u32, command: &Command) -> Hot {
        let mut command = *command;
        if is_put(&command) && self.0.of(30) {
            (command.op, command.bytes) = (abi::TY_OP_PUT, 0);
        }
        // SAFETY: by this function's contract; nothing moves if it was cut to 0 bytes.
        unsafe { below.post(lane, command) }
    }
}

#[test]
fn a_lost_put_is_caught() {
    caught::<LostPut>("l0/no_put_is_lost/r2", "nothing more came within");
}

/// Every 30th put raises its signal and forgets its payload.
#[derive(Default)]
pub(crate) struct LostPayload(Turn);
impl Fault for LostPayload {
    const NAME: &'static str = "lost_payload";

    unsafe fn post(&self, below: &Below, lane: u32, command: &Command) -> Hot {
        let lost = command.op == abi::TY_OP_PUT_SIGNAL && self.0.of(30);
        let bytes = if lost { 0 } else { command.bytes };
        // SAFETY: by this function's contract.
        unsafe { below.post(lane, Command { bytes, ..*command }) }
    }
}

#[test]
fn a_lost_payload_is_caught() {
    caught::<LostPayload>("l0/payload_before_signal/r4", "seen with its signal");
}

/// Lengths of 20 bits, as in a work request of that width.
#[derive(Default)]
pub(crate) struct CutPut;
impl Fault for CutPut {
    const NAME: &'static str = "cut_put";

    unsafe fn post(&self, below: &Below, lane: u32, command: &Command) -> Hot {
        // SAFETY: by this function's contract; a shorter put is inside what a longer one is.
        unsafe { below.post(lane, Command { bytes: command.bytes & 0xf_ffff, ..*command }) }
    }
}

#[test]
fn a_cut_put_is_caught() {
    caught::<CutPut>("l0/no_put_is_lost/r2", "seen with its signal");
}

/// Values are stored in two halves.
#[derive(Default)]
pub(crate) struct TornValue;
impl Fault for TornValue {
    const NAME: &'static str = "torn_value";

    unsafe fn post(&self, below: &Below, lane: u32, command: &Command) -> Hot {
        if command.op != abi::TY_OP_PUT_VALUE {
            // SAFETY: by this function's contract.
            return unsafe { below.post(lane, *command) };
        }
        let window = below.shm.peer_address(command.dst_window.into(), command.peer);
        let Ok(window) = window else { return Err(abi::TY_INTERNAL) };
        let halves = window.wrapping_add(command.dst_offset as usize).cast::<u32>();
        // SAFETY: 8 aligned bytes of the peer's window, by this function's contract; volatile,
        // because the reader looks at the same time: that is the fault.
        unsafe {
            halves.write_volatile(command.value as u32);
            std::thread::yield_now();
            halves.add(1).write_volatile((command.value >> 32) as u32);
        }
        Ok(1)
    }
}

#[test]
fn a_torn_eight_byte_value_is_caught() {
    caught::<TornValue>("l0/eight_byte_values_arrive_whole/r2", "expected 0x0123456789abcdef or");
}

/// Payloads take the neighbour's rail; signals arrive where they should.
#[derive(Default)]
pub(crate) struct NeighbourRail;
impl Fault for NeighbourRail {
    const NAME: &'static str = "neighbour_rail";

    unsafe fn post(&self, below: &Below, lane: u32, command: &Command) -> Hot {
        let mut rest = *command;
        if is_put(command) {
            let peer = (command.peer + 1) % below.ranks;
            let stray = Command { op: abi::TY_OP_PUT, flags: 0, peer, ..*command };
            // SAFETY: windows are alike on all ranks; the rest is this function's contract.
            unsafe { below.post(lane, stray)? };
            rest.bytes = 0;
        }
        // SAFETY: by this function's contract.
        unsafe { below.post(lane, rest) }
    }
}

#[test]
fn a_put_on_the_neighbour_rail_is_caught() {
    caught::<NeighbourRail>("l0/puts_reach_the_right_place/r4", "bytes are wrong");
}

/// Two entries of the table of peers are exchanged.
#[derive(Default)]
pub(crate) struct WrongPeer;
impl Fault for WrongPeer {
    const NAME: &'static str = "wrong_peer";

    unsafe fn post(&self, below: &Below, lane: u32, command: &Command) -> Hot {
        // SAFETY: windows are alike on all ranks; the rest is this function's contract.
        unsafe { below.post(lane, Command { peer: command.peer ^ 1, ..*command }) }
    }
}

#[test]
fn commands_to_the_wrong_peer_are_caught() {
    caught::<WrongPeer>("l0/puts_reach_the_right_place/r2", "bytes are wrong");
}

/// The source window's id is used on both sides.
#[derive(Default)]
pub(crate) struct WrongWindow;
impl Fault for WrongWindow {
    const NAME: &'static str = "wrong_window";

    unsafe fn post(&self, below: &Below, lane: u32, command: &Command) -> Hot {
        let mut command = *command;
        // Only where it is in range: a fault, not a crash.
        if is_put(&command) && command.src_window < command.dst_window && command.dst_offset < 4096
        {
            command.dst_window = command.src_window;
        }
        // SAFETY: the window named is longer than the offset and the few bytes of the case.
        unsafe { below.post(lane, command) }
    }
}

#[test]
fn the_wrong_window_is_caught() {
    caught::<WrongWindow>("l0/payload_before_signal/r2", "seen with its signal");
}

/// Destinations are rounded down to 16 bytes.
#[derive(Default)]
pub(crate) struct AlignedOffset;
impl Fault for AlignedOffset {
    const NAME: &'static str = "aligned_offset";

    unsafe fn post(&self, below: &Below, lane: u32, command: &Command) -> Hot {
        let dst_offset = command.dst_offset & !15;
        // SAFETY: by this function's contract; a smaller offset is inside the window as well.
        unsafe { below.post(lane, Command { dst_offset, ..*command }) }
    }
}

#[test]
fn a_rounded_offset_is_caught() {
    caught::<AlignedOffset>("l0/no_put_is_lost/r3", "seen with its signal");
}

/// Who looks again sees the signal of the last round as that of this one.
#[derive(Default)]
pub(crate) struct StaleSignal {
    seen: Mutex<BTreeMap<u32, u64>>,
}
impl Fault for StaleSignal {
    const NAME: &'static str = "stale_signal";

    fn read_signal(&self, below: &Below, lane: u32, id: u32) -> u64 {
        let total = below.shm.read_signal(lane, id);
        let again = self.seen.lock().unwrap().insert(id, total) == Some(total);
        total + u64::from(total > 0 && again)
    }
}

#[test]
fn a_stale_signal_of_the_last_round_is_caught() {
    caught::<StaleSignal>("l0/payload_before_signal/r2", "signal");
}

/// Every 100th signal is raised twice, as by a retry that did arrive the first time.
#[derive(Default)]
pub(crate) struct DoubledSignal(Turn);
impl Fault for DoubledSignal {
    const NAME: &'static str = "doubled_signal";

    unsafe fn post(&self, below: &Below, lane: u32, command: &Command) -> Hot {
        if raises(command) && self.0.of(100) {
            // SAFETY: by this function's contract.
            unsafe { below.post(lane, Command { op: abi::TY_OP_SIGNAL, flags: 0, ..*command })? };
        }
        // SAFETY: by this function's contract.
        unsafe { below.post(lane, *command) }
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

    unsafe fn post(&self, below: &Below, lane: u32, command: &Command) -> Hot {
        // SAFETY: by this function's contract.
        unsafe { below.post(lane, Command { add: command.add & 0x7fff, ..*command }) }
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

    unsafe fn post(&self, below: &Below, lane: u32, command: &Command) -> Hot {
        // SAFETY: by this function's contract; a smaller id is in range as well.
        unsafe { below.post(lane, Command { signal: command.signal & 0xfff, ..*command }) }
    }
}

#[test]
fn signals_that_share_a_total_are_caught() {
    caught::<NarrowId>("l0/signals_of_many_ids/r2", "no more");
}

/// An error completion is read as "not yet".
#[derive(Default)]
pub(crate) struct ErrorIsNotYet;
impl Fault for ErrorIsNotYet {
    const NAME: &'static str = "error_is_not_yet";

    fn poll(&self, below: &Below, lane: u32, events: &mut [Event]) -> Hot {
        let count = below.shm.poll(lane, events)?;
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

/// The event is there, but the transport calls itself healthy.
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

/// Commands are done when they were picked up; they are executed later.
#[derive(Default)]
pub(crate) struct DoneAtPickUp {
    early: Mutex<VecDeque<Event>>,
    waiting: Mutex<VecDeque<Command>>,
}
impl Fault for DoneAtPickUp {
    const NAME: &'static str = "done_at_pick_up";

    unsafe fn post(&self, below: &Below, lane: u32, command: &Command) -> Hot {
        if !is_put(command) || command.flags & abi::TY_FLAG_NOTIFY == 0 {
            // SAFETY: by this function's contract.
            return unsafe { below.post(lane, *command) };
        }
        let Command { peer, tag, .. } = *command;
        let done = Event { kind: abi::TY_EVENT_DONE, lane, peer, status: abi::TY_OK, tag };
        self.early.lock().unwrap().push_back(done);
        self.waiting.lock().unwrap().push_back(Command { flags: 0, ..*command });
        Ok(1)
    }

    fn poll(&self, below: &Below, lane: u32, events: &mut [Event]) -> Hot {
        if let (Some(done), Some(room)) =
            (self.early.lock().unwrap().pop_front(), events.first_mut())
        {
            *room = done;
            return Ok(1);
        }
        if let Some(command) = self.waiting.lock().unwrap().pop_front() {
            // SAFETY: a posted command; its source may have changed, which is the fault, but it is
            // memory of the window still.
            unsafe { below.post(lane, command)? };
        }
        below.shm.poll(lane, events)
    }
}

#[test]
fn a_slot_reused_at_pick_up_is_caught() {
    caught::<DoneAtPickUp>("l0/done_means_source_reusable/r2", "whose source was overwritten");
}

/// Every 50th done event is reported again.
#[derive(Default)]
pub(crate) struct DoneTwice(Turn, Mutex<Option<Event>>);
impl Fault for DoneTwice {
    const NAME: &'static str = "done_twice";

    fn poll(&self, below: &Below, lane: u32, events: &mut [Event]) -> Hot {
        if let (Some(again), Some(room)) = (self.1.lock().unwrap().take(), events.first_mut()) {
            *room = again;
            return Ok(1);
        }
        let count = below.shm.poll(lane, events)?;
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

    unsafe fn post(&self, below: &Below, lane: u32, command: &Command) -> Hot {
        // SAFETY: by this function's contract.
        unsafe { below.post(lane, Command { tag: command.tag & 0xffff_ffff, ..*command }) }
    }
}

#[test]
fn a_narrow_tag_is_caught() {
    caught::<NarrowTag>("l0/every_notified_command_completes_once/r2", "unknown tag");
}

/// Accepts what does not fit, and drops it.
#[derive(Default)]
pub(crate) struct Overrun;
impl Fault for Overrun {
    const NAME: &'static str = "overrun";

    unsafe fn post(&self, below: &Below, lane: u32, command: &Command) -> Hot {
        // SAFETY: by this function's contract.
        unsafe { below.post(lane, *command)? };
        Ok(1)
    }
}

#[test]
fn an_overrun_queue_is_caught() {
    caught::<Overrun>("l0/queue_full_is_back_pressure/r2", "found 4 events; expected 1000");
}

/// All lanes are one queue.
#[derive(Default)]
pub(crate) struct OneQueueForAllLanes;
impl Fault for OneQueueForAllLanes {
    const NAME: &'static str = "one_queue_for_all_lanes";

    unsafe fn post(&self, below: &Below, _: u32, command: &Command) -> Hot {
        // SAFETY: by this function's contract; the case uses one thread until it fails.
        unsafe { below.post(0, *command) }
    }

    fn poll(&self, below: &Below, _: u32, events: &mut [Event]) -> Hot {
        below.shm.poll(0, events)
    }
}

#[test]
fn lanes_that_share_a_queue_are_caught() {
    caught::<OneQueueForAllLanes>("l0/lanes_are_independent/r2", "expected each tag once");
}

/// Gets read this rank's own window.
#[derive(Default)]
pub(crate) struct GetFromItself;
impl Fault for GetFromItself {
    const NAME: &'static str = "get_from_itself";

    unsafe fn post(&self, below: &Below, lane: u32, command: &Command) -> Hot {
        let peer = if command.op == abi::TY_OP_GET { below.me } else { command.peer };
        // SAFETY: windows are alike on all ranks; the rest is this function's contract.
        unsafe { below.post(lane, Command { peer, ..*command }) }
    }
}

#[test]
fn a_get_from_the_wrong_rank_is_caught() {
    caught::<GetFromItself>("l0/get_reads_the_peer/r2", "after a get");
}

/// Peers' addresses are this rank's own.
#[derive(Default)]
pub(crate) struct AddressOfItself;
impl Fault for AddressOfItself {
    const NAME: &'static str = "address_of_itself";
    const KEEPS: u64 = IntactLoadStore::KEEPS;

    fn peer_address(&self, below: &Below, window: u32, _: u32) -> Result<*mut u8> {
        below.shm.peer_address(window, below.me)
    }
}

#[test]
fn addresses_of_the_wrong_rank_are_caught() {
    caught::<AddressOfItself>(
        "l0/peer_addresses_see_puts_and_stores/r2",
        "window 0, written by rank",
    );
}

/// Connects to whatever it is given.
#[derive(Default)]
pub(crate) struct UncheckedEndpoint;
impl Fault for UncheckedEndpoint {
    const NAME: &'static str = "unchecked_endpoint";

    fn connect(&self, below: &mut Below, peer: u32, data: &[u8]) -> Result<()> {
        below.shm.connect(peer, data).or(Ok(()))
    }
}

#[test]
fn an_unchecked_endpoint_is_caught() {
    caught::<UncheckedEndpoint>("l0/bring_up_refuses_damaged_endpoints/r2", "accepted an endpoint");
}
