//! Records on their way to other ranks.

use tokenyard_core::moe::{RECORD_HEADER, RECORD_TEXT};
use tokenyard_core::transport::{Command, NO_COMMAND};
use tokenyard_core::{Result, abi};

use crate::engine::control::{Header, Signal};
use crate::engine::record::{Body, NewRecord, as_bytes, span_of};
use crate::moe::runner::Runner;
use crate::moe::sizes::CONTROL;

/// A record on its way: from where to where in the control windows, and the signal that says so.
struct Sending {
    peer: u32,
    signal: u32,
    from: u64,
    to: u64,
}

/// Sends a record to the peer of a place, into this rank's place for the same group there.
pub(crate) fn send_record(
    runner: &Runner,
    signal: Signal,
    slot: usize,
    place: u32,
    record: NewRecord<'_>,
) -> Result<()> {
    let slots = &runner.places.slots;
    let domains = &runner.exchange.domains;
    let here = domains.place(domains.domain_of(place), domains.index);
    let at = |start: u64, place: u32| {
        start + span_of(&slots.records, signal) + slots.records.pitch * u64::from(place)
    };
    let sending = Sending {
        peer: domains.peer_of(place),
        signal: runner.order.channel.ids.id(signal, slot, here),
        from: at(slots.records_out(slot), place),
        to: at(slots.records_in(slot), here),
    };
    put_record(runner, slot, &sending, record)
}

fn put_record(
    runner: &Runner,
    slot: usize,
    sending: &Sending,
    record: NewRecord<'_>,
) -> Result<()> {
    let NewRecord { mut header, body } = record;
    let target = runner.places.control.at(sending.from);
    let mut bytes = RECORD_HEADER;
    let mut add = |data: &[u8]| {
        // SAFETY: the record lies in this rank's own control window, in a part that only this rank writes and
        // no peer reads or writes. It has room for its counts and for the text, which is cut. Commands that
        // were posted from it before are done (open_slot).
        unsafe {
            let to = target.add(bytes as usize);
            std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len());
        }
        bytes += data.len() as u64;
    };
    match body {
        Body::Counts(counts) => add(as_bytes(counts)),
        Body::Text(text) => {
            let text = &text[..text.len().min(RECORD_TEXT as usize)];
            add(text);
            header = header.with_text(text.len() as u64);
        }
        Body::Nothing => {}
    }
    // SAFETY: as above; records are aligned to 64 bytes.
    unsafe { target.cast::<Header>().write(header) };
    let command = Command {
        op: abi::TY_OP_PUT_SIGNAL,
        peer: sending.peer,
        signal: sending.signal,
        add: 1,
        src_window: CONTROL,
        src_offset: sending.from,
        dst_window: CONTROL,
        dst_offset: sending.to,
        bytes,
        ..NO_COMMAND
    };
    runner.order.post(slot, &command, header.operation())
}
