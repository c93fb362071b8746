//! Turns arguments into exchanges. Everything that can be refused before a rank starts is refused
//! here.

use std::borrow::Cow;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use tokenyard_conformance::moe::exchange;
use tokenyard_conformance::moe::input::{self, InputFile};
use tokenyard_conformance::moe::oracle::{
    Case, Combine, Input, Inputs, Layout, RowType, Scales, Sums, Tokens,
};
use tokenyard_core::bootstrap::MAX_RANKS;
use tokenyard_core::moe::Shape;

use super::{InputType, RunArgs};
use crate::layout::LayoutName;
use crate::memory;

const DEFAULT_RANKS: u32 = 4;
const DEFAULT_EXPERTS: u32 = 32;
/// Rows must be whole multiples of this many bytes on the wire.
const ROW_ALIGN: usize = 16;
const MAX_ALIGNMENT: u32 = 4096;

/// The exchanges of one run.
pub(crate) struct Plan {
    /// The first exchange.
    pub(crate) case: Case,
    /// The inputs of all ranks to every step, where a file has them.
    recorded: Option<Inputs>,
    /// Bytes of that file.
    file_bytes: u64,
    steps: u32,
}

/// The copies of the input file that every rank holds while every element is checked: the file as
/// it was read, and its rows.
const COPIES_OF_FILE: u64 = 2;
/// Bytes of bookkeeping, in the product and in the oracle together: for a row, for a selection of a token,
/// for an expert on a rank, and for a step (two times). An expert has records of both directions, plans and
/// counts: 60 to 105 bytes were measured. Each is rounded up, because a refusal does less harm than a machine
/// out of memory.
const PER_ROW: u128 = 64;
const PER_SELECTION: u128 = 16;
const PER_EXPERT: u128 = 128;
const PER_STEP: u128 = 32;

impl Plan {
    /// Checks the arguments. `ranks` is the size of the world, where it is already known.
    pub(crate) fn new(args: &RunArgs, ranks: Option<u32>) -> Result<Self> {
        let file = args.input.as_deref().map(read_input).transpose()?;
        let asked = [ranks, args.ranks].into_iter().flatten().collect::<Vec<_>>();
        if let [world, asked] = asked[..] {
            ensure!(
                world == asked,
                "read options: found a world of {world} ranks; expected --ranks {asked}"
            );
        }
        let recorded = file.as_ref().and_then(InputFile::ranks).map(|ranks| ranks as u32);
        let ranks = asked.first().copied().or(recorded).unwrap_or(DEFAULT_RANKS);
        ensure!(
            (1..=MAX_RANKS).contains(&ranks),
            "read options: found {ranks} ranks; expected 1 to {MAX_RANKS}. Fix: give --ranks in that range"
        );
        let case = match &file {
            Some(file) => recorded_case(args, file, ranks as usize)?,
            None => generated_case(args, ranks as usize)?,
        };
        check(&case)?;
        let file_bytes = file.as_ref().map_or(0, InputFile::bytes);
        let recorded = file.map(|file| file.inputs(&case)).transpose()?;
        Ok(Self { case, recorded, file_bytes, steps: args.steps })
    }

    /// The exchange of a step, counted from 0, and the inputs of all ranks.
    pub(crate) fn step(&self, step: u32) -> (Cow<'_, Case>, Cow<'_, Inputs>) {
        match &self.recorded {
            Some(inputs) => (Cow::Borrowed(&self.case), Cow::Borrowed(inputs)),
            None => {
                let seed = self.case.seed.wrapping_add(u64::from(step));
                let case = Case { seed, ..self.case.clone() };
                let inputs = Inputs::all(&case);
                (Cow::Owned(case), Cow::Owned(inputs))
            }
        }
    }

    /// Refuses a run whose check would take more memory than this machine has left. `here` of the
    /// ranks run on it.
    pub(crate) fn check_memory(&self, here: usize) -> Result<()> {
        let needed = self.bytes() / self.case.ranks as u64 * here as u64;
        let what = format!("checking every element of {}, {} steps,", self.case, self.steps);
        memory::ensure_room(
            needed,
            &what,
            "choose fewer tokens, experts, ranks or steps, or a smaller hidden size or top-k",
        )
    }

    /// The memory of all ranks together while they check. Each rank holds the inputs of all ranks.
    /// The rows that a rank received exist as the product's rows, as the oracle's, and as the
    /// experts' outputs before and after they are placed.
    fn bytes(&self) -> u64 {
        let case = &self.case;
        let wide = |number: usize| number as u128;
        let (ranks, most) = (wide(case.ranks), wide(case.max_tokens));
        let (topk, experts) = (wide(case.topk), wide(case.experts));
        let row = wide(case.hidden) * wide(case.combine.row.bytes().max(2));
        let received = match case.layout {
            Layout::Flat => ranks * most * topk.min(ranks),
            Layout::ExpertMajor { alignment, .. } => {
                ranks * most * topk + experts * wide(alignment)
            }
            Layout::Packed => experts * ranks * most,
            Layout::RankMajor { .. } => ranks * ranks * most,
        };
        // Inputs are copied where ranks may be lost.
        let inputs = 2 * ranks * ranks * most;
        // The value is below 2^110: no size is above 2^32, and a product has at most three sizes
        // besides the row, which core limits to 2^30 bytes.
        let bytes = (inputs + 5 * received) * (row + PER_ROW)
            + (inputs + received) * topk * PER_SELECTION
            + experts * (ranks + 1) * PER_EXPERT
            + u128::from(self.steps) * ranks * PER_STEP
            + u128::from(self.file_bytes * COPIES_OF_FILE) * (ranks + 1);
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

/// Reads an input file that fits into memory.
fn read_input(path: &Path) -> Result<InputFile> {
    // A file without metadata is refused where it is opened.
    let length = std::fs::metadata(path).map_or(0, |about| about.len()).min(input::MAX_BYTES);
    let what = format!("reading {}", path.display());
    memory::ensure_room(length * COPIES_OF_FILE, &what, "save fewer tokens in one file")?;
    Ok(InputFile::read(path)?)
}

fn generated_case(args: &RunArgs, ranks: usize) -> Result<Case> {
    let input = match args.input_type.unwrap_or(InputType::Bf16) {
        InputType::Bf16 => Input::Plain(RowType::Bf16),
        InputType::Fp16 => Input::Plain(RowType::F16),
        InputType::Fp32 => Input::Plain(RowType::F32),
        cast => Input::Cast(RowType::Bf16, scales(cast)),
    };
    let case = Case {
        ranks,
        experts: args.experts.unwrap_or(DEFAULT_EXPERTS) as usize,
        topk: args.topk as usize,
        hidden: args.hidden as usize,
        max_tokens: args.tokens as usize,
        tokens: Tokens::Full,
        input,
        routing: args.routing.into(),
        ..Case::default()
    };
    arrange(args, case)
}

fn recorded_case(args: &RunArgs, file: &InputFile, ranks: usize) -> Result<Case> {
    let mut case = file.case(ranks, args.experts.map(|e| e as usize))?;
    case.input = match (args.input_type, file.row()) {
        (None, row)
        | (Some(InputType::Bf16), row @ RowType::Bf16)
        | (Some(InputType::Fp16), row @ RowType::F16)
        | (Some(InputType::Fp32), row @ RowType::F32) => Input::Plain(row),
        (Some(InputType::Bf16 | InputType::Fp16 | InputType::Fp32), row) => {
            bail!(
                "read options: found rows of {row} in the input file; expected those of --input-type"
            )
        }
        (Some(cast), row) => Input::Cast(row, scales(cast)),
    };
    arrange(args, case)
}

/// The scales of a cast; a type without a cast has none.
fn scales(cast: InputType) -> Scales {
    match cast {
        InputType::Fp8Round => Scales::RoundedF32,
        InputType::Fp8Ue8m0 => Scales::Ue8m0,
        _ => Scales::F32,
    }
}

/// Adds the choices that generated and recorded rows share.
fn arrange(args: &RunArgs, case: Case) -> Result<Case> {
    let alignment = args.alignment;
    let grouped = args.layout == LayoutName::ExpertMajor;
    ensure!(
        (1..=MAX_ALIGNMENT).contains(&alignment) && (grouped || alignment == 1),
        "read options: found --alignment {alignment}; expected 1 to {MAX_ALIGNMENT}, and 1 unless the layout is \
         expert-major"
    );
    let layout = match args.layout {
        LayoutName::Flat => Layout::Flat,
        LayoutName::ExpertMajor => {
            Layout::ExpertMajor { alignment: alignment as usize, zero_padding: true }
        }
        LayoutName::Packed => Layout::Packed,
        LayoutName::RankMajor => Layout::RankMajor { zero_padding: true },
    };
    let row = match case.input {
        Input::Plain(row) | Input::Cast(row, _) => row,
        Input::Opaque(_) => RowType::Bf16,
    };
    // The experts weight rows that return as one sum per token and rank.
    let weighted = case.weights && !layout.has_a_row_per_token();
    let combine = Combine { row, biases: 0, weighted, sums: Sums::ByRank };
    Ok(Case { layout, combine, seed: args.seed, ..case })
}

/// Refuses sizes that the communicator would refuse on every rank.
fn check(case: &Case) -> Result<()> {
    let options = exchange::options(case);
    Shape {
        ranks: u32::try_from(case.ranks).context("ranks")?,
        experts: options.experts,
        topk: options.topk,
        hidden: options.hidden,
        max_tokens: options.max_tokens,
    }
    .new()?;
    case.validate()?;
    for bytes in [case.received_elem().bytes(), case.combine.row.bytes()] {
        let row = case.hidden * bytes;
        ensure!(
            row.is_multiple_of(ROW_ALIGN),
            "read options: found hidden = {}, rows of {row} bytes; expected a multiple of {ROW_ALIGN} bytes",
            case.hidden
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::{Parser, ValueEnum};
    use proptest::prelude::*;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: RunArgs,
    }

    fn plan(arguments: &str) -> Result<Plan> {
        let words = ["run", "c.toml"].into_iter().chain(arguments.split_whitespace());
        Plan::new(&Cli::try_parse_from(words)?.args, None)
    }

    fn refusal(arguments: &str) -> String {
        format!("{:#}", plan(arguments).err().unwrap())
    }

    #[test]
    fn every_step_has_fresh_data_of_the_same_shape() {
        let plan = plan("--tokens 4 --hidden 32 --seed 7").unwrap();
        let (first, second) = (plan.step(0), plan.step(1));
        assert_eq!((first.0.seed, second.0.seed), (7, 8));
        assert_ne!(first.1.ranks[0].x, second.1.ranks[0].x);
        assert_eq!(first.1.ranks[0].x.len(), second.1.ranks[0].x.len());
        assert_eq!(plan.case.ranks, 4);
    }

    #[test]
    fn what_the_communicator_would_refuse_is_refused_before_a_rank_starts() {
        for (arguments, reason) in [
            ("--ranks 3", "32 experts on 3 ranks"),
            ("--ranks 0", "found 0 ranks; expected 1 to 1048576"),
            ("--topk 33 --experts 64", "topk = 33"),
            ("--topk 9 --experts 8", "topk = 9; expected at most 8"),
            ("--tokens 0", "max_tokens = 0"),
            ("--hidden 6", "hidden = 6"),
            ("--hidden 8 --input-type fp8", "rows of 8 bytes"),
            ("--alignment 8", "unless the layout is expert-major"),
            ("--alignment 0 --layout expert-major", "--alignment 0"),
            ("--routing skewed --experts 8", "skewed routing to 8 experts"),
        ] {
            let message = refusal(arguments);
            assert!(message.contains(reason), "{arguments}: {message}");
        }
    }

    #[test]
    fn a_world_of_another_size_than_asked_for_is_refused() {
        let args = Cli::try_parse_from(["run", "c.toml", "--ranks", "2"]).unwrap().args;
        let error = Plan::new(&args, Some(4)).err().unwrap().to_string();
        assert!(error.contains("world of 4 ranks; expected --ranks 2"), "{error}");
    }

    #[test]
    fn shape_arguments_beside_an_input_file_are_refused() {
        assert!(refusal("--input a.safetensors --hidden 64").contains("cannot be used with"));
    }

    #[test]
    fn what_would_take_more_memory_than_any_machine_has_is_refused_with_both_sizes_and_the_fix() {
        for arguments in [
            "--experts 4294966272 --ranks 1024",
            "--tokens 2147483647 --ranks 1 --hidden 4096",
            "--hidden 268435456 --tokens 2097151 --ranks 4",
            "--tokens 67108864 --topk 32 --layout packed",
            "--experts 2147483648 --layout expert-major --alignment 4096",
        ] {
            let plan = plan(arguments).unwrap();
            assert!(plan.bytes() > 1 << 43, "{arguments}: {}", plan.bytes());
            let text = plan.check_memory(plan.case.ranks).unwrap_err().to_string();
            assert!(text.contains("of memory;") && text.contains("are available here"), "{text}");
            assert!(text.contains("Fix: choose fewer tokens, experts, ranks or steps"), "{text}");
        }
        // Measured: 2^20 experts on 8 ranks take 437 MiB.
        let bytes = |a: &str| plan(a).unwrap().bytes();
        assert!(bytes("--experts 1048576 --ranks 8 --tokens 1 --hidden 8") > 437 << 20);
        assert!(bytes("--steps 4294967295") > 500 << 30);
    }

    proptest! {
        /// Nothing is allocated by the size of an option before its memory was counted. A case that
        /// is accepted and counted as small is small.
        #[test]
        fn extreme_options_are_refused_or_counted(
            sizes in prop::array::uniform6((0_u32..33, 0_u32..3)),
            layout in 0_usize..3,
            input in 0_usize..6,
        ) {
            let [ranks, experts, topk, hidden, tokens, alignment] =
                sizes.map(|(bits, off)| (1_u64 << bits).saturating_sub(off.into()) as u32);
            let layout = *LayoutName::value_variants().get(layout).unwrap();
            let args = RunArgs {
                ranks: Some(ranks),
                experts: Some(experts),
                topk,
                hidden,
                tokens,
                layout,
                alignment: if layout == LayoutName::ExpertMajor { alignment } else { 1 },
                input_type: InputType::value_variants().get(input).copied(),
                ..Cli::try_parse_from(["run", "c.toml"]).unwrap().args
            };
            let Ok(plan) = Plan::new(&args, None) else { return Ok(()) };
            let [ranks, experts, hidden, tokens] = [ranks, experts, hidden, tokens].map(u64::from);
            prop_assert!(plan.bytes() >= 128_u64.saturating_mul(ranks * experts));
            let rows = (2 * ranks * hidden).saturating_mul(ranks * tokens);
            prop_assert!(plan.bytes() >= rows);
            if plan.bytes() < 4 << 20 {
                let (_, inputs) = plan.step(0);
                prop_assert_eq!(inputs.ranks.len() as u64, ranks);
            }
        }
    }

    #[test]
    fn the_memory_of_a_check_counts_what_each_layout_holds() {
        let bytes = |a: &str| plan(a).unwrap().bytes();
        let (row, steps) = (2 * 64 + 64, 10 * 4 * 32_u64);
        let experts = 8 * 5 * 128;
        let shape = "--tokens 10 --hidden 64 --experts 8 --topk 2";
        let selections = |received: u64| (320 + received) * 2 * 16;
        assert_eq!(bytes(shape), (320 + 5 * 80) * row + selections(80) + experts + steps);
        assert_eq!(
            bytes(&format!("{shape} --layout packed")),
            (320 + 5 * 320) * row + selections(320) + experts + steps
        );
    }
}
