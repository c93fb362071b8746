//! L2: calls that overlap, end in another order, wait for late ranks, are refused, and go beside exchanges.

use anyhow::Result;
use tokenyard_core::ErrorKind;
use tokenyard_core::ops::gather::GatherOptions;

use super::end::GatherEnd;
use crate::ops::bodies::with_pauses;
use crate::ops::case::{CaseBody, EndCase};
use crate::ops::drawn::shuffled;
use crate::ops::end::OperationEnd;

const MOST: usize = 600;
const LENGTHS: &[&[usize]] = &[&[MOST], &[0], &[64, 1], &[333], &[8, 0, 99]];

pub(super) fn cases() -> Vec<EndCase<GatherEnd>> {
    let case = |name, about, ranks, in_flight, body| EndCase {
        name,
        about,
        ranks,
        options: GatherOptions { max_bytes: MOST as u64, in_flight, reduces: false },
        lengths: LENGTHS,
        body,
    };
    let alone = CaseBody::Alone;
    let any_order = "calls in flight may be received in any order that all ranks share";
    let pauses = "a rank may be late with each half, also one that sends shards of others on";
    let refused =
        "a refusal and lengths that differ are errors on all ranks, and the next calls go";
    let streams = "a call in the order of a stream reads and writes in that order, or the stream is refused by name";
    let beside = "gathers and exchanges do not disturb each other";
    vec![
        case("any_order", any_order, 3, 5, alone(receive_in_any_order)),
        case("pauses", pauses, 3, 2, alone(with_pauses)),
        case("refused", refused, 3, 8, alone(refuse)),
        case("streams", streams, 2, 2, alone(pass_on_streams)),
        case("beside_exchanges", beside, 2, 4, CaseBody::BesideExchanges),
    ]
}

fn receive_in_any_order(end: &mut GatherEnd) -> Result<()> {
    for turn in 0..8 {
        (0..end.in_flight()).try_for_each(|_| end.send_next())?;
        let all: Vec<usize> = (0..end.open_calls()).collect();
        let mut left = all.clone();
        for call in shuffled(&all, turn) {
            let at = left.iter().take_while(|open| **open != call).count();
            left.remove(at);
            end.recv_at(at)?;
        }
    }
    Ok(())
}

fn pass_on_streams(end: &mut GatherEnd) -> Result<()> {
    (0..2 * LENGTHS.len()).try_for_each(|_| end.pass_in_order())
}

/// The last rank passes what the others do not, while earlier calls are open and while none is. An open call holds its
/// slot, so as many as the others need are in flight.
fn refuse(end: &mut GatherEnd) -> Result<()> {
    use ErrorKind::{InvalidInput, Mismatch, Refused};
    let last = end.place.ranks - 1;
    let is_last = end.place.rank == last;
    for open in [0, 2] {
        (0..open).try_for_each(|_| end.send_next())?;
        match is_last {
            true => end.fail(InvalidInput, None, &[MOST + 1])?,
            false => end.fail(Refused, Some(last), &[8])?,
        }
        // Equal sums that are divided otherwise differ as well.
        let others: &[usize] = &[8, 16];
        let odds: [&[usize]; 5] = [&[8, 17], &[16, 8], &[24], &[8, 16, 0], &[]];
        for odd in odds {
            end.fail(Mismatch, Some(last), if is_last { odd } else { others })?;
        }
        (0..open).try_for_each(|_| end.recv_next())?;
        end.pass()?;
    }
    Ok(())
}
