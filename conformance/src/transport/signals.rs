//! Signals: that totals are exact, 64 bits wide, and separate.

use anyhow::{Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::rig::{Needs, Rig};
use super::{Body, TransportCase};

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "signals_count_exactly",
        about: "totals are the sums of what was added, by every peer and by this rank itself",
        ranks: &[2, 4],
        flags: 0,
        needs: Needs { kinds: 3, ..Needs::SMALL },
        body: Body::Connected(signals_count_exactly),
    },
    TransportCase {
        name: "signals_of_many_ids",
        about: "each of the declared signal ids, first to last, has a total of its own",
        ranks: &[2],
        flags: 0,
        needs: Needs { kinds: 0, ..Needs::SMALL },
        body: Body::Connected(signals_of_many_ids),
    },
];

/// Adds of a round: what one byte, 15 and 16 bits hold, and what they just do not.
const ADDS: [u32; 10] = [1, 65_535, 2, 255, 256, 257, 32_767, 32_768, 65_534, 1];

fn signals_count_exactly(rig: &mut Rig<'_>) -> Result<()> {
    let (me, ranks) = (rig.me(), rig.ranks());
    let mut total = 0;
    for round in 0..40_u64 {
        let mut commands = Vec::new();
        for (index, add) in (0_u64..).zip(ADDS) {
            for peer in 0..ranks {
                // With a payload, with an empty one, and without.
                let op = if index % 3 == 0 { abi::TY_OP_SIGNAL } else { abi::TY_OP_PUT_SIGNAL };
                let bytes = if index % 3 == 2 { 16 } else { 0 };
                let signal = rig.signal(1, 0, me);
                let dst_offset = 1024 + 16 * u64::from(me);
                commands.push(Command { op, peer, signal, add, dst_offset, bytes, ..NO_COMMAND });
            }
            total += u64::from(add);
        }
        rig.post(0, &commands)?;
        // Every second round runs ahead of its receivers: totals are never reset (INV-2).
        if round % 2 == 1 {
            for peer in 0..ranks {
                rig.wait_signal(0, rig.signal(1, 0, peer), total)?;
            }
            rig.barrier("round is over")?;
        }
    }
    for peer in 0..ranks {
        for (kind, expected) in [(0, 0), (1, total), (2, 0)] {
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
    let ids = (0..count).filter(|id| raised(*id));
    let commands: Vec<_> = ids
        .map(|id| Command {
            op: abi::TY_OP_SIGNAL,
            peer: next,
            signal: id,
            add: add(id),
            ..NO_COMMAND
        })
        .collect();
    rig.post(0, &commands)?;
    for command in &commands {
        rig.wait_signal(0, command.signal, command.add.into())?;
    }
    for id in 0..count {
        let expected = if raised(id) { u64::from(add(id)) } else { 0 };
        let found = rig.transport.read_signal(0, id);
        ensure!(found == expected, "signal {id}: found total {found}; expected {expected}");
    }
    Ok(())
}
