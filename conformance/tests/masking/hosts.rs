//! A host that is cut off from the network, where hosts are network namespaces. These tests need the right
//! to make namespaces: `cargo xtask test hosts` runs them.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use libtest_mimic::{Failed, Trial};
use tokenyard_launch::{Event, Hosts, Job, Launcher, Net, Running, Stderr};

use crate::order::{Path, Phase, VICTIM, Worst};
use crate::{LIMIT, RANK};

pub(crate) fn trials() -> Vec<Trial> {
    [Phase::DispatchReceive, Phase::CombineReceive, Phase::Between]
        .into_iter()
        .zip(0..)
        .map(|(phase, layout)| {
            let run = move || run(crate::Loss::new(Worst::Cut, phase, layout, Path::Tcp));
            Trial::test(format!("hosts/cut/{}", phase.name()), run).with_ignored_flag(true)
        })
        .collect()
}

fn run(loss: crate::Loss) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let order = crate::order(&folder, loss);
    watch(&order).map_err(|error| Failed::from(format!("{error:#}")))
}

/// The others go on without the rank of the host that is cut off. That rank receives nothing, and ends.
fn watch(order: &crate::order::Order) -> Result<()> {
    let hosts = Hosts::new(order.ranks())?;
    let job = Job {
        program: std::env::current_exe()?,
        args: vec![RANK.into(), serde_json::to_string(order)?.into()],
        ranks: order.ranks() as u32,
        env: Vec::new(),
        stderr: Stderr::Capture,
    };
    let mut running = job.start_on(&hosts, Launcher::Hand)?;
    running.await_stop(VICTIM as u32, LIMIT).with_context(|| outputs(&running))?;
    hosts.cut(VICTIM, &Net::BOTH)?;
    running.resume(VICTIM as u32)?;
    let start = Instant::now();
    let mut succeeded = vec![None; order.ranks()];
    while !running.all_exited() {
        if let Some(Event::Exited { rank, status }) = running.next_event(Duration::from_millis(50))
        {
            succeeded[rank as usize] = Some(status.success());
        }
        let others_went_on = order.survivors().all(|r| order.marker("without", r).exists());
        if others_went_on && succeeded[VICTIM].is_some() {
            std::fs::write(order.marker("victim_ended", VICTIM), "")?;
        }
        ensure!(start.elapsed() < LIMIT, "the ranks do not end; {}", outputs(&running));
    }
    for (rank, succeeded) in succeeded.iter().enumerate() {
        ensure!(
            *succeeded == Some(rank != VICTIM),
            "rank {rank} ended wrong; {}",
            outputs(&running)
        );
    }
    let errors = running.stderr_tail(VICTIM as u32);
    ensure!(
        errors.contains("rank 0 was silent") && errors.contains("all ranks meet there"),
        "{errors}"
    );
    Ok(())
}

fn outputs(running: &Running) -> String {
    let ranks = (0..).take_while(|rank| running.pid(*rank).is_some());
    let outputs = ranks.map(|r| format!("rank {r} printed: {}", running.stderr_tail(r)));
    outputs.collect::<Vec<_>>().join("; ")
}
