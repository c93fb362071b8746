//! Declared limits: a transport that declares more than it can do fails at the limit itself.

use anyhow::{Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::completion::{check_events, flood};
use super::memory::{UNTOUCHED, compare, pattern};
use super::needs::Needs;
use super::rig::Rig;
use super::waits::Total;
use super::{Body, TransportCase};

/// The most windows that a communicator has.
const WINDOWS: [u64; abi::TY_MAX_WINDOWS] = [4096; abi::TY_MAX_WINDOWS];

/// More bytes than two sockets hold: the sender's and the receiver's buffers may grow to 4 and 6 MiB.
pub(super) const LARGE: usize = 16 << 20;

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "every_declared_queue_works",
        about: "each of the declared queues, up to 64, moves its own commands and signals, and gets where they work",
        invariants: "INV-1, INV-6",
        ranks: &[2],
        needs: Needs { queues: 0, kinds: 1, queue_depth: 8, ..Needs::SMALL },
        body: Body::Connected(every_declared_queue_works),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "a_queue_of_the_declared_depth_loses_nothing",
        about: "a queue as deep as declared ends every command that it accepted, once",
        invariants: "INV-5, INV-7",
        ranks: &[2],
        needs: Needs { queue_depth: u32::MAX, ..Needs::SMALL },
        body: Body::Connected(a_queue_of_the_declared_depth_loses_nothing),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "every_declared_window_is_reached",
        about: "each of the declared windows, up to 8, takes its own puts",
        invariants: "INV-1",
        ranks: &[2],
        needs: Needs { windows: &WINDOWS, fewer: true, ..Needs::SMALL },
        body: Body::Connected(every_declared_window_is_reached),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "puts_beyond_socket_buffers_arrive",
        about: "puts of up to 16 MiB, or the largest declared, arrive whole, and so do gets that both ranks answer at \
                once, where gets work",
        invariants: "INV-1, INV-6",
        ranks: &[2],
        needs: Needs { windows: &[LARGE as u64, LARGE as u64], ..Needs::SMALL },
        body: Body::Connected(puts_beyond_socket_buffers_arrive),
        ..TransportCase::BARE
    },
];

fn every_declared_queue_works(rig: &mut Rig<'_>) -> Result<()> {
    let (me, next, previous) = (rig.me(), rig.next(), rig.previous());
    let queues = rig.needs.queues;
    let bytes = 512;
    let at = |queue: u32| (queue as usize * bytes) as u64;
    let seed = |rank: u32, queue: u32| u64::from(rank) << 16 | u64::from(queue);
    let half = rig.windows[0].len() as u64 / 2;
    for queue in 0..queues {
        rig.windows[0].write(at(queue) as usize, &pattern(seed(me, queue), bytes));
    }
    for queue in 0..queues {
        let put = Command {
            op: abi::TY_OP_PUT_SIGNAL,
            flags: abi::TY_FLAG_NOTIFY,
            queue,
            peer: next,
            signal: rig.signal(0, queue, me),
            add: 1 + queue,
            src_offset: at(queue),
            dst_offset: half + at(queue),
            bytes: bytes as u64,
            tag: u64::from(queue),
            ..NO_COMMAND
        };
        rig.post(queue, &[put])?;
    }
    let totals: Vec<_> = (0..queues)
        .map(|queue| Total {
            queue,
            id: rig.signal(0, queue, previous),
            total: u64::from(1 + queue),
        })
        .collect();
    rig.wait_signals(&totals)?;
    for queue in 0..queues {
        let found = rig.windows[0].read((half + at(queue)) as usize, bytes);
        let what = format!("put of rank {previous} on queue {queue} of {queues}");
        compare(&what, &found, &pattern(seed(previous, queue), bytes))?;
        let events = rig.wait_events(queue, 1)?;
        ensure!(
            events.iter().all(|event| (event.queue, event.tag) == (queue, u64::from(queue))),
            "queue {queue} of {queues}: found {events:?}; expected one event of its own"
        );
    }
    rig.barrier("all queues have put")?;
    if rig.can_get() {
        (0..queues).try_for_each(|queue| get_back(rig, queue, bytes))
    } else {
        Ok(())
    }
}

/// Gets the bytes of a queue, which this rank has put.
fn get_back(rig: &mut Rig<'_>, queue: u32, bytes: usize) -> Result<()> {
    let half = rig.windows[0].len() / 2;
    let own = queue as usize * bytes;
    let data = rig.windows[0].read(own, bytes);
    rig.windows[0].write(own, &vec![UNTOUCHED; bytes]);
    let get = Command {
        op: abi::TY_OP_GET,
        flags: abi::TY_FLAG_NOTIFY,
        queue,
        peer: rig.next(),
        src_offset: own as u64,
        dst_offset: (half + own) as u64,
        bytes: bytes as u64,
        tag: u64::from(queue),
        ..NO_COMMAND
    };
    rig.post(queue, &[get])?;
    check_events(&rig.wait_events(queue, 1)?, std::iter::once(&get))?;
    compare(&format!("a get on queue {queue}"), &rig.windows[0].read(own, bytes), &data)
}

/// The most commands that the test posts at once: communicators use fewer.
const MOST_DEPTH: u32 = 16_384;

fn a_queue_of_the_declared_depth_loses_nothing(rig: &mut Rig<'_>) -> Result<()> {
    // At least one command more than fits, so that the queue is full once.
    let count = rig.needs.queue_depth.min(MOST_DEPTH) as usize + 100;
    flood(rig, count)
}

fn every_declared_window_is_reached(rig: &mut Rig<'_>) -> Result<()> {
    let (me, next, previous) = (rig.me(), rig.next(), rig.previous());
    let windows = rig.windows.len();
    let bytes = 1024;
    let seed = |rank: u32, window: usize| u64::from(rank) << 16 | window as u64;
    let mut puts = Vec::new();
    for window in 0..windows {
        rig.windows[window].write(0, &pattern(seed(me, window), bytes));
        puts.push(Command {
            op: abi::TY_OP_PUT_SIGNAL,
            peer: next,
            signal: rig.signal(0, 0, me),
            add: 1,
            src_window: window as u16,
            dst_window: window as u16,
            dst_offset: 2048,
            bytes: bytes as u64,
            ..NO_COMMAND
        });
    }
    rig.post(0, &puts)?;
    rig.wait_signal(0, rig.signal(0, 0, previous), windows as u64)?;
    for window in 0..windows {
        let found = rig.windows[window].read(2048, bytes);
        let what = format!("put of rank {previous} to window {window} of {windows}");
        compare(&what, &found, &pattern(seed(previous, window), bytes))?;
    }
    Ok(())
}

fn puts_beyond_socket_buffers_arrive(rig: &mut Rig<'_>) -> Result<()> {
    let (me, previous) = (rig.me(), rig.previous());
    let len = rig.windows[0].len();
    let sizes = [(5 << 20) + 1, LARGE].map(|bytes| rig.put_bytes(bytes));
    for (round, bytes) in (1_u64..).zip(sizes) {
        let seed = |rank: u32| u64::from(rank) << 16 | round;
        let at = len - bytes;
        rig.windows[0].write(at, &pattern(seed(me), bytes));
        rig.windows[1].fill(UNTOUCHED);
        rig.barrier("ready for a large put")?;
        rig.post(0, &[rig.put_to_next(at, bytes)])?;
        rig.wait_signal(0, rig.signal(0, 0, previous), round)?;
        let mut expected = vec![UNTOUCHED; at];
        expected.extend(pattern(seed(previous), bytes));
        let what = format!("put of {bytes} bytes of rank {previous}, seen with its signal");
        compare(&what, &rig.windows[1].read(0, len), &expected)?;
        rig.wait_events(0, 1)?;
        rig.barrier("a large put arrived")?;
    }
    if rig.can_get() { get_back_at_once(rig, rig.put_bytes(GOT)) } else { Ok(()) }
}

/// More bytes than the buffers of two sockets.
const GOT: usize = 12 << 20;

/// Both ranks get the end of what they have put last, two parts at once: each answers while its own answers come.
fn get_back_at_once(rig: &mut Rig<'_>, bytes: usize) -> Result<()> {
    let at = rig.windows[0].len() - bytes;
    let data = rig.windows[0].read(at, bytes);
    rig.windows[0].fill(UNTOUCHED);
    rig.barrier("ready for large gets")?;
    let part = |tag: u64, from: usize, bytes: usize| Command {
        op: abi::TY_OP_GET,
        flags: abi::TY_FLAG_NOTIFY,
        peer: rig.next(),
        dst_window: 1,
        src_offset: (at + from) as u64,
        dst_offset: (at + from) as u64,
        bytes: bytes as u64,
        tag,
        ..NO_COMMAND
    };
    let gets = [part(0, 0, bytes / 3), part(1, bytes / 3, bytes - bytes / 3)];
    rig.post(0, &gets)?;
    check_events(&rig.wait_events(0, gets.len())?, gets.iter())?;
    let mut expected = vec![UNTOUCHED; at];
    expected.extend(data);
    let what = format!("gets of {bytes} bytes from rank {}, which gets from this one", rig.next());
    compare(&what, &rig.windows[0].read(0, rig.windows[0].len()), &expected)?;
    rig.barrier("large gets are over")
}
