//! The work of a rank: exchanges, each checked, before the loss, without the lost rank, and after it came
//! back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tokenyard_conformance::moe::exchange::{self, Got, InputTensors, Losses, Placed};
use tokenyard_conformance::moe::oracle::{Case, Inputs};
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{Communicator, Handle, Received};

use crate::order::{Order, Path, Phase};
use crate::{LIMIT, domains, losing};

/// Rounds before the loss is certain: the victim does not reach the end of the last.
const BEFORE: u64 = 4;
/// Rounds without the victim, and rounds after it came back.
const ROUNDS: u64 = 3;

/// Runs one rank.
pub(crate) fn play(order: &Order) -> Result<()> {
    let config = order.config();
    let world = Arc::new(World::from_config(&config.world)?);
    let mut comm = Communicator::open(&world, &config, order.options())?;
    if order.spread.is_some() {
        let path = comm.report().choices.scale_up.as_ref().map(|level| level.path);
        ensure!(path == Some("put"), "rows go by {path:?} (INV-8)");
    }
    let is_victim = order.is_victim();
    let mut round = 0;
    let mut old = Old::new(order, &mut comm)?;
    if !order.back {
        // A rank that is lost before the first round is lost in all rounds.
        let before = if order.phase == Phase::Planning { 0 } else { BEFORE };
        for _ in 0..before {
            let last = round + 1 == BEFORE && is_victim;
            exchange_once(order, &mut comm, round, last)?;
            old.again(&mut comm)?;
            overlap(order, &mut comm, round, last)?;
            if is_victim {
                meet_fate(order, round);
            }
            round += 1;
        }
        // A victim does the same as the others until it learns of its loss: they may have sent it their
        // rows.
        let kept = Kept::new(order, &mut comm)?;
        if is_victim {
            exchange_once(order, &mut comm, round, false)?;
            bail!("the victim went on; expected its loss");
        }
        let silent = domains::absent_sources(order, order.rank);
        for _ in 0..ROUNDS {
            let lost = exchange_once(order, &mut comm, round, false)?;
            ensure!(lost == silent, "round {round}: found {lost:?} lost; expected {silent:?}");
            let lost = old.again(&mut comm)?;
            ensure!(lost == silent, "replay: found {lost:?} lost; expected {silent:?}");
            domains::refuse_in_turn(order, &mut comm, &old.tensors, &old.handle)?;
            overlap(order, &mut comm, round, false)?;
            round += 1;
        }
        ensure!(indices(comm.lost_ranks()) == order.victims(), "{:?} lost", comm.lost_ranks());
        order.mark("without")?;
        if !order.worst.kills() {
            outlast(order, &mut comm, round)?;
            return kept.check();
        }
        kept.check()?;
        wait_for_return(order, &world, &comm)?;
        drop((old, kept));
        comm = comm.renew()?;
        old = Old::new(order, &mut comm)?;
    }
    for round in BEFORE + ROUNDS..BEFORE + 2 * ROUNDS {
        let lost = exchange_once(order, &mut comm, round, false)?;
        ensure!(lost.is_empty(), "round {round}: found {lost:?} lost; expected all back");
        ensure!(old.again(&mut comm)?.is_empty(), "a replay lacks something; expected all back");
        overlap(order, &mut comm, round, false)?;
    }
    drop(old);
    ensure!(comm.lost_ranks().is_empty(), "found {:?} lost", comm.lost_ranks());
    Ok(comm.close()?)
}

/// A victim that is lost at any moment is lost on a thread of its own, after the first round; or, at the
/// latest, before its last round ends.
fn meet_fate(order: &Order, round: u64) {
    let order = order.clone();
    match order.phase {
        Phase::Anytime(after) if round == 0 => {
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_micros(after));
                order.do_worst()
            });
        }
        Phase::Anytime(_) | Phase::Between if round + 1 == BEFORE => {
            // The call cannot fail. If it did, the victim would go on, which is an error.
            let _ = order.do_worst();
        }
        _ => {}
    }
}

/// A handle from before the loss, used again and again.
struct Old {
    case: Case,
    inputs: Inputs,
    tensors: InputTensors,
    handle: Handle,
    /// The rows of each source that it has places for.
    counts: Vec<u8>,
}

impl Old {
    fn new(order: &Order, comm: &mut Communicator) -> Result<Self> {
        let case = order.case(1000);
        let inputs = Inputs::all(&case);
        let rank = comm.rank() as usize;
        let tensors = InputTensors::new(&case, rank, inputs.ranks[rank].clone());
        let (received, handle) = comm.dispatch(&tensors.dispatch()?)?;
        exchange::check_received_flagged(&case, &inputs, rank, &received)?;
        let counts = source_counts(&received)?;
        Ok(Self { case, inputs, tensors, handle, counts })
    }

    /// A replay and a combine, checked. Returns the ranks whose rows were left out.
    fn again(&mut self, comm: &mut Communicator) -> Result<Vec<usize>> {
        let rank = comm.rank() as usize;
        let received = comm.replay(&self.handle, &self.tensors.replay()?).context("replay")?;
        exchange::check_received_flagged(&self.case, &self.inputs, rank, &received)
            .context("replay")?;
        let counts = source_counts(&received)?;
        ensure!(counts == self.counts, "a replay has other places than its dispatch");
        let output = exchange::run_experts(&self.case, rank, &received).context("experts")?;
        let got = exchange::combine(comm, &self.tensors, &self.handle, &output, Placed::Outside)
            .context("combine after replay")?;
        check_combined(&self.case, &self.inputs, comm, &got).context("after replay")?;
        Ok(lost_sources(&received))
    }
}

/// Outputs of the first dispatches after the loss. They may use memory of the last operations, in which the
/// victim had places.
struct Kept(Vec<(Received, Vec<u8>)>);

impl Kept {
    fn new(order: &Order, comm: &mut Communicator) -> Result<Self> {
        (4000..4003).map(|seed| Self::one(order, comm, seed)).collect::<Result<_>>().map(Self)
    }

    fn one(order: &Order, comm: &mut Communicator, seed: u64) -> Result<(Received, Vec<u8>)> {
        let case = order.case(seed);
        let inputs = Inputs::all(&case);
        let rank = comm.rank() as usize;
        let tensors = InputTensors::new(&case, rank, inputs.ranks[rank].clone());
        let (received, _) = comm.dispatch(&tensors.dispatch()?)?;
        exchange::check_received_flagged(&case, &inputs, rank, &received).context("kept")?;
        let x = received.x().bytes().to_vec();
        Ok((received, x))
    }

    fn check(&self) -> Result<()> {
        for (received, x) in &self.0 {
            ensure!(received.x().bytes() == x, "an output has changed that no rank writes to");
        }
        Ok(())
    }
}

fn source_counts(received: &Received) -> Result<Vec<u8>> {
    let counts = received.source_counts().context("the output has no counts of its sources")?;
    Ok(counts.bytes().to_vec())
}

fn lost_sources(received: &Received) -> Vec<usize> {
    indices(received.lost_ranks())
}

pub(crate) fn indices(ranks: Vec<u32>) -> Vec<usize> {
    ranks.into_iter().map(|rank| rank as usize).collect()
}

/// Checks a combine's results. For each victim, which may have sent its part before it was lost, they
/// include that part or say that they lack it.
fn check_combined(case: &Case, inputs: &Inputs, comm: &Communicator, got: &Got) -> Result<()> {
    let until = Instant::now() + NEWS;
    loop {
        let lost = indices(comm.lost_ranks());
        let losses = Losses { before: &[], after: &lost };
        let rank = comm.rank() as usize;
        let checked = exchange::check_combined_around(case, inputs, losses, rank, got).map(drop);
        if checked.is_ok() || Instant::now() > until {
            return checked;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// How much later than a sum that lacks its part a rank may learn that another one is lost: a rank that knew it has
/// made a partial sum.
const NEWS: Duration = Duration::from_secs(2);

/// Goes on until the victim learns of its loss, whatever it still writes.
fn outlast(order: &Order, comm: &mut Communicator, mut round: u64) -> Result<()> {
    let start = Instant::now();
    let silent = domains::absent_sources(order, order.rank);
    while !order.marker("victim_ended", order.victims()[0]).exists() {
        let lost = exchange_once(order, comm, round, false)?;
        ensure!(lost == silent, "round {round}: found {lost:?} lost; expected {silent:?}");
        round += 1;
        ensure!(start.elapsed() < LIMIT, "the victim did not find out");
    }
    // The others may be a round behind: no rank leaves before all have finished.
    order.mark("through")?;
    while !order.survivors().all(|r| order.marker("through", r).exists()) {
        // Fails if the others finished while this rank had started another round.
        let _ = exchange_once(order, comm, round, false);
        round += 1;
        ensure!(start.elapsed() < LIMIT, "the others did not get through");
    }
    Ok(())
}

/// Waits until all ranks know that the victims wait to come back.
pub(crate) fn wait_for_return(order: &Order, world: &World, comm: &Communicator) -> Result<()> {
    let start = Instant::now();
    loop {
        let ready = indices(comm.returning_ranks()) == order.victims();
        let all = world.all_gather("ready", &[u8::from(ready)])?;
        if all.iter().filter(|ready| !ready.is_empty()).all(|ready| ready == &[1]) {
            return Ok(());
        }
        ensure!(start.elapsed() < LIMIT, "no rank came back");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// One exchange, checked: with the oracle's full result, or with the result without the victim where the
/// communicator reports it lost. Returns the ranks whose rows were left out.
pub(crate) fn exchange_once(
    order: &Order,
    comm: &mut Communicator,
    round: u64,
    last: bool,
) -> Result<Vec<usize>> {
    let at = |phase| if last && phase == order.phase { order.do_worst() } else { Ok(()) };
    let case = order.case(round);
    let inputs = Inputs::all(&case);
    let rank = comm.rank() as usize;
    let tensors = InputTensors::new(&case, rank, inputs.ranks[rank].clone());
    at(Phase::DispatchSend)?;
    if last && order.phase == Phase::Entered {
        losing::arm();
    }
    let sent = comm.dispatch_send(&tensors.dispatch()?)?;
    at(Phase::DispatchReceive)?;
    let (received, handle) = comm.dispatch_recv(sent)?;
    let torn = exchange::check_received_flagged(&case, &inputs, rank, &received);
    if torn.with_context(|| format!("round {round}"))? {
        order.mark("torn")?;
    }
    let output = exchange::run_experts(&case, rank, &received).context("experts")?;
    let mut buffers = exchange::Buffers::new(&tensors, &output);
    at(Phase::CombineSend)?;
    let sent = comm.combine_send(&handle, buffers.arguments(&tensors, &handle)?)?;
    at(Phase::CombineReceive)?;
    at(Phase::LateReceive)?;
    let is_late = order.phase == Phase::LateReceive && round + 1 == BEFORE && !order.is_victim();
    if is_late {
        wait_for_loss(order, comm)?;
    }
    comm.combine_recv(sent)?;
    let got = buffers.into_got()?;
    // Among several domains rows are put, even where they could be read.
    if is_late && order.path == Path::Stores && order.spread.is_none() {
        // The victims answered, but they may change their answer's memory by now.
        let left_out = exchange::left_out(&case, rank, order.victims());
        return exchange::check_combined_without(&case, &inputs, &left_out, rank, &got)
            .map(|()| lost_sources(&received));
    }
    check_combined(&case, &inputs, comm, &got).with_context(|| format!("round {round}"))?;
    Ok(lost_sources(&received))
}

/// Waits until this rank knows of the loss, which happens before the victims receive.
fn wait_for_loss(order: &Order, comm: &Communicator) -> Result<()> {
    let start = Instant::now();
    while indices(comm.lost_ranks()) != order.victims() {
        ensure!(start.elapsed() < LIMIT, "no rank was lost");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Two exchanges at once, checked.
fn overlap(order: &Order, comm: &mut Communicator, round: u64, last: bool) -> Result<()> {
    let rank = comm.rank() as usize;
    let cases = [order.case(2000 + round), domains::other_layout(order, 3000 + round)];
    let inputs = cases.each_ref().map(Inputs::all);
    let tensors = [0, 1].map(|i| InputTensors::new(&cases[i], rank, inputs[i].ranks[rank].clone()));
    let sent = comm.dispatch_send(&tensors[0].dispatch()?)?;
    let between = order.spread.is_some() && order.layout != 1;
    if last && order.phase == Phase::Overlap && between {
        order.do_worst()?;
    }
    let also = comm.dispatch_send(&tensors[1].dispatch()?)?;
    if last && order.phase == Phase::Overlap {
        order.do_worst()?;
    }
    let arrived = [comm.dispatch_recv(sent)?, comm.dispatch_recv(also)?];
    let mut buffers = Vec::new();
    for (i, (received, _)) in arrived.iter().enumerate() {
        exchange::check_received_flagged(&cases[i], &inputs[i], rank, received)
            .context("two at once")?;
        let output = exchange::run_experts(&cases[i], rank, received).context("experts")?;
        buffers.push(exchange::Buffers::new(&tensors[i], &output));
    }
    let mut sent = Vec::new();
    for ((tensors, (_, handle)), buffers) in tensors.iter().zip(&arrived).zip(&mut buffers) {
        sent.push(comm.combine_send(handle, buffers.arguments(tensors, handle)?)?);
    }
    for sent in sent {
        comm.combine_recv(sent)?;
    }
    for ((case, inputs), buffers) in cases.iter().zip(&inputs).zip(buffers) {
        check_combined(case, inputs, comm, &buffers.into_got()?).context("two at once")?;
    }
    Ok(())
}
