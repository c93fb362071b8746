//! Tables, over each kind of transport.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

mod users;

use std::sync::{Arc, Barrier};

use tokenyard_conformance::moe::exchange::options;
use tokenyard_conformance::moe::oracle::Case;
use tokenyard_conformance::moe::round::Round;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{TensorMut, TensorRef};
use tokenyard_core::moe::DType;
use tokenyard_core::ops::table::{Entries, PendingFetch, Table, TableOptions};
use tokenyard_core::ops::{SessionOptions, SessionUsers};
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_libfabric::Libfabric;
use users::{DRIVEN, GETS, PUTS, REORDERED, STORES, Spread, TWO_LEVELS, config, masked};

tokenyard_testkit::built_in_transport!(Libfabric);

/// Bytes of the values and of the scales of an entry, and the most entries of a rank.
const VALUES: usize = 24;
const SCALES: usize = 4;
const MOST: u64 = 10;

fn options_of(layers: u32, in_flight: u32) -> TableOptions {
    TableOptions {
        entry_bytes: VALUES as u64,
        scale_bytes: SCALES as u64,
        max_entries: MOST,
        layers,
        max_indices: 64,
        in_flight,
    }
}

/// Worlds that one link joins.
const ONE_LINK: [&str; 4] = [STORES, PUTS, REORDERED, GETS];

/// Entries of a rank in a layer: another number each.
fn count(rank: u32, layer: u32) -> u64 {
    [10, 3, 0][(rank + layer) as usize % 3]
}

/// The bytes of an entry that was written at this turn: each differs from those of every other one.
fn entry(rank: u32, layer: u32, number: u64, turn: u32) -> Vec<u8> {
    let seed = 31 * rank as usize + 1009 * layer as usize + 77 * number as usize;
    let seed = seed + 3001 * turn as usize;
    (0..VALUES + SCALES).map(|at| (seed + at * (1 + layer as usize)) as u8).collect()
}

/// Values and scales of all entries of a rank in a layer.
fn written(rank: u32, layer: u32, turn: u32) -> [Vec<u8>; 2] {
    let entries = (0..count(rank, layer)).map(|number| entry(rank, layer, number, turn));
    entries.fold([vec![], vec![]], |[mut values, mut scales], entry| {
        values.extend(&entry[..VALUES]);
        scales.extend(&entry[VALUES..]);
        [values, scales]
    })
}

fn rows(bytes: &[u8], width: usize) -> TensorRef<'_> {
    TensorRef::from_slice(bytes, bytes.len() / width, width).unwrap()
}

fn write(table: &mut Table, turn: u32) -> Result<()> {
    let (rank, layers) = (table.rank(), table.options().layers);
    let all: Vec<_> = (0..layers).map(|layer| written(rank, layer, turn)).collect();
    let layers = all.iter().map(|[values, scales]| Entries {
        values: rows(values, VALUES),
        scales: Some(rows(scales, SCALES)),
    });
    table.write(&layers.collect::<Vec<_>>())
}

fn send(table: &mut Table, layer: u32, indices: &[i64]) -> Result<PendingFetch> {
    table.fetch_send(layer, TensorRef::from_slice(indices, 1, indices.len())?)
}

/// The values and the scales of a fetch.
fn recv(table: &mut Table, pending: PendingFetch) -> Result<[Vec<u8>; 2]> {
    let count = pending.count() as usize;
    let mut outs = [vec![0xa5; count * VALUES], vec![0xa5; count * SCALES]];
    let [values, scales] = &mut outs;
    table.fetch_recv(
        pending,
        &mut TensorMut::from_slice(values, count, VALUES)?,
        Some(&mut TensorMut::from_slice(scales, count, SCALES)?),
    )?;
    Ok(outs)
}

fn expected(layer: u32, indices: &[i64], turn: u32) -> [Vec<u8>; 2] {
    let entry_of = |index: &i64| {
        let index = *index as u64;
        entry((index / MOST) as u32, layer, index % MOST, turn)
    };
    let entries: Vec<_> = indices.iter().map(entry_of).collect();
    let part = |range: std::ops::Range<usize>| {
        entries.iter().flat_map(|entry| entry[range.clone()].to_vec()).collect()
    };
    [part(0..VALUES), part(VALUES..VALUES + SCALES)]
}

/// Indices of a layer that exist, in an order that differs by rank and turn.
fn indices(ranks: u32, rank: u32, layer: u32, turn: u32) -> Vec<i64> {
    let all: Vec<i64> = (0..ranks)
        .flat_map(|owner| (0..count(owner, layer)).map(move |n| i64::from(owner) * 10 + n as i64))
        .collect();
    let step = [1, 7, 11][(rank + turn) as usize % 3];
    (0..64).map(|i| all[(i * step + turn as usize) % all.len()]).collect()
}

#[test]
fn each_rank_gets_the_entries_that_its_indices_name_of_any_rank() {
    for inside in ONE_LINK {
        let config = config(inside);
        in_threads(3, &config, |world: &Arc<World>| {
            let mut table = Table::open(world, &config, options_of(3, 2)).unwrap();
            for turn in 0..3 {
                write(&mut table, turn).unwrap();
                for layer in 0..3 {
                    let indices = indices(3, table.rank(), layer, turn);
                    for some in [&indices[..], &indices[..1], &indices[..0]] {
                        let pending = send(&mut table, layer, some).unwrap();
                        let found = recv(&mut table, pending).unwrap();
                        assert_eq!(found, expected(layer, some, turn), "{inside}");
                    }
                }
            }
            table.close().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn fetches_of_several_layers_are_in_flight_at_once_and_end_in_any_order() {
    for inside in ONE_LINK {
        let config = config(inside);
        in_threads(3, &config, |world: &Arc<World>| {
            let mut table = Table::open(world, &config, options_of(3, 3)).unwrap();
            write(&mut table, 0).unwrap();
            for turn in 0..4 {
                let rank = table.rank();
                let indices = [0, 1, 2].map(|layer| indices(3, rank, layer, turn));
                let mut pending: Vec<_> = (0..3)
                    .map(|layer| Some(send(&mut table, layer, &indices[layer as usize]).unwrap()))
                    .collect();
                let error = send(&mut table, 0, &[0]).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
                assert!(error.to_string().contains("in_flight = 3"), "{error}");
                for i in 0..3 {
                    let layer = (i + turn as usize + rank as usize) % 3;
                    let found = recv(&mut table, pending[layer].take().unwrap()).unwrap();
                    assert_eq!(found, expected(layer as u32, &indices[layer], 0), "{inside}");
                }
            }
            table.close().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn a_fetch_takes_any_free_slot_and_a_dropped_one_gives_its_own_back() {
    for inside in ONE_LINK {
        let config = config(inside);
        in_threads(2, &config, |world: &Arc<World>| {
            let mut table = Table::open(world, &config, options_of(1, 2)).unwrap();
            write(&mut table, 0).unwrap();
            let first = send(&mut table, 0, &[0, 12]).unwrap();
            for turn in 0..5 {
                // The first one holds its slot all the time.
                let pending = send(&mut table, 0, &[turn, 10]).unwrap();
                assert_eq!(recv(&mut table, pending).unwrap(), expected(0, &[turn, 10], 0));
            }
            drop(send(&mut table, 0, &[3]).unwrap());
            drop(send(&mut table, 0, &[13]).unwrap());
            assert_eq!(recv(&mut table, first).unwrap(), expected(0, &[0, 12], 0));
            drop(send(&mut table, 0, &[5]).unwrap());
            write(&mut table, 1).unwrap();
            let pending = send(&mut table, 0, &[0, 12]).unwrap();
            assert_eq!(recv(&mut table, pending).unwrap(), expected(0, &[0, 12], 1));
            drop(send(&mut table, 0, &[5]).unwrap());
            table.close().unwrap();
        })
        .unwrap();
    }
}

/// A write of one table met that of another, and both succeeded with counts of the other one.
#[test]
fn ranks_that_write_to_several_tables_in_another_order_end_with_an_error() {
    let config = config(STORES);
    in_threads(2, &config, |world: &Arc<World>| {
        let session =
            SessionOptions { tables: vec![options_of(1, 2); 2], ..SessionOptions::default() };
        let tables = session.open(world, &config).unwrap().tables;
        let mut tables = <[Table; 2]>::try_from(tables).unwrap();
        let first = &mut tables[world.rank() as usize];
        let error = write(first, 0).unwrap_err();
        assert!(error.to_string().contains("write table"), "{error}");
        assert!(first.is_closed());
    })
    .unwrap();
}

/// Ranks fetch at their own pace: a rank that only waits takes no part.
#[test]
fn a_rank_fetches_while_the_others_make_no_call() {
    for inside in ONE_LINK {
        let (config, meet) = (config(inside), Barrier::new(3));
        in_threads(3, &config, |world: &Arc<World>| {
            let mut table = Table::open(world, &config, options_of(1, 2)).unwrap();
            write(&mut table, 0).unwrap();
            for rank in 0..3 {
                if table.rank() == rank {
                    let indices = indices(3, rank, 0, 1);
                    let pending = send(&mut table, 0, &indices).unwrap();
                    assert_eq!(recv(&mut table, pending).unwrap(), expected(0, &indices, 0));
                }
                meet.wait();
            }
            table.close().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn an_index_without_an_entry_is_an_error_of_this_rank_alone_and_the_table_goes_on() {
    for inside in ONE_LINK {
        let config = config(inside);
        in_threads(3, &config, |world: &Arc<World>| {
            let mut table = Table::open(world, &config, options_of(1, 2)).unwrap();
            write(&mut table, 0).unwrap();
            if table.rank() == 2 {
                for (index, why) in [
                    (13, "index 13 is entry 3 of rank 1, which has written 3 to layer 0"),
                    (20, "index 20 is entry 0 of rank 2, which has written 0 to layer 0"),
                    (30, "index 30 is of no rank; expected 0 to 29"),
                    (-1, "index -1 is of no rank"),
                    (i64::MAX, "is of no rank"),
                    (i64::MIN, "is of no rank"),
                ] {
                    let pending = send(&mut table, 0, &[0, index, 1]).unwrap();
                    let mut values = vec![0xa5_u8; 3 * VALUES];
                    let mut scales = vec![0xa5_u8; 3 * SCALES];
                    let error = table
                        .fetch_recv(
                            pending,
                            &mut TensorMut::from_slice(&mut values, 3, VALUES).unwrap(),
                            Some(&mut TensorMut::from_slice(&mut scales, 3, SCALES).unwrap()),
                        )
                        .unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
                    assert!(error.to_string().contains(why), "{error}");
                    assert!(values.iter().chain(&scales).all(|byte| *byte == 0xa5));
                }
            }
            let pending = send(&mut table, 0, &[12]).unwrap();
            assert_eq!(recv(&mut table, pending).unwrap(), expected(0, &[12], 0));
            table.close().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn indices_of_both_widths_name_the_same_entries() {
    let config = config(STORES);
    in_threads(2, &config, |world: &Arc<World>| {
        let mut table = Table::open(world, &config, options_of(1, 2)).unwrap();
        write(&mut table, 0).unwrap();
        let narrow = TensorRef::from_slice(&[12_i32, 0, 9, 10], 2, 2).unwrap();
        let pending = table.fetch_send(0, narrow).unwrap();
        assert_eq!(recv(&mut table, pending).unwrap(), expected(0, &[12, 0, 9, 10], 0));
        table.close().unwrap();
    })
    .unwrap();
}

#[test]
fn entries_that_cannot_be_written_are_refused_on_all_ranks_and_the_old_ones_stay() {
    for inside in [STORES, PUTS] {
        let config = config(inside);
        in_threads(2, &config, |world: &Arc<World>| {
            let mut table = Table::open(world, &config, options_of(1, 2)).unwrap();
            write(&mut table, 0).unwrap();
            let (many, odd) = (vec![1; 11 * VALUES], vec![1; VALUES + 1]);
            let [good, scales] = written(1, 0, 1);
            let no_scales = Entries { values: rows(&good, VALUES), scales: None };
            let both = |values, width, scales| Entries {
                values: rows(values, width),
                scales: Some(rows(scales, SCALES)),
            };
            let bad: [(Vec<Entries<'_>>, &str); 5] = [
                (vec![], "layers: found 0; expected 1"),
                (vec![no_scales], "scales: found 0 bytes"),
                (vec![both(&many, VALUES, &scales)], "values: found 264 bytes"),
                (vec![both(&odd, 1, &scales)], "values: found 25 bytes"),
                (vec![both(&good, VALUES, &scales[4..])], "scales: found 8 bytes; expected 12"),
            ];
            for (layers, why) in bad {
                let error = match table.rank() {
                    1 => table.write(&layers).unwrap_err(),
                    _ => write(&mut table, 1).unwrap_err(),
                };
                let kind = [ErrorKind::Refused, ErrorKind::InvalidInput][table.rank() as usize];
                assert_eq!(error.kind(), kind, "{error}");
                assert!(error.to_string().contains(why), "{error}");
            }
            let pending = send(&mut table, 0, &[0, 12]).unwrap();
            // A write while a fetch is open would change what it reads.
            let error = write(&mut table, 1).unwrap_err();
            assert!(error.to_string().contains("1 fetches that were sent"), "{error}");
            assert_eq!(recv(&mut table, pending).unwrap(), expected(0, &[0, 12], 0));
            write(&mut table, 2).unwrap();
            let pending = send(&mut table, 0, &[0, 12]).unwrap();
            assert_eq!(recv(&mut table, pending).unwrap(), expected(0, &[0, 12], 2));
            table.close().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn tensors_that_cannot_be_used_are_errors_of_this_rank_alone_and_the_table_goes_on() {
    let config = config(PUTS);
    in_threads(2, &config, |world: &Arc<World>| {
        let mut table = Table::open(world, &config, options_of(2, 1)).unwrap();
        write(&mut table, 0).unwrap();
        let fails = |result: Result<PendingFetch>, why: &str| {
            let error: Error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
            assert!(error.to_string().contains(why), "{error}");
        };
        fails(send(&mut table, 2, &[0]), "layer: found 2; expected less than 2");
        fails(send(&mut table, 0, &[0; 65]), "indices: found 65; expected at most 64");
        let floats = TensorRef::from_slice(&[0_u8; 8], 1, 8).unwrap();
        fails(table.fetch_send(0, floats), "indices: found u8; expected i32 or i64");
        let gaps = [0_u8; 64];
        let gaps = TensorRef::strided(&gaps, DType::I64, [2, 2], [4, 1]).unwrap();
        fails(table.fetch_send(0, gaps), "indices: found gaps between rows");
        for room in [1, 3] {
            let pending = send(&mut table, 0, &[0, 1]).unwrap();
            let mut values = vec![0xa5_u8; room * VALUES];
            let mut out = TensorMut::from_slice(&mut values, room, VALUES).unwrap();
            let error = table.fetch_recv(pending, &mut out, None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
            assert!(error.to_string().contains("values: found"), "{error}");
            assert!(values.iter().all(|byte| *byte == 0xa5));
        }
        let pending = send(&mut table, 1, &[0, 1]).unwrap();
        assert_eq!(recv(&mut table, pending).unwrap(), expected(1, &[0, 1], 0));
        table.close().unwrap();
    })
    .unwrap();
}

#[test]
fn tables_and_communicators_share_a_session_and_none_disturbs_another() {
    for inside in [STORES, GETS] {
        let config = config(inside);
        in_threads(2, &config, |world: &Arc<World>| {
            let case = Case { ranks: 2, experts: 4, ..Case::default() };
            let session = SessionOptions {
                communicators: vec![options(&case)],
                tables: vec![options_of(1, 2), options_of(2, 2)],
                ..SessionOptions::default()
            };
            let SessionUsers { mut communicators, tables, .. } =
                session.open(world, &config).unwrap();
            let (mut comm, round) = (communicators.remove(0), Round::new(&case, world.rank()));
            let [mut one, mut other] = <[Table; 2]>::try_from(tables).unwrap();
            write(&mut one, 0).unwrap();
            write(&mut other, 1).unwrap();
            let pending = send(&mut one, 0, &[12, 3]).unwrap();
            round.run(&mut comm).unwrap();
            let error = {
                let foreign = send(&mut one, 0, &[1]).unwrap();
                recv(&mut other, foreign).unwrap_err()
            };
            assert!(error.to_string().contains("was sent by another table"), "{error}");
            let beside = send(&mut other, 1, &[0, 2]).unwrap();
            assert_eq!(recv(&mut other, beside).unwrap(), expected(1, &[0, 2], 1));
            assert_eq!(recv(&mut one, pending).unwrap(), expected(0, &[12, 3], 0));
            round.run(&mut comm).unwrap();
            comm.close().unwrap();
            other.close().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn options_that_make_no_table_are_refused_on_all_ranks_and_the_world_goes_on() {
    let config = config(STORES);
    in_threads(2, &config, |world: &Arc<World>| {
        let good = options_of(1, 2);
        for bad in [
            TableOptions { entry_bytes: 0, ..good },
            TableOptions { scale_bytes: u64::MAX, ..good },
            TableOptions { max_entries: 0, ..good },
            TableOptions { max_entries: 1 << 33, ..good },
            TableOptions { layers: 0, ..good },
            TableOptions { layers: 129, ..good },
            TableOptions { max_indices: 0, ..good },
            TableOptions { in_flight: 33, ..good },
        ] {
            // Rank 1 alone is wrong.
            let options = if world.rank() == 1 { bad } else { good };
            let error = Table::open(world, &config, options).unwrap_err();
            let kind = if world.rank() == 1 { ErrorKind::InvalidInput } else { ErrorKind::Refused };
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains("expected "), "{error}");
        }
        let unequal = TableOptions { max_entries: MOST + u64::from(world.rank()), ..good };
        let error = Table::open(world, &config, unequal).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        Table::open(world, &config, good).unwrap().close().unwrap();
    })
    .unwrap();
}

#[test]
fn a_table_over_two_levels_or_without_gets_or_that_masks_losses_is_not_supported() {
    let refused = |ranks, config: tokenyard_core::config::Config, why: &str| {
        in_threads(ranks, &config, |world: &Arc<World>| {
            let error = Table::open(world, &config, options_of(1, 2)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.to_string().contains(why), "{error}");
        })
        .unwrap();
    };
    refused(TWO_LEVELS.ranks, Spread::config(TWO_LEVELS), "found 2 domains of 2 ranks");
    refused(2, config(DRIVEN), "declares neither TY_CAP_LOAD_STORE nor TY_CAP_GET");
    refused(2, masked(), "on_failure = \"mask\"");
}

#[test]
fn a_rank_that_leaves_ends_the_write_of_the_others_and_is_named() {
    let config = config(STORES);
    in_threads(2, &config, |world: &Arc<World>| {
        let mut table = Table::open(world, &config, options_of(1, 2)).unwrap();
        if table.rank() == 1 {
            world.report_failure("the test ends this rank");
            return;
        }
        let error = write(&mut table, 0).unwrap_err();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(1)), "{error}");
        assert!(table.is_closed());
    })
    .unwrap();
}
