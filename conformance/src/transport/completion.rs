//! Completions: the content of a done event, the number of events, and the behaviour of a full queue.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::host::OpenTransport;
use tokenyard_core::transport::{Command, Event, NO_COMMAND};

use super::headway::Headway;
use super::limits::LARGE;
use super::memory::{UNTOUCHED, compare, pattern};
use super::needs::Needs;
use super::queue::Queue;
use super::rig::{self, Rig};
use super::{Body, TransportCase};

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "done_means_source_reusable",
        about: "a source may be overwritten once its command is done (INV-4, INV-5)",
        invariants: "INV-4, INV-5",
        ranks: &[2],
        needs: Needs { windows: &[1 << 20, 1 << 20], ..Needs::SMALL },
        body: Body::Connected(done_means_source_reusable),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "sources_behind_a_large_put_are_reusable",
        about: "a source may be overwritten once its put is done, also where 16 MiB are under way before it",
        invariants: "INV-4, INV-5",
        ranks: &[2],
        needs: Needs { windows: &[BEHIND, BEHIND], ..Needs::SMALL },
        body: Body::Connected(sources_behind_a_large_put_are_reusable),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "every_notified_command_completes_once",
        about: "each command with TY_FLAG_NOTIFY gives one done event with its tag, others none",
        invariants: "INV-7",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::Connected(every_notified_command_completes_once),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "queue_full_is_back_pressure",
        about: "a full queue accepts less; what it accepted is done, the rest comes later",
        invariants: "INV-5, INV-7",
        ranks: &[2],
        needs: Needs { queue_depth: 4, ..Needs::SMALL },
        body: Body::Connected(queue_full_is_back_pressure),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "queues_are_independent",
        about: "a queue that is not polled stops no other; queues work on threads of their own, and their puts arrive \
                whole",
        invariants: "INV-6",
        ranks: &[2],
        needs: Needs {
            queues: 2,
            queue_depth: 8,
            windows: &[2 * OF_QUEUE, 2 * OF_QUEUE],
            kinds: 2,
            ..Needs::SMALL
        },
        body: Body::Connected(queues_are_independent),
        ..TransportCase::BARE
    },
];

/// Puts of one round, from sources of their own.
const BATCH: usize = 4;
/// Rounds between two looks at the time: each size is there five times.
const STRETCH: u64 = 20;
/// The time after which slow fabrics have had enough of them.
const ENOUGH: Duration = Duration::from_secs(1);

fn done_means_source_reusable(rig: &mut Rig<'_>) -> Result<()> {
    let (me, previous) = (rig.me(), rig.previous());
    let room = rig.windows[0].len() / BATCH;
    let (start, mut total) = (Instant::now(), 0);
    for round in 0..3 * STRETCH {
        // The ranks have met behind the round before.
        if round > 0 && round % STRETCH == 0 && rig::of_any(rig.world, start.elapsed() > ENOUGH)? {
            break;
        }
        let bytes = rig.put_bytes([64, 4096, 50_000, room][round as usize % 4]);
        let seed = |writer: u32, part: usize| u64::from(writer) << 32 | round << 8 | part as u64;
        let mut commands = [NO_COMMAND; BATCH];
        for (part, command) in commands.iter_mut().enumerate() {
            rig.windows[0].write(part * room, &pattern(seed(me, part), bytes));
            *command = Command { tag: part as u64, ..rig.put_to_next(part * room, bytes) };
        }
        rig.post(0, &commands)?;
        let mut done = 0;
        while done < BATCH {
            for event in rig.wait_some_events(0, 1)? {
                // The source is overwritten at once, and only the one that is done.
                rig.windows[0].write(event.tag as usize % BATCH * room, &vec![OVERWRITTEN; bytes]);
                done += 1;
            }
        }
        total += BATCH as u64;
        rig.wait_signal(0, rig.signal(0, 0, previous), total)?;
        for part in 0..BATCH {
            let found = rig.windows[1].read(part * room, bytes);
            let what = format!("round {round}, put {part} of rank {previous}: {}", blame(&found));
            compare(&what, &found, &pattern(seed(previous, part), bytes))?;
            rig.windows[1].write(part * room, &vec![UNTOUCHED; bytes]);
        }
        rig.barrier("round is over")?;
    }
    Ok(())
}

/// Puts behind a large one, and the bytes of each.
const FOLLOWERS: usize = 16;
const FOLLOWER: usize = 1 << 16;
/// The window of the large put and its followers.
const BEHIND: u64 = (LARGE + FOLLOWERS * FOLLOWER) as u64;
/// The content of the large put.
const FILLED: u8 = 0x3c;

/// More than any socket takes at once is under way, so that a put which is done when it is queued shows.
fn sources_behind_a_large_put_are_reusable(rig: &mut Rig<'_>) -> Result<()> {
    let (me, previous) = (rig.me(), rig.previous());
    let (large, small) = (rig.put_bytes(LARGE), rig.put_bytes(FOLLOWER));
    let place = |part: usize| LARGE + part * FOLLOWER;
    let seed = |rank: u32, part: usize| u64::from(rank) << 16 | part as u64;
    let put = |at, bytes| Command { tag: at as u64, ..rig.put_to_next(at, bytes) };
    rig.windows[0].fill(FILLED);
    let mut commands: Vec<_> =
        (0..LARGE).step_by(large).map(|at| put(at, large.min(LARGE - at))).collect();
    for part in 0..FOLLOWERS {
        rig.windows[0].write(place(part), &pattern(seed(me, part), small));
        commands.push(put(place(part), small));
    }
    rig.post(0, &commands)?;
    let mut left = commands.len();
    while left > 0 {
        for event in rig.wait_some_events(0, 1)? {
            let Some(done) = commands.iter().find(|command| command.tag == event.tag) else {
                anyhow::bail!("found an event with the unknown tag {:#x}", event.tag);
            };
            let over = vec![OVERWRITTEN; done.bytes as usize];
            rig.windows[0].write(done.src_offset as usize, &over);
            left -= 1;
        }
    }
    rig.wait_signal(0, rig.signal(0, 0, previous), commands.len() as u64)?;
    for part in 0..FOLLOWERS {
        let found = rig.windows[1].read(place(part), small);
        let what = format!("put {part} of rank {previous} behind {LARGE} bytes: {}", blame(&found));
        compare(&what, &found, &pattern(seed(previous, part), small))?;
    }
    let found = rig.windows[1].read(0, LARGE);
    let what = format!("{LARGE} bytes of rank {previous}: {}", blame(&found));
    compare(&what, &found, &vec![FILLED; LARGE])?;
    rig.barrier("large puts are over")
}

/// The byte that overwrites a source.
const OVERWRITTEN: u8 = 0xee;

/// The fault that a wrong payload shows. A payload that never moved shows nothing about its source.
fn blame(found: &[u8]) -> &'static str {
    // Payloads are mixed words, of which few bytes are alike by chance.
    if found.windows(8).any(|bytes| bytes.iter().all(|byte| *byte == OVERWRITTEN)) {
        "it was read after it was done, when its source was overwritten (INV-4)"
    } else if found.iter().all(|byte| *byte == UNTOUCHED) {
        "its signal came and its payload did not (INV-1): a lost payload, not an early done event"
    } else {
        "its payload is wrong although its source did not change (INV-1)"
    }
}

fn every_notified_command_completes_once(rig: &mut Rig<'_>) -> Result<()> {
    let (me, ranks) = (rig.me(), rig.ranks());
    let mut ops =
        vec![abi::TY_OP_PUT, abi::TY_OP_PUT_SIGNAL, abi::TY_OP_PUT_VALUE, abi::TY_OP_SIGNAL];
    ops.extend(rig.can_get().then_some(abi::TY_OP_GET));
    let count = 600_u64;
    let mut commands = Vec::new();
    for i in 0..count {
        let op = ops[i as usize % ops.len()];
        // Neither 4 nor 5 ops have such a step: each asks for an event at times.
        let (notify, is_get) = (i % 3 != 1, op == abi::TY_OP_GET);
        commands.push(Command {
            op,
            flags: if notify { abi::TY_FLAG_NOTIFY } else { 0 },
            peer: (i / 3) as u32 % ranks,
            signal: if is_get { 0 } else { rig.signal(0, 0, me) },
            add: u32::from(!is_get),
            // A get reads what no rank writes, into what no put reads.
            src_offset: if is_get { 1 << 15 } else { 0 },
            dst_offset: if is_get { 3 << 14 } else { 4096 * (1 + u64::from(me)) },
            bytes: if op == abi::TY_OP_PUT_VALUE { 0 } else { 8 * (i % 7 + 1) },
            // Any 64 bits: the tag belongs to the caller of `post`.
            tag: !(i.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            ..NO_COMMAND
        });
    }
    rig.post(0, &commands)?;
    let notified = || commands.iter().filter(|c| c.flags & abi::TY_FLAG_NOTIFY != 0);
    let events = rig.wait_some_events(0, notified().count())?;
    check_events(&events, notified())?;
    // All ranks' commands have ended by now; the end of the case finds events that are reported later.
    rig.barrier("all done")
}

/// Checks that each of `commands` has exactly one done event, and that there is no other.
pub(super) fn check_events<'a>(
    events: &[Event],
    commands: impl Iterator<Item = &'a Command>,
) -> Result<()> {
    let mut expected = std::collections::BTreeMap::new();
    for command in commands {
        expected.insert(command.tag, command);
    }
    let wanted = expected.len();
    for event in events {
        let Some(command) = expected.remove(&event.tag) else {
            let tag = event.tag;
            anyhow::bail!(
                "found a second event, or an unknown tag, {tag:#x}; expected each tag once"
            );
        };
        let found = (event.kind, event.queue, event.peer, event.status);
        let right = (abi::TY_EVENT_DONE, command.queue, command.peer, abi::TY_OK);
        ensure!(
            found == right,
            "tag {:#x}: found (kind, queue, peer, status) {found:?}; expected {right:?}",
            event.tag
        );
    }
    ensure!(
        expected.is_empty(),
        "found {} tags in done events; expected {wanted}; tag {:#x} never came",
        events.len(),
        expected.keys().next().copied().unwrap_or(0)
    );
    Ok(())
}

/// More commands than any queue of depth 4 should take without a poll.
const FLOOD: usize = 1000;

fn queue_full_is_back_pressure(rig: &mut Rig<'_>) -> Result<()> {
    flood(rig, FLOOD)
}

/// Posts `count` commands, at first without a poll, for as long as the queue takes anything.
pub(super) fn flood(rig: &mut Rig<'_>, count: usize) -> Result<()> {
    let (me, next, previous) = (rig.me(), rig.next(), rig.previous());
    let commands: Vec<_> = (0..count as u64)
        .map(|tag| Command {
            op: abi::TY_OP_PUT_SIGNAL,
            flags: abi::TY_FLAG_NOTIFY,
            peer: next,
            signal: rig.signal(0, 0, me),
            add: 1,
            dst_offset: 8192,
            bytes: 8,
            tag,
            ..NO_COMMAND
        })
        .collect();
    let mut accepted = 0;
    while accepted < count {
        match rig.queues[0].try_post(&rig.transport, &commands[accepted..])? {
            0 => break,
            more => accepted += more,
        }
    }
    ensure!(accepted > 0, "an idle queue accepts nothing; expected at least one command");
    rig.post(0, &commands[accepted..])?;
    let events = rig.wait_events(0, count)?;
    check_events(&events, commands.iter())?;
    rig.wait_signal(0, rig.signal(0, 0, previous), count as u64)
}

fn queues_are_independent(rig: &mut Rig<'_>) -> Result<()> {
    let (me, previous) = (rig.me(), rig.previous());
    let put = |rig: &Rig<'_>, queue: u32, tag: u64| Command {
        queue,
        signal: rig.signal(0, queue, me),
        tag,
        ..rig.put_to_next(8 * queue as usize, 8)
    };
    // Queue 0 is full and not polled.
    let (one, other) = (put(rig, 0, 0), put(rig, 1, 1));
    let mut on_first = 0;
    while on_first < FLOOD && rig.queues[0].try_post(&rig.transport, &[one])? == 1 {
        on_first += 1;
    }
    let until = rig.until();
    rig.queues[1].post(&rig.transport, &[other], rig.needs.deadline)?;
    while rig.queues[1].events().is_empty() {
        rig.queues[1].drive(&rig.transport)?;
        ensure!(Instant::now() < until, "queue 1 does not go on while queue 0 is not polled");
    }
    check_events(&rig.wait_some_events(1, 1)?, [other].iter())?;
    rig.post(0, &vec![one; FLOOD - on_first])?;
    check_own(0, &rig.wait_some_events(0, FLOOD)?, FLOOD)?;
    rig.wait_signal(0, rig.signal(0, 0, previous), FLOOD as u64)?;
    rig.wait_signal(1, rig.signal(0, 1, previous), 1)?;
    rig.barrier("one queue at a time is over")?;
    both_queues_at_once(rig, [one, other])?;
    rig.wait_signal(0, rig.signal(0, 0, previous), (FLOOD + PER_THREAD) as u64)?;
    rig.wait_signal(1, rig.signal(0, 1, previous), (1 + PER_THREAD) as u64)?;
    (1..=MEETINGS).try_for_each(|round| payloads_of_both_queues(rig, round))
}

/// Commands that each thread posts.
const PER_THREAD: usize = 2000;

/// The same put again and again, on two threads.
fn both_queues_at_once(rig: &mut Rig<'_>, puts: [Command; 2]) -> Result<()> {
    on_two_threads(rig, puts.map(|put| vec![put; PER_THREAD]))?;
    let mut queues = rig.queues.iter_mut().zip(0..);
    queues.try_for_each(|(queue, id)| check_own(id, &queue.take(), PER_THREAD))
}

/// Two threads, one queue each, begin to post at once.
fn on_two_threads(rig: &mut Rig<'_>, puts: [Vec<Command>; 2]) -> Result<()> {
    let (deadline, start) = (rig.needs.deadline, &Barrier::new(2));
    let transport: &OpenTransport = &rig.transport;
    std::thread::scope(|scope| {
        let one = |(queue, puts): (_, Vec<Command>)| {
            scope.spawn(move || {
                start.wait();
                one_queue(transport, queue, &puts, deadline)
            })
        };
        let threads: Vec<_> = rig.queues.iter_mut().zip(puts).map(one).collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().map_err(|_| anyhow::anyhow!("the thread of a queue panicked"))?
        })
    })
}

/// Rounds of puts with payloads.
const MEETINGS: u64 = 4;
/// The bytes of these puts, and the bytes of a queue: each put of a round has a place of its own. A long one is half
/// sent for a while.
const PAYLOADS: [usize; 24] = {
    let mut bytes = [1 << 14; 24];
    (bytes[9], bytes[18]) = (1 << 18, 1 << 18);
    bytes
};
const OF_QUEUE: u64 = 1 << 20;

/// Puts of two threads at once, each with bytes of its own, which all arrive.
fn payloads_of_both_queues(rig: &mut Rig<'_>, round: u64) -> Result<()> {
    let (me, previous) = (rig.me(), rig.previous());
    let seed = |rank: u32, tag: u64| (round << 4 | u64::from(rank)) << 16 | tag;
    let puts = [0, 1].map(|queue| {
        let mut at = u64::from(queue) * OF_QUEUE;
        let of_place = |(number, bytes)| {
            let (bytes, offset) = (rig.put_bytes(bytes), at);
            at += bytes as u64;
            let (signal, tag) = (rig.signal(1, queue, me), u64::from(queue) << 8 | number);
            Command { queue, signal, tag, ..rig.put_to_next(offset as usize, bytes) }
        };
        (0..).zip(PAYLOADS).map(of_place).collect::<Vec<_>>()
    });
    for put in puts.iter().flatten() {
        let data = pattern(seed(me, put.tag), put.bytes as usize);
        rig.windows[0].write(put.src_offset as usize, &data);
    }
    rig.windows[1].fill(UNTOUCHED);
    rig.barrier("payloads of two queues")?;
    on_two_threads(rig, puts.clone())?;
    for (queue, puts) in (0..).zip(&puts) {
        check_events(&rig.queues[queue as usize].take(), puts.iter())?;
        rig.wait_signal(queue, rig.signal(1, queue, previous), round * puts.len() as u64)?;
    }
    for put in puts.iter().flatten() {
        let (at, bytes) = (put.dst_offset as usize, put.bytes as usize);
        let what = format!(
            "round {round}: put {} of rank {previous} on queue {}, which two threads posted on",
            put.tag & 0xff,
            put.queue
        );
        compare(&what, &rig.windows[1].read(at, bytes), &pattern(seed(previous, put.tag), bytes))?;
    }
    rig.barrier("payloads of two queues were read")
}

/// Checks that a queue whose commands all have its id as their tag gave `count` events, all of its own.
fn check_own(queue: u32, events: &[Event], count: usize) -> Result<()> {
    let own = events.iter().filter(|e| e.queue == queue && e.tag == u64::from(queue)).count();
    ensure!(
        own == count && events.len() == count,
        "queue {queue}: found {own} events of its own among {}; expected {count}",
        events.len()
    );
    Ok(())
}

fn one_queue(
    transport: &OpenTransport,
    queue: &mut Queue,
    puts: &[Command],
    deadline: Duration,
) -> Result<()> {
    for put in puts {
        queue.post(transport, &[*put], deadline)?;
    }
    let (mut headway, wanted) = (Headway::new(deadline), puts.len());
    while queue.events().len() < wanted {
        queue.drive(transport)?;
        let found = queue.events().len();
        ensure!(
            !headway.is_over(found as u64),
            "a queue: found {found} events; expected {wanted}, and one more within {deadline:?}"
        );
        std::thread::yield_now();
    }
    Ok(())
}
