//! L2: calls that overlap, end in another order, wait for late ranks, are refused, and go beside gathers and exchanges.

use anyhow::{Result, ensure};
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::{TensorMut, TensorRef};
use tokenyard_core::moe::DType::{Bf16, F32};
use tokenyard_core::ops::gather::GatherOptions;
use tokenyard_core::ops::gather::reduce::Precision;
use tokenyard_core::ops::gather::reduce::Spread::{All, Scatter};

use super::end::ReduceEnd;
use super::rules::Form;
use crate::ops::bodies::{stream, with_pauses};
use crate::ops::case::{CaseBody, EndCase};
use crate::ops::drawn::shuffled;
use crate::ops::end::OperationEnd;

const MOST: usize = 600;
const PLAIN: Form =
    Form { spread: Scatter, precision: Precision::Fp32, scale: 1.0, tensors: &[(F32, 150)] };
const FORMS: &[Form] = &[
    PLAIN,
    Form { spread: All, scale: 0.5, tensors: &[(Bf16, 99), (F32, 1)], ..PLAIN },
    Form { precision: Precision::Bf16, tensors: &[(F32, 33)], ..PLAIN },
    Form { spread: All, precision: Precision::Bf16, tensors: &[(F32, 150)], ..PLAIN },
    Form { spread: All, tensors: &[], ..PLAIN },
];

pub(super) fn cases() -> Vec<EndCase<ReduceEnd>> {
    let case = |name, about, ranks, in_flight, body| EndCase {
        name,
        about,
        ranks,
        options: GatherOptions { max_bytes: MOST as u64, in_flight, reduces: true },
        lengths: FORMS,
        body,
    };
    let alone = CaseBody::Alone;
    let any_order = "calls in flight may be received in any order that all ranks share";
    let pauses = "a rank may be late with each half, also one that sends parts of others on";
    let refused = "a refusal and calls that differ are errors on all ranks, and the next calls go";
    let gathers = "all-gathers of the same gather go among sums";
    let beside = "sums and exchanges do not disturb each other";
    let soak = "many calls in a row have the bits of the rule";
    vec![
        case("any_order", any_order, 3, 5, alone(receive_in_any_order)),
        case("pauses", pauses, 3, 2, alone(with_pauses)),
        case("refused", refused, 3, 12, alone(refuse)),
        case("among_gathers", gathers, 2, 3, alone(among_gathers)),
        case("beside_exchanges", beside, 2, 4, CaseBody::BesideExchanges),
        case("soak", soak, 2, 3, alone(|end| stream(end, 2000))),
    ]
}

fn receive_in_any_order(end: &mut ReduceEnd) -> Result<()> {
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

/// The last rank passes what the others do not, while earlier calls are open and while none is. An open call holds its
/// slot, so as many as the others need are in flight.
fn refuse(end: &mut ReduceEnd) -> Result<()> {
    use ErrorKind::{InvalidInput, Mismatch, Refused};
    let last = end.place.ranks - 1;
    let is_last = end.place.rank == last;
    for (open, spread) in [(0, Scatter), (2, All)] {
        (0..open).try_for_each(|_| end.send_next())?;
        let small = Form { spread, tensors: &[(F32, 8)], ..PLAIN };
        for bad in
            [Form { tensors: &[(F32, MOST / 4 + 1)], ..small }, Form { scale: f32::NAN, ..small }]
        {
            match is_last {
                true => end.fail(InvalidInput, None, &bad)?,
                false => end.fail(Refused, Some(last), &small)?,
            }
        }
        let others = Form { tensors: &[(F32, 8), (Bf16, 16)], ..small };
        // Equal sums of bytes that are divided otherwise, or of another type, differ as well.
        let odds = [
            Form { tensors: &[(F32, 8), (Bf16, 17)], ..others },
            Form { tensors: &[(Bf16, 16), (F32, 8)], ..others },
            Form { tensors: &[(F32, 16)], ..others },
            Form { tensors: &[(F32, 8), (F32, 8)], ..others },
            Form { tensors: &[], ..others },
            Form { scale: 0.5, ..others },
            Form { precision: Precision::Bf16, ..others },
            // The one call has another round behind this one.
            Form { spread: if spread == All { Scatter } else { All }, ..others },
        ];
        for odd in odds {
            end.fail(Mismatch, Some(last), if is_last { &odd } else { &others })?;
        }
        (0..open).try_for_each(|_| end.recv_next())?;
        end.pass()?;
    }
    Ok(())
}

fn among_gathers(end: &mut ReduceEnd) -> Result<()> {
    for turn in 0..12_u8 {
        end.send_next()?;
        let (own, mut all) =
            ([end.place.rank as u8 ^ turn; 77], vec![0; 77 * end.place.ranks as usize]);
        let shard = TensorRef::from_slice(&own, 1, 77)?;
        let pending = end.gather.all_gather_send(&[shard])?;
        end.send_next()?;
        // The sums before the shards, and behind them.
        if turn % 2 == 0 {
            end.recv_next()?;
        }
        let columns = all.len();
        let out = TensorMut::from_slice(&mut all, 1, columns)?;
        end.gather.all_gather_recv(pending, &mut [out])?;
        for (at, byte) in all.iter().enumerate() {
            let expected = (at / 77) as u8 ^ turn;
            ensure!(*byte == expected, "turn {turn}: byte {at}: found {byte}; expected {expected}");
        }
        while end.open_calls() > 0 {
            end.recv_next()?;
        }
    }
    Ok(())
}
