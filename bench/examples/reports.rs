//! The cost of `world.reports` while no report is written: the smallest exchange of two ranks, with
//! a folder for reports and with `none`, in turns.
#![allow(clippy::expect_used, clippy::print_stdout, reason = "a measurement for a developer")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokenyard_conformance::moe::exchange::options;
use tokenyard_conformance::moe::oracle::{Case, Tokens};
use tokenyard_conformance::moe::round::Round;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::Communicator;
use tokenyard_core::config::{Config, Reports};

/// Exchanges of one turn, and turns.
const EACH: usize = 200;
const TURNS: usize = 100;

/// Times of a turn's exchanges, one after the other.
fn turn(comm: &mut Communicator, round: &Round) -> anyhow::Result<Vec<Duration>> {
    let mut times = Vec::with_capacity(EACH);
    for _ in 0..EACH {
        let tensors = round.tensors.dispatch_on(comm)?;
        let start = Instant::now();
        let (received, handle) = comm.dispatch(&tensors)?;
        let sent = start.elapsed();
        let mut buffers = round.experts(&received)?;
        let arguments = buffers.arguments(&round.tensors, &handle)?;
        let start = Instant::now();
        comm.combine(&handle, arguments)?;
        times.push(sent + start.elapsed());
    }
    Ok(times)
}

fn measure(world: &Arc<World>, config: &Config) -> anyhow::Result<[Vec<Duration>; 2]> {
    let case = Case {
        ranks: 2,
        experts: 2,
        topk: 1,
        hidden: 8,
        max_tokens: 1,
        tokens: Tokens::Exactly(vec![1; 2]),
        ..Case::default()
    };
    let mut without = config.clone();
    without.reports = Reports::Nowhere;
    let mut comms = [
        Communicator::open(world, config, options(&case))?,
        Communicator::open(world, &without, options(&case))?,
    ];
    let round = Round::new(&case, world.rank());
    let mut times = [Vec::new(), Vec::new()];
    for number in 0..2 * TURNS {
        let which = number % 2;
        world.barrier("turn")?;
        times[which].extend(turn(&mut comms[which], &round)?);
    }
    times.iter_mut().for_each(|times| times.sort());
    Ok(times)
}

fn main() {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let folder = std::env::temp_dir().join("tokenyard-bench-reports");
    let text = format!(
        "[world]\nreports = \"{}\"\n[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n",
        folder.display()
    );
    let config = Config::parse(&text, "bench").expect("the config is right");
    let ranks = in_threads(2, &config, |world| measure(world, &config)).expect("two ranks");
    for (rank, times) in ranks.into_iter().enumerate() {
        let [with, without] = times.expect("exchanges");
        let at = |times: &[Duration], component: usize| times[times.len() / component].as_nanos();
        for (name, component) in [("fastest of 100", 100), ("quarter", 4), ("median", 2)] {
            let (with, without) = (at(&with, component), at(&without, component));
            println!(
                "rank {rank} {name}: with {with} ns, without {without} ns, ratio {:.3}",
                with as f64 / without as f64
            );
        }
    }
}
