//! Communicators that share one session: one bring-up, and nothing else in common.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};

use tokenyard_conformance::moe::exchange::options;
use tokenyard_conformance::moe::oracle::{Case, Layout};
use tokenyard_conformance::moe::round::Round;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::ErrorKind;
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{Communicator, CommunicatorOptions, Dispatch};
use tokenyard_core::config::Config;
use tokenyard_core::ops::SessionOptions;
use tokenyard_libfabric::Libfabric;

use super::COMMITS;

const LOAD_STORE: &str = "[transport.scale_up]\nuse = \"shm\"\n";
const COMMITTED: &str =
    "[transport.scale_up]\nuse = \"committed\"\n[transport.scale_up.committed]\ntest = 1\n";
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
    Config::parse(&text, "shared").unwrap()
}

/// Cases that differ in everything that a communicator fixes.
fn cases(ranks: usize, domains: usize) -> [Case; 3] {
    let first = Case { ranks, domains, experts: 2 * ranks, topk: 2, ..Case::default() };
    let second =
        Case { hidden: 8, max_tokens: 3, topk: 1, layout: Layout::Packed, ..first.clone() };
    let expert_major = Layout::ExpertMajor { alignment: 4, zero_padding: false };
    let third = Case {
        hidden: 2 * first.hidden,
        max_tokens: 33,
        experts: 4 * ranks,
        topk: 3,
        layout: expert_major,
        ..first.clone()
    };
    [first, second, third]
}

fn together(communicators: Vec<CommunicatorOptions>) -> SessionOptions {
    SessionOptions { communicators, ..SessionOptions::default() }
}

fn open(world: &Arc<World>, config: &Config, cases: &[Case]) -> Vec<(Communicator, Round)> {
    let all: Vec<CommunicatorOptions> = cases.iter().map(options).collect();
    let opened = together(all).open(world, config).unwrap().communicators;
    assert_eq!(opened.len(), cases.len());
    opened
        .into_iter()
        .zip(cases)
        .map(|(comm, case)| (comm, Round::new(case, world.rank())))
        .collect()
}

#[test]
fn operations_of_several_shapes_are_in_flight_at_once_over_one_set_of_connections() {
    for (transports, ranks, domains) in [
        (LOAD_STORE, 2, 1),
        (COMMITTED, 3, 1),
        (REORDERED, 2, 1),
        (DRIVEN, 2, 1),
        (TWO_LEVELS, 4, 2),
    ] {
        let (config, cases) = (config(transports), cases(ranks, domains));
        in_threads(ranks as u32, &config, |world| {
            let mut opened = open(world, &config, &cases);
            for _ in 0..3 {
                let dispatch = |(comm, round): &mut (Communicator, Round)| round.dispatch(comm);
                let live: Vec<_> = opened.iter_mut().map(|each| dispatch(each).unwrap()).collect();
                for ((comm, round), live) in opened.iter_mut().zip(&live).rev() {
                    round.finish(comm, live).unwrap();
                }
            }
            opened.into_iter().for_each(|(comm, _)| comm.close().unwrap());
        })
        .unwrap();
    }
    assert_eq!(COMMITS[1].load(Ordering::Relaxed), 3, "one commit of each rank");
}

#[test]
fn threads_use_communicators_of_one_session_at_the_same_time() {
    for transports in [REORDERED, DRIVEN] {
        let (config, cases) = (config(transports), cases(2, 1));
        in_threads(2, &config, |world| {
            let opened = open(world, &config, &cases);
            let together = Barrier::new(opened.len());
            std::thread::scope(|scope| {
                for (mut comm, round) in opened {
                    let together = &together;
                    scope.spawn(move || {
                        together.wait();
                        (0..10).for_each(|_| drop(round.run(&mut comm).unwrap()));
                    });
                }
            });
            world.barrier("all threads are done").unwrap();
        })
        .unwrap();
    }
}

#[test]
fn a_refusal_in_one_leaves_it_and_the_others_usable() {
    let (config, cases) = (config(REORDERED), cases(2, 1));
    in_threads(2, &config, |world| {
        let mut opened = open(world, &config, &cases);
        let live: Vec<_> =
            opened.iter_mut().map(|(comm, round)| round.dispatch(comm).unwrap()).collect();
        let (comm, round) = &mut opened[0];
        let most = round.case.max_tokens as u32;
        let beyond = if world.rank() == 0 { most + 1 } else { most };
        let call = Dispatch { max_tokens: Some(beyond), ..round.tensors.dispatch().unwrap() };
        let error = comm.dispatch(&call).unwrap_err();
        let kinds = [ErrorKind::InvalidInput, ErrorKind::Refused];
        assert_eq!(error.kind(), kinds[world.rank() as usize], "{error}");
        for ((comm, round), live) in opened.iter_mut().zip(&live) {
            round.finish(comm, live).unwrap();
            round.run(comm).unwrap();
        }
        drop(live);
        opened.into_iter().for_each(|(comm, _)| comm.close().unwrap());
    })
    .unwrap();
}

#[test]
fn each_is_closed_or_dropped_in_any_order_and_the_others_and_all_outputs_stay_usable() {
    for transports in [LOAD_STORE, DRIVEN] {
        for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
            let (config, cases) = (config(transports), cases(2, 1));
            in_threads(2, &config, |world| {
                let opened = open(world, &config, &cases);
                let mut opened: Vec<_> = opened.into_iter().map(Some).collect();
                let mut lives = Vec::new();
                for at in order {
                    let (mut comm, round) = opened[at].take().unwrap();
                    round.run(&mut comm).unwrap();
                    lives.push((round.dispatch(&mut comm).unwrap(), round));
                    // The first is dropped without a close, while the others use the transports.
                    if at == order[0] {
                        drop(comm)
                    } else {
                        comm.close().unwrap()
                    }
                    for (comm, round) in opened.iter_mut().flatten() {
                        round.run(comm).unwrap();
                    }
                }
                for (live, round) in lives {
                    round.check_received(&live.received).unwrap();
                }
            })
            .unwrap();
        }
    }
}

#[test]
fn the_loss_of_a_rank_ends_each_with_an_error_that_names_it() {
    let (config, cases) = (config(LOAD_STORE), cases(2, 1));
    in_threads(2, &config, |world| {
        let mut opened = open(world, &config, &cases);
        for (comm, round) in &mut opened {
            round.run(comm).unwrap();
        }
        if world.rank() == 1 {
            world.report_failure("the test ends this rank");
            return;
        }
        for (comm, round) in &mut opened {
            let error = comm.dispatch(&round.tensors.dispatch().unwrap()).unwrap_err();
            assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(1)), "{error}");
            assert!(comm.is_closed());
        }
    })
    .unwrap();
}

#[test]
fn ranks_that_open_different_communicators_or_none_are_refused_and_the_world_goes_on() {
    let (config, cases) = (config(LOAD_STORE), cases(2, 1));
    in_threads(2, &config, |world| {
        let all: Vec<_> = cases.iter().map(options).collect();
        let fails = |mine: &[CommunicatorOptions], text: &str| {
            let error = together(mine.to_vec()).open(world, &config).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        };
        fails(&all[..2 + world.rank() as usize], "users of the session");
        let other = CommunicatorOptions { topk: all[1].topk + world.rank(), ..all[1] };
        fails(&[all[0], other], "topk");
        fails(&[], "found no options");
        let (mut comm, round) = open(world, &config, &cases[..1]).remove(0);
        round.run(&mut comm).unwrap();
        comm.close().unwrap();
    })
    .unwrap();
}
