use anyhow::{Context, Result};
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::{Communicator, CommunicatorOptions};

use super::{expect_error, in_every_layout, open_with, small};
use crate::moe::exchange;
use crate::moe::oracle::{Case, Layout, Tokens};
use crate::moe::round::{Live, Round};
use crate::suite::{Rank, Test};

pub(super) fn tests() -> Vec<Test> {
    let mut tests = in_every_layout(
        "dispatches_in_flight",
        "in_flight dispatches sent before the first is received",
        2,
        dispatches,
    );
    let about = "a combine and the next dispatch sent before either is received";
    tests.extend(in_every_layout("combine_beside_dispatch", about, 3, mixed));
    let about = "operations received in another order than they were sent in, alike on all ranks";
    tests.extend(in_every_layout("received_out_of_order", about, 2, received_out_of_order));
    let about = "a dispatch that one rank refuses, sent while a combine is open on all";
    tests.extend(in_every_layout("refused_beside_combine", about, 2, refused_beside_combine));
    let about = "one operation too many is refused here, and the communicator goes on";
    tests.extend(in_every_layout("too_many_in_flight", about, 2, too_many));
    tests
}

/// Rounds of few tokens, so that the outputs of many fit the arena. As in decoding, their number changes from step to
/// step: each rank has 2, 1 and 0 in turn.
fn few(base: &Case, count: u64, rank: u32) -> Vec<Round> {
    let tokens = |seed: u64| (0..base.ranks).map(|r| 2 - (r + seed as usize) % 3).collect();
    (0..count)
        .map(|seed| {
            Round::new(&Case { seed, tokens: Tokens::Exactly(tokens(seed)), ..base.clone() }, rank)
        })
        .collect()
}

fn open(rank: &Rank<'_>, base: &Case, in_flight: u32) -> Result<Communicator> {
    open_with(rank, CommunicatorOptions { in_flight, ..exchange::options(base) })
}

fn dispatches(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = small(rank, layout);
    let mut comms = Vec::new();
    for in_flight in [1, 2, 4] {
        let mut comm = open(rank, &base, in_flight)?;
        let rounds = few(&base, u64::from(in_flight), comm.rank());
        for turn in 0..3 {
            let why = || format!("in_flight {in_flight}, turn {turn}");
            let calls: Vec<_> =
                rounds.iter().map(|r| r.tensors.dispatch_on(&comm)).collect::<Result<_>>()?;
            let mut sent = Vec::new();
            for call in &calls {
                sent.push(comm.dispatch_send(call).with_context(why)?);
            }
            let mut live = Vec::new();
            for (round, sent) in rounds.iter().zip(sent) {
                let (received, handle) = comm.dispatch_recv(sent).with_context(why)?;
                round.check_received(&received).with_context(why)?;
                live.push(Live { received, handle });
            }
            combine_together(&mut comm, &rounds, &live).with_context(why)?;
        }
        comms.push(comm);
    }
    Ok(comms)
}

/// Sends all combines, then receives all.
fn combine_together(comm: &mut Communicator, rounds: &[Round], live: &[Live]) -> Result<()> {
    let mut buffers: Vec<_> =
        rounds.iter().zip(live).map(|(r, l)| r.experts(&l.received)).collect::<Result<_>>()?;
    let mut sent = Vec::new();
    for ((round, live), buffers) in rounds.iter().zip(live).zip(&mut buffers) {
        let arguments = buffers.arguments(&round.tensors, &live.handle)?;
        sent.push(comm.combine_send(&live.handle, arguments)?);
    }
    for sent in sent {
        comm.combine_recv(sent)?;
    }
    for (round, buffers) in rounds.iter().zip(buffers) {
        round.check_combined(&buffers.into_got()?)?;
    }
    Ok(())
}

fn mixed(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = small(rank, layout);
    let mut comm = open(rank, &base, 2)?;
    let rounds = few(&base, 8, comm.rank());
    let mut live = rounds[0].dispatch(&mut comm)?;
    for (n, pair) in rounds.windows(2).enumerate() {
        let mut buffers = pair[0].experts(&live.received)?;
        let call = pair[1].tensors.dispatch_on(&comm)?;
        let arguments = buffers.arguments(&pair[0].tensors, &live.handle)?;
        let combine = comm.combine_send(&live.handle, arguments)?;
        let dispatch = comm.dispatch_send(&call)?;
        comm.combine_recv(combine)?;
        pair[0].check_combined(&buffers.into_got()?).with_context(|| format!("combine {n}"))?;
        let (received, handle) = comm.dispatch_recv(dispatch)?;
        pair[1].check_received(&received).with_context(|| format!("dispatch {n}"))?;
        live = Live { received, handle };
    }
    Ok(vec![comm])
}

/// A packed dispatch that is refused is received within its send. So the refusing rank is in a receive that
/// the other ranks enter only after the receive of the combine.
fn refused_beside_combine(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = small(rank, layout);
    let mut comm = open(rank, &base, 2)?;
    let rounds = few(&base, 2, comm.rank());
    for refuses in 0..rank.world.ranks() {
        let live = rounds[0].dispatch(&mut comm)?;
        let mut buffers = rounds[0].experts(&live.received)?;
        let mut call = rounds[1].tensors.dispatch_on(&comm)?;
        if comm.rank() == refuses {
            call.topk_idx = call.x;
        }
        let arguments = buffers.arguments(&rounds[0].tensors, &live.handle)?;
        let combine = comm.combine_send(&live.handle, arguments)?;
        let sent = comm.dispatch_send(&call);
        comm.combine_recv(combine).with_context(|| format!("rank {refuses} refuses"))?;
        let kinds = [ErrorKind::InvalidInput, ErrorKind::Refused];
        expect_error(sent.and_then(|sent| comm.dispatch_recv(sent)), &kinds, &["topk_idx"])?;
        rounds[0].check_combined(&buffers.into_got()?)?;
    }
    rounds[1].run(&mut comm)?;
    Ok(vec![comm])
}

fn received_out_of_order(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = small(rank, layout);
    let mut comm = open(rank, &base, 2)?;
    let rounds = few(&base, 3, comm.rank());
    let [first, second, third] = [
        rounds[0].tensors.dispatch_on(&comm)?,
        rounds[1].tensors.dispatch_on(&comm)?,
        rounds[2].tensors.dispatch_on(&comm)?,
    ];
    let sent_first = comm.dispatch_send(&first)?;
    let sent_second = comm.dispatch_send(&second)?;
    let (received, handle) = comm.dispatch_recv(sent_second)?;
    rounds[1].check_received(&received)?;
    let live = Live { received, handle };
    // The first dispatch still has the slot that the third would use.
    let early = comm.dispatch_send(&third);
    expect_error(early, &[ErrorKind::InvalidInput], &["operation 0", "in_flight = 2"])?;
    let (received, handle) = comm.dispatch_recv(sent_first)?;
    rounds[0].check_received(&received)?;
    rounds[1].finish(&mut comm, &live)?;
    rounds[0].finish(&mut comm, &Live { received, handle })?;
    rounds[2].run(&mut comm)?;
    Ok(vec![comm])
}

fn too_many(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = small(rank, layout);
    let mut comm = open(rank, &base, 1)?;
    let rounds = few(&base, 2, comm.rank());
    let (first, second) =
        (rounds[0].tensors.dispatch_on(&comm)?, rounds[1].tensors.dispatch_on(&comm)?);
    let sent = comm.dispatch_send(&first)?;
    let early = comm.dispatch_send(&second);
    expect_error(early, &[ErrorKind::InvalidInput], &["in_flight = 1"])?;
    let (received, handle) = comm.dispatch_recv(sent)?;
    rounds[0].check_received(&received)?;
    rounds[0].finish(&mut comm, &Live { received, handle })?;
    rounds[1].run(&mut comm)?;
    Ok(vec![comm])
}
