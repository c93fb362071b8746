//! Gathers of ranks that are threads, on a double of a device that copies at once.

use std::sync::Barrier;
use std::time::Duration;

use super::*;
use crate::driver::host_device;
use crate::ops::ranks::{Ranks, shape};

const LENGTHS: &[u64] = &[100, 0, 37];
const MOST: u64 = 150;
const LONG: Duration = Duration::from_secs(20);

/// Runs gathers of up to [`MOST`] bytes on so many ranks.
fn run(ranks: u32, in_flight: u32, cap: Duration, body: impl Fn(u32, &mut Gather) + Sync) {
    let shape = shape(ranks, in_flight, MOST, abi::TY_RUNS_GATHER);
    let bytes = RankPlaces::new(&shape).bytes().unwrap();
    Ranks::new(shape, bytes, cap).run(|shape, window, plan| {
        let context = host_device::context();
        // SAFETY: the ranks hold board and links until the body ends.
        let mut gather = unsafe { Gather::new(&context, &shape, window, plan).unwrap() };
        body(shape.rank, &mut gather);
    });
}

fn byte(rank: u32, number: u64, shard: usize) -> u8 {
    (u64::from(rank) * 71 + number * 13 + shard as u64 * 5 + 1) as u8
}

fn call(number: u64, parts: &[abi::TyPart], refusal: &str) -> abi::TyGather {
    abi::TyGather {
        size: size_of::<abi::TyGather>(),
        operation: number,
        parts: parts.as_ptr(),
        count: parts.len(),
        refusal: abi::TyStr { data: refusal.as_ptr(), bytes: refusal.len() },
        flags: 0,
        stream: std::ptr::null_mut(),
    }
}

fn parts(all: &mut [Vec<u8>]) -> Vec<abi::TyPart> {
    let part =
        |one: &mut Vec<u8>| abi::TyPart { data: one.as_mut_ptr().cast(), bytes: one.len() as u64 };
    all.iter_mut().map(part).collect()
}

fn send(gather: &mut Gather, number: u64, lengths: &[u64], refusal: &str) -> Result<()> {
    let rank = gather.line.mapped.rank;
    let shard = |(at, bytes): (usize, &u64)| vec![byte(rank, number, at); *bytes as usize];
    let mut shards: Vec<_> = lengths.iter().enumerate().map(shard).collect();
    // SAFETY: the shards live until the call has returned, which copies them.
    unsafe { gather.send(&call(number, &parts(&mut shards), refusal)) }
}

/// Receives a gather; the outputs have the bytes of all ranks, or are as they were.
fn recv(gather: &mut Gather, number: u64, lengths: &[u64]) -> Result<()> {
    let ranks = gather.places.ranks;
    let out = |bytes: &u64| vec![0xee; *bytes as usize * ranks as usize];
    let mut outs: Vec<_> = lengths.iter().map(out).collect();
    // SAFETY: the outputs live until the call has returned.
    let received = unsafe { gather.recv(&call(number, &parts(&mut outs), "")) };
    for (at, (out, bytes)) in outs.iter().zip(lengths).enumerate() {
        for (index, found) in out.iter().enumerate() {
            let rank = (index as u64 / bytes) as u32;
            let expected = if received.is_ok() { byte(rank, number, at) } else { 0xee };
            assert_eq!(*found, expected, "gather {number}, shard {at} of rank {rank}");
        }
    }
    received
}

#[test]
fn each_rank_gets_the_shards_of_all_ranks_in_any_order_of_calls_in_flight() {
    for (ranks, in_flight) in [(1, 2), (2, 1), (3, 4)] {
        run(ranks, in_flight, LONG, |rank, gather| {
            for round in 0..12 {
                let calls = (0..u64::from(in_flight)).map(|at| round * u64::from(in_flight) + at);
                let calls: Vec<_> = calls.collect();
                for number in &calls {
                    send(gather, *number, LENGTHS, "").unwrap();
                    if (u64::from(rank) + number) % 5 == 0 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                for number in calls.iter().rev() {
                    recv(gather, *number, LENGTHS).unwrap();
                }
            }
            gather.flush().unwrap();
        });
    }
}

#[test]
fn refusals_and_other_lengths_end_a_call_alike_on_all_ranks_and_the_next_calls_go() {
    run(3, 2, LONG, |rank, gather| {
        let mut number = 0;
        let mut end = |kind: ErrorKind, lengths: &[u64], refusal: &str| {
            send(gather, number, lengths, refusal).unwrap();
            let error = recv(gather, number, lengths).unwrap_err();
            assert_eq!((error.kind(), error.rank()), (kind, Some(2)), "{error}");
            send(gather, number + 1, LENGTHS, "").unwrap();
            recv(gather, number + 1, LENGTHS).unwrap();
            number += 2;
        };
        let is_last = rank == 2;
        end(ErrorKind::Refused, &[8], if is_last { "no tensor" } else { "" });
        end(ErrorKind::Mismatch, if is_last { &[16, 8] } else { &[8, 16] }, "");
        end(ErrorKind::Mismatch, if is_last { &[] } else { &[8, 16] }, "");
    });
}

#[test]
fn a_stream_that_captures_a_graph_is_refused_on_all_ranks_and_one_that_runs_is_taken() {
    run(2, 1, LONG, |rank, gather| {
        for (number, is_captured) in [(0, true), (1, false)] {
            let mut shard = [vec![byte(rank, number, 0); 8]];
            let mut out = [vec![0; 16]];
            let (shards, outs) = (parts(&mut shard), parts(&mut out));
            let on = |call| abi::TyGather {
                flags: abi::TY_GATHER_ON_STREAM,
                stream: host_device::stream(is_captured && rank == 1),
                ..call
            };
            // SAFETY: shards and outputs live until both calls have returned.
            let ended = unsafe {
                gather.send(&on(call(number, &shards, ""))).unwrap();
                gather.recv(&on(call(number, &outs, "")))
            };
            match is_captured {
                true => assert_eq!(ended.unwrap_err().kind(), ErrorKind::Refused),
                false => assert!(ended.is_ok() && out[0][..8] == vec![byte(0, number, 0); 8]),
            }
        }
    });
}

#[test]
fn a_rank_that_does_not_come_is_named_when_the_wait_for_it_ends() {
    run(3, 1, Duration::from_millis(100), |rank, gather| {
        if rank == 1 {
            return;
        }
        send(gather, 0, LENGTHS, "").unwrap();
        let error = recv(gather, 0, LENGTHS).unwrap_err();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Deadline, Some(1)), "{error}");
    });
}

#[test]
fn nothing_is_written_to_a_rank_that_has_not_left_the_last_call_of_a_slot() {
    let (late, done) = (Barrier::new(2), Barrier::new(2));
    run(2, 1, Duration::from_millis(300), |rank, gather| {
        let sent = send(gather, 0, LENGTHS, "");
        // No rank leaves before both barriers: a failure of one must not hold the other up.
        let [first, then] = if rank == 0 {
            let received = recv(gather, 0, LENGTHS);
            late.wait();
            let refused = send(gather, 1, LENGTHS, "");
            done.wait();
            [received, refused]
        } else {
            late.wait();
            done.wait();
            [recv(gather, 0, LENGTHS), Ok(())]
        };
        sent.and(first).unwrap();
        if rank == 0 {
            let error = then.unwrap_err();
            assert_eq!((error.kind(), error.rank()), (ErrorKind::Deadline, Some(1)), "{error}");
        }
    });
}
