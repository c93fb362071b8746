//! L2: messages that overlap, wait for each other, are refused, and go beside exchanges.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::Communicator;
use tokenyard_core::ops::pipe::PipeOptions;

use super::case::PipeCase;
use super::end::PipeEnd;
use super::rules::{self, below};
use crate::moe::exchange;
use crate::moe::oracle::Case;
use crate::moe::round::Round;

const MOST: usize = 600;

/// The longest random pause of a rank.
const PAUSE_US: u64 = 3000;

/// The time by which a send comes later than its receive.
const LATE: Duration = Duration::from_millis(30);

pub(super) fn cases() -> Vec<PipeCase> {
    let case = |name, about, ranks, in_flight, body| PipeCase {
        name,
        about,
        ranks,
        options: PipeOptions { max_bytes: MOST as u64, in_flight },
        lengths: &[MOST, 0, 64, 1, 333, 8],
        body,
    };
    let burst = "all messages in flight may be sent before one of them is received";
    let pauses = "a rank may be late with each send and each receive";
    let interleaved = "order holds between two ranks, whatever others send meanwhile";
    let early = "a receive may come long before its send";
    let stages = "ranks pass messages on in a chain, as stages of a pipeline do";
    let refused = "a refused message is an error on both sides, and the next ones arrive";
    let beside = "messages and exchanges do not disturb each other";
    vec![
        case("burst", burst, 2, 8, bursts),
        case("pauses", pauses, 3, 4, with_pauses),
        case("interleaved", interleaved, 3, 4, interleave),
        case("early_receive", early, 2, 2, receive_early),
        case("stages", stages, 3, 2, pass_on),
        case("refused", refused, 2, 8, refuse),
        case("beside_exchanges", beside, 2, 4, beside_exchanges),
    ]
}

fn bursts(end: &mut PipeEnd) -> Result<()> {
    for _ in 0..3 {
        for _ in 0..end.options().in_flight {
            for at in 0..end.peers.len() {
                end.send(end.peers[at])?;
            }
        }
        end.world.barrier("the burst is sent")?;
        for _ in 0..end.options().in_flight {
            for at in 0..end.peers.len() {
                end.recv(end.peers[at])?;
            }
        }
    }
    Ok(())
}

fn with_pauses(end: &mut PipeEnd) -> Result<()> {
    for turn in 0..30 {
        for (half, sends) in [(0, true), (1, false)] {
            let number = (u64::from(end.rank) << 16) | (turn << 1) | half;
            if below(number, 2) == 0 {
                std::thread::sleep(Duration::from_micros(below(!number, PAUSE_US)));
            }
            for at in 0..end.peers.len() {
                let peer = end.peers[at];
                if sends { end.send(peer)? } else { end.recv(peer)? }
            }
        }
    }
    Ok(())
}

/// Each rank has an order of its own in which it sends, and another in which it receives.
fn interleave(end: &mut PipeEnd) -> Result<()> {
    let each = end.options().in_flight as usize;
    for turn in 0..8 {
        let number = u64::from(end.rank) << 16 | turn;
        for to in shuffled(&end.peers.repeat(each), number) {
            end.send(to)?;
        }
        for from in shuffled(&end.peers.repeat(each), !number) {
            end.recv(from)?;
        }
    }
    Ok(())
}

fn shuffled(ranks: &[u32], number: u64) -> Vec<u32> {
    let mut shuffled = ranks.to_vec();
    for at in (1..shuffled.len()).rev() {
        let draw = number.wrapping_mul(64).wrapping_add(at as u64);
        shuffled.swap(at, below(draw, at as u64 + 1) as usize);
    }
    shuffled
}

/// Lower ranks send to higher ones, then the other way round.
fn receive_early(end: &mut PipeEnd) -> Result<()> {
    for turn in 0..4 {
        let sends_first = |peer: u32| (peer < end.rank) == (turn % 2 == 0);
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
    let chain = rules::chain(end.ranks, end.domains);
    let stage = chain.iter().position(|rank| *rank == end.rank).context("find the stage")?;
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

/// Refusals of a sender, of a receiver, and a length that the two do not share, among good messages.
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
    for peer in peers {
        expect(Mismatch, Some(peer), end.flush())?;
        expect(Refused, Some(peer), end.flush())?;
    }
    Ok(end.flush()?)
}

/// Checks that a call failed in this way, about this rank, and that the pipe goes on.
fn expect<T>(kind: ErrorKind, rank: Option<u32>, result: tokenyard_core::Result<T>) -> Result<()> {
    let Err(error) = result else { bail!("found success; expected an error of kind {kind:?}") };
    ensure!(
        error.kind() == kind && error.rank() == rank,
        "found `{error}` of kind {:?}, about rank {:?}; expected kind {kind:?}, about rank {rank:?}",
        error.kind(),
        error.rank(),
    );
    Ok(())
}

fn beside_exchanges(end: &mut PipeEnd) -> Result<()> {
    let ranks = end.ranks as usize;
    let (domains, experts) = (end.domains as usize, 2 * ranks);
    let base = Case { ranks, domains, experts, topk: 2, hidden: 64, ..Case::default() };
    let mut comm = Communicator::open(&end.world, &end.config, exchange::options(&base))?;
    for seed in 0..4 {
        let round = Round::new(&Case { seed, ..base.clone() }, comm.rank());
        for at in 0..end.peers.len() {
            end.send(end.peers[at])?;
        }
        let live = round.dispatch(&mut comm)?;
        for at in 0..end.peers.len() {
            end.send(end.peers[at])?;
            end.recv(end.peers[at])?;
        }
        round.finish(&mut comm, &live)?;
        for at in 0..end.peers.len() {
            end.recv(end.peers[at])?;
        }
    }
    Ok(comm.close()?)
}
