//! L1 cases of combine: types of sums, biases, weights, when a sum is rounded, rows in ten bits a value.

use super::{ExchangeWay, LAYOUTS, Suite, usual};
use crate::moe::oracle::{Case, Combine, Input, Layout, RowType, Scales, Sums, Values};

pub(super) fn combines(suite: &mut Suite) {
    let rows = [RowType::Bf16, RowType::F16, RowType::F32];
    for layout in LAYOUTS {
        for (biases, row) in rows.into_iter().enumerate() {
            let weighted = !layout.has_a_row_per_token() && biases != 1;
            let combine = Combine { row, biases, weighted, sums: Sums::ByRank };
            let about = "the sum starts with the biases, in the type of the expert outputs";
            for input in [Input::Plain(row), Input::Cast(RowType::Bf16, Scales::F32)] {
                let case = Case { layout, input, combine, ..usual() };
                suite.add("combine", about, ExchangeWay::CombineInput, case.clone());
                suite.add("combine", about, ExchangeWay::Outside, case);
            }
            let case = Case { layout, input: Input::Plain(row), combine, ..usual() };
            let about = "expert outputs may take the place of the received rows";
            suite.add("combine", about, ExchangeWay::InPlace, case);
        }
        let case = Case { layout, weights: false, ..usual() };
        suite.add("combine", "an exchange needs no weights", ExchangeWay::Outside, case);
    }
}

/// Forms of sums that some kernel sets do not take.
pub(super) fn forms(suite: &mut Suite) {
    for layout in LAYOUTS {
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
                    suite.add("forms", about, ExchangeWay::Outside, case);
                }
            }
        }
    }
}

/// Partial rows in LogFMT-10. Some chunks of the rows are encoded, others are not: their values are too large, or
/// all zeros.
pub(super) fn coded(suite: &mut Suite) {
    if suite.domains > 1 {
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
            suite.add("logfmt", about, ExchangeWay::Outside, case.clone());
            suite.add("logfmt", about, ExchangeWay::CombineInput, case.clone());
            if hidden == 1536 {
                let odd = Case { values: Values::SomeOdd, ..case.clone() };
                suite.add("logfmt", about, ExchangeWay::Outside, odd);
                let many = Case { ranks: 4, experts: 16, topk: 4, ..case };
                suite.add("logfmt", about, ExchangeWay::Outside, many);
            }
        }
    }
}
