//! A rank is killed at a step of a bring-up: of the first communicator, or as a process that comes back
//! while the others renew theirs. The others open the communicator without it, and later with the process
//! that replaces it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::{Failed, Trial};
use tokenyard_conformance::moe::exchange;
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::Communicator;

use crate::domains::{self, Spread};
use crate::mortal::Step;
use crate::order::{Order, Path, Phase, VICTIM, Worst};
use crate::rank::{exchange_once, indices, wait_for_return};
use crate::{LIMIT, Process};

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |when: &str, step: Step, lives: Vec<Option<Step>>| {
        let name = format!("opening/{when}/{}", step.name());
        Trial::test(name, move || run(lives).map_err(|error| Failed::from(format!("{error:#}"))))
    };
    let open = |step| trial("open", step, vec![Some(step), None]);
    let renew = |step| trial("renew", step, vec![Some(Step::Joined), Some(step), None]);
    let several = |when: &str, step: Step, lives: Vec<Option<Step>>| {
        let name = format!("opening/domains/{when}/{}", step.name());
        let run = move || play_on(lives, Some(Spread::of(2, 2, &[VICTIM])));
        Trial::test(name, move || run().map_err(|error| Failed::from(format!("{error:#}"))))
    };
    let trials = Step::ALL.into_iter().flat_map(|step| [open(step), renew(step)]);
    let several = [Step::Joined, Step::Register, Step::Connected].into_iter().flat_map(|step| {
        let renewed = vec![Some(Step::Joined), Some(step), None];
        [several("open", step, vec![Some(step), None]), several("renew", step, renewed)]
    });
    trials.chain(Step::FAILS.map(renew)).chain(several).collect()
}

/// Runs one rank.
pub(crate) fn play(order: &Order) -> Result<()> {
    let config = order.config();
    let world = Arc::new(World::from_config(&config.world)?);
    let is_victim = order.rank == VICTIM;
    if is_victim && let Some(step) = order.lives[order.life] {
        step.arm();
        if step == Step::Late {
            wait_for_others(order)?;
        }
        let mut options = exchange::options(&order.case(0));
        options.max_tokens += u32::from(step == Step::Differs);
        let opened = Communicator::open(&world, &config, options);
        match opened {
            Err(error) if Step::FAILS.contains(&step) => return Err(error.into()),
            _ => bail!("the victim outlived its bring-up: {:?}", opened.map(drop)),
        }
    }
    let mut comm = Communicator::open(&world, &config, exchange::options(&order.case(0)))?;
    let deaths = if is_victim { 0 } else { order.lives.len() - 1 };
    let silent = domains::absent_sources(order, order.rank);
    for life in 0..deaths {
        ensure!(indices(comm.lost_ranks()) == [VICTIM], "life {life}: {:?}", comm.lost_ranks());
        let lost = exchange_once(order, &mut comm, life as u64, false)?;
        ensure!(lost == silent, "life {life}: found {lost:?} lost; expected {silent:?}");
        order.mark(&without(life))?;
        wait_for_return(order, &world, &comm)?;
        comm = comm.renew()?;
    }
    ensure!(comm.lost_ranks().is_empty(), "found {:?} lost; expected all", comm.lost_ranks());
    let lost = exchange_once(order, &mut comm, 100, false)?;
    ensure!(lost.is_empty(), "found {lost:?} lost; expected all back");
    Ok(comm.close()?)
}

/// Waits until the others, which let this process in, have gone on without it.
fn wait_for_others(order: &Order) -> Result<()> {
    let start = Instant::now();
    while !order.survivors().all(|rank| order.marker(&without(order.life), rank).exists()) {
        ensure!(start.elapsed() < LIMIT, "the others do not go on");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn without(life: usize) -> String {
    format!("without_life_{life}")
}

fn run(lives: Vec<Option<Step>>) -> Result<()> {
    play_on(lives, None)
}

fn play_on(lives: Vec<Option<Step>>, spread: Option<Spread>) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let order =
        crate::order(&folder, crate::Loss::new(Worst::Killed, Phase::Between, 0, Path::Mortal));
    let order = Order { lives, spread, ..order };
    let start_rank = |rank| Process::start(&order, rank, false);
    let mut ranks = (0..order.ranks()).map(start_rank).collect::<Result<Vec<_>>>()?;
    for life in 1..order.lives.len() {
        let start = Instant::now();
        while !order.survivors().all(|rank| order.marker(&without(life - 1), rank).exists()) {
            for rank in order.survivors() {
                ensure!(ranks[rank].ended()?.is_none(), "rank {rank}: {}", ranks[rank].output());
            }
            ensure!(start.elapsed() < LIMIT, "life {life}: the others do not go on");
            std::thread::sleep(Duration::from_millis(20));
        }
        ensure!(!ranks[VICTIM].wait()?, "the victim outlived its bring-up");
        let output = ranks[VICTIM].output();
        ensure!(!output.contains("outlived"), "{output}");
        let says = order.lives[life - 1].map_or("", Step::says);
        ensure!(output.contains(says), "expected {says:?}; found {output:?}");
        ranks[VICTIM] = Process::start(&Order { life, ..order.clone() }, VICTIM, true)?;
    }
    for (rank, process) in ranks.iter_mut().enumerate() {
        let success = process.wait().with_context(|| format!("rank {rank}"))?;
        ensure!(success, "rank {rank}: {}", process.output());
    }
    Ok(())
}
