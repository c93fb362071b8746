//! Transports that lose, tear, misplace or reorder payloads, and the case that catches each.

use tokenyard_core::Result;
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Transport as _};

use crate::faulty_shm::{Below, Fault, Hot};
use crate::l0::{IntactLoadStore, Turn, caught, is_put};

/// The signal overtakes the payload, as on a fabric that reorders and a transport that does not wait.
#[derive(Default)]
pub(crate) struct SignalBeforePayload;
impl Fault for SignalBeforePayload {
    const NAME: &'static str = "signal_before_payload";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        if command.op != abi::TY_OP_PUT_SIGNAL || !is_put(command) {
            // SAFETY: by this function's contract.
            return unsafe { below.post(queue, *command) };
        }
        // SAFETY: two halves of a command that is valid by this function's contract.
        unsafe {
            below.post(queue, Command { op: abi::TY_OP_SIGNAL, flags: 0, ..*command })?;
            std::thread::yield_now();
            below.post(queue, Command { op: abi::TY_OP_PUT, ..*command })
        }
    }
}

#[test]
fn a_signal_before_its_payload_is_caught() {
    caught::<SignalBeforePayload>("l0/payload_before_signal/r2", "seen with its signal");
}

/// Drops every 30th put, and its signal too, and reports it as done.
#[derive(Default)]
pub(crate) struct LostPut(Turn);
impl Fault for LostPut {
    const NAME: &'static str = "lost_put";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        let mut command = *command;
        if is_put(&command) && self.0.of(30) {
            (command.op, command.bytes) = (abi::TY_OP_PUT, 0);
        }
        // SAFETY: by this function's contract; nothing moves if it was cut to 0 bytes.
        unsafe { below.post(queue, command) }
    }
}

#[test]
fn a_lost_put_is_caught() {
    caught::<LostPut>("l0/no_put_is_lost/r2", "nothing more came within");
}

/// Raises the signal of every 30th put without its payload.
#[derive(Default)]
pub(crate) struct LostPayload(Turn);
impl Fault for LostPayload {
    const NAME: &'static str = "lost_payload";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        let lost = command.op == abi::TY_OP_PUT_SIGNAL && self.0.of(30);
        let bytes = if lost { 0 } else { command.bytes };
        // SAFETY: by this function's contract.
        unsafe { below.post(queue, Command { bytes, ..*command }) }
    }
}

#[test]
fn a_lost_payload_is_caught() {
    caught::<LostPayload>("l0/payload_before_signal/r4", "seen with its signal");
}

#[test]
fn a_lost_payload_is_not_called_an_early_done_event() {
    caught::<LostPayload>("l0/done_means_source_reusable/r2", "not an early done event");
}

/// Lengths of 20 bits, as in a work request of that width.
#[derive(Default)]
pub(crate) struct CutPut;
impl Fault for CutPut {
    const NAME: &'static str = "cut_put";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        // SAFETY: by this function's contract; a shorter put is inside what a longer one is.
        unsafe { below.post(queue, Command { bytes: command.bytes & 0xf_ffff, ..*command }) }
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

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        if command.op != abi::TY_OP_PUT_VALUE {
            // SAFETY: by this function's contract.
            return unsafe { below.post(queue, *command) };
        }
        let window = below.shm.peer_address(command.dst_window.into(), command.peer);
        let Ok(window) = window else { return Err(abi::TY_INTERNAL) };
        let halves = window.wrapping_add(command.dst_offset as usize).cast::<u32>();
        // SAFETY: 8 aligned bytes of the peer's window, by this function's contract; volatile, because the
        // reader reads at the same time, which is the fault.
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

/// Payloads take the neighbour's rail; signals arrive at the right rank.
#[derive(Default)]
pub(crate) struct NeighbourRail;
impl Fault for NeighbourRail {
    const NAME: &'static str = "neighbour_rail";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        let mut rest = *command;
        if is_put(command) {
            let peer = (command.peer + 1) % below.ranks;
            let stray = Command { op: abi::TY_OP_PUT, flags: 0, peer, ..*command };
            // SAFETY: windows are alike on all ranks; the rest is this function's contract.
            unsafe { below.post(queue, stray)? };
            rest.bytes = 0;
        }
        // SAFETY: by this function's contract.
        unsafe { below.post(queue, rest) }
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

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        // SAFETY: windows are alike on all ranks; the rest is this function's contract.
        unsafe { below.post(queue, Command { peer: command.peer ^ 1, ..*command }) }
    }
}

#[test]
fn commands_to_the_wrong_peer_are_caught() {
    caught::<WrongPeer>("l0/puts_reach_the_right_place/r2", "found total");
}

/// Every put goes to the window that was registered first.
#[derive(Default)]
pub(crate) struct WrongWindow;
impl Fault for WrongWindow {
    const NAME: &'static str = "wrong_window";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        // SAFETY: no window of a case is longer than its first; the rest is this function's
        // contract.
        unsafe { below.post(queue, Command { dst_window: 0, ..*command }) }
    }
}

#[test]
fn the_wrong_window_is_caught() {
    caught::<WrongWindow>("l0/puts_reach_the_right_place/r4", "to window 1");
}

/// Destinations are rounded down to 16 bytes.
#[derive(Default)]
pub(crate) struct AlignedOffset;
impl Fault for AlignedOffset {
    const NAME: &'static str = "aligned_offset";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        let dst_offset = command.dst_offset & !15;
        // SAFETY: by this function's contract; a smaller offset is inside the window as well.
        unsafe { below.post(queue, Command { dst_offset, ..*command }) }
    }
}

#[test]
fn a_rounded_offset_is_caught() {
    caught::<AlignedOffset>("l0/no_put_is_lost/r3", "seen with its signal");
}

/// Gets read this rank's own window.
#[derive(Default)]
pub(crate) struct GetFromItself;
impl Fault for GetFromItself {
    const NAME: &'static str = "get_from_itself";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        let peer = if command.op == abi::TY_OP_GET { below.me } else { command.peer };
        // SAFETY: windows are alike on all ranks; the rest is this function's contract.
        unsafe { below.post(queue, Command { peer, ..*command }) }
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

/// Connects with any endpoint.
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
