//! Signals: totals are exact, 64 bits wide, and separate.

use anyhow::{Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::needs::Needs;
use super::rig::Rig;
use super::waits::Total;
use super::{Body, TransportCase};

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "signals_count_exactly",
        about: "totals are the sums of what was added, by every peer and by this rank itself",
        invariants: "INV-2",
        ranks: &[2, 4],
        needs: Needs { kinds: 3, ..Needs::SMALL },
        body: Body::Connected(signals_count_exactly),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "signals_of_many_ids",
        about: "each of the declared signal ids, first to last, has a total of its own, with and without a put",
        invariants: "INV-2",
        ranks: &[2],
        needs: Needs { kinds: 0, ..Needs::SMALL },
        body: Body::Connected(signals_of_many_ids),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "totals_have_64_bits",
        about: "a total goes on where 32 bits end",
        invariants: "INV-2",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::Connected(totals_have_64_bits),
        ..TransportCase::BARE
    },
];

/// Adds of a round: the largest values of 8, 15 and 16 bits, and values next to them.
const ADDS: [u32; 10] = [1, 65_535, 2, 255, 256, 257, 32_767, 32_768, 65_534, 1];

/// The adds of a round from `writer` to `reader`. The last three differ for each pair, so that a signal to
/// a wrong rank shows even if all ranks act alike.
fn adds(writer: u32, reader: u32) -> impl Iterator<Item = u32> {
    let own = 100 * (writer + 1) + reader + 1;
    ADDS.into_iter().chain((0..3).map(move |form| own + 10_000 * form))
}

fn signals_count_exactly(rig: &mut Rig<'_>) -> Result<()> {
    let (me, ranks) = (rig.me(), rig.ranks());
    let round_total = |writer| adds(writer, me).map(u64::from).sum::<u64>();
    let totals = |rig: &Rig<'_>, rounds: u64| -> Vec<Total> {
        let total = |writer| Total {
            queue: 0,
            id: rig.signal(1, 0, writer),
            total: rounds * round_total(writer),
        };
        (0..ranks).map(total).collect()
    };
    let rounds = 40;
    for round in 0..rounds {
        let mut commands = Vec::new();
        for peer in 0..ranks {
            for (index, add) in (0_u64..).zip(adds(me, peer)) {
                // With a payload, with an empty one, and without.
                let op = if index % 3 == 0 { abi::TY_OP_SIGNAL } else { abi::TY_OP_PUT_SIGNAL };
                let bytes = if index % 3 == 2 { 16 } else { 0 };
                let signal = rig.signal(1, 0, me);
                let dst_offset = 1024 + 16 * u64::from(me);
                commands.push(Command { op, peer, signal, add, dst_offset, bytes, ..NO_COMMAND });
            }
        }
        rig.post(0, &commands)?;
        // Every second round does not wait for its receivers: totals are never reset (INV-2).
        if round % 2 == 1 {
            let expected = totals(rig, round + 1);
            rig.wait_signals(&expected)?;
            rig.barrier("round is over")?;
        }
    }
    for peer in 0..ranks {
        for (kind, expected) in [(0, 0), (1, rounds * round_total(peer)), (2, 0)] {
            let id = rig.signal(kind, 0, peer);
            let found = rig.transport.read_signal(0, id);
            ensure!(
                found == expected,
                "signal {id}, which rank {peer} raises: found total {found}; expected {expected}"
            );
        }
    }
    Ok(())
}

fn signals_of_many_ids(rig: &mut Rig<'_>) -> Result<()> {
    let (next, count) = (rig.next(), rig.needs.signals);
    // Powers of two and their neighbours, the last one, and a few in between.
    let raised = |id: u32| {
        id == 0
            || id.is_power_of_two()
            || (id + 1).is_power_of_two()
            || id + 1 == count
            || id.is_multiple_of(97)
    };
    // Every id has one writer: with two ranks, the next one.
    let add = |id: u32| 1 + id % 65_535;
    let ids = || (0..count).filter(|id| raised(*id));
    // By each op that raises a signal: they may cross in different ways.
    let ops = [abi::TY_OP_SIGNAL, abi::TY_OP_PUT_SIGNAL];
    let of_op = |op| {
        ids().map(move |id| Command { op, peer: next, signal: id, add: add(id), ..NO_COMMAND })
    };
    rig.post(0, &ops.into_iter().flat_map(of_op).collect::<Vec<_>>())?;
    let total = |id: u32| ops.len() as u64 * u64::from(add(id));
    let expected: Vec<_> = ids().map(|id| Total { queue: 0, id, total: total(id) }).collect();
    rig.wait_signals(&expected)?;
    for id in 0..count {
        let expected = if raised(id) { total(id) } else { 0 };
        let found = rig.transport.read_signal(0, id);
        ensure!(found == expected, "signal {id}: found total {found}; expected {expected}");
    }
    Ok(())
}

/// This many adds of 65,535 exceed 32 bits in total.
const MANY: u64 = (1 << 32) / 65_500 + 8;
/// Adds that are raised before all ranks have received as many.
const STEP: u64 = 4096;

fn totals_have_64_bits(rig: &mut Rig<'_>) -> Result<()> {
    // One way: the total of one rank shows as much as those of both, and slow fabrics take long for each.
    let (signal, add) = (rig.signal(0, 0, 0), 65_535);
    let one = Command { op: abi::TY_OP_SIGNAL, peer: 1, signal, add, ..NO_COMMAND };
    let batch = [one; 64];
    let mut posted = 0;
    while posted < MANY {
        // A deadline for each step: a slow fabric takes long for all of them.
        let step = (posted + STEP).min(MANY);
        while posted < step {
            let count = (step - posted).min(batch.len() as u64);
            if rig.me() == 0 {
                rig.post(0, &batch[..count as usize])?;
            }
            posted += count;
        }
        if rig.me() == 1 {
            rig.wait_signal(0, signal, posted * u64::from(add))?;
        }
        rig.barrier("as many signals on all ranks")?;
    }
    Ok(())
}
