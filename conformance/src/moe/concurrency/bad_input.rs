//! Every mistake of one rank is refused on all ranks before a row moves, and the communicator goes on.

use anyhow::{Context, Result, bail};
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::{
    Cast, Combine, Communicator, CommunicatorOptions, Dispatch, Replay, TensorRef,
};
use tokenyard_core::moe::{DType, Layout as MoeLayout};

use super::{EXPERT_MAJOR, close, expect_error, l2, open, open_with, small};
use crate::device::Copies;
use crate::moe::exchange::{self, Aligned, Buffers};
use crate::moe::oracle::{Case, Layout, Tokens};
use crate::moe::round::{Live, Round};
use crate::suite::{Rank, Test};

/// Spoils the arguments of a dispatch.
type SpoilDispatch = for<'a> fn(&mut Dispatch<'a>, &'a Material) -> Result<()>;
/// Spoils the arguments of a combine.
type SpoilCombine = for<'a> fn(&mut Combine<'a>, &'a Material) -> Result<()>;

/// Memory that wrong tensors are made of.
struct Material {
    case: Case,
    tokens: usize,
    zeros: Aligned,
    indices: Vec<i64>,
}

impl Material {
    fn new(round: &Round) -> Self {
        let case = round.case.clone();
        let entries = 2 * case.max_tokens * case.topk.max(4);
        Self {
            tokens: round.tensors.tokens(),
            zeros: Aligned::filled(16 * case.max_tokens * case.hidden, 0),
            indices: vec![-1; entries],
            case,
        }
    }

    fn zeros(&self, dtype: DType, rows: usize, cols: usize) -> Result<TensorRef<'_>> {
        let bytes = self.zeros.bytes().get(..rows * cols * dtype.bytes());
        Ok(TensorRef::from_bytes(bytes.context("enough zeros")?, dtype, rows, cols)?)
    }

    /// Indices that select nothing, but for those of the first row.
    fn first_row(&mut self, entries: [i64; 2]) {
        self.indices[..2].copy_from_slice(&entries);
    }
}

/// A mistake: its name, its change of the arguments, and the words that the error must contain.
struct Mistake<F> {
    name: &'static str,
    spoil: F,
    says: &'static [&'static str],
}

const fn mistake<F>(name: &'static str, spoil: F, says: &'static [&'static str]) -> Mistake<F> {
    Mistake { name, spoil, says }
}

/// H = 64, K = 3, E = 12, M = 12; T = 5 everywhere.
fn case(rank: &Rank<'_>, layout: Layout) -> Case {
    let case = small(rank, layout);
    Case { experts: 12, tokens: Tokens::Exactly(vec![5; case.ranks]), ..case }
}

const DISPATCH: &[Mistake<SpoilDispatch>] = &[
    mistake(
        "x_too_narrow",
        |d, m| set(&mut d.x, m.zeros(DType::Bf16, m.tokens, 56)),
        &["[5, 56]", "[5, 64]"],
    ),
    mistake(
        "x_too_few_rows",
        |d, m| set(&mut d.x, m.zeros(DType::Bf16, 4, 64)),
        &["[4, 64]", "[5, 64]"],
    ),
    mistake(
        "x_of_a_type_that_does_not_travel",
        |d, m| set(&mut d.x, m.zeros(DType::I32, 5, 64)),
        &["x", "i32", "bf16"],
    ),
    mistake(
        "x_with_gaps",
        |d, m| {
            set(&mut d.x, Ok(TensorRef::strided(m.zeros.bytes(), DType::Bf16, [5, 64], [80, 1])?))
        },
        &["x", "80", "contiguous"],
    ),
    mistake(
        "too_many_tokens",
        |d, m| {
            let tokens = m.case.max_tokens + 1;
            d.topk_weights = None;
            set(&mut d.x, m.zeros(DType::Bf16, tokens, 64))?;
            set(&mut d.topk_idx, indices(m, tokens, 3))
        },
        &["13 tokens", "max_tokens = 12"],
    ),
    mistake(
        "topk_idx_too_wide",
        |d, m| set(&mut d.topk_idx, indices(m, 5, 4)),
        &["topk_idx", "[5, 4]", "[5, 3]"],
    ),
    mistake(
        "topk_idx_of_the_wrong_type",
        |d, m| set(&mut d.topk_idx, m.zeros(DType::I32, 5, 3)),
        &["topk_idx", "i32", "i64"],
    ),
    mistake(
        "weights_of_the_wrong_shape",
        |d, m| set_some(&mut d.topk_weights, m.zeros(DType::F32, 5, 2)),
        &["topk_weights", "[5, 2]", "[5, 3]"],
    ),
    mistake(
        "weights_of_the_wrong_type",
        |d, m| set_some(&mut d.topk_weights, m.zeros(DType::Bf16, 5, 3)),
        &["topk_weights", "bf16", "fp32"],
    ),
    mistake(
        "scales_beside_a_cast",
        |d, m| {
            d.cast = Cast::Fp8;
            set_some(&mut d.scales, m.zeros(DType::F32, 5, 1))
        },
        &["scales", "cast"],
    ),
    mistake(
        "scales_of_too_many_columns",
        |d, m| {
            set(&mut d.x, m.zeros(DType::Fp8E4m3, 5, 64))?;
            set_some(&mut d.scales, m.zeros(DType::F32, 5, 17))
        },
        &["scales", "17", "16"],
    ),
    mistake(
        "scales_of_too_few_rows",
        |d, m| {
            set(&mut d.x, m.zeros(DType::Fp8E4m3, 5, 64))?;
            set_some(&mut d.scales, m.zeros(DType::F32, 4, 1))
        },
        &["scales", "[4, 1]", "[5, 1]"],
    ),
    mistake(
        "alignment_0",
        |d, _| {
            d.layout = MoeLayout::ExpertMajor { alignment: 0, zero_padding: false };
            Ok(())
        },
        &["alignment", "found 0", "1 to 4096"],
    ),
    // The size is so large that the most rows that could arrive have no place in an index.
    mistake(
        "alignment_beyond_any_output",
        |d, _| {
            d.layout = MoeLayout::ExpertMajor { alignment: 1 << 30, zero_padding: false };
            Ok(())
        },
        &["alignment", "found 1073741824", "1 to 4096"],
    ),
];

const COMBINE: &[Mistake<SpoilCombine>] = &[
    mistake("rows_missing", |c, m| set(&mut c.x, m.zeros(DType::Bf16, 1, 64)), &["x", "[1, 64]"]),
    mistake(
        "rows_too_narrow",
        |c, m| {
            let rows = c.x.rows();
            set(&mut c.x, m.zeros(DType::Bf16, rows, 32))
        },
        &["x", "32]", "64]"],
    ),
    mistake(
        "rows_of_a_type_without_a_sum",
        |c, m| {
            let rows = c.x.rows();
            set(&mut c.x, m.zeros(DType::I32, rows, 64))
        },
        &["x", "i32", "bf16"],
    ),
    mistake(
        "out_of_another_type",
        |c, m| {
            let rows = c.x.rows();
            set(&mut c.x, m.zeros(DType::F16, rows, 64))
        },
        &["out", "bf16"],
    ),
    mistake(
        "bias_of_the_wrong_shape",
        |c, m| set_some(&mut c.bias[0], m.zeros(DType::Bf16, 4, 64)),
        &["bias 0", "[4, 64]", "[5, 64]"],
    ),
    mistake(
        "bias_of_another_type",
        |c, m| set_some(&mut c.bias[0], m.zeros(DType::F32, 5, 64)),
        &["bias 0", "fp32", "bf16"],
    ),
    mistake(
        "second_bias_alone",
        |c, m| set_some(&mut c.bias[1], m.zeros(DType::Bf16, 5, 64)),
        &["bias", "second without the first"],
    ),
    mistake(
        "weights_nowhere_to_go",
        |c, _| {
            c.out_weights = None;
            Ok(())
        },
        &["weights", "both or neither"],
    ),
    mistake(
        "weighted_flat_rows",
        |c, _| {
            c.weighted = true;
            Ok(())
        },
        &["weighted", "flat"],
    ),
];

fn set<'a>(slot: &mut TensorRef<'a>, value: Result<TensorRef<'a>>) -> Result<()> {
    *slot = value?;
    Ok(())
}

fn set_some<'a>(slot: &mut Option<TensorRef<'a>>, value: Result<TensorRef<'a>>) -> Result<()> {
    *slot = Some(value?);
    Ok(())
}

fn indices(m: &Material, rows: usize, cols: usize) -> Result<TensorRef<'_>> {
    let entries = m.indices.get(..rows * cols).context("enough indices")?;
    Ok(TensorRef::from_slice(entries, rows, cols)?)
}

pub(super) fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for m in DISPATCH {
        tests.push(test(m.name, move |rank| {
            refused_dispatch(rank, m.says, |dispatch, material| (m.spoil)(dispatch, material))
        }));
    }
    let rows: [(&str, [i64; 2], &[&str]); 4] = [
        ("expert_out_of_range", [12, -1], &["expert 12 in row 0", "less than experts = 12"]),
        (
            "expert_far_out_of_range",
            [i64::MAX, -1],
            &["expert 9223372036854775807", "less than experts = 12"],
        ),
        ("expert_twice_in_a_row", [4, 4], &["expert 4 in row 0", "distinct"]),
        ("last_expert_twice_in_a_row", [11, 11], &["expert 11 in row 0", "distinct"]),
    ];
    for (name, entries, says) in rows {
        tests.push(test(name, move |rank| refused_routing(rank, entries, says)));
    }
    for m in COMBINE {
        tests.push(test(m.name, move |rank| refused_combine(rank, m)));
    }
    tests.push(test("weighted_without_weights", weighted_without_weights));
    tests.push(test("replay_of_other_rows", replay_of_other_rows));
    tests.push(test("replay_after_refused_routing", replay_after_refused_routing));
    tests.push(test("handle_of_another_communicator", handle_of_another_communicator));
    tests
}

fn test(
    name: &str,
    body: impl Fn(&Rank<'_>) -> Result<Vec<Communicator>> + Send + Sync + 'static,
) -> Test {
    let about = "a mistake of one rank is refused on all before a row moves";
    l2(&format!("bad_input/{name}"), about, 3, move |rank| close(body(rank)?))
}

/// The rank that makes the mistake.
const WRONG: u32 = 1;

/// Checks the error of this rank: the wrong rank gets its own, the others get one that names the wrong
/// rank.
fn judge<T>(comm: &Communicator, result: tokenyard_core::Result<T>, says: &[&str]) -> Result<()> {
    if comm.rank() == WRONG {
        expect_error(result, &[ErrorKind::InvalidInput], says)?;
        return Ok(());
    }
    let mut says = says.to_vec();
    let name = format!("rank {WRONG}");
    says.push(&name);
    let error = expect_error(result, &[ErrorKind::Refused], &says)?;
    if error.rank() != Some(WRONG) {
        bail!("found an error about rank {:?}; expected {WRONG}", error.rank());
    }
    Ok(())
}

fn refused_dispatch(
    rank: &Rank<'_>,
    says: &[&str],
    spoil: impl for<'a> Fn(&mut Dispatch<'a>, &'a Material) -> Result<()>,
) -> Result<Vec<Communicator>> {
    let case = case(rank, EXPERT_MAJOR);
    let mut comm = open(rank, &case)?;
    let round = Round::new(&case, comm.rank());
    let material = Material::new(&round);
    // Runs twice, because a refusal must leave every slot as it was.
    for _ in 0..2 {
        let mut dispatch = round.tensors.dispatch()?;
        if comm.rank() == WRONG {
            spoil(&mut dispatch, &material)?;
        }
        let copies = Copies::default();
        let result = comm.dispatch(&copies.dispatch(&comm, dispatch)?);
        judge(&comm, result, says)?;
        round.run(&mut comm).context("after the refusal")?;
    }
    Ok(vec![comm])
}

fn refused_routing(rank: &Rank<'_>, entries: [i64; 2], says: &[&str]) -> Result<Vec<Communicator>> {
    let case = case(rank, EXPERT_MAJOR);
    let mut comm = open(rank, &case)?;
    let round = Round::new(&case, comm.rank());
    let mut material = Material::new(&round);
    material.first_row(entries);
    let mut dispatch = round.tensors.dispatch()?;
    if comm.rank() == WRONG {
        dispatch.topk_idx = indices(&material, 5, 3)?;
    }
    let copies = Copies::default();
    let result = comm.dispatch(&copies.dispatch(&comm, dispatch)?);
    judge(&comm, result, says)?;
    round.run(&mut comm).context("after the refusal")?;
    Ok(vec![comm])
}

fn refused_combine(rank: &Rank<'_>, m: &Mistake<SpoilCombine>) -> Result<Vec<Communicator>> {
    let case = case(rank, Layout::Flat);
    let mut comm = open(rank, &case)?;
    let round = Round::new(&case, comm.rank());
    let material = Material::new(&round);
    let live = round.dispatch(&mut comm)?;
    let mut buffers = round.experts(&live.received)?;
    let wrong = comm.rank() == WRONG;
    let combine = buffers.arguments_but(&round.tensors, &live.handle, |combine| {
        if wrong { (m.spoil)(combine, &material) } else { Ok(()) }
    })?;
    let result = comm.combine(&live.handle, combine);
    judge(&comm, result, m.says)?;
    round.finish(&mut comm, &live).context("after the refusal")?;
    round.run(&mut comm).context("after the refusal")?;
    Ok(vec![comm])
}

fn weighted_without_weights(rank: &Rank<'_>) -> Result<Vec<Communicator>> {
    let case = Case { weights: false, ..case(rank, EXPERT_MAJOR) };
    let mut comm = open(rank, &case)?;
    let round = Round::new(&case, comm.rank());
    let live = round.dispatch(&mut comm)?;
    let mut buffers = round.experts(&live.received)?;
    let mut combine = buffers.arguments(&round.tensors, &live.handle)?;
    combine.weighted = comm.rank() == WRONG;
    let result = comm.combine(&live.handle, combine);
    judge(&comm, result, &["weighted", "no topk_weights"])?;
    round.finish(&mut comm, &live).context("after the refusal")?;
    Ok(vec![comm])
}

fn replay_of_other_rows(rank: &Rank<'_>) -> Result<Vec<Communicator>> {
    let case = case(rank, Layout::Flat);
    let mut comm = open(rank, &case)?;
    let round = Round::new(&case, comm.rank());
    let material = Material::new(&round);
    let live = round.dispatch(&mut comm)?;
    let mut replay: Replay<'_> = round.tensors.replay()?;
    if comm.rank() == WRONG {
        replay.x = material.zeros(DType::Bf16, 6, 64)?;
    }
    let copies = Copies::default();
    let result = comm.replay(&live.handle, &copies.replay(&comm, replay)?);
    judge(&comm, result, &["x", "[6, 64]", "[5, 64]"])?;
    round.finish(&mut comm, &live).context("after the refusal")?;
    Ok(vec![comm])
}

/// A mistake in a new routing does not affect the routing that a handle holds.
fn replay_after_refused_routing(rank: &Rank<'_>) -> Result<Vec<Communicator>> {
    let case = case(rank, EXPERT_MAJOR);
    let mut comm = open(rank, &case)?;
    let round = Round::new(&case, comm.rank());
    let mut material = Material::new(&round);
    material.first_row([12, -1]);
    let live = round.dispatch(&mut comm)?;
    let mut dispatch = round.tensors.dispatch()?;
    if comm.rank() == WRONG {
        dispatch.topk_idx = indices(&material, 5, 3)?;
    }
    let copies = Copies::default();
    let result = comm.dispatch(&copies.dispatch(&comm, dispatch)?);
    judge(&comm, result, &["expert 12 in row 0"])?;
    let again = round.replayed(&Case { seed: case.seed + 1, ..case.clone() });
    let received = comm.replay(&live.handle, &again.tensors.replay_on(&comm)?).context("replay")?;
    again.check_received(&received).context("replay")?;
    again.finish(&mut comm, &Live { received, ..live }).context("after the replay")?;
    Ok(vec![comm])
}

/// One of the foreign handles has a number that this communicator has no handle for.
fn handle_of_another_communicator(rank: &Rank<'_>) -> Result<Vec<Communicator>> {
    let case = case(rank, Layout::Flat);
    let with = |handles| CommunicatorOptions { handles, ..exchange::options(&case) };
    let (mut comm, mut other) = (open_with(rank, with(1))?, open_with(rank, with(2))?);
    let round = Round::new(&case, comm.rank());
    let live = round.dispatch(&mut comm)?;
    let strangers = [round.dispatch(&mut other)?, round.dispatch(&mut other)?];
    let wrong = comm.rank() == WRONG;
    for stranger in &strangers {
        let mut buffers: Buffers = round.experts(&live.received)?;
        let handle = if wrong { &stranger.handle } else { &live.handle };
        let combine = buffers.arguments(&round.tensors, handle)?;
        let result = comm.combine(handle, combine);
        judge(&comm, result, &["another communicator"])?;
        let result = comm.replay(handle, &round.tensors.replay_on(&comm)?);
        judge(&comm, result, &["another communicator"])?;
        if wrong {
            let elem = exchange::row_dtype(case.combine.row);
            let result = comm.combine_input(&stranger.handle, elem);
            expect_error(result, &[ErrorKind::InvalidInput], &["another communicator"])?;
        }
    }
    round.finish(&mut comm, &live).context("after the refusals")?;
    for stranger in &strangers {
        round.finish(&mut other, stranger)?;
    }
    Ok(vec![comm, other])
}
