//! L2: messages that overlap, wait for each other, are refused, and go beside exchanges.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokenyard_core::ErrorKind;
use tokenyard_core::ops::pipe::PipeOptions;

use super::end::PipeEnd;
use super::rules;
use crate::ops::bodies::with_pauses;
use crate::ops::case::{CaseBody, EndCase};
use crate::ops::drawn::shuffled;
use crate::ops::end::OperationEnd;
use crate::ops::expect;

const MOST: usize = 600;

/// The time by which a send comes later than its receive.
const LATE: Duration = Duration::from_millis(30);

pub(super) fn cases() -> Vec<EndCase<PipeEnd>> {
    let case = |name, about, ranks, in_flight, body| EndCase {
        name,
        about,
        ranks,
        options: PipeOptions { max_bytes: MOST as u64, in_flight },
        lengths: &[MOST, 0, 64, 1, 333, 8],
        body,
    };
    let alone = CaseBody::Alone;
    let burst = "all messages in flight may be sent before one of them is received";
    let pauses = "a rank may be late with each send and each receive";
    let interleaved = "order holds between two ranks, whatever others send meanwhile";
    let early = "a receive may come long before its send";
    let stages = "ranks pass messages on in a chain, as stages of a pipeline do";
    let refused = "a refused message is an error on both sides, and the next ones arrive";
    let beside = "messages and exchanges do not disturb each other";
    vec![
        case("burst", burst, 2, 8, alone(bursts)),
        case("pauses", pauses, 3, 4, alone(with_pauses)),
        case("interleaved", interleaved, 3, 4, alone(interleave)),
        case("early_receive", early, 2, 2, alone(receive_early)),
        case("stages", stages, 3, 2, alone(pass_on)),
        case("refused", refused, 2, 8, alone(refuse)),
        case("beside_exchanges", beside, 2, 4, CaseBody::BesideExchanges),
    ]
}

fn bursts(end: &mut PipeEnd) -> Result<()> {
    for _ in 0..3 {
        (0..end.in_flight()).try_for_each(|_| end.send_next())?;
        end.place.world.barrier("the burst is sent")?;
        (0..end.in_flight()).try_for_each(|_| end.recv_next())?;
    }
    Ok(())
}

/// Each rank has an order of its own in which it sends, and another in which it receives.
fn interleave(end: &mut PipeEnd) -> Result<()> {
    let each = end.in_flight() as usize;
    for turn in 0..8 {
        let number = u64::from(end.place.rank) << 16 | turn;
        for to in shuffled(&end.peers.repeat(each), number) {
            end.send(to)?;
        }
        for from in shuffled(&end.peers.repeat(each), !number) {
            end.recv(from)?;
        }
    }
    Ok(())
}

/// Lower ranks send to higher ones, then the other way round.
fn receive_early(end: &mut PipeEnd) -> Result<()> {
    for turn in 0..4 {
        let sends_first = |peer: u32| (peer < end.place.rank) == (turn % 2 == 0);
        let (firsts, others): (Vec<u32>, Vec<u32>) =
            end.peers.iter().partition(|peer| sends_first(**peer));
        for from in firsts {
            end.recv(from)?;
        }
        std::thread::sleep(LATE);
        for to in others {
            end.send(to)?;
        }
    }
    Ok(())
}

/// Each stage adds one to each byte of what it passes on.
fn pass_on(end: &mut PipeEnd) -> Result<()> {
    let chain = rules::chain(end.place.ranks, end.place.domains);
    let stage = chain.iter().position(|rank| *rank == end.place.rank).context("find the stage")?;
    for batch in 0..12_u8 {
        let arrived = match stage.checked_sub(1) {
            Some(before) => end.recv_bytes(MOST, chain[before])?,
            None => vec![batch; MOST],
        };
        let expected = batch + stage as u8;
        let wrong = arrived.iter().position(|byte| *byte != expected);
        ensure!(
            wrong.is_none(),
            "batch {batch} at stage {stage}: byte {wrong:?} of {arrived:?}; expected {expected}"
        );
        if let Some(next) = chain.get(stage + 1) {
            let output: Vec<u8> = arrived.iter().map(|byte| byte + 1).collect();
            end.send_bytes(&output, *next)?;
        }
    }
    Ok(())
}

/// Refusals of a sender, of a receiver, and a length that the two do not share, among good messages. A sender learns of
/// them at the sends that need the slots again.
fn refuse(end: &mut PipeEnd) -> Result<()> {
    use ErrorKind::{InvalidInput, Mismatch, Refused};
    let too_long = vec![0; MOST + 1];
    let peers = end.peers.clone();
    for to in peers.iter().copied() {
        end.send(to)?;
        expect(InvalidInput, None, end.send_bytes(&too_long, to))?;
        end.send(to)?;
        end.send_bytes(&[1; 100], to)?;
        end.send_bytes(&[2; 100], to)?;
        end.send(to)?;
    }
    for from in peers.iter().copied() {
        end.recv(from)?;
        expect(Refused, Some(from), end.recv_bytes(8, from))?;
        end.recv(from)?;
        expect(Mismatch, Some(from), end.recv_bytes(101, from))?;
        expect(InvalidInput, None, end.recv_bytes(too_long.len(), from))?;
        end.recv(from)?;
    }
    for to in peers.iter().copied() {
        // Eight are in flight, so message 11 needs the slot of message 3.
        (6..11).try_for_each(|_| end.send(to))?;
        for kind in [Mismatch, Refused] {
            expect(kind, Some(to), end.try_send(to))?;
            end.send(to)?;
        }
    }
    for from in peers.iter().copied() {
        (6..13).try_for_each(|_| end.recv(from))?;
    }
    // Those that no send has reported, flush does.
    for to in peers.iter().copied() {
        end.send_bytes(&[3; 100], to)?;
    }
    for from in peers.iter().copied() {
        expect(Mismatch, Some(from), end.recv_bytes(99, from))?;
    }
    for to in peers {
        expect(Mismatch, Some(to), end.flush())?;
    }
    Ok(end.flush()?)
}
