//! The work of one rank.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokenyard_conformance::moe::exchange::{
    InputTensors, Losses, Placed, Staged, check_combined_around, check_received_around, domains,
    options, run_experts,
};
use tokenyard_conformance::moe::oracle::{Case, Inputs, routing};
use tokenyard_core::bootstrap::{Identity, Secret, World, WorldOptions};
use tokenyard_core::communicator::{Combine, Communicator};
use tokenyard_core::config::Config;

use super::message::{Cause, Failure, Loss, Message, Opened, RankResult};
use super::plan::Plan;
use super::results::RankTally;
use super::summary::Summary;
use super::times::{Times, settle};
use super::{RunArgs, Verdict, results};
use crate::output::{People, print_json};
use crate::{preload, signals, warnings, writable};

/// The interval at which the communicator is asked for lost ranks, while this rank waits for news
/// of a loss.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A rank that has joined the others.
struct Rank<'a> {
    args: &'a RunArgs,
    config: Config,
    plan: Plan,
    world: Arc<World>,
    /// Whether this program started the ranks: then the launcher reads their lines.
    launched: bool,
}

pub(crate) fn main(args: &RunArgs) -> Result<Verdict> {
    let launched = tokenyard_launch::adopt()?;
    signals::report_to_launcher(launched);
    if launched {
        warnings::tell_launcher(tell_warning);
    }
    let mut name = "rank".to_owned();
    let end = Rank::join(args, launched).map_err(Failure::from).and_then(|rank| {
        name = format!("rank {}", rank.world.rank());
        rank.run().inspect_err(|failure| {
            // The others already know that a peer is lost; this rank must not appear as a second
            // failed rank.
            if failure.cause != Cause::Peer {
                rank.world.report_failure(&failure.text);
            }
        })
    });
    let Err(failure) = end else { return Ok(Verdict::Right) };
    let verdict = super::diagnosis::verdict([failure.cause]);
    if launched {
        print_json(&Message::Failed(failure))?;
    } else {
        People::errors().error(format_args!("{name}: {}", failure.text));
    }
    Ok(verdict)
}

/// Tells the launcher of a call that may end this process: the other ranks may end in the same one.
fn tell_call(call: &str) {
    // A launcher that is gone reads none.
    let _ = print_json(&Message::Calls { call: call.to_owned() });
}

fn tell_warning(text: String) {
    let _ = print_json(&Message::Warned { text });
}

fn env(name: &str) -> Option<String> {
    tokenyard_core::bootstrap::environment(name)
}

impl<'a> Rank<'a> {
    fn join(args: &'a RunArgs, launched: bool) -> Result<Self> {
        let config = Config::load(&args.config)?;
        if !launched {
            // Its launcher sees only its exit code.
            preload::try_plugins(Some(&config))?;
            writable::check_reports(&config)?;
        }
        // The launcher's rendezvous applies, whatever the config has for other launchers.
        let spec = if launched { "env" } else { &config.world.bootstrap };
        let identity = Identity::resolve(spec, &env)?;
        let plan = Plan::new(args, Some(identity.place.ranks))?;
        if let (false, Some(output)) = (launched, &args.output) {
            let mine = results::rank_path(output, identity.place.rank as usize);
            args.read_files().writes("--output", &mine)?;
        }
        if launched {
            print_json(&Message::Joining)?;
        } else {
            // The launcher of `tokenyard run` has checked the memory of all ranks; a rank of
            // another launcher checks its own.
            plan.check_memory(1)?;
        }
        let world = World::join(WorldOptions {
            secret: Secret::from_env(&env)?,
            on_call: if launched { Some(tell_call) } else { None },
            ..WorldOptions::configured(&config.world, identity)
        })?;
        if !launched {
            warnings::tell_rank_zero(&world);
        }
        let rank = Self { args, config, plan, world: Arc::new(world), launched };
        rank.say(&Message::Joined)?;
        Ok(rank)
    }

    fn run(&self) -> Result<(), Failure> {
        if !self.launched && self.world.rank() == 0 {
            Summary::new(self.args, &self.config, &self.plan.case).print_head();
        }
        let mut comm = Communicator::open(&self.world, &self.config, options(&self.plan.case))
            .map_err(anyhow::Error::from)?;
        self.agree()?;
        let mut tally = Tally::default();
        let mut opened = None;
        for step in 0..self.args.steps {
            let (case, inputs) = self.plan.step(step);
            let case = Case { domains: domains(&comm), ..case.into_owned() };
            if opened.is_none() {
                opened = Some(self.report_opened(&comm, &case, &inputs)?);
            }
            let last = step + 1 == self.args.steps;
            let part = self
                .step(&mut comm, &case, &inputs, &mut tally)
                .map_err(|failure| failure.at(step + 1, self.args.steps))?;
            tally.note_lost(&comm.lost_ranks(), step + 1);
            if last {
                self.write(&part)?;
            }
            self.say(&Message::Step { done: step + 1 })?;
        }
        tally.out_bytes = put_between_domains(&comm);
        // A rank that left would be lost for those that still combine.
        comm.close().map_err(anyhow::Error::from)?;
        self.finish(opened, tally)
    }

    /// Checks values that are not part of the communicator's own agreement, but must be equal on
    /// all ranks.
    fn agree(&self) -> Result<()> {
        let items = [
            ("exchange".to_owned(), self.plan.case.to_string()),
            ("steps".to_owned(), self.args.steps.to_string()),
        ];
        Ok(self.world.agree("run", &items)?)
    }

    fn report_opened(&self, comm: &Communicator, case: &Case, inputs: &Inputs) -> Result<Opened> {
        let opened = Opened {
            report: serde_json::to_value(comm.report())?,
            busiest_over_mean: busiest_over_mean(case, inputs),
        };
        self.say(&Message::Opened(opened.clone()))?;
        Ok(opened)
    }

    /// One exchange; every element is compared.
    fn step(
        &self,
        comm: &mut Communicator,
        case: &Case,
        inputs: &Inputs,
        tally: &mut Tally,
    ) -> Result<RankTally, Failure> {
        let rank = self.world.rank() as usize;
        let check = |error: anyhow::Error| Failure::check(&error);
        let tensors = InputTensors::new(case, rank, inputs.ranks[rank].clone());
        let arguments = tensors.dispatch_on(comm)?;
        let before = lost(comm);
        self.align("dispatch")?;
        let (received, handle) =
            tally.dispatch.time(comm, |comm| comm.dispatch(&arguments)).context("dispatch")?;
        self.check(comm, received.lost_ranks().is_empty(), |after| {
            let losses = Losses { before: &before, after };
            check_received_around(case, inputs, losses, rank, &received)
        })
        .context("after dispatch")
        .map_err(check)?;
        let output = run_experts(case, rank, &received).context("experts").map_err(check)?;
        let rows = received.tokens() as u64;
        let mut part = RankTally::new(rank, &received);
        drop(received);
        let staged = Staged::new(comm, &tensors, &output, &handle, Placed::CombineInput)
            .context("combine")?;
        let before = lost(comm);
        let combine = |call: Combine<'_>| {
            self.align("combine")?;
            Ok(tally.combine.time(comm, |comm| comm.combine(&handle, call))?)
        };
        let got = staged.combine_by(&tensors, &handle, combine).context("combine")?;
        let Tally { dispatch, combine, .. } = tally;
        settle(&self.world, [dispatch, combine]).context("after combine")?;
        let lacks = self
            .check(comm, got.missing.iter().all(|missing| *missing == 0), |after| {
                let losses = Losses { before: &before, after };
                check_combined_around(case, inputs, losses, rank, &got)
            })
            .context("after combine")
            .map_err(check)?;
        tally.count(case, &inputs.without(case, &lacks), rank, rows);
        tally.tokens_missing += got.missing.iter().filter(|missing| **missing > 0).count() as u64;
        part.add_combined(case, got);
        Ok(part)
    }

    /// Checks the result of an operation, given the ranks that are lost by now. A result may be
    /// incomplete because of a loss that another rank reported first. If there is such a loss, this
    /// rank learns of it soon, so the check is repeated.
    fn check<T>(
        &self,
        comm: &Communicator,
        is_whole: bool,
        check: impl Fn(&[usize]) -> Result<T>,
    ) -> Result<T> {
        let end = Instant::now() + self.config.world.deadline;
        let mut known = lost(comm);
        let mut found = check(&known);
        while found.is_err() && !is_whole && Instant::now() < end {
            std::thread::sleep(LOOK_EVERY);
            let now = lost(comm);
            if now != known {
                found = check(&now);
                known = now;
            }
        }
        found
    }

    /// Lets all ranks start a measured phase together, so that the time of no rank includes another
    /// rank's check.
    fn align(&self, phase: &str) -> Result<()> {
        self.world.barrier(phase).with_context(|| format!("before {phase}"))
    }

    fn write(&self, part: &RankTally) -> Result<()> {
        let path = match (&self.args.parts, &self.args.output) {
            (Some(folder), _) => results::part_path(folder, part.rank()),
            (None, Some(output)) => results::rank_path(output, part.rank()),
            (None, None) => return Ok(()),
        };
        part.write(&path)
    }

    fn finish(&self, opened: Option<Opened>, tally: Tally) -> Result<(), Failure> {
        let result = tally.result(self.world.rank(), &self.plan.case);
        if self.launched {
            return Ok(self.say(&Message::Done(result))?);
        }
        let mine = serde_json::to_vec(&result).map_err(anyhow::Error::from)?;
        let all = self.world.all_gather("results", &mine).map_err(anyhow::Error::from)?;
        if self.world.rank() == 0 {
            // A lost rank contributes no bytes.
            let given = all.iter().filter(|bytes| !bytes.is_empty());
            let results: Result<Vec<RankResult>, _> =
                given.map(|bytes| serde_json::from_slice(bytes)).collect();
            let mut summary = Summary::new(self.args, &self.config, &self.plan.case);
            summary.opened = opened;
            summary.ranks = results.context("results of the ranks")?;
            summary.lost = super::diagnosis::lost(&summary.ranks, |_| None);
            summary.print(self.args.json)?;
        } else {
            // Rank 0 prints the table; in the log of each other rank, this line is the result.
            People::errors().say(format_args!(
                "rank {}: {} elements of {} steps are right",
                result.rank, result.elements_checked, self.args.steps
            ));
        }
        Ok(())
    }

    fn say(&self, message: &Message) -> Result<()> {
        if self.launched { print_json(message) } else { Ok(()) }
    }
}

impl Failure {
    fn at(mut self, step: u32, steps: u32) -> Self {
        self.text = format!("step {step} of {steps}: {}", self.text);
        self
    }
}

/// Ranks without which a communicator goes on.
fn lost(comm: &Communicator) -> Vec<usize> {
    comm.lost_ranks().into_iter().map(|rank| rank as usize).collect()
}

/// Bytes that this rank has put to ranks of other domains; none where one link reaches all ranks, or the kernel set
/// does not count.
fn put_between_domains(comm: &Communicator) -> Option<u64> {
    if domains(comm) < 2 {
        return None;
    }
    let report = comm.reporter().capture("bytes").ok()?;
    let links = report.peers.iter().flat_map(|peer| &peer.links);
    let mut out = links.filter(|link| link.level == "scale-out").peekable();
    out.peek()?;
    out.map(|link| link.counts.as_ref().map(|counts| counts.bytes)).sum()
}

/// The counts so far.
#[derive(Default)]
struct Tally {
    dispatch: Times,
    combine: Times,
    rows_sent: u64,
    rows_received: u64,
    /// (token, other domain) pairs.
    crossings: u64,
    out_bytes: Option<u64>,
    elements: u64,
    tokens_missing: u64,
    /// The step from which each lost rank is lost.
    lost: BTreeMap<u32, u32>,
}

impl Tally {
    fn note_lost(&mut self, ranks: &[u32], step: u32) {
        for rank in ranks {
            self.lost.entry(*rank).or_insert(step);
        }
    }

    fn count(&mut self, case: &Case, inputs: &Inputs, rank: usize, received: u64) {
        let mine = &inputs.ranks[rank];
        let tokens = case.tokens_of(rank);
        let domain = case.domain_of(rank);
        for token in 0..tokens {
            let sent = routing::destinations(case, mine.selections(case, token));
            let others: BTreeSet<usize> = sent.iter().map(|to| case.domain_of(to.rank)).collect();
            self.rows_sent += sent.len() as u64;
            self.crossings += others.iter().filter(|other| **other != domain).count() as u64;
        }
        self.rows_received += received;
        self.elements += (received + tokens as u64) * case.hidden as u64;
    }

    fn result(self, rank: u32, case: &Case) -> RankResult {
        let scales = case.scales().map_or(0, |(elem, count)| elem.bytes() * count);
        let row = case.hidden * case.received_elem().bytes() + scales;
        let returned = case.hidden * case.combine.row.bytes();
        RankResult {
            rank,
            tokens: case.tokens_of(rank as usize) as u64,
            rows_sent: self.rows_sent,
            rows_received: self.rows_received,
            bytes_received: self.rows_received * row as u64,
            bytes_returned: self.rows_sent * returned as u64,
            out_bytes: self.out_bytes,
            out_row_bytes: self.crossings * (row + returned) as u64,
            clock: self.dispatch.clock.max(self.combine.clock),
            dispatch_us: self.dispatch.median_us(),
            combine_us: self.combine.median_us(),
            elements_checked: self.elements,
            lost: self.lost.into_iter().map(|(rank, from_step)| Loss { rank, from_step }).collect(),
            tokens_missing_experts: self.tokens_missing,
        }
    }
}

/// The load of the busiest expert over the mean load.
fn busiest_over_mean(case: &Case, inputs: &Inputs) -> f64 {
    let mut loads = vec![0u64; case.experts];
    for expert in inputs.ranks.iter().flat_map(|rank| &rank.topk_idx).filter(|e| **e >= 0) {
        loads[*expert as usize] += 1;
    }
    let total: u64 = loads.iter().sum();
    let busiest = loads.into_iter().max().unwrap_or(0);
    if total == 0 { 0.0 } else { busiest as f64 * case.experts as f64 / total as f64 }
}

#[cfg(test)]
mod tests {
    use tokenyard_conformance::moe::oracle::Routing;

    use super::*;

    #[test]
    fn a_skewed_routing_shows_in_the_load() {
        let load = |routing| {
            let case = Case { experts: 16, routing, ..Case::default() };
            busiest_over_mean(&case, &Inputs::all(&case))
        };
        assert!(load(Routing::Skewed) >= 4.0);
        assert_eq!(load(Routing::OneExpert), 16.0);
        assert_eq!(load(Routing::Nothing), 0.0);
    }

    #[test]
    fn sent_and_received_rows_count_pairs_of_token_and_rank() {
        let case = Case { ranks: 2, experts: 4, topk: 4, max_tokens: 3, ..Case::default() };
        let inputs = Inputs::all(&case);
        let mut tally = Tally::default();
        // Every token selects all experts, so it goes to both ranks once.
        tally.count(&case, &inputs, 1, 6);
        let result = tally.result(1, &case);
        assert_eq!((result.rows_sent, result.rows_received), (6, 6));
        assert_eq!(result.bytes_received, 6 * 256 * 2);
        assert_eq!(result.elements_checked, (6 + 3) * 256);
        assert_eq!((result.out_bytes, result.out_row_bytes), (None, 0), "one domain");
    }

    #[test]
    fn rows_between_domains_are_pairs_of_a_token_and_another_domain_there_and_back() {
        let case =
            Case { ranks: 4, domains: 2, experts: 8, topk: 8, max_tokens: 3, ..Case::default() };
        let mut tally = Tally::default();
        // Every token selects all experts, so it goes to both ranks of the other domain in one row.
        tally.count(&case, &Inputs::all(&case), 1, 12);
        let row = (case.hidden * (case.received_elem().bytes() + case.combine.row.bytes())) as u64;
        assert_eq!(tally.result(1, &case).out_row_bytes, 3 * row);
    }
}
