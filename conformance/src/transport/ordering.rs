//! The order of puts (`TY_CAP_ORDERED`) on every queue. `progress.rs` has the case of one queue, with values and more
//! sizes.

use std::time::Instant;

use anyhow::{Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::memory::{compare, pattern};
use super::needs::Needs;
use super::rig::Rig;
use super::{Body, TransportCase};

pub(super) const CASES: &[TransportCase] = &[TransportCase {
    name: "puts_of_every_queue_arrive_in_order",
    about: "with TY_CAP_ORDERED puts of each of the declared queues, up to 64, arrive in the order in which they were \
            posted",
    invariants: "the capability `ordered`",
    ranks: &[2],
    flags: abi::TY_CAP_ORDERED,
    needs: Needs { windows: &[ROOM, ROOM], queues: 0, queue_depth: 8, ..Needs::SMALL },
    body: Body::Connected(puts_of_every_queue_arrive_in_order),
    ..TransportCase::BARE
}];

/// The sizes of a queue's puts, and the bit that each adds. Short ones could overtake long ones.
const SIZES: [usize; 4] = [30_000, 8, 9000, 1];
const ALL: u64 = (1 << SIZES.len()) - 1;
/// The places of a queue's puts, and the windows for as many queues as a case opens.
const PLACE: usize = 1 << 15;
const ROOM: u64 = (64 * SIZES.len() * PLACE) as u64;
const ROUNDS: u64 = 4;

/// The place of a put of a queue.
fn place(queue: u32, number: usize) -> usize {
    (queue as usize * SIZES.len() + number) * PLACE
}

/// The bytes of a put, by its writer, its queue and its round.
fn payload(writer: u32, queue: u32, round: u64, number: usize, bytes: usize) -> Vec<u8> {
    let of = u64::from(writer) << 32 | u64::from(queue) << 16;
    pattern(of | round << 8 | number as u64, bytes)
}

fn puts_of_every_queue_arrive_in_order(rig: &mut Rig<'_>) -> Result<()> {
    let (me, next) = (rig.me(), rig.next());
    let sizes = SIZES.map(|bytes| rig.put_bytes(bytes));
    for round in 1..=ROUNDS {
        for queue in 0..rig.needs.queues {
            let signal = rig.signal(0, queue, me);
            let puts = (0..).zip(sizes).map(|(number, bytes)| {
                let at = place(queue, number);
                rig.windows[0].write(at, &payload(me, queue, round, number, bytes));
                Command {
                    op: abi::TY_OP_PUT_SIGNAL,
                    queue,
                    peer: next,
                    signal,
                    add: 1 << number,
                    dst_window: 1,
                    src_offset: at as u64,
                    dst_offset: at as u64,
                    bytes: bytes as u64,
                    ..NO_COMMAND
                }
            });
            let puts: Vec<_> = puts.collect();
            rig.post(queue, &puts)?;
        }
        arrive_in_order(rig, round, sizes)?;
        rig.barrier("a round of all queues is over")?;
    }
    Ok(())
}

/// Looks at the totals of all queues, behind each poll of one of them, until they are complete.
fn arrive_in_order(rig: &mut Rig<'_>, round: u64, sizes: [usize; 4]) -> Result<()> {
    let until = rig.until();
    let mut seen = vec![0_u64; rig.needs.queues as usize];
    for queue in (0..seen.len()).cycle() {
        // One alone: a poll of each would move too much at once, and hide the order.
        rig.queues[queue].drive(&rig.transport)?;
        look(rig, round, sizes, &mut seen)?;
        if seen.iter().all(|total| *total == ALL) {
            break;
        }
        rig.check_peers()?;
        ensure!(
            Instant::now() < until,
            "round {round}: found the signals {seen:?} of the queues of rank {}; expected {ALL} of each",
            rig.previous()
        );
    }
    Ok(())
}

/// Checks that the total of each queue is that of its first puts, and that these are there.
fn look(rig: &Rig<'_>, round: u64, sizes: [usize; 4], seen: &mut [u64]) -> Result<()> {
    let previous = rig.previous();
    for (queue, seen) in (0..).zip(seen) {
        let id = rig.signal(0, queue, previous);
        let found = rig.transport.read_signal(queue, id).saturating_sub((round - 1) * ALL);
        ensure!(
            found <= ALL && (found + 1).is_power_of_two(),
            "round {round}, queue {queue}: found the signals {found:#b} of rank {previous}; expected that of each put \
             which was posted before the last one that is seen (TY_CAP_ORDERED)"
        );
        for number in seen.trailing_ones()..found.trailing_ones() {
            let number = number as usize;
            let what = format!("round {round}, queue {queue}: put {number}, seen with its signal");
            let read = rig.windows[1].read(place(queue, number), sizes[number]);
            compare(&what, &read, &payload(previous, queue, round, number, sizes[number]))?;
        }
        *seen = found;
    }
    Ok(())
}
