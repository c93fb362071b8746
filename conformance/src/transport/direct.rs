//! Capabilities that a transport may declare beside puts: gets, and peers' memory by address.

use anyhow::{Context as _, Result};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event, NO_COMMAND};

use super::completion::check_events;
use super::memory::{UNTOUCHED, compare, copy_from, pattern};
use super::needs::Needs;
use super::rig::Rig;
use super::{Body, TransportCase};

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "get_reads_the_peer",
        about: "a done get has read the peer's bytes, and nothing else, from and into either window",
        invariants: "INV-4",
        ranks: &[2, 3],
        flags: abi::TY_CAP_GET,
        needs: Needs { windows: &[1 << 18, 1 << 18], ..Needs::SMALL },
        body: Body::Connected(get_reads_the_peer),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "peer_addresses_see_puts_and_stores",
        about: "peers' windows are memory of this process: loads see puts, owners see stores",
        invariants: "INV-1",
        ranks: &[2, 3],
        flags: abi::TY_CAP_LOAD_STORE,
        needs: Needs { windows: &[1 << 16, 1 << 16], ..Needs::SMALL },
        body: Body::Connected(peer_addresses_see_puts_and_stores),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "stored_payload_before_signal",
        about: "plain stores to a peer are there when a signal sent after them is seen (INV-1)",
        invariants: "INV-1",
        ranks: &[2],
        flags: abi::TY_CAP_LOAD_STORE,
        needs: Needs { windows: &[1 << 20], ..Needs::SMALL },
        body: Body::Connected(stored_payload_before_signal),
        ..TransportCase::BARE
    },
];

/// Between both windows, each way. The last round reads the places of the first one, which have other bytes by then.
fn get_reads_the_peer(rig: &mut Rig<'_>) -> Result<()> {
    let ways = [(0, 1), (1, 0), (0, 1)];
    (1..).zip(ways).try_for_each(|(round, (here, there))| get_from_all(rig, round, here, there))
}

/// The gets from a peer: bytes, their place in the peer's window, and the place in this rank's. They are under way
/// together.
const GETS: [(usize, usize, usize); 4] =
    [(8, 40, 16), (1, 3, 5), (4097, 1001, 77), (1 << 17, 9, 1 << 16)];

/// Gets from window `there` of each rank into window `here` of this one.
fn get_from_all(rig: &mut Rig<'_>, round: u64, here: usize, there: usize) -> Result<()> {
    let (me, ranks) = (rig.me(), rig.ranks());
    let len = rig.windows[there].len();
    let of = |rank: u32| pattern(round << 32 | u64::from(rank), len);
    rig.windows[there].write(0, &of(me));
    rig.barrier("sources are ready")?;
    for peer in 0..ranks {
        let theirs = of(peer);
        let mut expected = vec![UNTOUCHED; len];
        let mut gets = Vec::new();
        for (tag, (bytes, from, to)) in (0..).zip(GETS) {
            let bytes = rig.put_bytes(bytes);
            expected[to..to + bytes].copy_from_slice(&theirs[from..from + bytes]);
            gets.push(Command {
                op: abi::TY_OP_GET,
                flags: abi::TY_FLAG_NOTIFY,
                peer,
                src_window: here as u16,
                dst_window: there as u16,
                src_offset: to as u64,
                dst_offset: from as u64,
                bytes: bytes as u64,
                tag,
                ..NO_COMMAND
            });
        }
        rig.windows[here].fill(UNTOUCHED);
        rig.post(0, &gets)?;
        let what = format!("round {round}: window {here} after a get");
        let events = read_as_they_end(rig, &what, &gets, &expected)?;
        let what = format!("{what} from rank {peer}");
        compare(&what, &rig.windows[here].read(0, len), &expected)?;
        check_events(&events, gets.iter())?;
    }
    // The gets did not change the memory that they read.
    rig.barrier("all have read")?;
    let what = format!("window {there} after gets of all ranks");
    compare(&what, &rig.windows[there].read(0, len), &of(me))
}

/// Waits for the events of gets. The bytes of each are there at its own event. Returns the events.
fn read_as_they_end(
    rig: &mut Rig<'_>,
    what: &str,
    gets: &[Command],
    expected: &[u8],
) -> Result<Vec<Event>> {
    let mut ended = Vec::new();
    while ended.len() < gets.len() {
        let events = rig.wait_some_events(0, 1)?;
        for get in gets.iter().filter(|get| events.iter().any(|event| event.tag == get.tag)) {
            let (to, bytes) = (get.src_offset as usize, get.bytes as usize);
            let what =
                format!("{what} of {bytes} bytes from rank {}, seen with its event", get.peer);
            let found = rig.windows[get.src_window as usize].read(to, bytes);
            compare(&what, &found, &expected[to..to + bytes])?;
        }
        ended.extend(events);
    }
    Ok(ended)
}

fn peer_addresses_see_puts_and_stores(rig: &mut Rig<'_>) -> Result<()> {
    let (me, ranks) = (rig.me(), rig.ranks());
    let (bytes, place) =
        (1000, |window: usize, writer: u32| 4096 * (1 + window) + 1000 * writer as usize);
    let seed = |window: usize, writer: u32, reader: u32| {
        (window as u64 * 64 + u64::from(writer)) * 64 + u64::from(reader)
    };
    for peer in 0..ranks {
        // Window 0 by plain stores, window 1 by puts.
        let address = rig.transport.peer_address(0, peer).context("address of window 0")?;
        let data = pattern(seed(0, me, peer), bytes);
        // SAFETY: the place is inside window 0 of a connected peer, and only this rank writes it until its
        // signal.
        unsafe {
            std::ptr::copy_nonoverlapping(data.as_ptr(), address.add(place(0, me)), bytes);
        }
        let from = 1024 * peer as usize;
        rig.windows[1].write(from, &pattern(seed(1, me, peer), bytes));
        rig.post(
            0,
            &[Command {
                op: abi::TY_OP_PUT_SIGNAL,
                peer,
                signal: rig.signal(0, 0, me),
                add: 1,
                src_window: 1,
                dst_window: 1,
                src_offset: from as u64,
                dst_offset: (place(1, me)) as u64,
                bytes: bytes as u64,
                ..NO_COMMAND
            }],
        )?;
    }
    for writer in 0..ranks {
        rig.wait_signal(0, rig.signal(0, 0, writer), 1)?;
        for window in 0..2 {
            let found = rig.windows[window].read(place(window, writer), bytes);
            let what = format!("window {window}, written by rank {writer}");
            compare(&what, &found, &pattern(seed(window, writer, me), bytes))?;
        }
    }
    rig.barrier("all written")?;
    for (window, peer) in [0, 1].into_iter().flat_map(|w| (0..ranks).map(move |p| (w, p))) {
        let address = rig.transport.peer_address(window as u32, peer)?;
        for writer in 0..ranks {
            // SAFETY: inside the window of a connected peer; no rank writes it after the barrier.
            let found = unsafe { copy_from(address.add(place(window, writer)), bytes) };
            let what = format!("window {window} of rank {peer} by address, from rank {writer}");
            compare(&what, &found, &pattern(seed(window, writer, peer), bytes))?;
        }
    }
    rig.barrier("all read")
}

fn stored_payload_before_signal(rig: &mut Rig<'_>) -> Result<()> {
    let (me, peer) = (rig.me(), rig.next());
    let address = rig.transport.peer_address(0, peer)?;
    let half = rig.windows[0].len() / 2;
    for round in 1..=200_u64 {
        let bytes = [8, 4096, half][round as usize % 3];
        let data = pattern(u64::from(me) << 32 | round, bytes);
        // SAFETY: each rank stores to the lower half of its peer's window, and only after the peer has
        // reported that it has read it.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), address, bytes) };
        let signal = |kind| rig.signal(kind, 0, me);
        let note = |kind| Command {
            op: abi::TY_OP_SIGNAL,
            peer,
            signal: signal(kind),
            add: 1,
            ..NO_COMMAND
        };
        let (stored, looked) = (note(0), note(1));
        rig.post(0, &[stored])?;
        rig.wait_signal(0, rig.signal(0, 0, peer), round)?;
        let expected = pattern(u64::from(peer) << 32 | round, bytes);
        let what = format!("stores of round {round} by rank {peer}, seen with their signal");
        compare(&what, &rig.windows[0].read(0, bytes), &expected)?;
        rig.post(0, &[looked])?;
        rig.wait_signal(0, rig.signal(1, 0, peer), round)?;
    }
    Ok(())
}
