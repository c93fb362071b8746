//! Bodies of cases that all operations share.

use std::sync::Arc;

use anyhow::Result;
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::Communicator;
use tokenyard_core::config::Config;

use super::drawn;
use super::end::{OperationEnd, WorldPlace};
use crate::moe::oracle::Case;
use crate::moe::round::Round;

/// Sends and receives `count` times, while as many as possible are on their way.
pub(super) fn stream<E: OperationEnd>(end: &mut E, count: u64) -> Result<()> {
    let ahead = u64::from(end.in_flight()) - 1;
    for turn in 0..count + ahead {
        if turn < count {
            end.send_next()?;
        }
        if turn >= ahead {
            end.recv_next()?;
        }
    }
    Ok(())
}

/// A rank may be late with each half.
pub(super) fn with_pauses<E: OperationEnd>(end: &mut E) -> Result<()> {
    for turn in 0..30 {
        let number = (u64::from(end.place().rank) << 16) | (turn << 1);
        drawn::pause(number);
        end.send_next()?;
        drawn::pause(number | 1);
        end.recv_next()?;
    }
    Ok(())
}

/// The exchange of [`beside_exchanges`].
pub(super) fn exchange(world: &Arc<World>, config: &Config) -> Case {
    let WorldPlace { ranks, domains, .. } = WorldPlace::of(world, config);
    let (ranks, domains) = (ranks as usize, domains as usize);
    Case { ranks, domains, experts: 2 * ranks, topk: 2, hidden: 64, ..Case::default() }
}

/// Exchanges on a communicator of the same session, among what the operation passes.
pub(super) fn beside_exchanges<E: OperationEnd>(
    end: &mut E,
    mut comm: Communicator,
    base: &Case,
) -> Result<()> {
    for seed in 0..4 {
        let round = Round::new(&Case { seed, ..base.clone() }, comm.rank());
        end.send_next()?;
        let live = round.dispatch(&mut comm)?;
        end.send_next()?;
        end.recv_next()?;
        round.finish(&mut comm, &live)?;
        end.recv_next()?;
    }
    Ok(comm.close()?)
}
