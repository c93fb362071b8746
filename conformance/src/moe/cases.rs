//! L1: one exchange at a time, every element against the oracle.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use tokenyard_core::communicator::{CallForm, Communicator, TensorRef};
use tokenyard_core::moe::DType;

use crate::device::Copies;
use crate::moe::copied_out;
use crate::moe::exchange::{self, Placed};
use crate::moe::oracle::{
    Case, Combine, Input, Layout, Routing, RowType, Scales, Sums, Tokens, Values,
};
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
        }
    }
}

/// The tests of this level. The capabilities of a transport do not matter here: the same exchange
/// must work on every one. With several domains, each has the ranks and experts of the case.
pub fn tests(domains: u32) -> Vec<Test> {
    let domains = domains as usize;
    let mut suite = Suite { domains, tests: Vec::new(), names: BTreeSet::new() };
    suite.types();
    suite.odd_values();
    suite.combines();
    suite.tokens();
    suite.routings();
    suite.sizes();
    suite.hidden_sizes();
    suite.alignments();
    suite.worlds();
    suite.scales();
    suite.copies();
    suite.forms();
    suite.coded();
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

    fn types(&mut self) {
        let inputs = [
            Input::Plain(RowType::Bf16),
            Input::Plain(RowType::F16),
            Input::Plain(RowType::F32),
            Input::Cast(RowType::Bf16, Scales::F32),
            Input::Cast(RowType::Bf16, Scales::RoundedF32),
            Input::Cast(RowType::Bf16, Scales::Ue8m0),
            Input::Cast(RowType::F16, Scales::F32),
            Input::Cast(RowType::F32, Scales::Ue8m0),
            Input::Opaque(2),
        ];
        let about = "rows of this type in this layout";
        for layout in LAYOUTS {
            for input in inputs {
                let case = Case { layout, input, ..usual() };
                self.add("types", about, ExchangeWay::Outside, case.clone());
                let local = case.experts / case.ranks;
                if self.domains == 2 {
                    // With more ranks in a domain than domains, a rail and a domain differ in size.
                    let wide = Case { ranks: 4, experts: 4 * local, ..case.clone() };
                    self.add("types", about, ExchangeWay::Outside, wide);
                }
                if self.domains > 1 {
                    // A domain of one rank has no scale-up link.
                    let alone = Case { ranks: 1, experts: local, ..case };
                    self.add("types", about, ExchangeWay::Outside, alone);
                }
            }
        }
    }

    /// Values that casts and sums seldom see.
    fn odd_values(&mut self) {
        let about = "NaN, infinities, the smallest and the largest values are values like others";
        for input in [
            Input::Plain(RowType::Bf16),
            Input::Plain(RowType::F16),
            Input::Plain(RowType::F32),
            Input::Cast(RowType::Bf16, Scales::F32),
            Input::Cast(RowType::Bf16, Scales::RoundedF32),
            Input::Cast(RowType::F16, Scales::Ue8m0),
            Input::Cast(RowType::F32, Scales::F32),
            Input::Cast(RowType::F32, Scales::Ue8m0),
            Input::Opaque(5),
        ] {
            let case = Case { input, values: Values::SomeOdd, hidden: 528, ..usual() };
            let packed = Case { layout: Layout::Packed, ..case.clone() };
            self.add("types", about, ExchangeWay::Outside, case);
            self.add("types", about, ExchangeWay::Outside, packed);
        }
        let about = "rows and scales of nothing but 0xFF arrive, too";
        for layout in LAYOUTS {
            for input in [
                Input::Plain(RowType::Bf16),
                Input::Plain(RowType::F32),
                Input::Cast(RowType::Bf16, Scales::F32),
                Input::Cast(RowType::F16, Scales::Ue8m0),
                Input::Opaque(5),
            ] {
                let values = Values::Filler;
                let case = Case { layout, input, values, hidden: 528, ..usual() };
                self.add("types", about, ExchangeWay::Outside, case);
            }
        }
    }

    fn combines(&mut self) {
        let rows = [RowType::Bf16, RowType::F16, RowType::F32];
        for layout in LAYOUTS {
            for (biases, row) in rows.into_iter().enumerate() {
                let weighted = !layout.has_a_row_per_token() && biases != 1;
                let combine = Combine { row, biases, weighted, sums: Sums::ByRank };
                let about = "the sum starts with the biases, in the type of the expert outputs";
                for input in [Input::Plain(row), Input::Cast(RowType::Bf16, Scales::F32)] {
                    let case = Case { layout, input, combine, ..usual() };
                    self.add("combine", about, ExchangeWay::CombineInput, case.clone());
                    self.add("combine", about, ExchangeWay::Outside, case);
                }
                let case = Case { layout, input: Input::Plain(row), combine, ..usual() };
                let about = "expert outputs may take the place of the received rows";
                self.add("combine", about, ExchangeWay::InPlace, case);
            }
            let case = Case { layout, weights: false, ..usual() };
            self.add("combine", "an exchange needs no weights", ExchangeWay::Outside, case);
        }
    }

    fn tokens(&mut self) {
        let about = "T may differ between ranks and may be 0";
        for layout in LAYOUTS {
            for tokens in [
                Tokens::Full,
                Tokens::Ragged,
                Tokens::OddRanksEmpty,
                Tokens::Exactly(vec![0, 0, 0]),
                Tokens::Exactly(vec![0, 16, 1]),
            ] {
                let case = Case { ranks: 3, experts: 12, layout, tokens, ..usual() };
                self.add("tokens", about, ExchangeWay::Outside, case);
            }
        }
    }

    fn routings(&mut self) {
        for layout in LAYOUTS {
            for routing in [
                Routing::Uniform,
                Routing::Skewed,
                Routing::OneExpert,
                Routing::OwnRank,
                Routing::SomeNothing,
                Routing::Nothing,
            ] {
                let case = Case { experts: 16, layout, routing, ..usual() };
                self.add(
                    "routing",
                    "rows reach the experts they select",
                    ExchangeWay::Outside,
                    case,
                );
            }
        }
    }

    fn sizes(&mut self) {
        for layout in LAYOUTS {
            for (experts, topk) in [(2, 1), (16, 8), (64, 32), (2, 2), (128, 4)] {
                let case = Case { experts, topk, layout, ..usual() };
                self.add("sizes", "any top-k, few and many experts", ExchangeWay::Outside, case);
            }
            for routing in [Routing::Uniform, Routing::SomeNothing] {
                let case = Case { layout, routing, worst_case: true, ..usual() };
                let about = "outputs of worst-case size hold the right rows in front";
                self.add("sizes", about, ExchangeWay::Outside, case.clone());
                self.add("sizes", about, ExchangeWay::CombineInput, case);
            }
        }
    }

    fn hidden_sizes(&mut self) {
        let about = "any row of a multiple of 16 bytes, on the wire and in memory";
        let plain = [
            (RowType::Bf16, [8, 24, 40, 136, 7168]),
            (RowType::F16, [8, 24, 104, 520, 1000]),
            (RowType::F32, [4, 12, 20, 132, 260]),
        ];
        for layout in LAYOUTS {
            for (row, sizes) in plain {
                for hidden in sizes {
                    let combine = Combine { row, biases: 1, weighted: false, sums: Sums::ByRank };
                    let input = Input::Plain(row);
                    let case = Case { hidden, layout, input, combine, max_tokens: 5, ..usual() };
                    self.add("hidden", about, ExchangeWay::Outside, case);
                }
            }
            for (hidden, scales) in [
                (16, Scales::F32),
                (48, Scales::Ue8m0),
                (144, Scales::RoundedF32),
                (1040, Scales::Ue8m0),
                (7168, Scales::F32),
            ] {
                let input = Input::Cast(RowType::Bf16, scales);
                let case = Case { hidden, layout, input, max_tokens: 5, ..usual() };
                self.add("hidden", about, ExchangeWay::Outside, case);
            }
        }
    }

    fn alignments(&mut self) {
        for alignment in [1, 3, 128] {
            for zero_padding in [true, false] {
                let layout = Layout::ExpertMajor { alignment, zero_padding };
                let case = Case { layout, ..usual() };
                let about = "experts start aligned, and padding is zero where that was asked";
                self.add("alignment", about, ExchangeWay::Outside, case.clone());
                self.add(
                    "alignment",
                    about,
                    ExchangeWay::Outside,
                    Case { worst_case: true, ..case },
                );
            }
        }
        for input in [Input::Plain(RowType::Bf16), Input::Cast(RowType::Bf16, Scales::Ue8m0)] {
            let layout = Layout::RankMajor { zero_padding: true };
            let about = "the places behind a source's rows are zero where that was asked";
            let case = Case { layout, input, ranks: 3, experts: 12, ..usual() };
            self.add("alignment", about, ExchangeWay::Outside, case.clone());
            let nothing = Case { routing: Routing::SomeNothing, worst_case: true, ..case };
            self.add("alignment", about, ExchangeWay::Outside, nothing);
        }
    }

    fn worlds(&mut self) {
        for layout in LAYOUTS {
            for ranks in [1, 2, 3, 4] {
                for input in
                    [Input::Plain(RowType::Bf16), Input::Cast(RowType::Bf16, Scales::Ue8m0)]
                {
                    let case = Case { ranks, experts: 12, input, layout, ..usual() };
                    self.add("worlds", "worlds of 1 to 4 ranks", ExchangeWay::Outside, case);
                }
            }
        }
    }

    fn copies(&mut self) {
        for layout in LAYOUTS {
            for input in [Input::Plain(RowType::Bf16), Input::Opaque(2)] {
                let about =
                    "an output may be copied out of the arena, which has its place back then";
                let case = Case { layout, input, ..usual() };
                self.add("copy", about, ExchangeWay::CopiedOut, case.clone());
                self.add("copy", about, ExchangeWay::CopiedOut, Case { weights: false, ..case });
            }
        }
    }

    /// Forms of calls that some kernel sets do not take.
    fn forms(&mut self) {
        for layout in LAYOUTS {
            for worst_case in [false, true] {
                let about = "a call may bound its tokens below the communicator's";
                let case = Case { layout, worst_case, ..usual() };
                self.add("forms", about, ExchangeWay::CallTokens, case);
            }
            for row in [RowType::Bf16, RowType::F16, RowType::F32] {
                for (sums, weighted, about) in [
                    (Sums::Once, false, "a sum is rounded once where the call asks for it"),
                    (Sums::Once, true, "a sum is rounded once where the call asks for it"),
                    (Sums::LateWeights, true, "a combine may bring weights, and leave experts out"),
                    (Sums::LateWeightsOnce, true, "a combine may bring weights, rounded once"),
                    (Sums::WeightsOfAllRanks, false, "returned weights may be sums over ranks"),
                ] {
                    let combine = Combine { row, biases: 1, weighted, sums };
                    let case = Case { layout, combine, ..usual() };
                    if case.validate().is_ok() {
                        self.add("forms", about, ExchangeWay::Outside, case);
                    }
                }
            }
        }
        self.packed_forms();
    }

    fn packed_forms(&mut self) {
        let inputs = [
            Input::Plain(RowType::Bf16),
            Input::Cast(RowType::Bf16, Scales::F32),
            Input::Cast(RowType::F16, Scales::RoundedF32),
            Input::Cast(RowType::Bf16, Scales::Ue8m0),
            Input::Opaque(7),
        ];
        for input in inputs {
            for worst_case in [false, true] {
                // Several groups of channels, of which the last is not whole.
                let case =
                    Case { layout: Layout::Packed, input, worst_case, hidden: 1104, ..usual() };
                let columns = Case { scale_columns: true, ..case.clone() };
                if case.scales().is_some() {
                    let about = "packed scales may lie column by column";
                    self.add("forms", about, ExchangeWay::Outside, columns.clone());
                    self.add("forms", about, ExchangeWay::CopiedOut, columns.clone());
                }
                let about = "packed sources may be tokens alone";
                let tokens = Case { source_tokens: true, ..case };
                self.add("forms", about, ExchangeWay::Outside, tokens);
                let both = Case { source_tokens: true, ..columns };
                self.add("forms", about, ExchangeWay::CallTokens, both);
            }
        }
    }

    /// Partial rows in LogFMT-10. Some chunks of the rows are encoded, others are not: their values are too large, or
    /// all zeros.
    fn coded(&mut self) {
        if self.domains > 1 {
            return;
        }
        for (hidden, biases) in [(512, 0), (1536, 1), (2048, 2), (7168, 0)] {
            for (sums, weighted, about) in [
                (Sums::Coded, false, "a rank's sum may travel in ten bits a value"),
                (Sums::Coded, true, "a rank's sum may travel in ten bits a value"),
                (Sums::LateWeightsCoded, true, "ten bits a value, with weights of the combine"),
            ] {
                let combine = Combine { row: RowType::Bf16, biases, weighted, sums };
                let case = Case { layout: Layout::Packed, combine, hidden, ..usual() };
                self.add("logfmt", about, ExchangeWay::Outside, case.clone());
                self.add("logfmt", about, ExchangeWay::CombineInput, case.clone());
                if hidden == 1536 {
                    let odd = Case { values: Values::SomeOdd, ..case.clone() };
                    self.add("logfmt", about, ExchangeWay::Outside, odd);
                    let many = Case { ranks: 4, experts: 16, topk: 4, ..case };
                    self.add("logfmt", about, ExchangeWay::Outside, many);
                }
            }
        }
    }

    fn scales(&mut self) {
        for layout in LAYOUTS {
            for count in [1, 3, 7] {
                let case = Case { layout, input: Input::Opaque(count), ..usual() };
                let about = "opaque scales pass untouched, whatever their strides";
                self.add("scales", about, ExchangeWay::StridedScales, case.clone());
                self.add("scales", about, ExchangeWay::Outside, case);
            }
        }
    }
}

/// The same case in each of several domains.
fn spread(case: Case, domains: usize) -> Case {
    let tokens = match case.tokens {
        Tokens::Exactly(counts) => Tokens::Exactly(counts.repeat(domains)),
        other => other,
    };
    let (ranks, experts) = (case.ranks * domains, case.experts * domains);
    Case { ranks, experts, domains, tokens, ..case }
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
    [layout, tokens, packed, sums, code].into_iter().flatten()
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
        ExchangeWay::StridedScales => strided_scales(comm, round),
        ExchangeWay::CopiedOut => {
            let between =
                Round::new(&Case { seed: case.seed + ROUNDS, ..case.clone() }, comm.rank());
            copied_out::check(comm, round, &between)
        }
    }
}

/// Dispatches with scales `[T, S]` that are stored column by column, and combines.
fn strided_scales(comm: &mut Communicator, round: &Round) -> Result<()> {
    let mut dispatch = round.tensors.dispatch()?;
    let scales = dispatch.scales.context("the case has opaque scales")?;
    let (rows, columns) = (scales.rows(), scales.cols());
    let words = scales.elements::<i32>();
    let by_column: Vec<u8> = (0..rows * columns)
        .flat_map(|i| words[i % rows * columns + i / rows].to_ne_bytes())
        .collect();
    let by_column = exchange::Aligned::copy_of(&by_column);
    let shape = [rows, columns];
    dispatch.scales =
        Some(TensorRef::strided(by_column.bytes(), DType::I32, shape, [1, rows.max(1)])?);
    let copies = Copies::default();
    let dispatch = copies.dispatch(comm, dispatch)?;
    let (received, handle) = comm.dispatch(&dispatch).context("dispatch")?;
    round.check_received(&received)?;
    round.finish(comm, &crate::moe::round::Live { received, handle })?;
    Ok(())
}
