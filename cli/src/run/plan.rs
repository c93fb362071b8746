//! From arguments to exchanges: everything that can be refused before a rank starts is refused here.

use std::borrow::Cow;

use anyhow::{Context, Result, bail, ensure};
use tokenyard_conformance::exchange;
use tokenyard_conformance::input::InputFile;
use tokenyard_conformance::oracle::{
    Case, Combine, Input, Inputs, Layout, RowType, Scales, Tokens,
};
use tokenyard_core::moe::Shape;
use tokenyard_doctor::bytes;

use super::{Args, InputType, LayoutName};
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
    /// What all ranks bring to every step, where a file says it.
    recorded: Option<Inputs>,
}

impl Plan {
    /// Checks the arguments. `ranks` is the size of the world where it is known already.
    pub(crate) fn new(args: &Args, ranks: Option<u32>) -> Result<Self> {
        let file = args.input.as_deref().map(InputFile::read).transpose()?;
        let asked = [ranks, args.ranks].into_iter().flatten().collect::<Vec<_>>();
        if let [world, asked] = asked[..] {
            ensure!(world == asked, "found a world of {world} ranks; expected --ranks {asked}");
        }
        let recorded = file.as_ref().and_then(InputFile::ranks).map(|ranks| ranks as u32);
        let ranks = asked.first().copied().or(recorded).unwrap_or(DEFAULT_RANKS);
        ensure!(ranks > 0, "found --ranks 0; expected at least 1");
        let case = match &file {
            Some(file) => recorded_case(args, file, ranks as usize)?,
            None => generated_case(args, ranks as usize)?,
        };
        check(&case)?;
        let recorded = file.map(|file| file.inputs(&case)).transpose()?;
        Ok(Self { case, recorded })
    }

    /// The exchange of a step, counted from 0, and what all ranks bring to it.
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

    /// Refuses a run whose check would take more memory than this machine has left.
    pub(crate) fn check_memory(&self) -> Result<()> {
        let needed = check_bytes(&self.case);
        let Some(available) = available_memory() else { return Ok(()) };
        ensure!(
            needed <= available,
            "checking every element of {} takes about {} of memory; {} are available here. \
             Fix: choose fewer tokens, a smaller hidden size or fewer ranks",
            self.case,
            bytes(needed),
            bytes(available)
        );
        Ok(())
    }
}

fn generated_case(args: &Args, ranks: usize) -> Result<Case> {
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

fn recorded_case(args: &Args, file: &InputFile, ranks: usize) -> Result<Case> {
    let mut case = file.case(ranks, args.experts.map(|e| e as usize))?;
    case.input = match (args.input_type, file.row()) {
        (None, row)
        | (Some(InputType::Bf16), row @ RowType::Bf16)
        | (Some(InputType::Fp16), row @ RowType::F16)
        | (Some(InputType::Fp32), row @ RowType::F32) => Input::Plain(row),
        (Some(InputType::Bf16 | InputType::Fp16 | InputType::Fp32), row) => {
            bail!("found rows of {row} in the input file; expected those of --input-type")
        }
        (Some(cast), row) => Input::Cast(row, scales(cast)),
    };
    arrange(args, case)
}

/// The scales of a cast; types that are not cast have none to choose.
fn scales(cast: InputType) -> Scales {
    match cast {
        InputType::Fp8Round => Scales::RoundedF32,
        InputType::Fp8Ue8m0 => Scales::Ue8m0,
        _ => Scales::F32,
    }
}

/// Adds what is chosen alike for generated and recorded rows.
fn arrange(args: &Args, case: Case) -> Result<Case> {
    let alignment = args.alignment;
    let grouped = args.layout == LayoutName::ExpertMajor;
    ensure!(
        (1..=MAX_ALIGNMENT).contains(&alignment) && (grouped || alignment == 1),
        "found --alignment {alignment}; expected 1 to {MAX_ALIGNMENT}, and 1 unless the layout is \
         expert-major"
    );
    let layout = match args.layout {
        LayoutName::Flat => Layout::Flat,
        LayoutName::ExpertMajor => {
            Layout::ExpertMajor { alignment: alignment as usize, zero_padding: true }
        }
        LayoutName::Packed => Layout::Packed,
    };
    let row = match case.input {
        Input::Plain(row) | Input::Cast(row, _) => row,
        Input::Opaque(_) => RowType::Bf16,
    };
    // Flat rows are weighted by their experts, because they come back merged.
    let weighted = case.weights && layout != Layout::Flat;
    let combine = Combine { row, biases: 0, weighted };
    Ok(Case { layout, combine, seed: args.seed, ..case })
}

/// Refuses what the yard would refuse on every rank.
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
            "found hidden = {}, rows of {row} bytes; expected a multiple of {ROW_ALIGN} bytes",
            case.hidden
        );
    }
    Ok(())
}

/// What all ranks together hold while they check: each knows what everybody brings, and what a rank
/// received exists as the product's rows, the oracle's, and the experts' outputs before and after
/// they are placed.
fn check_bytes(case: &Case) -> u64 {
    let (ranks, most) = (case.ranks as u64, case.max_tokens as u64);
    let (topk, experts) = (case.topk as u64, case.experts as u64);
    let row = case.hidden as u64 * case.combine.row.bytes().max(2) as u64;
    let received = match case.layout {
        Layout::Flat => ranks * most * topk.min(ranks),
        Layout::ExpertMajor { alignment, .. } => ranks * most * topk + experts * alignment as u64,
        Layout::Packed => experts * ranks * most,
    };
    let brought = ranks * ranks * most;
    (brought + 4 * received).saturating_mul(row)
}

/// Bytes that this process may still use: of the machine, and of its container.
fn available_memory() -> Option<u64> {
    let text = memory::read("/proc/meminfo")?;
    let machine = memory::meminfo(&text, "MemAvailable")?;
    let container = memory::container_memory().map(|c| c.limit.saturating_sub(c.used));
    Some(container.map_or(machine, |c| c.min(machine)))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
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
    fn what_the_yard_would_refuse_is_refused_before_a_rank_starts() {
        for (arguments, reason) in [
            ("--ranks 3", "32 experts on 3 ranks"),
            ("--ranks 0", "--ranks 0"),
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
    fn the_memory_of_a_check_counts_what_each_layout_holds() {
        let bytes = |a: &str| check_bytes(&plan(a).unwrap().case);
        let row = 2 * 64;
        let shape = "--tokens 10 --hidden 64 --experts 8 --topk 2";
        assert_eq!(bytes(shape), (160 + 4 * 80) * row);
        assert_eq!(bytes(&format!("{shape} --layout packed")), (160 + 4 * 320) * row);
    }
}
