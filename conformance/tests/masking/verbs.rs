//! Masked losses over RDMA. These tests need one device per rank, which soft-RoCE in the test machine
//! provides: with `--verbs` only they run, without it none of them. `cargo xtask test vm` runs them.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use libtest_mimic::{Failed, Trial};
use rustix::process::{Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tokenyard_conformance::faults::CutLink;

use crate::order::{Order, Path, Phase, VICTIM, Worst};
use crate::{LIMIT, Process, hang, trial};

/// The argument that selects these tests.
pub(crate) const ARGUMENT: &str = "--verbs";

pub(crate) fn trials() -> Vec<Trial> {
    let killed = [
        (Phase::Planning, 0),
        (Phase::Entered, 0),
        (Phase::DispatchReceive, 1),
        (Phase::CombineSend, 2),
    ];
    let losses = killed
        .map(|(phase, layout)| trial(crate::Loss::new(Worst::Killed, phase, layout, Path::Verbs)));
    let stopped = trial(crate::Loss::new(Worst::Stopped, Phase::CombineReceive, 1, Path::Verbs));
    let cut = Trial::test("cut/dispatch_receive/verbs", || {
        let folder = tempfile::tempdir()?;
        let order = crate::order(
            &folder,
            crate::Loss::new(Worst::Cut, Phase::DispatchReceive, 0, Path::Verbs),
        );
        watch_cut(&order).map_err(|error| Failed::from(format!("{error:#}")))
    });
    losses.into_iter().chain([stopped, cut]).collect()
}

/// The rank whose link is cut ends, although the others receive its entries: its device reports the link.
/// The others go on.
fn watch_cut(order: &Order) -> Result<()> {
    let mut ranks: Vec<Process> =
        (0..order.ranks()).map(|rank| Process::start(order, rank, false)).collect::<Result<_>>()?;
    await_stop(&ranks[VICTIM])?;
    let _cut = CutLink::of(VICTIM as u32)?;
    kill_process(ranks[VICTIM].pid(), Signal::CONT)?;
    let start = Instant::now();
    while !order.survivors().all(|rank| order.marker("without", rank).exists()) {
        ensure!(start.elapsed() < LIMIT, "{}", hang(&ranks));
        for rank in order.survivors() {
            ensure!(ranks[rank].ended()?.is_none(), "rank {rank}: {}", ranks[rank].output());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    ensure!(!ranks[VICTIM].wait()?, "the victim did not notice");
    let output = ranks[VICTIM].output();
    ensure!(output.contains("the port of this rank is down"), "the victim printed: {output}");
    ensure!(output.contains("rxe1 port 1"), "it does not name its device: {output}");
    std::fs::write(order.marker("victim_ended", VICTIM), "")?;
    for rank in order.survivors() {
        let success = ranks[rank].wait().with_context(|| format!("rank {rank}"))?;
        ensure!(success, "rank {rank}: {}", ranks[rank].output());
    }
    Ok(())
}

/// Waits until a rank has stopped itself.
fn await_stop(rank: &Process) -> Result<()> {
    let start = Instant::now();
    let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    while waitid(WaitId::Pid(rank.pid()), options)?.is_none() {
        ensure!(start.elapsed() < LIMIT, "it did not stop; it printed: {}", rank.output());
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
