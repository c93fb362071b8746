//! Slots that write into room of the host: they keep within it, and say no more than they wrote.

use anyhow::{Context as _, Result, ensure};
use tokenyard_core::config::ComponentTable;
use tokenyard_core::host::blank_error;
use tokenyard_core::link::NO_DEVICE_API;
use tokenyard_core::transport::{Command, Event, NO_COMMAND, NO_EVENT};
use tokenyard_core::{ErrorKind, abi};

use super::needs::Needs;
use super::queue::STATUSES;
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
        about: "probe skips comments, and refuses a key that the component's table does not have, with TY_CONFIG, the \
                file, the line and the key",
        invariants: "the config table",
        ranks: &[1],
        needs: Needs::SMALL,
        body: Body::Alone(unknown_keys_are_refused),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "events_fit_their_room",
        about: "poll writes at most as many events as its capacity, also where that is 0, and keeps the others",
        invariants: "INV-7",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::Connected(events_fit_their_room),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "endpoints_fit_their_room",
        about: "endpoint writes at most as many bytes as its capacity, and gives that length",
        invariants: "the order of calls: `endpoint`",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::Alone(endpoints_fit_their_room),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "the_source_for_kernels_stays",
        about: "device_source, where it succeeds, gives the same text without parameters each time",
        invariants: "the order of calls: `device_source`",
        ranks: &[1],
        needs: Needs::SMALL,
        body: Body::Alone(the_source_for_kernels_stays),
        ..TransportCase::BARE
    },
];

/// The byte beside the room of a slot.
pub(super) const BESIDE: u8 = 0xd7;

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
const UNKNOWN_KEY: &str = "a_key_of_no_component";

/// A component's table, and a key at its end that no component has.
pub(super) fn with_unknown_key(table: &ComponentTable) -> ComponentTable {
    ComponentTable::from_text(&format!("{}\n{UNKNOWN_KEY} = 1", table.text()), table.file())
}

/// The number of a table's last line in the operator's file.
fn last_line(text: &str) -> usize {
    text.lines().fold(0, |line, text| {
        // It states the number of the next line.
        let stated = text.strip_prefix("#line ").and_then(|number| number.parse::<usize>().ok());
        stated.map_or(line + 1, |number| number - 1)
    })
}

/// Whether a message has this line of the file.
fn names_line(message: &str, file: &str, line: usize) -> bool {
    let place = format!("{file}:{line}");
    let behind = |(at, _): (usize, &str)| message[at + place.len()..].chars().next();
    message
        .match_indices(&place)
        .map(behind)
        .any(|next| next.is_none_or(|next| !next.is_ascii_digit()))
}

fn unknown_keys_are_refused(rank: &Rank<'_>, _: &Needs) -> Result<()> {
    let (component, choice) = rig::choose(rank.config)?;
    let (text, file) = (choice.table.text(), choice.table.file());
    let commented = format!("# one line\n{text}\n\n  # another = 1, \"of several words\"\n#\n");
    let commented = component.probe(&ComponentTable::from_text(&commented, file));
    commented.context("probe with comments in the table; expected that they are skipped")?;
    let table = with_unknown_key(&choice.table);
    let refused = component.probe(&table).err();
    let kind = refused.as_ref().map(tokenyard_core::Error::kind);
    ensure!(
        kind == Some(ErrorKind::Config),
        "probe with the unknown key `{UNKNOWN_KEY}`: found {kind:?}; expected TY_CONFIG"
    );
    let error = refused.map(|error| error.to_string()).unwrap_or_default();
    ensure!(
        error.contains(UNKNOWN_KEY),
        "probe with the unknown key `{UNKNOWN_KEY}` names no such key: `{error}`; expected an error that names it"
    );
    let line = last_line(table.text());
    ensure!(
        names_line(&error, file, line),
        "probe with the unknown key `{UNKNOWN_KEY}` in line {line}: `{error}`; expected {file}:{line} in it"
    );
    Ok(())
}

fn endpoints_fit_their_room(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let rig = Rig::open(rank, needs, rank.config.world.deadline)?;
    // SAFETY: the copy is used while the transport is open.
    let abi::TyLink { table, instance, .. } = unsafe { rig.transport.link() }.as_abi();
    // SAFETY: tables live as long as the process.
    let endpoint = unsafe { (*table).endpoint }.context("a required slot is null")?;
    let capacity = abi::TY_ENDPOINT_BYTES;
    for peer in 0..rig.ranks() {
        let mut data = [BESIDE; abi::TY_ENDPOINT_BYTES + 64];
        let (mut bytes, mut error) = (0, blank_error());
        // SAFETY: an open instance, with all windows; the room is as large as stated.
        let status = unsafe {
            endpoint(instance, peer, data.as_mut_ptr(), capacity, &raw mut bytes, &raw mut error)
        };
        ensure!(status == abi::TY_OK, "endpoint: found status {status}; expected 0");
        ensure!(
            bytes <= capacity && data[capacity..].iter().all(|byte| *byte == BESIDE),
            "endpoint for peer {peer}: found {bytes} bytes in room for {capacity}; expected no more, and none beside it"
        );
    }
    Ok(rank.world.barrier("all have written their endpoints")?)
}

fn the_source_for_kernels_stays(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let (transport, _) = rig::open_transport(rank, needs, rank.config.world.deadline)?;
    // SAFETY: the copy is used while the transport is open.
    let abi::TyLink { table, .. } = unsafe { transport.link() }.as_abi();
    // SAFETY: tables live as long as the process.
    let Some(device_source) = (unsafe { (*table).device_source }) else { return Ok(()) };
    let mut found: Option<Vec<u8>> = None;
    for look in 1..=2 {
        let (mut room, mut error) = (NO_DEVICE_API, blank_error());
        // SAFETY: a judged table; both structures live for the call.
        let status = unsafe { device_source(&raw mut room, &raw mut error) };
        if status != abi::TY_OK {
            ensure!(
                STATUSES.contains(&status) && found.is_none(),
                "device_source: found status {status} at look {look}; expected the same each time"
            );
            return Ok(());
        }
        ensure!(room.params.is_null(), "device_source: found parameters; expected none");
        // SAFETY: the text is static.
        let text = unsafe { std::slice::from_raw_parts(room.source.data, room.source.bytes) };
        ensure!(
            room.size == NO_DEVICE_API.size && !text.is_empty(),
            "device_source: found size {} and {} bytes; expected size {} and a text",
            room.size,
            text.len(),
            NO_DEVICE_API.size
        );
        ensure!(
            found.is_none_or(|first| first == text),
            "device_source: found another text at look {look}; expected the same each time"
        );
        found = Some(text.to_vec());
    }
    Ok(())
}

fn events_fit_their_room(rig: &mut Rig<'_>) -> Result<()> {
    let count = 8;
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
    // Rooms of no event come now and then: such a poll drives, and keeps all events.
    for room in [0, 2, 1].into_iter().cycle() {
        if found.len() >= count as usize {
            break;
        }
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
            "found {} events by polls with room for 0 to 2; expected {count} (INV-7)",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_a_table_counts_from_what_a_comment_says() {
        assert_eq!(last_line("\n\nkey = 1"), 3);
        assert_eq!(last_line("a = 1\n#line 7\nb = 2\nc = 3"), 8);
        assert!(names_line("at f:7: no", "f", 7) && names_line("f:70, f:7", "f", 7));
        assert!(!names_line("f:70", "f", 7) && !names_line("", "f", 7));
    }
}
