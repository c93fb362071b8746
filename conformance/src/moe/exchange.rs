//! One exchange on a communicator, checked against the oracle: dispatch, experts, combine.

mod arrived;
mod combined;
mod input_tensors;
mod losses;

pub(crate) use arrived::{ARRAYS, array, by_row};
pub use arrived::{check_received, compare_received, run_experts};
pub use combined::{
    Buffers, Got, Placed, Staged, check_combined, check_combined_without, combine, combine_in_place,
};
pub use input_tensors::{Aligned, InputTensors};
pub use losses::{
    Losses, absent_sources, check_combined_around, check_received_around, check_received_flagged,
    left_out,
};

use anyhow::{Context, Result};
use tokenyard_core::communicator::{Cast, Communicator, CommunicatorOptions};
use tokenyard_core::moe::{DType, Layout as MoeLayout, ScaleLayout, SourceIndex};

use crate::moe::oracle::{Case, Elem, Input, Inputs, Layout, RowType, Scales};

/// The communicator that a case needs.
pub fn options(case: &Case) -> CommunicatorOptions {
    CommunicatorOptions::new(
        case.experts as u32,
        case.topk as u32,
        case.hidden as u32,
        case.max_tokens as u32,
    )
}

/// Domains that `comm` routes over: those that combine rounds for.
pub fn domains(comm: &Communicator) -> usize {
    let report = comm.report();
    if report.algorithm == "direct" { 1 } else { report.choices.domains as usize }
}

/// The product's name for an element type of the oracle.
pub fn dtype(elem: Elem) -> DType {
    match elem {
        Elem::Bf16 => DType::Bf16,
        Elem::F16 => DType::F16,
        Elem::F32 => DType::F32,
        Elem::E4m3 => DType::Fp8E4m3,
        Elem::I32 | Elem::Bits32 => DType::I32,
        Elem::I64 => DType::I64,
    }
}

/// The product's name for a row type of the oracle.
pub fn row_dtype(row: RowType) -> DType {
    match row {
        RowType::Bf16 => DType::Bf16,
        RowType::F16 => DType::F16,
        RowType::F32 => DType::F32,
    }
}

/// The product's name for a layout of the oracle.
pub fn layout(case: &Case) -> MoeLayout {
    match case.layout {
        Layout::Flat => MoeLayout::Flat,
        Layout::ExpertMajor { alignment, zero_padding } => {
            MoeLayout::ExpertMajor { alignment: alignment as u32, zero_padding }
        }
        Layout::Packed => MoeLayout::Packed,
        Layout::RankMajor { zero_padding } => MoeLayout::RankMajor { zero_padding },
    }
}

/// The product's names for the forms of packed arrays.
fn packed_forms(case: &Case) -> (ScaleLayout, SourceIndex) {
    let scales = match case.scale_columns {
        true => ScaleLayout::ColumnMajor,
        false => ScaleLayout::RowMajor,
    };
    let source = match case.source_tokens {
        true => SourceIndex::Token,
        false => SourceIndex::RankAndToken,
    };
    (scales, source)
}

fn cast(input: Input) -> Cast {
    match input {
        Input::Plain(_) | Input::Opaque(_) => Cast::None,
        Input::Cast(_, Scales::F32) => Cast::Fp8,
        Input::Cast(_, Scales::RoundedF32) => Cast::Fp8Round,
        Input::Cast(_, Scales::Ue8m0) => Cast::Fp8Ue8m0,
    }
}

/// One whole exchange of a case on this rank, every element checked.
///
/// # Errors
/// The communicator's error, or the first difference from the oracle.
pub fn check(comm: &mut Communicator, case: &Case, inputs: &Inputs, placed: Placed) -> Result<()> {
    let rank = comm.rank() as usize;
    let tensors = InputTensors::new(case, rank, inputs.ranks[rank].clone());
    let (received, handle) = comm.dispatch(&tensors.dispatch_on(comm)?).context("dispatch")?;
    check_received(case, inputs, rank, &received).context("after dispatch")?;
    let output = run_experts(case, rank, &received).context("experts")?;
    drop(received);
    let got = combine(comm, &tensors, &handle, &output, placed).context("combine")?;
    check_combined(case, inputs, rank, &got).context("after combine")
}
