//! Sums over all ranks, over each kind of transport. Cases of the suite have their bits: these are the rules of calls.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

mod users;

use std::sync::{Arc, Barrier, Mutex};

use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{TensorMut, TensorRef};
use tokenyard_core::moe::DType;
use tokenyard_core::ops::gather::reduce::{Precision, Spread as Gets, Sum};
use tokenyard_core::ops::gather::{Gather, GatherOptions};
use tokenyard_core::{Error, ErrorKind};
use tokenyard_libfabric::Libfabric;
use users::{STORES, Spread, TWO_LEVELS, WORLDS, config, masked};

tokenyard_testkit::built_in_transport!(Libfabric);

const OPTIONS: GatherOptions = GatherOptions { max_bytes: 256, in_flight: 2, reduces: true };
const PLAIN: Sum = Sum { precision: Precision::Fp32, scale: 1.0 };

fn tensor(data: &[f32]) -> TensorRef<'_> {
    TensorRef::from_slice(data, 1, data.len()).unwrap()
}

fn out(data: &mut [f32]) -> TensorMut<'_> {
    let length = data.len();
    TensorMut::from_slice(data, 1, length).unwrap()
}

/// Numbers of a rank whose sum depends on the order of its terms.
fn numbers(rank: u32) -> Vec<f32> {
    let number = |at: u32| (0.1 + rank as f32 + at as f32 * 0.37).powi(3 + (rank + at) as i32 % 7);
    (0..24).map(number).collect()
}

#[test]
fn sums_have_the_same_bits_with_any_number_of_domains_and_on_all_ranks() {
    let sums = |ranks, domains| {
        let config = Spread { inside: STORES, ranks, domains }.config();
        let found = Mutex::new(vec![Vec::new(); ranks as usize]);
        in_threads(ranks, &config, |world: &Arc<World>| {
            let mut gather = Gather::open(world, &config, OPTIONS).unwrap();
            let (own, mut all) = (numbers(world.rank()), vec![0.0; 24]);
            let sum = Sum { precision: Precision::Bf16, scale: 0.3 };
            gather.all_reduce(&[tensor(&own)], &mut [out(&mut all)], sum).unwrap();
            gather.close().unwrap();
            let bits = all.iter().map(|value| value.to_bits()).collect();
            found.lock().unwrap()[world.rank() as usize] = bits;
        })
        .unwrap();
        let found = found.into_inner().unwrap();
        assert!(found.iter().all(|bits| *bits == found[0]), "{found:?}");
        found[0].clone()
    };
    let one = sums(6, 1);
    assert_eq!(one, sums(6, 3));
    assert_eq!(one, sums(6, 2));
}

#[test]
fn what_cannot_be_summed_is_refused_by_name_and_the_gather_goes_on() {
    for spread in WORLDS {
        let (ranks, config) = (spread.ranks, spread.config());
        in_threads(ranks, &config, |world: &Arc<World>| {
            let mut gather = Gather::open(world, &config, OPTIONS).unwrap();
            let (good, is_odd) = (vec![1.0_f32; 2 * ranks as usize], gather.rank() == 1);
            let uneven = vec![1.0_f32; 2 * ranks as usize + 1];
            let long = vec![1.0_f32; 65 * ranks as usize];
            let bytes = vec![1_u8; 2 * ranks as usize];
            let bytes = TensorRef::from_slice(&bytes, 1, bytes.len()).unwrap();
            let nan = Sum { scale: f32::NAN, ..PLAIN };
            let uneven_says =
                format!("{} elements; expected a multiple of the {ranks} ranks", uneven.len());
            for (bad, sum, says) in [
                (tensor(&uneven), PLAIN, &*uneven_says),
                (tensor(&long), PLAIN, "found 260 bytes for each rank; expected at most 256"),
                (bytes, PLAIN, "tensor: found u8; expected bf16 or fp32"),
                (tensor(&good), nan, "scale: found NaN; expected a finite number"),
            ] {
                let pending = match is_odd {
                    true => gather.reduce_send(Gets::Scatter, &[bad], sum),
                    false => gather.reduce_send(Gets::Scatter, &[tensor(&good)], PLAIN),
                };
                let mut part = [0.0; 2];
                let end = pending.and_then(|sent| gather.reduce_recv(sent, &mut [out(&mut part)]));
                let (error, kind) = (
                    end.unwrap_err(),
                    if is_odd { ErrorKind::InvalidInput } else { ErrorKind::Refused },
                );
                assert_eq!((error.kind(), part), (kind, [0.0; 2]), "{error}");
                assert!(error.to_string().contains(says), "{error}");
            }
            let mut part = [0.0; 2];
            gather.reduce_scatter(&[tensor(&good)], &mut [out(&mut part)], PLAIN).unwrap();
            assert_eq!(part, [ranks as f32; 2]);
            gather.close().unwrap();
        })
        .unwrap();
    }
}

/// A call, by its name in reports. A shard has more bytes than a part, and no number of ranks divides them. The parts
/// for a domain have more bytes than a shard may have.
fn call(gather: &mut Gather, name: &str, ranks: usize) -> (tokenyard_core::Result<()>, Vec<u8>) {
    let (own, bytes) = (vec![1.0_f32; 60 * ranks], vec![1_u8; 251]);
    let length = match name {
        "all-gather" => 251 * ranks,
        "reduce-scatter" => 240,
        _ => 240 * ranks,
    };
    let mut room = vec![0xa5; length];
    let end = if name == "all-gather" {
        let shard = TensorRef::from_slice(&bytes, 1, 251).unwrap();
        gather.all_gather(&[shard], &mut [TensorMut::from_slice(&mut room, 1, length).unwrap()])
    } else {
        let out = TensorMut::from_bytes(&mut room, DType::F32, 1, length / 4).unwrap();
        match name {
            "reduce-scatter" => gather.reduce_scatter(&[tensor(&own)], &mut [out], PLAIN),
            _ => gather.all_reduce(&[tensor(&own)], &mut [out], PLAIN),
        }
    };
    (end, room)
}

#[test]
fn different_calls_are_a_mismatch_on_all_ranks_from_the_first_one_on_and_the_gather_goes_on() {
    let pairs = [
        ["all-gather", "reduce-scatter"],
        ["reduce-scatter", "all-reduce"],
        ["all-reduce", "all-gather"],
    ];
    // A rank does the one call or the other, and each pair is the first one of a gather.
    let orders = pairs.into_iter().flat_map(|[one, other]| [[one, other], [other, one]]);
    for spread in WORLDS {
        let (ranks, config) = (spread.ranks, spread.config());
        in_threads(ranks, &config, |world: &Arc<World>| {
            for first in 0..pairs.len() {
                let mut gather = Gather::open(world, &config, OPTIONS).unwrap();
                for [one, other] in orders.clone().skip(2 * first) {
                    let name = if gather.rank() == 1 { one } else { other };
                    let (end, room) = call(&mut gather, name, ranks as usize);
                    let error = end.unwrap_err();
                    let found = (error.kind(), error.rank());
                    assert_eq!(found, (ErrorKind::Mismatch, Some(1)), "{spread:?}: {error}");
                    assert!(room.iter().all(|byte| *byte == 0xa5), "{name}: nothing is written");
                }
                for name in pairs.as_flattened() {
                    call(&mut gather, name, ranks as usize).0.unwrap();
                }
                gather.close().unwrap();
            }
        })
        .unwrap();
    }
}

#[test]
fn reports_name_calls_by_their_kind() {
    let config = config(STORES);
    in_threads(2, &config, |world: &Arc<World>| {
        let mut gather = Gather::open(world, &config, OPTIONS).unwrap();
        let own = [1.0; 2];
        let scatter = gather.reduce_send(Gets::Scatter, &[tensor(&own)], PLAIN).unwrap();
        let all = gather.reduce_send(Gets::All, &[tensor(&own)], PLAIN).unwrap();
        let kinds = |gather: &Gather| {
            let activity = gather.reporter().capture("a test").unwrap().activity;
            activity.recent.into_iter().map(|call| call.kind).collect::<Vec<_>>()
        };
        assert_eq!(kinds(&gather), ["reduce-scatter", "all-reduce"]);
        gather.reduce_recv(scatter, &mut [out(&mut [0.0])]).unwrap();
        gather.reduce_recv(all, &mut [out(&mut [0.0; 2])]).unwrap();
        // A refused call is of the kind of the others' call.
        let why = Error::new(ErrorKind::InvalidInput, "a test", "no tensors");
        gather.refuse_reduce(Gets::All, why);
        gather.all_gather(&[], &mut []).unwrap();
        assert_eq!(kinds(&gather)[2..], ["all-reduce", "all-gather"]);
        gather.close().unwrap();
    })
    .unwrap();
}

#[test]
fn outputs_that_cannot_be_written_end_a_scatter_here_and_an_all_reduce_everywhere() {
    for spread in [Spread { inside: STORES, ranks: 2, domains: 1 }, TWO_LEVELS] {
        let (ranks, config) = (spread.ranks, spread.config());
        in_threads(ranks, &config, |world: &Arc<World>| {
            let mut gather = Gather::open(world, &config, OPTIONS).unwrap();
            let (own, is_odd) = (vec![2.0_f32; ranks as usize], gather.rank() == 1);
            for gets in [Gets::Scatter, Gets::All] {
                let pending = gather.reduce_send(gets, &[tensor(&own)], PLAIN).unwrap();
                let right = if gets == Gets::All { ranks as usize } else { 1 };
                let mut room = vec![0.0; if is_odd { right + 1 } else { right }];
                let end = gather.reduce_recv(pending, &mut [out(&mut room)]);
                match (is_odd, gets) {
                    (true, _) => {
                        let error = end.unwrap_err();
                        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
                        assert!(error.to_string().contains("out: found"), "{error}");
                    }
                    (false, Gets::Scatter) => end.unwrap(),
                    (false, Gets::All) => {
                        let error = end.unwrap_err();
                        assert_eq!(
                            (error.kind(), error.rank()),
                            (ErrorKind::Refused, Some(1)),
                            "{error}"
                        );
                        // Its own part is written by then, and no other.
                        let mut expected = vec![0.0; right];
                        expected[gather.rank() as usize] = 2.0 * ranks as f32;
                        assert_eq!(room, expected);
                    }
                }
            }
            let mut all = vec![0.0; ranks as usize];
            gather.all_reduce(&[tensor(&own)], &mut [out(&mut all)], PLAIN).unwrap();
            assert_eq!(all, vec![2.0 * ranks as f32; ranks as usize]);
            gather.close().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn a_gather_without_sums_refuses_them_and_options_are_equal_on_all_ranks() {
    let config = config(STORES);
    in_threads(2, &config, |world: &Arc<World>| {
        let reduces = world.rank() == 1;
        let error = Gather::open(world, &config, GatherOptions { reduces, ..OPTIONS }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        assert!(error.to_string().contains("reduces"), "{error}");
        let mut gather = Gather::open(world, &config, GatherOptions::new(256)).unwrap();
        let error = gather.reduce_send(Gets::All, &[tensor(&[1.0; 2])], PLAIN).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        assert!(error.to_string().contains("reduces = true"), "{error}");
        gather.close().unwrap();
    })
    .unwrap();
}

#[test]
fn sums_where_losses_are_masked_are_not_supported() {
    let config = masked();
    in_threads(2, &config, |world: &Arc<World>| {
        let error = Gather::open(world, &config, OPTIONS).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    })
    .unwrap();
}

#[test]
fn a_rank_that_leaves_ends_the_sum_of_the_others_and_is_named() {
    let (config, sent) = (config(STORES), Barrier::new(3));
    in_threads(3, &config, |world: &Arc<World>| {
        let mut gather = Gather::open(world, &config, OPTIONS).unwrap();
        let pending = gather.reduce_send(Gets::All, &[tensor(&[1.0; 3])], PLAIN).unwrap();
        sent.wait();
        if gather.rank() == 1 {
            world.report_failure("the test ends this rank");
            return;
        }
        // The parts are here: the sums of the lost rank are not.
        let error = gather.reduce_recv(pending, &mut [out(&mut [0.0; 3])]).unwrap_err();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(1)), "{error}");
        assert!(gather.is_closed());
    })
    .unwrap();
}
