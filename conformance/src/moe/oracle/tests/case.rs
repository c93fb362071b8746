use std::collections::BTreeSet;

use super::*;

#[test]
fn a_name_says_everything_and_never_changes() {
    assert_eq!(
        Case::default().to_string(),
        "flat.bf16.r2-e8-k2-h256-m16.full.uniform.weights.to-bf16.s0"
    );
    let case = Case {
        ranks: 4,
        experts: 16,
        topk: 4,
        tokens: Tokens::Exactly(vec![1, 0, 3, 16]),
        input: Input::Cast(RowType::F16, Scales::Ue8m0),
        layout: Layout::ExpertMajor { alignment: 128, zero_padding: true },
        worst_case: true,
        combine: Combine { row: RowType::F32, biases: 2, weighted: true, sums: Sums::ByRank },
        routing: Routing::Given(0xabc),
        seed: 7,
        ..Case::default()
    };
    assert_eq!(
        case.to_string(),
        "expert128z.fp16-cast-ue8m0.r4-e16-k4-h256-m16.t1-0-3-16.given0000000000000abc.weights\
         .to-fp32-weighted-bias2.worst.s7"
    );
}

#[test]
fn cases_that_differ_in_one_field_have_different_names() {
    let base = Case::default;
    let mut cases = vec![
        base(),
        Case { ranks: 4, ..base() },
        Case { experts: 4, ..base() },
        Case { topk: 3, ..base() },
        Case { hidden: 128, ..base() },
        Case { max_tokens: 8, ..base() },
        Case { worst_case: true, ..base() },
        Case { max_rows: vec![1, 0], ..base() },
        Case { max_rows: vec![10, 0], ..base() },
        Case { weights: false, ..base() },
        Case { scale_columns: true, ..base() },
        Case { source_tokens: true, ..base() },
        Case { seed: 1, ..base() },
    ];
    let exactly = |counts: &[usize]| Tokens::Exactly(counts.to_vec());
    let tokens = [Tokens::Ragged, Tokens::OddRanksEmpty, exactly(&[1, 11]), exactly(&[11, 1])];
    cases.extend(tokens.map(|tokens| Case { tokens, ..base() }));
    let casts = [Scales::F32, Scales::RoundedF32, Scales::Ue8m0];
    let inputs = casts.map(|scales| Input::Cast(RowType::Bf16, scales)).into_iter();
    let inputs = inputs.chain([Input::Plain(RowType::F32), Input::Opaque(1), Input::Opaque(2)]);
    cases.extend(inputs.map(|input| Case { input, ..base() }));
    let expert = |alignment, zero_padding| Layout::ExpertMajor { alignment, zero_padding };
    let layouts = [expert(1, false), expert(1, true), expert(8, false), Layout::Packed];
    cases.extend(layouts.map(|layout| Case { layout, ..base() }));
    let combine = |row, biases, weighted| Combine { row, biases, weighted, sums: Sums::ByRank };
    let combines = [
        combine(RowType::F16, 0, false),
        combine(RowType::Bf16, 1, false),
        combine(RowType::Bf16, 2, false),
        combine(RowType::Bf16, 0, true),
    ];
    cases.extend(combines.map(|combine| Case { combine, ..base() }));
    let routings = [
        Routing::Skewed,
        Routing::OneExpert,
        Routing::OwnRank,
        Routing::SomeNegative,
        Routing::SomeNothing,
        Routing::Nothing,
        Routing::Given(0),
        Routing::Given(1),
    ];
    cases.extend(routings.map(|routing| Case { routing, ..base() }));
    let names: BTreeSet<String> = cases.iter().map(Case::to_string).collect();
    assert_eq!(names.len(), cases.len());
}

#[test]
fn impossible_cases_are_refused_with_what_was_found_and_expected() {
    let base = Case::default;
    let message = |case: Case| case.validate().unwrap_err().to_string();
    assert_eq!(base().validate(), Ok(()));
    assert!(message(Case { hidden: 0, ..base() }).contains("found a size of 0"));
    assert!(message(Case { ranks: 3, ..base() }).contains("found 8 experts; expected a multiple"));
    assert!(message(Case { topk: 9, ..base() }).contains("found topk = 9; expected at most 8"));
    assert!(
        message(Case { max_tokens: 1 << 30, ..base() }).contains("expected at most 2147483647")
    );
    let tokens = Tokens::Exactly(vec![16, 17]);
    assert!(message(Case { tokens, ..base() }).contains("2 numbers of at most 16"));
    let layout = Layout::ExpertMajor { alignment: 0, zero_padding: true };
    assert!(message(Case { layout, ..base() }).contains("found alignment 0"));
    assert!(message(Case { input: Input::Opaque(0), ..base() }).contains("0 opaque scales"));
    let combine = Combine { biases: 3, ..base().combine };
    assert!(message(Case { combine, ..base() }).contains("found 3 biases; expected at most 2"));
    let combine = Combine { weighted: true, ..base().combine };
    assert!(message(Case { combine, ..base() }).contains("a layout that is not flat"));
    let unweighted = Case { combine, layout: Layout::Packed, weights: false, ..base() };
    assert!(message(unweighted).contains("expected weights"));
    let columns = Case { scale_columns: true, layout: Layout::Packed, ..base() };
    assert_eq!(columns.validate(), Ok(()));
    let flat = Case { layout: Layout::Flat, ..columns };
    assert!(message(flat).contains("found forms of packed arrays with flat rows"));
    let capped = Case { max_rows: vec![1, 2, 3], ..base() };
    assert!(message(capped).contains("found 3 caps of flat rows; expected none, or 2"));
    let capped = Case { max_rows: vec![1, 2], layout: Layout::Packed, ..base() };
    assert!(message(capped).contains("found 2 caps of packed rows"));
    let skewed = Case { routing: Routing::Skewed, topk: 3, ..base() };
    assert!(message(skewed).contains("found skewed routing to 8 experts; expected at least 12"));
}

#[test]
fn token_counts_follow_their_rule() {
    let counts = |tokens| {
        let case = Case { ranks: 8, max_tokens: 5, tokens, ..Case::default() };
        (0..8).map(|rank| case.tokens_of(rank)).collect::<Vec<_>>()
    };
    assert_eq!(counts(Tokens::Full), [5; 8]);
    assert_eq!(counts(Tokens::OddRanksEmpty), [5, 0, 5, 0, 5, 0, 5, 0]);
    let ragged = counts(Tokens::Ragged);
    assert!(ragged.iter().all(|count| (1..=5).contains(count)));
    assert!(ragged.iter().any(|count| *count != ragged[0]));
}

#[test]
fn received_rows_have_the_scales_of_their_input() {
    let scales = |input| Case { input, hidden: 641, ..Case::default() }.scales();
    let cast = |scales| Input::Cast(RowType::F32, scales);
    assert_eq!(scales(Input::Plain(RowType::F16)), None);
    assert_eq!(scales(cast(Scales::F32)), Some((Elem::F32, 6)));
    assert_eq!(scales(cast(Scales::RoundedF32)), Some((Elem::F32, 6)));
    assert_eq!(scales(cast(Scales::Ue8m0)), Some((Elem::Bits32, 2)));
    assert_eq!(scales(Input::Opaque(9)), Some((Elem::Bits32, 9)));
}
