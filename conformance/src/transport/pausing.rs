//! A peer that pauses, and takes a part now and then: it is slow, and not lost.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::ending::FILLS;
use super::headway::Headway;
use super::limits::LARGE;
use super::lost_peer::{PART, await_loss, bring_up_within, signal};
use super::needs::Needs;
use super::patience::bring_up_soon;
use super::progress::of_rank;
use super::rig::Rig;
use super::{Body, TransportCase};
use crate::suite::{Loss, Outcome, Rank};

const PAUSES: TransportCase = TransportCase {
    invariants: "INV-6",
    ranks: &[2],
    needs: Needs { windows: &[LARGE as u64, LARGE as u64], ..Needs::SMALL },
    ..TransportCase::BARE
};

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "a_pausing_peer_is_not_lost",
        about: "without TY_CAP_MANUAL_PROGRESS puts end as done where the peer's process is stopped twice, together \
                for longer than the deadline, and takes a part between",
        without: abi::TY_CAP_MANUAL_PROGRESS,
        body: Body::OwnProcess(a_pausing_peer_is_not_lost),
        ..PAUSES
    },
    TransportCase {
        name: "a_silent_peer_is_not_lost",
        about: "with TY_CAP_MANUAL_PROGRESS puts end as done where the peer drives nothing twice, together for longer \
                than the deadline, and takes a part between",
        flags: abi::TY_CAP_MANUAL_PROGRESS,
        body: Body::Alone(a_silent_peer_is_not_lost),
        ..PAUSES
    },
];

/// Puts that are under way: far more than the peer takes before it is stopped again.
const PUTS: u64 = 16;

fn a_pausing_peer_is_not_lost(rank: &Rank<'_>, needs: &Needs) -> Result<Outcome> {
    let world = rank.config.world.deadline;
    // Rank 1 waits for what two pauses give, for as long as the world allows.
    let longest = world / 2;
    for deadline in [world / PART, longest] {
        let (mut rig, pids) = bring_up_within(rank, needs, deadline)?;
        let puts = if rig.me() == 1 {
            Loss::Stopped.befall().map(|()| 0)
        } else {
            pause_twice(&mut rig, rank, pids[1])
        };
        if rig.me() == 0 {
            signal(pids[1], Signal::CONT)?;
        }
        let posted =
            of_rank(rank.world, 0, &puts.as_ref().map_or(FAILED, |puts| *puts).to_le_bytes())?;
        if posted != FAILED {
            if rig.me() == 1 {
                // Beside the put by which they met.
                rig.wait_signal(0, rig.signal(0, 0, 0), 1 + posted)?;
            }
            return rig.end(true).map(|()| Outcome::Pass);
        }
        // A busy machine may let rank 1 be as silent as one that is lost: it gets a longer deadline.
        if deadline == longest {
            puts?;
        }
    }
    Ok(Outcome::Pass)
}

/// The number of puts of a rank 0 of which one has failed.
const FAILED: u64 = u64::MAX;

/// Shorter than the deadline; two of them are longer.
fn pause(rig: &Rig<'_>) -> Duration {
    rig.needs.deadline * 3 / 5
}

/// Posts puts, and stops the peer once more when it has taken one. Returns how many puts there were.
fn pause_twice(rig: &mut Rig<'_>, rank: &Rank<'_>, pid: u32) -> Result<u64> {
    await_loss(rank, pid, Loss::Stopped)?;
    let (posted, mut ended) = fill(rig, PUTS)?;
    let pause = pause(rig);
    if ended < posted {
        ended += wait(rig, pause, u64::MAX)?;
        signal(pid, Signal::CONT)?;
        ended += wait(rig, rig.needs.deadline, 1)?;
        signal(pid, Signal::STOP)?;
        await_loss(rank, pid, Loss::Stopped)?;
        ended += wait(rig, pause, u64::MAX)?;
    }
    signal(pid, Signal::CONT)?;
    if ended < posted {
        ended += wait(rig, 2 * rig.needs.deadline, posted - ended)?;
    }
    ensure!(ended == posted, "found {ended} ended puts to a peer that pauses; expected {posted}");
    Ok(posted)
}

/// Posts as many of so many puts as the queue takes. Returns how many, and how many of them have ended.
fn fill(rig: &mut Rig<'_>, puts: u64) -> Result<(u64, u64)> {
    let bytes = rig.put_bytes(LARGE) as u64;
    let put = Command {
        op: abi::TY_OP_PUT_SIGNAL,
        flags: abi::TY_FLAG_NOTIFY,
        peer: 1,
        signal: rig.signal(0, 0, 0),
        add: 1,
        dst_window: 1,
        bytes,
        ..NO_COMMAND
    };
    let (mut posted, mut ended) = (0, 0);
    for _ in 0..FILLS {
        if posted < puts {
            posted += rig.queues[0].try_post(&rig.transport, &[put])? as u64;
        }
        ended += drive(rig)?;
    }
    Ok((posted, ended))
}

/// Drives for a time, or until so many puts have ended. Returns how many have.
fn wait(rig: &mut Rig<'_>, time: Duration, enough: u64) -> Result<u64> {
    let (until, mut ended) = (Instant::now() + time, 0);
    while ended < enough && Instant::now() < until {
        ended += drive(rig)?;
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(ended)
}

/// Polls once. Returns how many puts have ended; each must be done.
fn drive(rig: &mut Rig<'_>) -> Result<u64> {
    rig.drive().context("a put to a peer that pauses")?;
    Ok(rig.queues[0].take().len() as u64)
}

/// Puts to a silent peer, at most: several times what two sockets hold, also where a system lets them grow.
const SILENT_PUTS: u64 = 16;
/// Silences, which together are longer than the deadline.
const SILENCES: u32 = 2;
/// Calls of each rank in a turn, in which the peer takes a part.
const CALLS: u32 = 16;

/// The next step, which rank 0 chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// A turn.
    Turn,
    /// The case anew: a silence was as long as the deadline, because the machine is busy.
    Anew,
    /// The end: so many puts have ended.
    End(u64),
}

/// Tells both ranks what comes next. Collective; rank 0 says it.
fn tell(rig: &Rig<'_>, next: Next) -> Result<Next> {
    let (turn, anew) = (u64::MAX, u64::MAX - 1);
    let word = match next {
        Next::Turn => turn,
        Next::Anew => anew,
        Next::End(puts) => puts,
    };
    let word = of_rank(rig.world, 0, &word.to_le_bytes())?;
    let others = |word| if word == anew { Next::Anew } else { Next::End(word) };
    Ok(if word == turn { Next::Turn } else { others(word) })
}

fn a_silent_peer_is_not_lost(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    for too_short in 0.. {
        let mut rig = bring_up_soon(rank, needs, too_short)?;
        let next = if rig.me() == 0 {
            let mut silence = Silence { since: Instant::now(), longest: Duration::ZERO };
            let ended = put_beside_silences(&mut rig, &mut silence);
            let is_busy = silence.longest() > rig.needs.deadline * 9 / 10;
            let is_last = rig.needs.deadline >= rank.config.world.deadline;
            let anew = ended.is_err() && is_busy && !is_last;
            tell(&rig, if anew { Next::Anew } else { Next::End(ended?) })?
        } else {
            drive_at_turns(&mut rig)?
        };
        if let Next::End(puts) = next {
            if rig.me() == 1 {
                rig.wait_signal(0, rig.signal(0, 0, 0), puts)?;
            }
            return rig.end(true);
        }
    }
    Ok(())
}

/// Rank 1 is silent until it gets a turn. Returns what comes after the last one.
fn drive_at_turns(rig: &mut Rig<'_>) -> Result<Next> {
    loop {
        let next = tell(rig, Next::Turn)?;
        if next != Next::Turn {
            return Ok(next);
        }
        (0..CALLS).try_for_each(|_| rig.drive())?;
        of_rank(rig.world, 1, &[0; 8])?;
    }
}

/// The times in which rank 1 takes nothing, as rank 0 sees them: rather too long than too short.
struct Silence {
    since: Instant,
    longest: Duration,
}

impl Silence {
    fn longest(&self) -> Duration {
        self.longest.max(self.since.elapsed())
    }
}

/// Rank 0 drives all the time, and gives rank 1 turns after two silences. Returns how many puts have ended.
fn put_beside_silences(rig: &mut Rig<'_>, silence: &mut Silence) -> Result<u64> {
    let limit = 10 * rig.needs.deadline;
    let (mut posted, mut ended, mut silences) = (0, 0, 0);
    let mut headway = Headway::new(limit);
    loop {
        // A turn may take all that was posted, and a silence without a put that waits is none.
        while silences < SILENCES && ended == posted && posted < SILENT_PUTS {
            let more = fill(rig, 1)?;
            (posted, ended) = (posted + more.0, ended + more.1);
        }
        if ended == posted {
            return Ok(ended);
        }
        if silences < SILENCES {
            ended += wait(rig, pause(rig), posted - ended)?;
            silences += u32::from(ended < posted);
        }
        let before = ended;
        while ended < posted && ended == before {
            ended += give_turn(rig, silence)?;
            ensure!(
                !headway.is_over(ended),
                "found {ended} ended puts to a peer that takes a part at times, and no more within {limit:?}; \
                 expected {posted}"
            );
        }
    }
}

/// Rank 1 takes a part. Returns how many puts have ended.
fn give_turn(rig: &mut Rig<'_>, silence: &mut Silence) -> Result<u64> {
    let begin = Instant::now();
    tell(rig, Next::Turn)?;
    of_rank(rig.world, 1, &[0; 8])?;
    let mut ended = 0;
    for _ in 0..CALLS {
        ended += drive(rig)?;
    }
    *silence = Silence { since: begin, longest: silence.longest() };
    Ok(ended)
}
