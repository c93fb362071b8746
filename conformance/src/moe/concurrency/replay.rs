use anyhow::{Context, Result, anyhow};
use tokenyard_core::communicator::{Communicator, Received};

use super::{in_every_layout, open, small};
use crate::moe::exchange::{self, Placed};
use crate::moe::oracle::rng::{Rng, Stream};
use crate::moe::oracle::routing::Placement;
use crate::moe::oracle::{
    Case, Combine, ExpertOutput, Input, Layout, RowType, Scales, Sums, Tokens, expected_combine,
};
use crate::moe::round::Round;
use crate::suite::{Rank, Test};

pub(super) fn tests() -> Vec<Test> {
    let mut tests =
        in_every_layout("replay", "other rows with the same routing, in the same places", 3, again);
    let about = "the backward of dispatch: gradients and weight gradients, combined";
    tests.extend(in_every_layout("backward_of_dispatch", about, 2, backward_of_dispatch));
    let about = "the backward of combine: output gradients, dispatched by a replay";
    tests.extend(in_every_layout("backward_of_combine", about, 2, backward_of_combine));
    let about = "a replay sent before an earlier dispatch is received";
    tests.extend(in_every_layout("replay_in_halves", about, 2, in_halves));
    tests
}

/// Token counts that do not depend on the seed, because a replay has those of its handle.
fn fixed(rank: &Rank<'_>, layout: Layout) -> Case {
    let case = small(rank, layout);
    let tokens = (0..case.ranks).map(|rank| [4, 0, 3][rank % 3]).collect();
    Case { tokens: Tokens::Exactly(tokens), ..case }
}

fn replay(
    comm: &mut Communicator,
    round: &Round,
    handle: &tokenyard_core::communicator::Handle,
) -> Result<Received> {
    let received = comm.replay(handle, &round.tensors.replay_on(comm)?).context("replay")?;
    round.check_received(&received).context("replay")?;
    Ok(received)
}

fn again(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = fixed(rank, layout);
    let inputs = [
        Input::Plain(RowType::Bf16),
        Input::Plain(RowType::F32),
        Input::Cast(RowType::Bf16, Scales::F32),
        Input::Opaque(2),
    ];
    let mut comms = Vec::new();
    for worst_case in [false, true] {
        let mut comm = open(rank, &base)?;
        let first = Round::new(&Case { worst_case, ..base.clone() }, comm.rank());
        let live = first.dispatch(&mut comm)?;
        for (seed, input) in (1..).zip(inputs) {
            let case = Case { seed, input, worst_case, ..base.clone() };
            let round = first.replayed(&case);
            let received =
                replay(&mut comm, &round, &live.handle).with_context(|| format!("{case}"))?;
            drop(received);
        }
        // The handle still combines the rows of its own dispatch.
        first.finish(&mut comm, &live).context("combine after replays")?;
        drop(live);
        comms.push(comm);
    }
    Ok(comms)
}

/// The expert outputs that every rank returns. The values depend on nothing but the case, so each rank can
/// compute those of all ranks.
pub(super) fn gradients(round: &Round, seed: u64) -> Vec<ExpertOutput> {
    let Round { case, inputs, .. } = round;
    (0..case.ranks)
        .map(|rank| {
            let rows = Placement::new(case, inputs, rank).rows;
            let mut rng = Rng::new(seed, Stream::Rows, rank);
            let mut value = || (rng.below(4001) as f32 - 2000.0) / 256.0;
            let elements: Vec<f32> = (0..rows * case.hidden).map(|_| value()).collect();
            let columns = if case.layout.has_a_row_per_token() { case.topk } else { 1 };
            let weights = (0..rows * columns).map(|_| value()).collect();
            ExpertOutput { rows: case.combine.row.encode(&elements), weights: Some(weights) }
        })
        .collect()
}

fn backward_of_dispatch(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = fixed(rank, layout);
    let mut comm = open(rank, &base)?;
    for row in [RowType::Bf16, RowType::F32] {
        let combine = Combine { row, biases: 0, weighted: false, sums: Sums::ByRank };
        let round = Round::new(&Case { combine, ..base.clone() }, comm.rank());
        let live = round.dispatch(&mut comm)?;
        let outputs = gradients(&round, 7);
        let me = comm.rank() as usize;
        let got = exchange::combine(
            &mut comm,
            &round.tensors,
            &live.handle,
            &outputs[me],
            Placed::Outside,
        )?;
        let expected = expected_combine(&round.case, &round.inputs, &outputs, me)?;
        expected.x.compare(got.x.bytes()).map_err(|e| anyhow!("row gradients: {e}"))?;
        let weights = expected.weights.context("weights came back")?;
        let found: Vec<u8> =
            got.weights.unwrap_or_default().iter().flat_map(|w| w.to_le_bytes()).collect();
        weights.compare(&found).map_err(|e| anyhow!("weight gradients: {e}"))?;
    }
    Ok(vec![comm])
}

fn backward_of_combine(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = fixed(rank, layout);
    let mut comm = open(rank, &base)?;
    let forward = Round::new(&base, comm.rank());
    let live = forward.dispatch(&mut comm)?;
    forward.finish(&mut comm, &live)?;
    for row in [RowType::Bf16, RowType::F32] {
        let input = Input::Plain(row);
        let gradients = forward.replayed(&Case { seed: 5, input, weights: false, ..base.clone() });
        replay(&mut comm, &gradients, &live.handle).with_context(|| format!("{row}"))?;
    }
    Ok(vec![comm])
}

fn in_halves(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = fixed(rank, layout);
    let mut comm = open(rank, &base)?;
    let first = Round::new(&base, comm.rank());
    let live = first.dispatch(&mut comm)?;
    let second = Round::new(&Case { seed: 2, ..base.clone() }, comm.rank());
    let third = first.replayed(&Case { seed: 3, ..base.clone() });
    let (dispatch, replay) = (second.tensors.dispatch_on(&comm)?, third.tensors.replay_on(&comm)?);
    let sent = comm.dispatch_send(&dispatch)?;
    let sent_replay = comm.replay_send(&live.handle, &replay)?;
    let (received, handle) = comm.dispatch_recv(sent)?;
    second.check_received(&received)?;
    let replayed = comm.replay_recv(sent_replay)?;
    third.check_received(&replayed).context("replay")?;
    first.finish(&mut comm, &live)?;
    drop((live, replayed));
    second.finish(&mut comm, &crate::moe::round::Live { received, handle })?;
    Ok(vec![comm])
}
