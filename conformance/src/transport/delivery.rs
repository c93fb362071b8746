//! Payloads: they arrive whole, at the right place, before their signal.

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::memory::{UNTOUCHED, compare, pattern};
use super::needs::Needs;
use super::rig::{self, Rig};
use super::{Body, TransportCase};

const MIB: u64 = 1 << 20;

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "payload_before_signal",
        about: "whoever sees the signal of a put sees all of its payload (INV-1)",
        invariants: "INV-1",
        ranks: &[2, 4],
        needs: Needs { windows: &[MIB, MIB], ..Needs::SMALL },
        body: Body::Connected(payload_before_signal),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "no_put_is_lost",
        about: "thousands of puts, of all sizes and alignments, arrive, and touch nothing else",
        invariants: "INV-1",
        ranks: &[2, 3],
        needs: Needs { windows: &[4 * MIB, 4 * MIB], ..Needs::SMALL },
        body: Body::Connected(no_put_is_lost),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "eight_byte_values_arrive_whole",
        about: "a reader sees the old value or the new one, never a mix (INV-3)",
        invariants: "INV-3",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::Connected(eight_byte_values_arrive_whole),
        ..TransportCase::BARE
    },
];

/// Rounds of one put each, around a ring.
const ROUNDS: u64 = 240;
/// Rounds between two looks at the time: each size is there ten times.
const STRETCH: u64 = 60;
/// The time after which slow fabrics have had enough of them.
const ENOUGH: Duration = Duration::from_secs(2);
/// Small puts race for the head of a payload, large ones for its tail.
const SIZES: [usize; 6] = [8, 200, 4096, 30_000, 1 << 16, 1 << 20];

fn payload_before_signal(rig: &mut Rig<'_>) -> Result<()> {
    let start = Instant::now();
    for first in (1..=ROUNDS).step_by(STRETCH as usize) {
        payloads_before_signals(rig, first..first + STRETCH)?;
        // The ranks meet before they ask, because no rank drives the transport in that call.
        rig.barrier("a stretch is over")?;
        if rig::of_any(rig.world, start.elapsed() > ENOUGH)? {
            break;
        }
    }
    Ok(())
}

fn payloads_before_signals(rig: &mut Rig<'_>, rounds: Range<u64>) -> Result<()> {
    let (me, next, previous) = (rig.me(), rig.next(), rig.previous());
    let seed = |writer: u32, round: u64| u64::from(writer) << 32 | round;
    for round in rounds {
        let bytes = rig.put_bytes(SIZES[round as usize % SIZES.len()]);
        rig.windows[0].write(0, &pattern(seed(me, round), bytes));
        let expected = pattern(seed(previous, round), bytes);
        let put = Command {
            op: abi::TY_OP_PUT_SIGNAL,
            peer: next,
            signal: rig.signal(0, 0, me),
            add: 1,
            dst_window: 1,
            bytes: bytes as u64,
            ..NO_COMMAND
        };
        rig.post(0, &[put])?;
        rig.wait_signal(0, rig.signal(0, 0, previous), round)?;
        // The tail first: a payload that is still on its way lacks it.
        let tail = bytes.min(64);
        let last = rig.windows[1].read(bytes - tail, tail);
        let all = rig.windows[1].read(0, bytes);
        let what =
            || format!("payload of round {round} from rank {previous}, seen with its signal");
        compare(&format!("tail of {}", what()), &last, &expected[bytes - tail..])?;
        compare(&what(), &all, &expected)?;
        // The writer may write its next payload, and so may this rank once its own was read.
        let signal = rig.signal(1, 0, me);
        rig.post(
            0,
            &[Command { op: abi::TY_OP_SIGNAL, peer: previous, signal, add: 1, ..NO_COMMAND }],
        )?;
        rig.wait_signal(0, rig.signal(1, 0, next), round)?;
    }
    Ok(())
}

/// Sizes of a round's puts: around the sizes at which fabrics cut.
const PIECES: [usize; 22] = [
    0, 1, 2, 3, 7, 8, 9, 15, 63, 64, 65, 511, 4095, 4096, 4097, 8191, 65_535, 65_536, 65_537, 0,
    300_001, 1_048_577,
];

/// A round's puts, and the expected content of the window that they write.
struct DeliveryRound {
    puts: Vec<Command>,
    image: Vec<u8>,
}

impl DeliveryRound {
    /// The pieces of `theirs` lie side by side with gaps, at odd offsets; this rank's own lie alike.
    fn new(rig: &Rig<'_>, number: usize, theirs: &[u8]) -> Self {
        let window = theirs.len();
        let mut pieces = PIECES.map(|bytes| rig.put_bytes(bytes)).to_vec();
        // The largest put that the transport and half a window allow.
        pieces.push(rig.put_bytes(window / 2));
        let (mut puts, mut image) = (Vec::new(), vec![UNTOUCHED; window]);
        let mut at = 1 + number;
        for (index, bytes) in pieces.into_iter().enumerate() {
            let from = (at * 3 + index) % (window - bytes);
            image[at..at + bytes].copy_from_slice(&theirs[from..from + bytes]);
            let quiet = index % 3 == 2 && bytes > 0;
            puts.push(Command {
                op: if quiet { abi::TY_OP_PUT } else { abi::TY_OP_PUT_SIGNAL },
                peer: rig.next(),
                signal: if quiet { 0 } else { rig.signal(0, 0, rig.me()) },
                add: u32::from(!quiet),
                dst_window: 1,
                src_offset: from as u64,
                dst_offset: at as u64,
                bytes: bytes as u64,
                ..NO_COMMAND
            });
            at += bytes + 1 + index % 5;
        }
        if number % 2 == 1 {
            puts.reverse();
        }
        Self { puts, image }
    }

    fn with_signal(&self) -> impl Iterator<Item = &Command> {
        self.puts.iter().filter(|put| put.op == abi::TY_OP_PUT_SIGNAL)
    }
}

fn no_put_is_lost(rig: &mut Rig<'_>) -> Result<()> {
    let total = pieces_arrive(rig)?;
    thousands_arrive(rig, total)
}

/// The number of small puts: among so many, one that is lost now and then shows.
const THOUSANDS: usize = 4000;
/// Bytes of each put's place.
const PLACE: usize = 64;

/// Many small puts, each to a place of its own. Each also raises the signal by an amount of its own, so
/// that the total shows which one is lost. `before` is the total so far.
fn thousands_arrive(rig: &mut Rig<'_>, before: u64) -> Result<()> {
    let (me, next, previous) = (rig.me(), rig.next(), rig.previous());
    let bytes = THOUSANDS * PLACE;
    let source = |rank: u32| pattern(u64::from(rank) << 16 | 0xffff, bytes);
    rig.windows[0].write(0, &source(me));
    rig.windows[1].fill(UNTOUCHED);
    rig.barrier("cleared for many puts")?;
    let put = |index: usize| Command {
        op: abi::TY_OP_PUT_SIGNAL,
        peer: next,
        signal: rig.signal(0, 0, me),
        add: 1 + index as u32,
        dst_window: 1,
        src_offset: (index * PLACE) as u64,
        dst_offset: (index * PLACE) as u64,
        bytes: (1 + index % PLACE) as u64,
        ..NO_COMMAND
    };
    let puts: Vec<Command> = (0..THOUSANDS).map(put).collect();
    let total = before + puts.iter().map(|put| u64::from(put.add)).sum::<u64>();
    rig.post(0, &puts)?;
    rig.wait_signal(0, rig.signal(0, 0, previous), total).with_context(|| {
        format!("{THOUSANDS} puts of rank {previous}; number i of them adds i + 1 (INV-1)")
    })?;
    let (found, theirs) = (rig.windows[1].read(0, bytes), source(previous));
    let lost: Vec<usize> = (0..THOUSANDS)
        .filter(|index| {
            let (at, bytes) = (index * PLACE, 1 + index % PLACE);
            found[at..at + bytes] != theirs[at..at + bytes]
        })
        .collect();
    ensure!(
        lost.is_empty(),
        "{} of {THOUSANDS} puts of rank {previous} raised their signal and lost their payload (INV-1): \
         found others' bytes in puts {:?}",
        lost.len(),
        &lost[..lost.len().min(8)]
    );
    rig.barrier("many puts arrived")
}

/// Puts of sizes around those at which fabrics cut. Returns the total that their signals add up to.
fn pieces_arrive(rig: &mut Rig<'_>) -> Result<u64> {
    let previous = rig.previous();
    let window = rig.windows[1].len();
    let mut total = 0;
    for number in 0..4 {
        let source = |rank: u32| pattern(u64::from(rank) << 16 | number as u64, window);
        rig.windows[0].write(0, &source(rig.me()));
        rig.windows[1].fill(UNTOUCHED);
        rig.barrier("cleared")?;
        let round = DeliveryRound::new(rig, number, &source(previous));
        rig.post(0, &round.puts)?;
        total += round.with_signal().count() as u64;
        rig.wait_signal(0, rig.signal(0, 0, previous), total)?;
        for put in round.with_signal() {
            let (at, bytes) = (put.dst_offset as usize, put.bytes as usize);
            let what = format!("put of {bytes} bytes to offset {at}, seen with its signal");
            compare(&what, &rig.windows[1].read(at, bytes), &round.image[at..at + bytes])?;
        }
        // Puts without a signal arrive at any time (INV-2); gaps stay untouched.
        let check = |rig: &Rig<'_>| {
            let what = format!("window 1 after {} puts of rank {previous}", round.puts.len());
            compare(&what, &rig.windows[1].read(0, window), &round.image)
        };
        rig.wait(
            |rig| check(rig).is_ok(),
            |rig| check(rig).err().map_or_else(|| "it came late".into(), |e| e.to_string()),
        )?;
        rig.barrier("checked")?;
    }
    Ok(total)
}

/// The least number of reads of the value.
const LOOKS: u64 = 100_000;
/// The least number of reads of each value, and of changes between them.
const SEEN: u64 = 20;

/// The two values differ in every bit.
const VALUES: [u64; 2] = [0x0123_4567_89ab_cdef, !0x0123_4567_89ab_cdef];
/// The offset that they are put to.
const AT: usize = 4096;

fn eight_byte_values_arrive_whole(rig: &mut Rig<'_>) -> Result<()> {
    rig.windows[0].store(AT, VALUES[0]);
    rig.barrier("the first value is set")?;
    let enough = rig.signal(0, 0, 1);
    if rig.me() == 0 {
        return write_values(rig, enough);
    }
    read_values(rig)?;
    let enough = Command { op: abi::TY_OP_SIGNAL, peer: 0, signal: enough, add: 1, ..NO_COMMAND };
    rig.post(0, &[enough])
}

/// Puts both values in turn until the reader has seen enough.
fn write_values(rig: &mut Rig<'_>, enough: u32) -> Result<()> {
    // Twice the deadline, so that the reader, whose error says more, gives up first.
    let until = rig.until() + rig.needs.deadline;
    for value in VALUES.into_iter().cycle() {
        if rig.transport.read_signal(0, enough) > 0 {
            break;
        }
        let dst_offset = AT as u64;
        rig.post(
            0,
            &[Command { op: abi::TY_OP_PUT_VALUE, peer: 1, dst_offset, value, ..NO_COMMAND }],
        )?;
        rig.drive()?;
        rig.check_peers()?;
        ensure!(Instant::now() < until, "the reader never reported that it has seen enough");
    }
    Ok(())
}

fn read_values(rig: &mut Rig<'_>) -> Result<()> {
    let until = rig.until();
    let (mut looks, mut seen, mut changes, mut last) = (0, [0_u64; 2], 0, VALUES[0]);
    while looks < LOOKS || seen.iter().any(|n| *n < SEEN) || changes < SEEN {
        let found = rig.windows[0].load(AT);
        let index = VALUES.iter().position(|value| *value == found).with_context(|| {
            let [one, two] = VALUES;
            format!("look {looks}: found {found:#018x}; expected {one:#018x} or {two:#018x}")
        })?;
        seen[index] += 1;
        changes += u64::from(found != last);
        (last, looks) = (found, looks + 1);
        if looks % 1024 == 0 {
            rig.drive()?;
            ensure!(
                Instant::now() < until,
                "found {changes} changes of the value in {looks} looks; expected {SEEN}"
            );
            std::thread::yield_now();
        }
    }
    Ok(())
}
