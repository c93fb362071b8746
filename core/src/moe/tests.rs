//! The plans against naive definitions, for all ranks of random small worlds, and their memory in
//! a large one.

use proptest::prelude::*;

use super::*;

/// The routing of all ranks: `routing[rank]` is `[T, K]`.
#[derive(Debug, Clone)]
struct World {
    shape: Shape,
    alignment: u32,
    routing: Vec<Vec<i64>>,
}

impl World {
    fn rows(&self, rank: u32) -> impl Iterator<Item = &[i64]> {
        self.routing[rank as usize].chunks_exact(self.shape.topk as usize)
    }

    fn ranks(&self) -> std::ops::Range<u32> {
        0..self.shape.ranks
    }

    fn selects_rank(&self, row: &[i64], rank: u32) -> bool {
        row.iter().any(|&e| e >= 0 && self.shape.rank_of(e as u32) == rank)
    }

    /// The tokens of `source` with an expert on `rank`.
    fn tokens_between(&self, source: u32, rank: u32) -> Vec<u32> {
        (0..)
            .zip(self.rows(source))
            .filter(|(_, row)| self.selects_rank(row, rank))
            .map(|(t, _)| t)
            .collect()
    }

    /// The number of tokens of `source` that select `expert`.
    fn selections(&self, source: u32, expert: u32) -> u32 {
        self.rows(source).filter(|row| row.contains(&i64::from(expert))).count() as u32
    }

    fn send_plans(&self) -> Vec<SendPlan> {
        let mut scratch = TopkScratch::new(&self.shape);
        self.ranks()
            .map(|rank| {
                let topk_idx = &self.routing[rank as usize];
                validate_topk(&self.shape, topk_idx, &mut scratch).unwrap();
                let mut plan = SendPlan::new(&self.shape);
                plan.build(topk_idx);
                plan
            })
            .collect()
    }

    /// The plan of owner `rank`, from the counts that the sources would send it.
    fn recv_plan(&self, rank: u32, sends: &[SendPlan]) -> RecvPlan {
        let local = self.shape.local_experts() as usize;
        let rows: Vec<u32> = sends.iter().map(|send| send.rank_counts()[rank as usize]).collect();
        let counts: Vec<u32> = sends
            .iter()
            .flat_map(|send| &send.expert_counts()[rank as usize * local..][..local])
            .copied()
            .collect();
        let mut plan = RecvPlan::new(&self.shape);
        plan.build(self.alignment, &rows, &counts).unwrap();
        plan
    }
}

/// One row of topk_idx: distinct experts, some entries negative.
fn any_row(shape: Shape) -> impl Strategy<Value = Vec<i64>> {
    let order = Just((0..i64::from(shape.experts)).collect::<Vec<_>>()).prop_shuffle();
    let keep = prop::collection::vec(prop::bool::weighted(0.8), shape.topk as usize);
    (order, keep, prop::bool::weighted(0.1)).prop_map(|(order, keep, nothing)| {
        order.iter().zip(keep).map(|(&e, keep)| if keep && !nothing { e } else { -1 - e }).collect()
    })
}

fn any_world() -> impl Strategy<Value = World> {
    (1..=6u32, 1..=8u32, 1..=MAX_TOPK, 1..=9u32, 1..=5u32)
        .prop_flat_map(|(ranks, local, topk, max_tokens, alignment)| {
            let experts = ranks * local;
            let topk = topk.min(experts);
            let shape = Shape { ranks, experts, topk, hidden: 16, max_tokens }.new().unwrap();
            let rows = prop::collection::vec(any_row(shape), 0..=max_tokens as usize);
            let routing =
                prop::collection::vec(rows.prop_map(|rows| rows.concat()), ranks as usize);
            (Just(shape), Just(alignment), routing)
        })
        .prop_map(|(shape, alignment, routing)| World { shape, alignment, routing })
}

/// The tokens that go to a rank, ascending.
fn tokens_for(plan: &SendPlan, rank: u32) -> &[u32] {
    let [from, to] = [rank, rank + 1].map(|at| plan.rank_offsets()[at as usize] as usize);
    &plan.tokens()[from..to]
}

proptest! {
    #[test]
    fn a_token_counts_once_per_rank_and_once_per_expert(world in any_world()) {
        for (source, plan) in world.ranks().zip(world.send_plans()) {
            prop_assert_eq!(plan.num_tokens() as usize, world.rows(source).count());
            let mut offset = 0;
            for rank in world.ranks() {
                let tokens = world.tokens_between(source, rank);
                prop_assert_eq!(plan.rank_counts()[rank as usize] as usize, tokens.len());
                prop_assert_eq!(plan.rank_offsets()[rank as usize], offset);
                prop_assert_eq!(tokens_for(&plan, rank), &tokens[..]);
                offset += tokens.len() as u32;
            }
            prop_assert_eq!(plan.rank_offsets()[world.shape.ranks as usize], offset);
            prop_assert_eq!(plan.tokens().len() as u32, offset);
            for expert in 0..world.shape.experts {
                let expected = world.selections(source, expert);
                prop_assert_eq!(plan.expert_counts()[expert as usize], expected);
            }
        }
    }

    #[test]
    fn a_fan_lists_ranks_by_their_highest_selecting_k(world in any_world()) {
        for (source, plan) in world.ranks().zip(world.send_plans()) {
            for (token, row) in (0..).zip(world.rows(source)) {
                let highest = |rank: &u32| {
                    let on_rank = |&e: &i64| e >= 0 && world.shape.rank_of(e as u32) == *rank;
                    row.iter().rposition(on_rank)
                };
                let mut ranks: Vec<u32> =
                    world.ranks().filter(|&rank| world.selects_rank(row, rank)).collect();
                ranks.sort_by_key(highest);
                let fan = plan.fan(token);
                prop_assert_eq!(fan.iter().map(|f| f.rank).collect::<Vec<_>>(), ranks);
                for f in fan {
                    prop_assert_eq!(tokens_for(&plan, f.rank)[f.index as usize], token);
                }
            }
        }
    }

    #[test]
    fn local_experts_of_all_ranks_make_up_the_row(world in any_world()) {
        let local = world.shape.local_experts();
        for row in world.ranks().flat_map(|source| world.rows(source)) {
            let mut found = vec![];
            for rank in world.ranks() {
                let before = found.len();
                found.extend(
                    local_experts(&world.shape, row, rank)
                        .map(|(k, expert)| (k as usize, i64::from(rank * local + expert))),
                );
                prop_assert!(found[before..].is_sorted());
            }
            found.sort_unstable();
            let expected: Vec<_> =
                row.iter().copied().enumerate().filter(|(_, expert)| *expert >= 0).collect();
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn flat_rows_of_all_sources_fill_the_owner_without_gap_or_overlap(world in any_world()) {
        let sends = world.send_plans();
        for rank in world.ranks() {
            let plan = world.recv_plan(rank, &sends);
            let mut owners = vec![];
            for source in world.ranks() {
                prop_assert_eq!(plan.row_base(source) as usize, owners.len());
                prop_assert_eq!(
                    plan.rows_from(source) as usize,
                    world.tokens_between(source, rank).len()
                );
                owners.resize(owners.len() + plan.rows_from(source) as usize, source);
            }
            prop_assert_eq!(plan.num_rows() as usize, owners.len());
        }
    }

    #[test]
    fn expert_rows_fill_each_expert_in_source_order_from_an_aligned_start(world in any_world()) {
        let sends = world.send_plans();
        let local = world.shape.local_experts();
        for rank in world.ranks() {
            let plan = world.recv_plan(rank, &sends);
            let mut end = 0;
            for expert in 0..local {
                let start = plan.expert_starts()[expert as usize];
                prop_assert_eq!(start, end);
                prop_assert_eq!(start % world.alignment, 0);
                let mut next = start;
                for source in world.ranks() {
                    prop_assert_eq!(plan.expert_base(expert, source), next);
                    prop_assert_eq!(plan.expert_bases(source)[expert as usize], next);
                    next += world.selections(source, rank * local + expert);
                }
                prop_assert_eq!(plan.expert_counts()[expert as usize], next - start);
                end = next.div_ceil(world.alignment) * world.alignment;
            }
            prop_assert_eq!(plan.num_expert_rows(), end);
        }
    }

    #[test]
    fn exact_regions_fit_into_worst_case_regions(world in any_world()) {
        let sends = world.send_plans();
        let alignment = world.alignment;
        let row = RowFormat { x_bytes: 32, scale_bytes: 4, weights: true };
        for layout in [
            Layout::Flat,
            Layout::ExpertMajor { alignment, zero_padding: true },
            Layout::Packed,
            Layout::RankMajor { zero_padding: true },
        ] {
            let spec = RegionSpec::new(world.shape, layout, row);
            let worst = RegionRows::worst(&spec).unwrap();
            for rank in world.ranks() {
                let plan = world.recv_plan(rank, &sends);
                let rows = RegionRows {
                    tokens: plan.num_rows().into(),
                    experts: plan.num_expert_rows().into(),
                };
                prop_assert!(rows.tokens <= worst.tokens);
                if matches!(layout, Layout::ExpertMajor { .. }) {
                    prop_assert!(rows.experts <= worst.experts);
                }
                let exact = RegionLayout::new(&spec, rows).unwrap();
                prop_assert!(exact.bytes <= RegionLayout::worst(&spec).unwrap().bytes);
            }
        }
    }

    #[test]
    fn counts_from_a_peer_are_accepted_or_refused_but_never_panic(
        world in any_world(),
        noise in prop::collection::vec(any::<u32>(), 64),
    ) {
        let local = world.shape.local_experts() as usize;
        let mut noise = noise.into_iter().map(|n| if n & 1 == 0 { n } else { n % 8 }).cycle();
        let rows: Vec<u32> = world.ranks().map(|_| noise.next().unwrap()).collect();
        let counts: Vec<u32> = (0..rows.len() * local).map(|_| noise.next().unwrap()).collect();
        let mut plan = RecvPlan::new(&world.shape);
        match plan.build(world.alignment, &rows, &counts) {
            Ok(()) => prop_assert!(rows.iter().all(|&n| n <= world.shape.max_tokens)),
            Err(error) => prop_assert_eq!(error.kind(), crate::ErrorKind::Protocol),
        }
    }
}

#[test]
fn a_plan_can_be_built_again_and_forgets_the_last_routing() {
    let shape = Shape { ranks: 2, experts: 4, topk: 2, hidden: 16, max_tokens: 3 };
    let mut plan = SendPlan::new(&shape);
    plan.build(&[0, 3, 1, 0, 2, 3]);
    assert_eq!(plan.rank_counts(), [2, 2]);
    assert_eq!(plan.tokens(), [0, 1, 0, 2]);
    assert_eq!(plan.fan(0), [Fan { rank: 0, index: 0 }, Fan { rank: 1, index: 0 }]);
    plan.build(&[3, 0]);
    assert_eq!(plan.fan(0), [Fan { rank: 1, index: 0 }, Fan { rank: 0, index: 0 }]);
    assert_eq!((plan.num_tokens(), plan.expert_counts()), (1, &[1, 0, 0, 1][..]));
    plan.build(&[]);
    assert_eq!((plan.num_tokens(), plan.rank_counts()), (0, &[0, 0][..]));
    assert_eq!((plan.tokens(), plan.rank_offsets()), (&[][..], &[0, 0, 0][..]));
}

#[test]
fn capped_copies_stay_in_their_places_and_those_beyond_are_counted() {
    let shape = Shape { ranks: 2, experts: 6, topk: 2, hidden: 16, max_tokens: 8 };
    let mut plan = RecvPlan::new(&shape);
    // Experts 0, 1 and 2 get 3, 2 and 4 rows: they start at 0, 4 and 8, and end at 3, 6 and 12.
    let cases = [
        (12, [3, 2, 4], [0, 4, 8, 12], [0, 0, 0]),
        (11, [3, 2, 3], [0, 4, 8, 11], [0, 0, 1]),
        (7, [3, 2, 0], [0, 4, 7, 7], [0, 0, 4]),
        (5, [3, 1, 0], [0, 4, 5, 5], [0, 1, 4]),
        (1, [1, 0, 0], [0, 1, 1, 1], [2, 2, 4]),
    ];
    for (most, counts, starts, dropped) in cases {
        plan.build(4, &[5, 3], &[2, 1, 3, 1, 1, 1]).unwrap();
        plan.cap_copies(most);
        assert_eq!((plan.expert_counts(), plan.expert_starts()), (&counts[..], &starts[..]));
        assert_eq!((plan.dropped(), plan.num_expert_rows()), (&dropped[..], starts[3]));
        // A source learns its places as they are without a cap, and N is not capped.
        assert_eq!((plan.expert_bases(1), plan.num_rows()), (&[2, 5, 11][..], 8));
    }
    plan.build(4, &[5, 3], &[2, 1, 3, 1, 1, 1]).unwrap();
    assert_eq!(plan.dropped(), [0, 0, 0], "a plan that is built again has no cap");
}

#[test]
fn capped_tokens_leave_the_rows_of_the_first_sources_and_their_ids_say_which_experts_are_left() {
    let shape = Shape { ranks: 2, experts: 4, topk: 2, hidden: 16, max_tokens: 8 };
    let mut plan = RecvPlan::new(&shape);
    plan.build(1, &[3, 2], &[3, 1, 0, 2]).unwrap();
    plan.cap_tokens(4);
    assert_eq!((plan.num_rows(), plan.rows_from(0), plan.rows_from(1)), (4, 3, 1));
    // Numbers that are no experts of this rank, or too many of one, change nothing else.
    plan.keep_rows(&[0, 1, 0, -1, -1, 0, 1, 7, 0]);
    assert_eq!((plan.expert_counts(), plan.dropped()), (&[3, 2][..], &[0, 1][..]));
    plan.build(1, &[3, 2], &[3, 1, 0, 2]).unwrap();
    plan.cap_tokens(2);
    assert_eq!((plan.num_rows(), plan.rows_from(1), plan.row_base(1)), (2, 0, 2));
}

#[test]
fn a_source_that_contradicts_itself_is_named() {
    let shape = Shape { ranks: 2, experts: 4, topk: 1, hidden: 16, max_tokens: 3 };
    let mut plan = RecvPlan::new(&shape);
    // [rows of both sources], [counts of both sources for two experts]
    for (rows, counts) in [
        ([0, 4], [0, 0, 4, 0]), // more than M
        ([0, 3], [0, 0, 2, 0]), // a row without an expert
        ([0, 1], [0, 0, 1, 1]), // more than min(K, El) per row
        ([0, 0], [0, 0, u32::MAX, 1]),
    ] {
        let error = plan.build(1, &rows, &counts).expect_err("contradiction");
        assert_eq!(error.kind(), crate::ErrorKind::Protocol);
        assert!(error.to_string().contains("[source rank: 1]"), "{error}");
    }
    let error = plan.build(0, &[0, 0], &[0; 4]).expect_err("no alignment");
    assert_eq!(error.kind(), crate::ErrorKind::InvalidInput);
    let error = plan.build(i32::MAX as u32, &[3, 0], &[1, 2, 0, 0]).expect_err("too many rows");
    assert!(error.message().contains("expected at most 2147483647"), "{error}");
    plan.build(1, &[3, 0], &[1, 2, 0, 0]).unwrap();
}

#[test]
fn plans_of_2048_ranks_need_memory_per_rank_and_expert_not_per_pair() {
    let (ranks, experts, topk, max_tokens) = (2048, 2048, 8, 64);
    let shape = Shape { ranks, experts, topk, hidden: 16, max_tokens }.new().unwrap();
    // 8 distinct experts per token: a walk with an odd step never repeats within 2048 steps.
    let topk_idx: Vec<i64> = (0..i64::from(max_tokens * topk)).map(|i| i * 773 % 2048).collect();
    validate_topk(&shape, &topk_idx, &mut TopkScratch::new(&shape)).unwrap();
    let mut send = SendPlan::new(&shape);
    let mut recv = RecvPlan::new(&shape);
    for _ in 0..2 {
        send.build(&topk_idx);
        // The plan of the owner of an expert that every rank selects for all its tokens.
        let rows = vec![max_tokens; ranks as usize];
        recv.build(128, &rows, &rows).unwrap();
    }
    assert_eq!(send.tokens().len(), topk_idx.len());
    assert_eq!(recv.num_rows(), ranks * max_tokens);
    let (ranks, experts) = (ranks as usize, experts as usize);
    let rows = (max_tokens * shape.max_fanout()) as usize;
    assert!(send.memory_bytes() <= 16 * (ranks + experts) + 16 * rows, "{}", send.memory_bytes());
    assert!(recv.memory_bytes() <= 16 * (ranks + experts), "{}", recv.memory_bytes());
    // No build allocated, and the report matches the memory in use.
    assert_eq!(send.memory_bytes() as u64, SendPlan::bytes_for(&shape));
    assert_eq!(recv.memory_bytes() as u64, RecvPlan::bytes_for(&shape));
}

#[test]
fn a_row_that_no_put_could_carry_is_refused() {
    let shape = Shape { ranks: 1, experts: 1, topk: 1, hidden: 16, max_tokens: 1 };
    assert!(Shape { hidden: super::MAX_HIDDEN, ..shape }.new().is_ok());
    let error = Shape { hidden: super::MAX_HIDDEN + 4, ..shape }.new().expect_err("too wide");
    assert!(error.to_string().contains("found hidden = 268435460; expected at most 268435456"));
}
