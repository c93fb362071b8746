//! L1 cases of dispatch: types and layouts of rows, routings, numbers of tokens, sizes, copies of outputs.

use anyhow::{Context, Result};
use tokenyard_core::communicator::{Communicator, TensorRef};
use tokenyard_core::moe::DType;

use super::{ExchangeWay, LAYOUTS, Suite, usual};
use crate::device::Copies;
use crate::moe::exchange;
use crate::moe::oracle::{
    Case, Combine, Input, Layout, Routing, RowType, Scales, Sums, Tokens, Values,
};
use crate::moe::round::{Live, Round};

pub(super) fn types(suite: &mut Suite) {
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
            suite.add("types", about, ExchangeWay::Outside, case.clone());
            let local = case.experts / case.ranks;
            if suite.domains == 2 {
                // With more ranks in a domain than domains, a rail and a domain differ in size.
                let wide = Case { ranks: 4, experts: 4 * local, ..case.clone() };
                suite.add("types", about, ExchangeWay::Outside, wide);
            }
            if suite.domains > 1 {
                // A domain of one rank has no scale-up link.
                let alone = Case { ranks: 1, experts: local, ..case };
                suite.add("types", about, ExchangeWay::Outside, alone);
            }
        }
    }
}

/// Values that casts and sums seldom see.
pub(super) fn odd_values(suite: &mut Suite) {
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
        suite.add("types", about, ExchangeWay::Outside, case);
        suite.add("types", about, ExchangeWay::Outside, packed);
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
            suite.add("types", about, ExchangeWay::Outside, case);
        }
    }
}

pub(super) fn tokens(suite: &mut Suite) {
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
            suite.add("tokens", about, ExchangeWay::Outside, case);
        }
    }
}

pub(super) fn routings(suite: &mut Suite) {
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
            suite.add("routing", "rows reach the experts they select", ExchangeWay::Outside, case);
        }
    }
}

pub(super) fn sizes(suite: &mut Suite) {
    for layout in LAYOUTS {
        for (experts, topk) in [(2, 1), (16, 8), (64, 32), (2, 2), (128, 4)] {
            let case = Case { experts, topk, layout, ..usual() };
            suite.add("sizes", "any top-k, few and many experts", ExchangeWay::Outside, case);
        }
        for routing in [Routing::Uniform, Routing::SomeNothing] {
            let case = Case { layout, routing, worst_case: true, ..usual() };
            let about = "outputs of worst-case size hold the right rows in front";
            suite.add("sizes", about, ExchangeWay::Outside, case.clone());
            suite.add("sizes", about, ExchangeWay::CombineInput, case);
        }
    }
}

pub(super) fn hidden_sizes(suite: &mut Suite) {
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
                suite.add("hidden", about, ExchangeWay::Outside, case);
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
            suite.add("hidden", about, ExchangeWay::Outside, case);
        }
    }
}

pub(super) fn alignments(suite: &mut Suite) {
    for alignment in [1, 3, 128] {
        for zero_padding in [true, false] {
            let layout = Layout::ExpertMajor { alignment, zero_padding };
            let case = Case { layout, ..usual() };
            let about = "experts start aligned, and padding is zero where that was asked";
            suite.add("alignment", about, ExchangeWay::Outside, case.clone());
            suite.add("alignment", about, ExchangeWay::Outside, Case { worst_case: true, ..case });
        }
    }
    for input in [Input::Plain(RowType::Bf16), Input::Cast(RowType::Bf16, Scales::Ue8m0)] {
        let layout = Layout::RankMajor { zero_padding: true };
        let about = "the places behind a source's rows are zero where that was asked";
        let case = Case { layout, input, ranks: 3, experts: 12, ..usual() };
        suite.add("alignment", about, ExchangeWay::Outside, case.clone());
        let nothing = Case { routing: Routing::SomeNothing, worst_case: true, ..case };
        suite.add("alignment", about, ExchangeWay::Outside, nothing);
    }
}

pub(super) fn worlds(suite: &mut Suite) {
    for layout in LAYOUTS {
        for ranks in [1, 2, 3, 4] {
            for input in [Input::Plain(RowType::Bf16), Input::Cast(RowType::Bf16, Scales::Ue8m0)] {
                let case = Case { ranks, experts: 12, input, layout, ..usual() };
                suite.add("worlds", "worlds of 1 to 4 ranks", ExchangeWay::Outside, case);
            }
        }
    }
}

pub(super) fn scales(suite: &mut Suite) {
    for layout in LAYOUTS {
        for count in [1, 3, 7] {
            let case = Case { layout, input: Input::Opaque(count), ..usual() };
            let about = "opaque scales pass untouched, whatever their strides";
            suite.add("scales", about, ExchangeWay::StridedScales, case.clone());
            suite.add("scales", about, ExchangeWay::Outside, case);
        }
    }
}

pub(super) fn copies(suite: &mut Suite) {
    for layout in LAYOUTS {
        for input in [Input::Plain(RowType::Bf16), Input::Opaque(2)] {
            let about = "an output may be copied out of the arena, which has its place back then";
            let case = Case { layout, input, ..usual() };
            suite.add("copy", about, ExchangeWay::CopiedOut, case.clone());
            suite.add("copy", about, ExchangeWay::CopiedOut, Case { weights: false, ..case });
        }
    }
}

/// A call may have a smaller M than its communicator.
pub(super) fn call_tokens(suite: &mut Suite) {
    for layout in LAYOUTS {
        for worst_case in [false, true] {
            let about = "a call may bound its tokens below the communicator's";
            let case = Case { layout, worst_case, ..usual() };
            suite.add("forms", about, ExchangeWay::CallTokens, case);
        }
    }
}

/// Packed outputs in forms that some kernel sets do not take.
pub(super) fn packed_forms(suite: &mut Suite) {
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
            let case = Case { layout: Layout::Packed, input, worst_case, hidden: 1104, ..usual() };
            let columns = Case { scale_columns: true, ..case.clone() };
            if case.scales().is_some() {
                let about = "packed scales may lie column by column";
                suite.add("forms", about, ExchangeWay::Outside, columns.clone());
                suite.add("forms", about, ExchangeWay::CopiedOut, columns.clone());
            }
            let about = "packed sources may be tokens alone";
            let tokens = Case { source_tokens: true, ..case };
            suite.add("forms", about, ExchangeWay::Outside, tokens);
            let both = Case { source_tokens: true, ..columns };
            suite.add("forms", about, ExchangeWay::CallTokens, both);
        }
    }
}

/// Dispatches with scales `[T, S]` that are stored column by column, and combines.
pub(super) fn strided_scales(comm: &mut Communicator, round: &Round) -> Result<()> {
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
    round.finish(comm, &Live { received, handle })?;
    Ok(())
}
