//! Records on their way to other ranks.

use tokenyard_core::moe::{RECORD_HEADER, RECORD_TEXT};
use tokenyard_core::transport::{Command, NO_COMMAND};
use tokenyard_core::{Result, abi};

use crate::engine::areas::CONTROL;
use crate::engine::control::{Header, Signal};
use crate::engine::order::SlotOrder;
use crate::engine::places::Places;
use crate::engine::record::{Body, NewRecord, as_bytes, span_of};

/// A record on its way: from where to where in the control windows, and the signal that says so.
struct Sending {
    peer: u32,
    signal: u32,
    from: u64,
    to: u64,
}

/// A record's signal, its slot, and the place that it is for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordPlace {
    pub(crate) signal: Signal,
    pub(crate) slot: usize,
    pub(crate) place: u32,
}

/// Sends a record to the peer of a place, into this rank's place for the same group there.
pub(crate) fn send_record(
    order: &SlotOrder,
    places: &Places,
    to: RecordPlace,
    record: NewRecord<'_>,
) -> Result<()> {
    let RecordPlace { signal, slot, place } = to;
    let slots = &places.slots;
    let domains = &order.member.domains;
    let here = domains.place(domains.domain_of(place), domains.index);
    let at = |start: u64, place: u32| {
        start + span_of(&slots.records, signal) + slots.records.pitch * u64::from(place)
    };
    let sending = Sending {
        peer: domains.peer_of(place),
        signal: order.channel.ids.id(signal, slot, here),
        from: at(slots.records_out(slot), place),
        to: at(slots.records_in(slot), here),
    };
    let command = write_record(places, &sending, record);
    order.post(slot, &command, record.header.operation())
}

/// Writes a record at the place from which it leaves. Returns the command that carries it to its peer.
fn write_record(places: &Places, sending: &Sending, record: NewRecord<'_>) -> Command {
    let NewRecord { mut header, body } = record;
    let target = places.control.at(sending.from);
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
    Command {
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
    }
}
