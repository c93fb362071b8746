//! Slots that write into room of the host: they keep within it, and say no more than they wrote.

use anyhow::{Context as _, Result, ensure};
use tokenyard_core::config::ComponentTable;
use tokenyard_core::transport::{Command, Event, NO_COMMAND, NO_EVENT};
use tokenyard_core::{ErrorKind, abi};

use super::needs::Needs;
use super::rig::{self, Rig};
use super::{Body, TransportCase};
use crate::suite::Rank;

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "names_of_links_fit_their_room",
        about: "link_name writes one line of UTF-8, at most as long as its capacity, and gives that length",
        invariants: "the order of calls: `link_name`",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::Connected(names_of_links_fit_their_room),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "unknown_keys_are_refused",
        about: "probe refuses a key that the component's table does not have, with TY_CONFIG",
        invariants: "the config table",
        ranks: &[1],
        needs: Needs::SMALL,
        body: Body::Alone(unknown_keys_are_refused),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "events_fit_their_room",
        about: "poll writes at most as many events as its capacity, and keeps the others",
        invariants: "INV-7",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::Connected(events_fit_their_room),
        ..TransportCase::BARE
    },
];

/// The byte beside the room of a slot.
const BESIDE: u8 = 0xd7;

fn names_of_links_fit_their_room(rig: &mut Rig<'_>) -> Result<()> {
    // SAFETY: the copy is used while the transport is open.
    let abi::TyLink { table, instance, .. } = unsafe { rig.transport.link() }.as_abi();
    // SAFETY: tables live as long as the process.
    let Some(link_name) = (unsafe { (*table).link_name }) else { return Ok(()) };
    for peer in 0..rig.ranks() {
        for capacity in [abi::TY_LINK_NAME_BYTES, 16, 1] {
            let mut data = [BESIDE; abi::TY_LINK_NAME_BYTES + 64];
            let mut bytes = 0;
            // SAFETY: an open instance; the room is as large as stated.
            let status =
                unsafe { link_name(instance, peer, data.as_mut_ptr(), capacity, &raw mut bytes) };
            ensure!(status == abi::TY_OK, "link_name: found status {status}; expected 0");
            ensure!(
                bytes <= capacity && data[capacity..].iter().all(|byte| *byte == BESIDE),
                "link_name: found {bytes} bytes in room for {capacity}; expected no more, and none beside it"
            );
            let text = &data[..bytes];
            let is_utf8 = match std::str::from_utf8(text) {
                Ok(_) => true,
                // The room may cut the last character.
                Err(error) => bytes == capacity && error.error_len().is_none(),
            };
            let text = String::from_utf8_lossy(text);
            ensure!(is_utf8, "link_name: found {text:?}; expected UTF-8");
            ensure!(!text.contains('\n'), "link_name: found {text:?}; expected one line");
        }
    }
    Ok(())
}

/// A key that no component has.
const UNKNOWN_KEY: &str = "a_key_of_no_component = 1\n";

fn unknown_keys_are_refused(rank: &Rank<'_>, _: &Needs) -> Result<()> {
    let (component, choice) = rig::choose(rank.config)?;
    let text = format!("{UNKNOWN_KEY}{}", choice.table.text());
    let table = ComponentTable::from_text(&text, choice.table.file());
    let kind = component.probe(&table).err().map(|error| error.kind());
    ensure!(
        kind == Some(ErrorKind::Config),
        "probe with the unknown key {UNKNOWN_KEY:?}: found {kind:?}; expected TY_CONFIG"
    );
    Ok(())
}

fn events_fit_their_room(rig: &mut Rig<'_>) -> Result<()> {
    let (count, room) = (8, 2);
    let (next, signal) = (rig.next(), rig.signal(0, 0, rig.me()));
    let flags = abi::TY_FLAG_NOTIFY;
    let signals = (0..count).map(|tag| Command {
        op: abi::TY_OP_SIGNAL,
        flags,
        peer: next,
        signal,
        add: 1,
        tag,
        ..NO_COMMAND
    });
    rig.post(0, &signals.collect::<Vec<_>>())?;
    // Events that `post` left are the rig's; those of this case are polled by hand.
    let mut found: Vec<u64> = rig.queues[0].take().iter().map(|event| event.tag).collect();
    // SAFETY: the copy is used while the transport is open.
    let abi::TyLink { table, instance, .. } = unsafe { rig.transport.link() }.as_abi();
    // SAFETY: tables live as long as the process.
    let poll = unsafe { (*table).poll }.context("a required slot is null")?;
    let until = rig.until();
    while found.len() < count as usize {
        let beside = Event { tag: u64::MAX, ..NO_EVENT };
        let (mut events, mut wrote) = ([beside; 8], 0);
        // SAFETY: an open instance, whose queue this thread owns; the room is as large as stated.
        let status = unsafe { poll(instance, 0, events.as_mut_ptr(), room, &raw mut wrote) };
        ensure!(status == abi::TY_OK, "poll: found status {status}; expected 0");
        ensure!(
            wrote <= room && events[room..].iter().all(|event| event.tag == u64::MAX),
            "poll: found {wrote} events in room for {room}; expected no more, and none beside it"
        );
        found.extend(events[..wrote].iter().map(|event| event.tag));
        ensure!(
            std::time::Instant::now() < until,
            "found {} events by polls with room for {room}; expected {count} (INV-7)",
            found.len()
        );
    }
    found.sort_unstable();
    ensure!(
        found == (0..count).collect::<Vec<_>>(),
        "found the tags {found:?}; expected each once"
    );
    rig.wait_signal(0, rig.signal(0, 0, rig.previous()), count)
}
