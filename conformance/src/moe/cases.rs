//! L1: one exchange at a time, every element against the oracle. `dispatch` and `combine` have the cases of one of
//! them; what both need to run a case is here. A new rule of an operation gets its cases in its file.
//! Watched by `tests/mutants`: each mutant of a kernel set fails in a case.

mod caps;
mod combine;
mod dispatch;

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use tokenyard_core::communicator::{CallForm, Communicator};

use crate::moe::copied_out;
use crate::moe::exchange::{self, Placed};
use crate::moe::oracle::{Case, Layout, Routing, Sums, Tokens};
use crate::moe::round::Round;
use crate::suite::{Level, Outcome, Rank, Test};

const EXPERT_MAJOR: Layout = Layout::ExpertMajor { alignment: 4, zero_padding: true };
const RANK_MAJOR: Layout = Layout::RankMajor { zero_padding: false };
const LAYOUTS: [Layout; 4] = [Layout::Flat, EXPERT_MAJOR, Layout::Packed, RANK_MAJOR];

/// Exchanges of one test, each with other data and another routing.
const ROUNDS: u64 = 2;

/// How a test uses the communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExchangeWay {
    /// Expert outputs in memory of the caller.
    Outside,
    /// Expert outputs in the room that the communicator gives.
    CombineInput,
    /// Expert outputs over the received rows.
    InPlace,
    /// Opaque scales whose rows are not contiguous: column by column, as some libraries store them.
    StridedScales,
    /// Received rows are copied to the caller's memory before the test reads them.
    CopiedOut,
    /// The communicator takes four times as many tokens as the calls.
    CallTokens,
    /// Other rows follow with the same routing, before the combine.
    Replayed,
    /// More rows come to rank 0 than its cap takes, and it drops none.
    TooMany,
}

impl ExchangeWay {
    fn suffix(self) -> &'static str {
        match self {
            Self::Outside => "",
            Self::CombineInput => ".combine-input",
            Self::InPlace => ".in-place",
            Self::StridedScales => ".strided-scales",
            Self::CopiedOut => ".copied-out",
            Self::CallTokens => ".call-tokens",
            Self::Replayed => ".replayed",
            Self::TooMany => ".too-many",
        }
    }
}

/// The tests of this level. The capabilities of a transport do not matter here: the same exchange
/// must work on every one. With several domains, each has the ranks and experts of the case.
pub fn tests(domains: u32) -> Vec<Test> {
    let domains = domains as usize;
    let mut suite = Suite { domains, tests: Vec::new(), names: BTreeSet::new() };
    dispatch::types(&mut suite);
    dispatch::odd_values(&mut suite);
    combine::combines(&mut suite);
    dispatch::tokens(&mut suite);
    dispatch::routings(&mut suite);
    dispatch::sizes(&mut suite);
    dispatch::hidden_sizes(&mut suite);
    dispatch::alignments(&mut suite);
    dispatch::worlds(&mut suite);
    dispatch::scales(&mut suite);
    dispatch::copies(&mut suite);
    dispatch::call_tokens(&mut suite);
    combine::forms(&mut suite);
    dispatch::packed_forms(&mut suite);
    combine::coded(&mut suite);
    caps::caps(&mut suite);
    suite.tests
}

struct Suite {
    domains: usize,
    tests: Vec<Test>,
    names: BTreeSet<String>,
}

impl Suite {
    fn add(&mut self, group: &str, about: &str, way: ExchangeWay, case: Case) {
        let case = spread(case, self.domains);
        let name = format!("l1/{group}/{case}{}", way.suffix());
        // Groups of cases overlap where that makes them easier to read; one test per case is enough.
        if !self.names.insert(format!("{case}{}", way.suffix())) {
            return;
        }
        self.tests.push(Test {
            name,
            level: Level::L1,
            ranks: case.ranks as u32,
            about: about.to_owned(),
            in_processes: false,
            lacks: None,
            body: Box::new(move |rank| run(rank, &case, way)),
        });
    }
}

/// The same case in each of several domains.
fn spread(case: Case, domains: usize) -> Case {
    let tokens = match case.tokens {
        Tokens::Exactly(counts) => Tokens::Exactly(counts.repeat(domains)),
        other => other,
    };
    let (ranks, experts) = (case.ranks * domains, case.experts * domains);
    let max_rows = case.max_rows.repeat(domains);
    Case { ranks, experts, domains, tokens, max_rows, ..case }
}

/// Two ranks, ragged, some entries negative: the base of most cases.
fn usual() -> Case {
    Case { topk: 3, tokens: Tokens::Ragged, routing: Routing::SomeNegative, ..Case::default() }
}

fn run(rank: &Rank<'_>, case: &Case, way: ExchangeWay) -> Result<Outcome> {
    case.validate()?;
    let mut options = exchange::options(case);
    if way == ExchangeWay::CallTokens {
        options.max_tokens *= 4;
    }
    let mut comm = Communicator::open(rank.world, rank.config, options)?;
    if let Some(form) = forms_of(case, way).find(|form| !comm.takes(*form)) {
        comm.close()?;
        return Ok(Outcome::NotSupported(form.to_string()));
    }
    let domains = exchange::domains(&comm);
    for seed in 0..ROUNDS {
        let round = Round::new(&Case { seed, domains, ..case.clone() }, comm.rank());
        exchange_once(&mut comm, &round, way).with_context(|| format!("seed {seed}"))?;
    }
    comm.close()?;
    Ok(Outcome::Pass)
}

/// The forms of calls that a test needs.
fn forms_of(case: &Case, way: ExchangeWay) -> impl Iterator<Item = CallForm> + use<> {
    let tokens = (way == ExchangeWay::CallTokens).then_some(CallForm::CallTokens);
    let packed = (case.scale_columns || case.source_tokens).then_some(CallForm::PackedForms);
    let cap = (!case.max_rows.is_empty()).then_some(CallForm::RowCap);
    let (layout, given) = match case.layout {
        Layout::Packed => (None, CallForm::PackedSums),
        Layout::Flat | Layout::ExpertMajor { .. } => (None, CallForm::RoundOnce),
        Layout::RankMajor { .. } => (Some(CallForm::RankMajor), CallForm::RoundOnce),
    };
    let (sums, code) = match case.combine.sums {
        Sums::ByRank => (None, None),
        Sums::Once | Sums::LateWeights | Sums::LateWeightsOnce => (Some(given), None),
        Sums::Coded => (None, Some(CallForm::LogFmt10)),
        Sums::LateWeightsCoded => (Some(given), Some(CallForm::LogFmt10)),
        Sums::WeightsOfAllRanks => (Some(CallForm::SumWeights), None),
    };
    [layout, tokens, packed, cap, sums, code].into_iter().flatten()
}

fn exchange_once(comm: &mut Communicator, round: &Round, way: ExchangeWay) -> Result<()> {
    let Round { case, inputs, tensors, .. } = round;
    match way {
        ExchangeWay::Outside | ExchangeWay::CallTokens => {
            exchange::check(comm, case, inputs, Placed::Outside)
        }
        ExchangeWay::CombineInput => exchange::check(comm, case, inputs, Placed::CombineInput),
        ExchangeWay::InPlace => {
            let mut live = round.dispatch(comm)?;
            let output = exchange::run_experts(case, comm.rank() as usize, &live.received)?;
            let (handle, received) = (&live.handle, &mut live.received);
            let got = exchange::combine_in_place(comm, tensors, handle, &output, received)
                .context("combine")?;
            round.check_combined(&got)
        }
        ExchangeWay::StridedScales => dispatch::strided_scales(comm, round),
        ExchangeWay::Replayed => caps::replayed(comm, round),
        ExchangeWay::TooMany => caps::too_many(comm, round),
        ExchangeWay::CopiedOut => {
            let between =
                Round::new(&Case { seed: case.seed + ROUNDS, ..case.clone() }, comm.rank());
            copied_out::check(comm, round, &between)
        }
    }
}
