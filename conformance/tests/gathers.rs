//! All-gathers, over each kind of transport.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

mod users;

use std::sync::{Arc, Barrier};

use tokenyard_conformance::moe::exchange::options;
use tokenyard_conformance::moe::oracle::Case;
use tokenyard_conformance::moe::round::Round;
use tokenyard_conformance::ops::pipe::linked;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::ErrorKind;
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{TensorMut, TensorRef};
use tokenyard_core::moe::DType;
use tokenyard_core::ops::gather::{Gather, GatherOptions, PendingGather};
use tokenyard_core::ops::pipe::PipeOptions;
use tokenyard_core::ops::{SessionOptions, SessionUsers};
use tokenyard_libfabric::Libfabric;
use users::{DRIVEN, STORES, Spread, TWO_LEVELS, WORLDS, config, masked, muts, refs};

tokenyard_testkit::built_in_transport!(Libfabric);

/// The bytes of a shard: each differs from those of every other one.
fn shard(rank: u32, call: usize, tensor: usize, length: usize) -> Vec<u8> {
    let seed = 31 * rank as usize + 1009 * call + 77 * tensor;
    (0..length).map(|at| (seed + at * (1 + call + tensor)) as u8).collect()
}

fn shards(rank: u32, call: usize, lengths: &[usize]) -> Vec<Vec<u8>> {
    lengths.iter().enumerate().map(|(i, length)| shard(rank, call, i, *length)).collect()
}

fn expected(ranks: u32, call: usize, lengths: &[usize]) -> Vec<Vec<u8>> {
    let of_tensor = |(i, length): (usize, &usize)| {
        (0..ranks).flat_map(|rank| shard(rank, call, i, *length)).collect()
    };
    lengths.iter().enumerate().map(of_tensor).collect()
}

fn rooms(ranks: u32, lengths: &[usize]) -> Vec<Vec<u8>> {
    lengths.iter().map(|length| vec![0xa5; ranks as usize * length]).collect()
}

#[test]
fn each_rank_gets_the_shards_of_all_ranks_in_order() {
    let calls: [&[usize]; 6] = [&[1000], &[0], &[], &[1, 64, 3], &[4096], &[512, 0, 513]];
    for spread in WORLDS {
        let (ranks, config) = (spread.ranks, spread.config());
        in_threads(ranks, &config, |world: &Arc<World>| {
            let mut gather = Gather::open(world, &config, GatherOptions::new(4096)).unwrap();
            for round in 0..3 {
                for (number, lengths) in calls.into_iter().enumerate() {
                    let call = 10 * round + number;
                    let own = shards(gather.rank(), call, lengths);
                    let mut outs = rooms(ranks, lengths);
                    gather.all_gather(&refs(&own), &mut muts(&mut outs)).unwrap();
                    assert_eq!(outs, expected(ranks, call, lengths), "{spread:?}");
                }
            }
            gather.close().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn several_calls_are_in_flight_at_once_and_end_in_any_order() {
    for spread in WORLDS {
        let (ranks, config) = (spread.ranks, spread.config());
        in_threads(ranks, &config, |world: &Arc<World>| {
            let options = GatherOptions { in_flight: 3, ..GatherOptions::new(256) };
            let mut gather = Gather::open(world, &config, options).unwrap();
            for round in 0..4 {
                let send = |call: usize, gather: &mut Gather| {
                    let own = shards(gather.rank(), call, &[100 + call]);
                    gather.all_gather_send(&refs(&own)).unwrap()
                };
                let calls = [0, 1, 2].map(|call| 3 * round + call);
                let pending = calls.map(|call| send(call, &mut gather));
                let error = gather.all_gather_send(&[]).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
                assert!(error.to_string().contains("in_flight = 3"), "{error}");
                for (pending, call) in pending.into_iter().zip(calls).rev() {
                    let lengths = [100 + call];
                    let mut outs = rooms(ranks, &lengths);
                    gather.all_gather_recv(pending, &mut muts(&mut outs)).unwrap();
                    assert_eq!(outs, expected(ranks, call, &lengths));
                }
            }
            gather.close().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn lengths_that_differ_and_refusals_end_a_call_on_all_ranks_and_the_gather_goes_on() {
    for spread in WORLDS {
        let (ranks, config) = (spread.ranks, spread.config());
        in_threads(ranks, &config, |world: &Arc<World>| {
            let mut gather = Gather::open(world, &config, GatherOptions::new(64)).unwrap();
            let is_odd = gather.rank() == 1;
            let mut call = |own: usize, room: usize| {
                let (own, mut outs) = (vec![vec![1; own]], vec![vec![0xa5; room]]);
                let end = gather.all_gather(&refs(&own), &mut muts(&mut outs));
                (end, outs)
            };
            // Shards of other lengths.
            let length = if is_odd { 7 } else { 8 };
            let (end, outs) = call(length, ranks as usize * length);
            assert_eq!(end.unwrap_err().kind(), ErrorKind::Mismatch);
            assert!(outs[0].iter().all(|byte| *byte == 0xa5), "nothing is written");
            // Equal sums that are divided otherwise.
            let divided: [usize; 2] = if is_odd { [3, 5] } else { [5, 3] };
            let own = divided.map(|length| vec![1; length]);
            let mut outs = rooms(ranks, &divided);
            let error = gather.all_gather(&refs(&own), &mut muts(&mut outs)).unwrap_err();
            assert_eq!((error.kind(), error.rank()), (ErrorKind::Mismatch, Some(1)), "{error}");
            assert_eq!(outs, rooms(ranks, &divided), "nothing is written");
            let mut call = |own: usize, room: usize| {
                let (own, mut outs) = (vec![vec![1; own]], vec![vec![0xa5; room]]);
                let end = gather.all_gather(&refs(&own), &mut muts(&mut outs));
                (end, outs)
            };
            // Too many bytes, and an output without room, each on one rank.
            for (length, room) in [(65, 65 * ranks as usize), (8, 1)] {
                let bad = if is_odd { (length, room) } else { (8, 8 * ranks as usize) };
                let error = call(bad.0, bad.1).0.unwrap_err();
                let kind = if is_odd { ErrorKind::InvalidInput } else { ErrorKind::Refused };
                assert_eq!(error.kind(), kind, "{error}");
                assert!(error.to_string().contains("expected"), "{error}");
            }
            // A shard with gaps, on one rank.
            let (data, mut outs) = (vec![1_u8; 16], vec![vec![0xa5_u8; 8 * ranks as usize]]);
            let stride = if is_odd { [4, 1] } else { [2, 1] };
            let shard = TensorRef::strided(&data, DType::U8, [4, 2], stride).unwrap();
            let error = gather.all_gather(&[shard], &mut muts(&mut outs)).unwrap_err();
            assert!(error.to_string().contains("shard: found gaps between rows"), "{error}");
            let mut call = |own: usize, room: usize| {
                let (own, mut outs) = (vec![vec![1; own]], vec![vec![0xa5; room]]);
                let end = gather.all_gather(&refs(&own), &mut muts(&mut outs));
                (end, outs)
            };
            let (end, outs) = call(8, 8 * ranks as usize);
            end.unwrap();
            assert!(outs[0].iter().all(|byte| *byte == 1));
            gather.close().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn gathers_pipes_and_communicators_share_a_session_and_none_disturbs_another() {
    let one = |inside| Spread { inside, ranks: 2, domains: 1 };
    for spread in [one(STORES), one(DRIVEN), TWO_LEVELS] {
        let (Spread { ranks, domains, .. }, config) = (spread, spread.config());
        in_threads(ranks, &config, |world: &Arc<World>| {
            let (all, domains) = (ranks as usize, domains as usize);
            let case = Case { ranks: all, domains, experts: 2 * all, ..Case::default() };
            let session = SessionOptions {
                communicators: vec![options(&case)],
                pipes: vec![PipeOptions::new(64)],
                gathers: vec![GatherOptions::new(256), GatherOptions::new(64)],
                ..SessionOptions::default()
            };
            let SessionUsers { mut communicators, mut pipes, gathers, .. } =
                session.open(world, &config).unwrap();
            let (mut comm, mut pipe) = (communicators.remove(0), pipes.remove(0));
            let [mut wide, mut narrow] = <[Gather; 2]>::try_from(gathers).unwrap();
            assert_eq!([&wide, &narrow].map(|gather| gather.options().max_bytes), [256, 64]);
            let (rank, round) = (world.rank(), Round::new(&case, world.rank()));
            let send = |gather: &mut Gather, call, lengths: &[usize]| {
                gather.all_gather_send(&refs(&shards(rank, call, lengths))).unwrap()
            };
            let recv = |gather: &mut Gather, pending, call, lengths: &[usize]| {
                let mut outs = rooms(ranks, lengths);
                gather.all_gather_recv(pending, &mut muts(&mut outs)).unwrap();
                assert_eq!(outs, expected(ranks, call, lengths), "{spread:?}");
            };
            let peers = linked(rank, ranks, domains as u32);
            let first = send(&mut wide, 0, &[200, 7]);
            for to in &peers {
                pipe.send(TensorRef::from_slice(&[rank as u8; 9], 1, 9).unwrap(), *to).unwrap();
            }
            round.run(&mut comm).unwrap();
            let second = send(&mut narrow, 1, &[60]);
            recv(&mut wide, first, 0, &[200, 7]);
            for from in &peers {
                let mut data = [0xa5_u8; 9];
                pipe.recv(TensorMut::from_slice(&mut data, 1, 9).unwrap(), *from).unwrap();
                assert_eq!(data, [*from as u8; 9]);
            }
            round.run(&mut comm).unwrap();
            comm.close().unwrap();
            recv(&mut narrow, second, 1, &[60]);
            wide.close().unwrap();
            pipe.close().unwrap();
            narrow.close().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn options_that_make_no_gather_are_refused_on_all_ranks_and_the_world_goes_on() {
    let config = config(STORES);
    in_threads(2, &config, |world: &Arc<World>| {
        let good = GatherOptions::new(64);
        for bad in [
            GatherOptions { max_bytes: 0, ..good },
            GatherOptions { max_bytes: u64::MAX, ..good },
            GatherOptions { in_flight: 0, ..good },
            GatherOptions { in_flight: 33, ..good },
        ] {
            // Rank 1 alone is wrong.
            let options = if world.rank() == 1 { bad } else { good };
            let error = Gather::open(world, &config, options).unwrap_err();
            let kind = if world.rank() == 1 { ErrorKind::InvalidInput } else { ErrorKind::Refused };
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains("expected 1 to"), "{error}");
        }
        for unequal in [
            GatherOptions { max_bytes: 64 + u64::from(world.rank()), ..good },
            GatherOptions { in_flight: 2 + world.rank(), ..good },
        ] {
            let error = Gather::open(world, &config, unequal).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        }
        Gather::open(world, &config, good).unwrap().close().unwrap();
    })
    .unwrap();
}

#[test]
fn a_gather_that_masks_losses_is_not_supported() {
    let config = masked();
    in_threads(2, &config, |world: &Arc<World>| {
        let error = Gather::open(world, &config, GatherOptions::new(64)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("on_failure = \"mask\""), "{error}");
        assert!(error.to_string().contains("a gather"), "{error}");
    })
    .unwrap();
}

#[test]
fn a_gather_with_an_open_call_does_not_close_and_says_so() {
    let (config, meet) = (config(STORES), Barrier::new(2));
    in_threads(2, &config, |world: &Arc<World>| {
        let mut gather = Gather::open(world, &config, GatherOptions::new(64)).unwrap();
        let _pending = gather.all_gather_send(&refs(&[vec![1; 8]])).unwrap();
        meet.wait();
        // Its failure ends the other rank as well, wherever that is.
        if world.rank() == 0 {
            let error = gather.close().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
            assert!(error.to_string().contains("a call was sent and not received"), "{error}");
        }
        meet.wait();
    })
    .unwrap();
}

#[test]
fn outputs_that_cannot_be_written_end_a_call_on_this_rank_alone_and_the_gather_goes_on() {
    for spread in [Spread { inside: STORES, ranks: 2, domains: 1 }, TWO_LEVELS] {
        let (ranks, config) = (spread.ranks, spread.config());
        in_threads(ranks, &config, |world: &Arc<World>| {
            let mut gather = Gather::open(world, &config, GatherOptions::new(64)).unwrap();
            let (rank, lengths) = (gather.rank(), [8, 3]);
            // Too short, and one too few.
            for (call, wrong) in [(0, &[8, 2][..]), (1, &[8])] {
                let room = if rank == 1 { wrong } else { &lengths };
                let own = shards(rank, call, &lengths);
                let pending = gather.all_gather_send(&refs(&own)).unwrap();
                let mut outs = rooms(ranks, room);
                let received = gather.all_gather_recv(pending, &mut muts(&mut outs));
                if rank == 1 {
                    let error = received.unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
                    assert_eq!(outs, rooms(ranks, room), "nothing is written");
                } else {
                    received.unwrap();
                    assert_eq!(outs, expected(ranks, call, &lengths), "{spread:?}");
                }
            }
            let (own, mut outs) = (shards(rank, 2, &lengths), rooms(ranks, &lengths));
            gather.all_gather(&refs(&own), &mut muts(&mut outs)).unwrap();
            assert_eq!(outs, expected(ranks, 2, &lengths));
            gather.close().unwrap();
        })
        .unwrap();
    }
}

/// A call of another gather was received as the one of its number here, or closed the gather.
#[test]
fn a_call_of_another_gather_is_refused_and_both_go_on() {
    let (config, meet) = (config(STORES), Barrier::new(2));
    in_threads(2, &config, |world: &Arc<World>| {
        let gathers = vec![GatherOptions::new(64); 2];
        let session = SessionOptions { gathers, ..SessionOptions::default() };
        let gathers = session.open(world, &config).unwrap().gathers;
        let [mut one, mut other] = <[Gather; 2]>::try_from(gathers).unwrap();
        let (rank, lengths) = (one.rank(), [8]);
        let send = |gather: &mut Gather, call| -> PendingGather {
            gather.all_gather_send(&refs(&shards(rank, call, &lengths))).unwrap()
        };
        let pending = send(&mut one, 0);
        let mut outs = rooms(2, &lengths);
        let error = other.all_gather_recv(pending, &mut muts(&mut outs)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        assert_eq!(outs, rooms(2, &lengths), "nothing is written");
        for call in [1, 2] {
            let pending = send(&mut other, call);
            let mut outs = rooms(2, &lengths);
            other.all_gather_recv(pending, &mut muts(&mut outs)).unwrap();
            assert_eq!(outs, expected(2, call, &lengths));
        }
        assert!(!one.is_closed() && !other.is_closed());
        other.close().unwrap();
        meet.wait();
        // Its call can no longer be received.
        if rank == 0 {
            assert_eq!(one.close().unwrap_err().kind(), ErrorKind::InvalidInput);
        }
        meet.wait();
    })
    .unwrap();
}

#[test]
fn a_rank_that_leaves_ends_the_gather_of_the_others_and_is_named() {
    let config = config(STORES);
    in_threads(2, &config, |world: &Arc<World>| {
        let mut gather = Gather::open(world, &config, GatherOptions::new(64)).unwrap();
        if gather.rank() == 1 {
            world.report_failure("the test ends this rank");
            return;
        }
        let mut outs = rooms(2, &[8]);
        let error = gather.all_gather(&refs(&[vec![1; 8]]), &mut muts(&mut outs)).unwrap_err();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(1)), "{error}");
        assert!(gather.is_closed());
    })
    .unwrap();
}
