//! The work of one rank of a play.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use nix::sys::signal::{SigSet, Signal, raise};
use tokenyard_conformance::moe::exchange::{domains, options};
use tokenyard_conformance::moe::oracle::{Case, Tokens};
use tokenyard_conformance::moe::round::{Live, Round};
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{Communicator, write_reports};
use tokenyard_core::config::Config;

use crate::plays::{Act, Play, Then, all};

/// Successful exchanges before the act of rank 1.
const WELL: u32 = 3;
/// Longer than any play.
const LONG: Duration = Duration::from_secs(300);

pub(crate) fn main(name: &str, config: &str) -> ExitCode {
    let answered = answer();
    let play = all().into_iter().find(|play| play.name == name).expect("a play of this name");
    match answered.and_then(|()| run(&play, Path::new(config))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Handles the signal as a framework would, with its own handler.
fn answer() -> Result<()> {
    tokenyard_launch::adopt()?;
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGUSR1);
    signals.thread_block()?;
    std::thread::spawn(move || {
        while signals.wait().is_ok() {
            write_reports("SIGUSR1").into_iter().for_each(|report| drop(report.unwrap()));
        }
    });
    Ok(())
}

fn run(play: &Play, config: &Path) -> Result<()> {
    let config = Config::load(config)?;
    let world = Arc::new(World::from_config(&config.world)?);
    let ranks = world.ranks() as usize;
    let mut case = Case {
        ranks,
        experts: 4 * ranks,
        topk: 3,
        hidden: 64,
        max_tokens: 12,
        tokens: Tokens::Exactly(vec![4; ranks]),
        ..Case::default()
    };
    let mut comm = Communicator::open(&world, &config, options(&case))?;
    case.domains = domains(&comm);
    let first = FirstExchange::run(&case, &mut comm)?;
    for number in 1_u32.. {
        case.seed = number.into();
        if number == WELL && comm.rank() == 1 {
            act(play.act, &world, &mut comm, &case, &first)?;
        }
        let round = Round::new(&case, comm.rank());
        if let Some(then) = play.masks {
            if then == Then::Sleeps && comm.rank() == 2 && !comm.lost_ranks().is_empty() {
                std::thread::sleep(LONG);
            }
            masked_exchange(&mut comm, &round)?;
        } else {
            let live = round.dispatch(&mut comm)?;
            round.finish(&mut comm, &live)?;
        }
        println!("step {number}");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// A completed exchange whose handle lives, so that it can be replayed.
struct FirstExchange {
    round: Round,
    live: Live,
}

impl FirstExchange {
    fn run(case: &Case, comm: &mut Communicator) -> Result<Self> {
        let round = Round::new(case, comm.rank());
        let live = round.dispatch(comm)?;
        round.finish(comm, &live)?;
        Ok(Self { round, live })
    }

    fn replay(&self, comm: &mut Communicator) -> Result<()> {
        let replay = self.round.tensors.replay_on(comm)?;
        Ok(comm.replay(&self.live.handle, &replay).map(drop)?)
    }
}

/// An exchange without the oracle, which has no losses.
fn masked_exchange(comm: &mut Communicator, round: &Round) -> Result<()> {
    let (received, handle) = comm.dispatch(&round.tensors.dispatch_on(comm)?)?;
    let mut buffers = round.experts(&received)?;
    Ok(comm.combine(&handle, buffers.arguments(&round.tensors, &handle)?)?)
}

fn act(
    act: Act,
    world: &World,
    comm: &mut Communicator,
    case: &Case,
    first: &FirstExchange,
) -> Result<()> {
    if act != Act::Nothing {
        println!("now");
    }
    match act {
        Act::Nothing => {}
        Act::Killed => raise(Signal::SIGKILL)?,
        Act::Stopped => raise(Signal::SIGSTOP)?,
        Act::Sleeps => std::thread::sleep(LONG),
        Act::SleepsInside => {
            let round = Round::new(case, comm.rank());
            let dispatch = round.tensors.dispatch_on(comm)?;
            let sent = comm.dispatch_send(&dispatch)?;
            std::thread::sleep(LONG);
            comm.dispatch_recv(sent)?;
        }
        Act::Fails => {
            world.report_failure("out of memory");
            bail!("out of memory");
        }
        Act::Replays => first.replay(comm)?,
        Act::Meets => world.barrier("end of an epoch")?,
    }
    Ok(())
}
