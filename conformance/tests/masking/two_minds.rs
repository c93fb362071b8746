//! A rank that has no room is lost after rank 2 has received that report and before rank 0 has. Rank 2
//! knows the dispatch as refused, and rank 0 knows it as completed without the lost rank.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::{Failed, Trial};
use tokenyard_conformance::moe::exchange::{self, InputTensors};
use tokenyard_conformance::moe::oracle::{Case, Inputs, Tokens};
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{Communicator, CommunicatorOptions};
use tokenyard_core::{Error, ErrorKind};

use crate::order::{LAYOUTS, Order, Path, Phase, VICTIM, Worst};
use crate::{LIMIT, Process, losing};

/// More dispatches than any arena of the case has room for.
const MOST: u64 = 2000;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for path in [Path::Stores, Path::Puts] {
        for (layout, (name, _)) in (0..).zip(LAYOUTS) {
            let run = move || {
                let folder = tempfile::tempdir()?;
                let order = crate::order(
                    &folder,
                    crate::Loss::new(Worst::Killed, Phase::Refusing, layout, path),
                );
                watch(&order).map_err(|error| Failed::from(format!("{error:#}")))
            };
            trials.push(Trial::test(format!("killed/refusing/{name}/{}", path.name()), run));
        }
    }
    trials
}

fn watch(order: &Order) -> Result<()> {
    let ranks = (0..order.ranks()).map(|rank| Process::start(order, rank, false));
    let mut ranks: Vec<Process> = ranks.collect::<Result<_>>()?;
    for (rank, process) in ranks.iter_mut().enumerate() {
        let success = process.wait().with_context(|| format!("rank {rank}"))?;
        ensure!(success == (rank != VICTIM), "rank {rank} printed: {}", process.output());
    }
    Ok(())
}

/// Dispatches until a call fails. The victim holds its outputs; rank 2 has no tokens, so that rank 0 waits
/// for none of its rows.
pub(crate) fn play(order: &Order) -> Result<()> {
    let config = order.config();
    let world = Arc::new(World::from_config(&config.world)?);
    let options = CommunicatorOptions { in_flight: 1, ..exchange::options(&order.case(0)) };
    let mut comm = Communicator::open(&world, &config, options)?;
    let mut kept = Vec::new();
    let lands = order.layout().has_fixed_places();
    losing::arm();
    for round in 0..MOST {
        let case = Case { tokens: Tokens::Exactly(vec![12, 12, 0]), ..order.case(round) };
        let tensors = InputTensors::new(&case, order.rank, Inputs::for_rank(&case, order.rank));
        match comm.dispatch(&tensors.dispatch()?) {
            Ok((received, _)) if order.is_victim() => kept.push(received),
            Ok(_) => {}
            // Rows that are not counted land in memory that no other output uses: the disagreement shows with
            // the next dispatch.
            Err(error) if lands && error.kind() == ErrorKind::Full => {}
            Err(error) => return end(order, &error),
        }
    }
    bail!("no rank was without room")
}

/// Checks that neither rank goes on as if nothing had happened.
fn end(order: &Order, error: &Error) -> Result<()> {
    order.mark("ended")?;
    let expected = match order.rank {
        0 => "rank 2 learned that the operation was refused, and this rank completed it",
        _ => "rank 0 completed the operation, and this rank learned that it was refused",
    };
    // The slower rank receives the other's report of its end.
    let is_reported =
        error.kind() == ErrorKind::PeerLost && error.to_string().contains("completed");
    let is_found = error.kind() == ErrorKind::Mismatch && error.to_string().contains(expected);
    ensure!(is_found || is_reported, "found: {error}");
    let start = Instant::now();
    while !order.survivors().all(|rank| order.marker("ended", rank).exists()) {
        ensure!(start.elapsed() < LIMIT, "the other did not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
