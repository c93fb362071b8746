//! All-gathers, over each kind of transport.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::sync::Arc;

use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::ErrorKind;
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{TensorMut, TensorRef};
use tokenyard_core::config::Config;
use tokenyard_core::moe::DType;
use tokenyard_core::ops::gather::{Gather, GatherOptions};
use tokenyard_libfabric::Libfabric;

const STORES: &str = "[transport.scale_up]\nuse = \"shm\"\n";
const PUTS: &str =
    "[transport.scale_up]\nuse = \"shm\"\n[transport.scale_up.shm]\nload_store = false\n";
const REORDERED: &str = "[transport.scale_up]\nuse = \"faulty\"\n\
                         [transport.scale_up.faulty]\ninner = \"shm\"\nseed = 3\n";
const DRIVEN: &str = "[transport.scale_up]\nuse = \"libfabric\"\n\
                      [transport.scale_up.libfabric]\nprovider = \"tcp\"\n";
const TWO_LEVELS: &str = "[transport.scale_up]\nuse = \"shm\"\n[transport.scale_out]\nuse = \"shm\"\n\
                          [transport.scale_out.shm]\nload_store = false\n[topology]\ndomains = 2\n";

tokenyard_testkit::built_in_transport!(Libfabric);

fn config(transports: &str) -> Config {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    tokenyard_faulty::link();
    let text = format!("[world]\ndeadline_ms = 10000\n[kernels]\nuse = \"cpu\"\n{transports}");
    Config::parse(&text, "gathers").unwrap()
}

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

fn refs(data: &[Vec<u8>]) -> Vec<TensorRef<'_>> {
    data.iter().map(|one| TensorRef::from_slice(one, 1, one.len()).unwrap()).collect()
}

fn muts(data: &mut [Vec<u8>]) -> Vec<TensorMut<'_>> {
    data.iter_mut()
        .map(|one| {
            let length = one.len();
            TensorMut::from_slice(one.as_mut_slice(), 1, length).unwrap()
        })
        .collect()
}

fn rooms(ranks: u32, lengths: &[usize]) -> Vec<Vec<u8>> {
    lengths.iter().map(|length| vec![0xa5; ranks as usize * length]).collect()
}

const WORLDS: [(&str, u32); 5] =
    [(STORES, 3), (PUTS, 3), (REORDERED, 2), (DRIVEN, 2), (TWO_LEVELS, 4)];

#[test]
fn each_rank_gets_the_shards_of_all_ranks_in_order() {
    let calls: [&[usize]; 6] = [&[1000], &[0], &[], &[1, 64, 3], &[4096], &[512, 0, 513]];
    for (transports, ranks) in WORLDS {
        let config = config(transports);
        in_threads(ranks, &config, |world: &Arc<World>| {
            let mut gather = Gather::open(world, &config, GatherOptions::new(4096)).unwrap();
            for round in 0..3 {
                for (number, lengths) in calls.into_iter().enumerate() {
                    let call = 10 * round + number;
                    let own = shards(gather.rank(), call, lengths);
                    let mut outs = rooms(ranks, lengths);
                    gather.all_gather(&refs(&own), &mut muts(&mut outs)).unwrap();
                    assert_eq!(outs, expected(ranks, call, lengths), "{transports}");
                }
            }
            gather.close().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn several_calls_are_in_flight_at_once_and_end_in_any_order() {
    for (transports, ranks) in WORLDS {
        let config = config(transports);
        in_threads(ranks, &config, |world: &Arc<World>| {
            let options = GatherOptions { max_bytes: 256, in_flight: 3 };
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
    for (transports, ranks) in WORLDS {
        let config = config(transports);
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
