//! Records on their way to other ranks.

use tokenyard_core::moe::{RECORD_HEADER, RECORD_TEXT};
use tokenyard_core::transport::{Command, NO_COMMAND};
use tokenyard_core::{Result, abi};

use super::channel::{Channel, no_rail};
use super::control::{Header, Signal};
use super::engine::Engine;
use super::record::{Body, NewRecord, as_bytes, span_of};
use super::windows::CONTROL;

/// A record on its way: from where to where in the control windows, and the signal that says so.
struct Sending {
    peer: u32,
    signal: u32,
    from: u64,
    to: u64,
}

/// Sends a record to the peer of a place, into this rank's place for the same domain there.
pub(super) fn send_record(
    engine: &Engine,
    signal: Signal,
    slot: usize,
    place: u32,
    record: NewRecord<'_>,
) -> Result<()> {
    let records = &engine.places.sizes.records;
    let domains = &engine.world.domains;
    let here = domains.place(domains.domain_of(place), domains.index);
    let at = |start: u64, place: u32| {
        start + span_of(records, signal) + records.pitch * u64::from(place)
    };
    let sending = Sending {
        peer: domains.peer_of(place),
        signal: engine.order.channel.ids.id(signal, slot, here),
        from: at(engine.places.sizes.records_out(slot), place),
        to: at(engine.places.sizes.records_in(slot), here),
    };
    put_record(engine, &engine.order.channel, slot, &sending, record)
}

/// Sends a record to the rail's rank in `domain`.
pub(super) fn send_rail_record(
    engine: &Engine,
    signal: Signal,
    slot: usize,
    domain: u32,
    record: NewRecord<'_>,
) -> Result<()> {
    let Some(rail) = &engine.order.rail else { return Err(no_rail()) };
    let records = &engine.places.sizes.rail_records;
    let place = |start: u64, place: u32| {
        start + span_of(records, signal) + records.pitch * u64::from(place)
    };
    let sending = Sending {
        peer: domain,
        signal: rail.ids.id(signal, slot, engine.world.domains.mine),
        from: place(engine.places.sizes.rail_records_out(slot), domain),
        to: place(engine.places.sizes.rail_records_in(slot), engine.world.domains.mine),
    };
    put_record(engine, rail, slot, &sending, record)
}

fn put_record(
    engine: &Engine,
    channel: &Channel,
    slot: usize,
    sending: &Sending,
    record: NewRecord<'_>,
) -> Result<()> {
    let NewRecord { mut header, body } = record;
    let target = engine.places.control.at(sending.from);
    let mut bytes = RECORD_HEADER;
    let mut add = |data: &[u8]| {
        // SAFETY: the record lies in this rank's own control window, in a component that only this
        // rank writes and no peer reads or writes; it has room for its counts and for the text,
        // which is cut; what was posted from it before is done (open_slot).
        unsafe {
            let to = target.add(bytes as usize);
            std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len());
        }
        bytes += data.len() as u64;
    };
    match body {
        Body::Counts(lists) => lists.iter().for_each(|list| add(as_bytes(list))),
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
    engine.order.post(channel, slot, &command, header.operation())
}
