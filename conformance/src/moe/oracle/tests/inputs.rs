use super::*;

fn routed(routing: Routing) -> (Case, Inputs) {
    let case = Case {
        ranks: 4,
        experts: 32,
        topk: 4,
        hidden: 32,
        max_tokens: 64,
        routing,
        ..Case::default()
    };
    case.validate().unwrap();
    let inputs = Inputs::all(&case);
    // Generated inputs pass the checks of given ones.
    let inputs = Inputs::given(&case, inputs.ranks).unwrap();
    (case, inputs)
}

/// The number of selections of each of 32 experts.
fn loads(inputs: &Inputs) -> Vec<usize> {
    let mut loads = vec![0; 32];
    for expert in inputs.ranks.iter().flat_map(|rank| &rank.topk_idx) {
        if let Ok(expert) = usize::try_from(*expert) {
            loads[expert] += 1;
        }
    }
    loads
}

#[test]
fn every_process_generates_the_same_inputs() {
    let case = Case {
        input: Input::Cast(RowType::F16, Scales::F32),
        combine: Combine { row: RowType::F32, biases: 2, weighted: false, sums: Sums::ByRank },
        tokens: Tokens::Ragged,
        ..Case::default()
    };
    let all = Inputs::all(&case);
    for rank in 0..2 {
        assert_eq!(all.ranks[rank], Inputs::for_rank(&case, rank));
    }
    assert_ne!(all.ranks[0].x[..64], all.ranks[1].x[..64]);
    assert_ne!(all.ranks[0].biases[0], all.ranks[0].biases[1]);
    let other = Inputs::all(&Case { seed: 1, ..case });
    assert_ne!(all.ranks[0].x[..64], other.ranks[0].x[..64]);
}

#[test]
fn generated_values_never_change() {
    // A recorded run: a change of these breaks every recorded result.
    let inputs = Inputs::for_rank(&Case::default(), 0);
    assert_eq!(inputs.topk_idx[..6], [2, 3, 4, 2, 4, 1]);
    assert_eq!(inputs.x[..6], [131, 61, 30, 192, 18, 64]);
    assert_eq!(inputs.topk_weights.unwrap()[0].to_bits(), 0x3ef8_d2d8);
}

#[test]
fn values_have_signs_zeros_and_magnitudes_and_rows_differ() {
    for row in RowType::ALL {
        let input = Input::Plain(row);
        let case = Case { input, hidden: 1024, max_tokens: 128, ..Case::default() };
        let x = Inputs::for_rank(&case, 0).x;
        let values = row.decode(&x);
        let share = |test: fn(&f32) -> bool| {
            values.iter().filter(|value| test(value)).count() as f32 / values.len() as f32
        };
        assert!((0.4..0.6).contains(&share(|value| *value < 0.0)));
        assert!((0.02..0.15).contains(&share(|value| *value == 0.0)));
        assert!((0.02..0.3).contains(&share(|value| (1e-9..1e-4).contains(&value.abs()))));
        assert!((0.03..0.3).contains(&share(|value| value.abs() > 0.5)));
        assert!(values.iter().all(|value| value.abs() <= 4.0));
        let mut rows: Vec<&[u8]> = x.chunks(1024 * row.bytes()).collect();
        rows.sort_unstable();
        rows.dedup();
        assert_eq!(rows.len(), 128);
    }
}

#[test]
fn opaque_inputs_have_no_nan() {
    let case = Case { input: Input::Opaque(2), ..Case::default() };
    let inputs = Inputs::for_rank(&case, 0);
    assert!(inputs.x.iter().all(|code| code & 0x7f != 0x7f));
    let scales = f32s(&inputs.scales.unwrap());
    assert!(scales.len() == 32 && scales.iter().all(|scale| (0.003..3.0).contains(scale)));
}

#[test]
fn uniform_routing_selects_k_experts_everywhere() {
    let (_, inputs) = routed(Routing::Uniform);
    // 1024 selections of 32 experts: 32 on average.
    assert!(loads(&inputs).iter().all(|load| (10..64).contains(load)));
}

#[test]
fn skewed_routing_gives_one_expert_four_times_the_mean() {
    let (_, inputs) = routed(Routing::Skewed);
    let loads = loads(&inputs);
    assert_eq!(loads.iter().sum::<usize>(), 1024);
    assert!(*loads.iter().max().unwrap() >= 4 * 1024 / 32);
}

#[test]
fn one_expert_routing_selects_nothing_else() {
    let (_, inputs) = routed(Routing::OneExpert);
    let mut loads = loads(&inputs);
    loads.sort_unstable();
    assert_eq!((loads[31], loads[30]), (256, 0));
    let firsts = inputs.ranks[0].topk_idx.chunks(4).filter(|row| row[0] >= 0).count();
    assert!((1..64).contains(&firsts), "the selecting k varies");
}

#[test]
fn own_rank_routing_stays_at_home() {
    let (case, inputs) = routed(Routing::OwnRank);
    for (rank, inputs) in inputs.ranks.iter().enumerate() {
        assert!(inputs.topk_idx.iter().all(|expert| case.rank_of(*expert as usize) == rank));
    }
    // With fewer local experts than K, the rest selects nothing.
    let case = Case { ranks: 8, topk: 3, routing: Routing::OwnRank, ..Case::default() };
    assert_eq!(Inputs::for_rank(&case, 5).topk_idx[..3], [5, -1, -1]);
}

#[test]
fn negative_selections_come_singly_by_rows_or_everywhere() {
    let negatives = |routing| {
        let (_, inputs) = routed(routing);
        let count = |row: &[i64]| row.iter().filter(|expert| **expert < 0).count();
        inputs.ranks.iter().flat_map(|rank| rank.topk_idx.chunks(4).map(count)).collect::<Vec<_>>()
    };
    let some = negatives(Routing::SomeNegative);
    assert!((150..350).contains(&some.iter().sum::<usize>()) && some.contains(&1));
    let rows = negatives(Routing::SomeNothing);
    assert!(rows.iter().all(|count| [0, 4].contains(count)));
    assert!((50..130).contains(&rows.iter().filter(|count| **count == 4).count()));
    assert_eq!(negatives(Routing::Nothing), [4; 256]);
    let (_, inputs) = routed(Routing::SomeNegative);
    assert!(inputs.ranks[0].topk_idx.iter().any(|expert| *expert < -1), "not only -1 is negative");
}

#[test]
fn given_inputs_that_do_not_fit_are_refused_by_rank() {
    let (case, inputs) = example(Layout::Flat);
    let refused = |change: fn(&mut Vec<RankInputs>)| {
        let mut ranks = inputs.ranks.clone();
        change(&mut ranks);
        Inputs::given(&case, ranks).unwrap_err().to_string()
    };
    assert!(refused(|ranks| ranks.truncate(1)).contains("found inputs of 1 ranks; expected 2"));
    let message = refused(|ranks| ranks[1].topk_idx.truncate(3));
    assert_eq!(message, "rank 1, topk_idx: found length Some(3); expected Some(4)");
    assert!(refused(|ranks| ranks[0].x.truncate(1)).starts_with("rank 0, x: "));
    assert!(refused(|ranks| ranks[0].scales = Some(vec![])).starts_with("rank 0, scales: "));
    assert!(refused(|ranks| ranks[0].topk_weights = None).starts_with("rank 0, topk_weights: "));
    assert!(refused(|ranks| ranks[1].biases.push(vec![])).starts_with("rank 1, biases: "));
    let message = refused(|ranks| ranks[0].topk_idx[2] = 4);
    assert_eq!(message, "rank 0, token 1, k 0: found expert 4; expected below 4");
    let message = refused(|ranks| ranks[1].topk_idx[1] = 3);
    assert_eq!(message, "rank 1, token 0: found expert 3 twice; expected once");
}

#[test]
fn odd_values_are_there_and_the_rest_is_not_changed() {
    let case = Case { max_tokens: 64, input: Input::Plain(RowType::F32), ..Case::default() };
    let even = f32s(&Inputs::for_rank(&case, 0).x);
    let odd = f32s(&Inputs::for_rank(&Case { values: Values::SomeOdd, ..case }, 0).x);
    assert!(even.iter().all(|v| v.is_finite()));
    let count = |is: fn(&f32) -> bool| odd.iter().filter(|v| is(v)).count();
    for found in [
        count(|v| v.is_nan() && v.is_sign_negative()),
        count(|v| v.is_nan() && v.is_sign_positive()),
        count(|v| *v == f32::INFINITY),
        count(|v| *v == f32::NEG_INFINITY),
        count(|v| v.is_subnormal()),
        count(|v| *v == f32::MAX),
    ] {
        assert!(found > 0);
    }
    let changed = even.iter().zip(&odd).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    assert!((odd.len() / 200..odd.len() / 50).contains(&changed), "{changed} of {}", odd.len());
}
