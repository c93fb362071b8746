//! Progress: the transport moves commands by itself, or the caller moves them by `progress`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use tokenyard_core::abi;
use tokenyard_core::bootstrap::World;
use tokenyard_core::host::OpenTransport;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::headway::Headway;
use super::memory::{compare, pattern};
use super::needs::Needs;
use super::patience::bring_up_soon;
use super::rig::Rig;
use super::{Body, TransportCase};
use crate::suite::Rank;

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "puts_move_without_a_poll",
        about: "without TY_CAP_MANUAL_PROGRESS a put arrives although no rank calls anything",
        invariants: "INV-6",
        ranks: &[2],
        without: abi::TY_CAP_MANUAL_PROGRESS,
        needs: Needs { windows: &[1 << 20, 1 << 20], ..Needs::SMALL },
        body: Body::Connected(puts_move_without_a_poll),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "progress_alone_moves_puts",
        about: "with TY_CAP_MANUAL_PROGRESS a put arrives while a thread calls `progress`, and no thread polls; \
                the next poll has its event",
        invariants: "INV-6",
        ranks: &[2],
        flags: abi::TY_CAP_MANUAL_PROGRESS,
        needs: Needs { windows: &[1 << 20, 1 << 20], ..Needs::SMALL },
        body: Body::Connected(progress_alone_moves_puts),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "health_answers_beside_poll",
        about: "health, link_name and progress answer on a thread of their own while another one posts and polls",
        invariants: "the threads: `health`",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::Connected(health_answers_beside_poll),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "a_slow_peer_is_not_lost",
        about: "with TY_CAP_MANUAL_PROGRESS puts end as done where the peer takes a part now and then, for longer \
                than the deadline",
        invariants: "INV-6",
        ranks: &[2],
        flags: abi::TY_CAP_MANUAL_PROGRESS,
        needs: Needs { windows: &[1 << 20, 1 << 20], ..Needs::SMALL },
        body: Body::Alone(a_slow_peer_is_not_lost),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "ordered_puts_arrive_in_order",
        about: "with TY_CAP_ORDERED puts and values of a queue, long and short, arrive in the order in which they \
                were posted",
        invariants: "the capability `ordered`",
        ranks: &[2],
        flags: abi::TY_CAP_ORDERED,
        needs: Needs { windows: &[1 << 19, 1 << 19], ..Needs::SMALL },
        body: Body::Connected(ordered_puts_arrive_in_order),
        ..TransportCase::BARE
    },
];

/// From a word to more than a fabric sends at once.
const SIZES: [usize; 6] = [8, 4096, 0, 65_536, 1, 1 << 19];

fn puts_move_without_a_poll(rig: &mut Rig<'_>) -> Result<()> {
    for (round, bytes) in (1_u64..).zip(SIZES) {
        put_once(rig, round, bytes)?;
        arrives(rig, round, bytes, "no rank calls poll or progress")?;
    }
    rig.wait_events(0, SIZES.len()).map(drop)
}

fn progress_alone_moves_puts(rig: &mut Rig<'_>) -> Result<()> {
    for (round, bytes) in (1_u64..).zip(SIZES) {
        put_once(rig, round, bytes)?;
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let transport = &rig.transport;
            let mover = scope.spawn(|| {
                while !over.load(Ordering::Acquire) {
                    drive(transport)?;
                    std::thread::yield_now();
                }
                Ok(())
            });
            let arrived = arrives(rig, round, bytes, "a thread of each rank calls progress alone");
            over.store(true, Ordering::Release);
            mover.join().map_err(|_| anyhow!("the thread that drives panicked"))?.and(arrived)
        })?;
    }
    rig.wait_events(0, SIZES.len()).context("events of commands that progress has moved").map(drop)
}

/// The number of answers of `health` beside posts and polls, and of these. Where one takes long, fewer do: with `LEAST`
/// it is likely that an answer and a poll overlap, also where threads seldom run at once.
const BESIDE: u64 = 2000;
const LEAST: u64 = 20;

fn health_answers_beside_poll(rig: &mut Rig<'_>) -> Result<()> {
    let (answers, posted) = (AtomicU64::new(0), AtomicU64::new(0));
    let over = AtomicBool::new(false);
    let (next, is_driven, deadline) = (rig.next(), rig.is_driven(), rig.needs.deadline);
    let enough = Instant::now() + deadline / 2;
    let signal = rig.signal(0, 0, rig.me());
    let (op, flags) = (abi::TY_OP_PUT_SIGNAL, abi::TY_FLAG_NOTIFY);
    let put = Command { op, flags, peer: next, signal, add: 1, bytes: 64, ..NO_COMMAND };
    let (transport, queue) = (&rig.transport, &mut rig.queues[0]);
    std::thread::scope(|scope| {
        let asker = scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                transport.health().context("health beside poll; expected it to be good")?;
                transport.link_name(next);
                if is_driven {
                    drive(transport)?;
                }
                answers.fetch_add(1, Ordering::Relaxed);
                std::thread::yield_now();
            }
            Ok(())
        });
        let mut work = || {
            let few = || answers.load(Ordering::Relaxed).min(posted.load(Ordering::Relaxed));
            let is_enough = || few() >= BESIDE || few() >= LEAST && Instant::now() > enough;
            while !is_enough() && !asker.is_finished() {
                queue.post(transport, &[put], deadline)?;
                posted.fetch_add(1, Ordering::Relaxed);
                let until = Instant::now() + deadline;
                while queue.take().is_empty() {
                    queue.drive(transport)?;
                    ensure!(Instant::now() < until, "found {} puts and answers", few());
                    std::thread::yield_now();
                }
            }
            Ok(())
        };
        let worked = work();
        over.store(true, Ordering::Release);
        asker.join().map_err(|_| anyhow!("the thread that asks panicked"))?.and(worked)
    })?;
    Ok(())
}

/// Long puts: more than a fabric holds, so that it is full for most of the time.
const SLOW_PUTS: u64 = 32;
/// A part of the deadline, which a turn takes. Rank 0 drives as often for each time that rank 1 does.
const TURN: u32 = 16;
/// Turns in which rank 1 is slow: longer than the deadline. After them it takes the rest at the fabric's own pace.
const SLOW_TURNS: u32 = TURN * 3 / 2;

fn a_slow_peer_is_not_lost(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    for too_short in 0.. {
        let mut rig = bring_up_soon(rank, needs, too_short)?;
        if take_slowly(&mut rig, rank.config.world.deadline)? {
            return rig.end(true);
        }
    }
    Ok(())
}

/// The number by which rank 0 says that the case begins anew.
const ANEW: u64 = u64::MAX;

/// Returns whether all puts have ended. Else a busy machine has made a turn as long as the deadline, and a longer one
/// may do.
fn take_slowly(rig: &mut Rig<'_>, limit: Duration) -> Result<bool> {
    let deadline = rig.needs.deadline;
    let (me, bytes, signal) = (rig.me(), rig.put_bytes(1 << 20) as u64, rig.signal(0, 0, 0));
    let (op, flags) = (abi::TY_OP_PUT_SIGNAL, abi::TY_FLAG_NOTIFY);
    let put = Command { op, flags, peer: 1, signal, add: 1, dst_window: 1, bytes, ..NO_COMMAND };
    let (mut posted, mut ended, mut arrived) = (0, 0, 0);
    // Time, and not turns: a NIC, or a thread, that moves the puts may get less of a busy machine than the turns do.
    let (mut turn, mut headway, mut turns) = (0, Headway::new(limit), Turns::start());
    // Rank 1 has driven each time before rank 0 does: the fabric has room then, however busy the machine is.
    while ended < SLOW_PUTS || arrived < SLOW_PUTS {
        let is_slow = turn < SLOW_TURNS;
        turn += 1;
        ensure!(
            !headway.is_over(if is_slow { u64::from(turn) } else { ended + arrived }),
            "found {ended} ended puts and {arrived} arrived ones after {turn} turns, and no more within {limit:?}; \
             expected {SLOW_PUTS}"
        );
        let mut news = [0; 8];
        if me == 1 {
            (0..if is_slow { 1 } else { TURN }).try_for_each(|_| rig.drive())?;
            news = rig.transport.read_signal(0, signal).to_le_bytes();
            if is_slow {
                std::thread::sleep(deadline / TURN);
            }
        }
        arrived = of_rank(rig.world, 1, &news)?;
        if me == 0 {
            while posted < SLOW_PUTS && rig.queues[0].try_post(&rig.transport, &[put])? == 1 {
                posted += 1;
            }
            let driven = (0..TURN).try_for_each(|_| rig.drive()).context("a put to a slow peer");
            turns.next();
            if driven.is_ok() || deadline >= limit || turns.longest < deadline * 9 / 10 {
                driven?;
                ended += rig.queues[0].take().len() as u64;
            } else {
                ended = ANEW;
            }
            news = ended.to_le_bytes();
        }
        ended = of_rank(rig.world, 0, &news)?;
        if ended == ANEW {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The times of turns, each with the one before: rather too long than too short for the silence of rank 1.
struct Turns {
    last: [Instant; 2],
    longest: Duration,
}

impl Turns {
    fn start() -> Self {
        Self { last: [Instant::now(); 2], longest: Duration::ZERO }
    }

    fn next(&mut self) {
        let now = Instant::now();
        self.longest = self.longest.max(now - self.last[0]);
        self.last = [self.last[1], now];
    }
}

/// The number that a rank gives.
pub(super) fn of_rank(world: &World, of: usize, news: &[u8; 8]) -> Result<u64> {
    let all = world.all_gather("a turn", news)?;
    let bytes = all[of].as_slice().try_into().context("a number of a rank")?;
    Ok(u64::from_le_bytes(bytes))
}

pub(super) fn drive(transport: &OpenTransport) -> Result<()> {
    let moved = transport.progress();
    moved.map(drop).map_err(|status| anyhow!("progress: found status {status}; expected 0 or 1"))
}

fn seed(rank: u32, round: u64) -> u64 {
    u64::from(rank) << 32 | round
}

fn put_once(rig: &mut Rig<'_>, round: u64, bytes: usize) -> Result<()> {
    let (me, next) = (rig.me(), rig.next());
    let bytes = rig.put_bytes(bytes);
    rig.windows[0].write(0, &pattern(seed(me, round), bytes));
    let signal = rig.signal(0, 0, me);
    let put = Command {
        op: abi::TY_OP_PUT_SIGNAL,
        flags: abi::TY_FLAG_NOTIFY,
        peer: next,
        signal,
        add: 1,
        dst_window: 1,
        bytes: bytes as u64,
        ..NO_COMMAND
    };
    // A queue may refuse commands for a while, even an idle one.
    let until = rig.until();
    while rig.queues[0].try_post(&rig.transport, &[put])? == 0 {
        if rig.is_driven() {
            drive(&rig.transport)?;
        }
        ensure!(Instant::now() < until, "an idle queue accepts nothing; expected one command");
        std::thread::yield_now();
    }
    Ok(())
}

/// Checks that the put of the rank before this one arrives while this rank calls nothing but `read_signal`.
fn arrives(rig: &Rig<'_>, round: u64, bytes: usize, meanwhile: &str) -> Result<()> {
    let previous = rig.previous();
    let bytes = rig.put_bytes(bytes);
    let (id, until) = (rig.signal(0, 0, previous), rig.until());
    loop {
        let found = rig.transport.read_signal(0, id);
        if found >= round {
            break;
        }
        rig.check_peers()?;
        ensure!(
            Instant::now() < until,
            "signal {id} of a put of {bytes} bytes: found total {found}; expected {round} within {:?}, while \
             {meanwhile} (TY_CAP_MANUAL_PROGRESS)",
            rig.needs.deadline
        );
        std::thread::sleep(Duration::from_micros(50));
    }
    let what = format!("put of {bytes} bytes of rank {previous}, seen with its signal");
    compare(&what, &rig.windows[1].read(0, bytes), &pattern(seed(previous, round), bytes))?;
    // The barrier ensures that all have read this put before the next one is written; no rank drives a
    // queue in it.
    Ok(rig.world.barrier("a put has arrived")?)
}

/// Rounds of [`MIXED`] puts.
const ROUNDS: u64 = 30;
/// Sizes of a round's puts: long ones, which a fabric cuts, and short ones, which could overtake them.
const MIXED: [usize; 8] = [150_000, 8, 70_000, 1, 5000, 64, 90_000, 8];
/// The bits of a round's puts that raise a signal; every third raises none.
const RAISED: u64 = 0b1101_1011;
/// The put before which a value is posted.
const VALUE_BEFORE: usize = 4;

/// The place of the value, behind the puts.
fn value_place(rig: &Rig<'_>) -> usize {
    rig.windows[1].len() - 8
}

fn ordered_puts_arrive_in_order(rig: &mut Rig<'_>) -> Result<()> {
    let (me, next, previous) = (rig.me(), rig.next(), rig.previous());
    for round in 1..=ROUNDS {
        let mut puts = Vec::new();
        let mut at = 0;
        for number in 0..MIXED.len() {
            let bytes = rig.put_bytes(MIXED[(number + round as usize) % MIXED.len()]);
            rig.windows[0].write(at, &pattern(seed(me, round) << 8 | number as u64, bytes));
            // Each adds a bit of its own, so that the total shows which have arrived.
            let add = RAISED as u32 & 1 << number;
            puts.push(Command {
                op: if add == 0 { abi::TY_OP_PUT } else { abi::TY_OP_PUT_SIGNAL },
                peer: next,
                signal: rig.signal(0, 0, me),
                add,
                dst_window: 1,
                src_offset: at as u64,
                dst_offset: at as u64,
                bytes: bytes as u64,
                ..NO_COMMAND
            });
            at += bytes.next_multiple_of(8);
        }
        let mut commands = puts.clone();
        commands.insert(
            VALUE_BEFORE,
            Command {
                op: abi::TY_OP_PUT_VALUE,
                peer: next,
                dst_window: 1,
                dst_offset: value_place(rig) as u64,
                value: seed(me, round),
                ..NO_COMMAND
            },
        );
        rig.post(0, &commands)?;
        arrive_in_order(rig, round, &puts)?;
        let end = rig.signal(1, 0, me);
        let read =
            Command { op: abi::TY_OP_SIGNAL, peer: previous, signal: end, add: 1, ..NO_COMMAND };
        rig.post(0, &[read])?;
        rig.wait_signal(0, rig.signal(1, 0, next), round)?;
    }
    Ok(())
}

/// Checks at each new total that the puts up to the last one whose signal is seen are all there.
fn arrive_in_order(rig: &mut Rig<'_>, round: u64, puts: &[Command]) -> Result<()> {
    let previous = rig.previous();
    let (id, until) = (rig.signal(0, 0, previous), rig.until());
    let mut seen = 0;
    let last_of = |total: u64| u64::BITS - total.leading_zeros();
    while seen < RAISED {
        rig.drive()?;
        let found = rig.transport.read_signal(0, id).saturating_sub((round - 1) * RAISED);
        let last = last_of(found);
        ensure!(
            found <= RAISED && found == RAISED & ((1 << last) - 1),
            "round {round}: found the signals {found:#b} of rank {previous}; expected that of each put which \
             was posted before the last one that is seen (TY_CAP_ORDERED)"
        );
        for number in last_of(seen)..last {
            let Command { dst_offset, bytes, .. } = puts[number as usize];
            let what = format!(
                "round {round}: put {number} of {bytes} bytes of rank {previous}, which was posted before the \
                 one whose signal was seen"
            );
            let (at, bytes) = (dst_offset as usize, bytes as usize);
            let expected = pattern(seed(previous, round) << 8 | u64::from(number), bytes);
            compare(&what, &rig.windows[1].read(at, bytes), &expected)?;
        }
        if last as usize > VALUE_BEFORE {
            let (value, posted) = (rig.windows[1].load(value_place(rig)), seed(previous, round));
            ensure!(
                value == posted,
                "round {round}: found value {value:#x} of rank {previous}; expected {posted:#x}, which was posted \
                 before the put whose signal was seen (TY_CAP_ORDERED)"
            );
        }
        rig.check_peers()?;
        ensure!(
            Instant::now() < until,
            "round {round}: found the signals {found:#b} of rank {previous}; expected all of {RAISED:#b}"
        );
        seen = found;
    }
    Ok(())
}
