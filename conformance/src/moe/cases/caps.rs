//! L1 cases of caps: outputs of at most P rows, which drop what is beyond, or refuse it.

use anyhow::{Context, Result, ensure};
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::{Communicator, Dispatch, Sizes};
use tokenyard_core::moe::{Overflow, RowCap};

use super::{EXPERT_MAJOR, ExchangeWay, Suite, usual};
use crate::moe::exchange;
use crate::moe::oracle::routing::Placement;
use crate::moe::oracle::{Case, Combine, Input, Layout, Routing, RowType, Scales, Sums, Tokens};
use crate::moe::round::Round;

const ALIGNED: Layout = Layout::ExpertMajor { alignment: 8, zero_padding: false };
const DENSE: Layout = Layout::ExpertMajor { alignment: 1, zero_padding: true };

/// Two ranks of 16 tokens, to each of which most of them come.
fn full(layout: Layout, max_rows: [usize; 2]) -> Case {
    Case { layout, tokens: Tokens::Full, max_rows: max_rows.to_vec(), ..usual() }
}

/// Caps within one domain: among several of several ranks, kernel sets refuse them.
pub(super) fn caps(suite: &mut Suite) {
    if suite.domains > 1 {
        return;
    }
    let about = "rows beyond the cap are dropped, and counted";
    for layout in [Layout::Flat, EXPERT_MAJOR, ALIGNED, DENSE] {
        // Fewer rows than any expert has, caps inside of an expert and behind it, one that cuts nothing, and none.
        for max_rows in [[1, 3], [16, 9], [24, 0], [0, 17], [4096, 10]] {
            for worst_case in [false, true] {
                let case = Case { worst_case, ..full(layout, max_rows) };
                suite.add("caps", about, ExchangeWay::Outside, case);
            }
        }
        values(suite, layout);
        sums(suite, layout);
        let about = "the rows of one expert, which are too many, and no rows at all";
        for routing in [Routing::OneExpert, Routing::Nothing, Routing::SomeNothing] {
            let case = Case { routing, ..full(layout, [5, 5]) };
            suite.add("caps", about, ExchangeWay::Outside, case);
        }
        let about = "a rank without tokens drops rows of others";
        let tokens = Tokens::Exactly(vec![16, 0, 3]);
        let case = Case { ranks: 3, experts: 12, tokens, ..full(layout, [0, 0]) };
        let case = Case { max_rows: vec![7, 4, 0], ..case };
        suite.add("caps", about, ExchangeWay::Outside, case);
        let about = "a replay drops the rows that its dispatch has dropped";
        for worst_case in [false, true] {
            let case = Case { worst_case, ..full(layout, [6, 11]) };
            suite.add("caps", about, ExchangeWay::Replayed, case);
        }
        let about =
            "a cap that drops no rows refuses them on all ranks, and the next exchange works";
        suite.add("caps", about, ExchangeWay::TooMany, full(layout, [2, 0]));
    }
}

/// Rows with scales, and without weights.
fn values(suite: &mut Suite, layout: Layout) {
    let about = "rows of any type are dropped with their scales and weights";
    for input in [
        Input::Plain(RowType::F32),
        Input::Cast(RowType::Bf16, Scales::F32),
        Input::Cast(RowType::F16, Scales::Ue8m0),
        Input::Opaque(3),
    ] {
        let case = Case { input, ..full(layout, [9, 13]) };
        suite.add("caps", about, ExchangeWay::Outside, case);
    }
    let case = Case { weights: false, ..full(layout, [9, 13]) };
    suite.add("caps", about, ExchangeWay::Outside, case.clone());
    suite.add("caps", about, ExchangeWay::CombineInput, case.clone());
    suite.add("caps", about, ExchangeWay::InPlace, case);
}

fn sums(suite: &mut Suite, layout: Layout) {
    let about = "a dropped copy adds nothing to a sum";
    let merged = layout.has_a_row_per_token();
    let all = [
        (false, Sums::ByRank),
        (!merged, Sums::ByRank),
        (!merged, if merged { Sums::WeightsOfAllRanks } else { Sums::Once }),
        (!merged, if merged { Sums::ByRank } else { Sums::LateWeights }),
    ];
    for (weighted, sums) in all {
        let combine = Combine { row: RowType::Bf16, biases: 2, weighted, sums };
        let case = Case { combine, ..full(layout, [9, 13]) };
        suite.add("caps", about, ExchangeWay::Outside, case);
    }
}

/// Dispatches, sends other rows with the same routing, and combines.
pub(super) fn replayed(comm: &mut Communicator, round: &Round) -> Result<()> {
    let live = round.dispatch(comm)?;
    let again = round.replayed(&Case { seed: round.case.seed + 7, ..round.case.clone() });
    let received = comm.replay(&live.handle, &again.tensors.replay_on(comm)?).context("replay")?;
    again.check_received(&received).context("replay")?;
    drop(received);
    round.finish(comm, &live)?;
    Ok(())
}

/// Dispatches with a cap on rank 0 that is too low, and drops nothing; then with one that is just high enough.
pub(super) fn too_many(comm: &mut Communicator, round: &Round) -> Result<()> {
    let Round { case, inputs, tensors, .. } = round;
    let me = comm.rank() as usize;
    let free = Case { max_rows: Vec::new(), ..case.clone() };
    let cap_of = |rows: usize| {
        let rows = rows as u64;
        (me == 0).then_some(RowCap { rows, overflow: Overflow::Error })
    };
    let host = tensors.dispatch_on(comm)?;
    let dispatch = Dispatch { cap: cap_of(case.max_rows[0]), sizes: Sizes::Exact, ..host };
    let error = comm.dispatch(&dispatch).err().context("found rows beyond the cap of rank 0")?;
    let text = error.to_string();
    ensure!(error.kind() == ErrorKind::Full, "found {text}; expected an error of no room");
    let needed = Placement::new(&free, inputs, 0).rows;
    let words =
        [format!("{needed} rows"), format!("at most {}", case.max_rows[0]), "rank 0 ".into()];
    for word in words {
        ensure!(text.contains(&word), "found {text}; expected {word:?} in it");
    }
    let dispatch = Dispatch { cap: cap_of(needed), ..dispatch };
    let (received, handle) = comm.dispatch(&dispatch).context("dispatch with room")?;
    let whole = Case { max_rows: vec![needed, 0], ..case.clone() };
    exchange::check_received(&whole, inputs, me, &received).context("after dispatch")?;
    drop((received, handle));
    Ok(())
}
