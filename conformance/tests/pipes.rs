//! Messages between pairs of ranks, over each kind of transport.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

mod users;

use std::sync::Arc;

use tokenyard_conformance::moe::exchange::options;
use tokenyard_conformance::moe::oracle::Case;
use tokenyard_conformance::moe::round::Round;
use tokenyard_conformance::ops::pipe::linked;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{TensorMut, TensorRef};
use tokenyard_core::ops::pipe::{Pipe, PipeOptions};
use tokenyard_core::ops::{SessionOptions, SessionUsers};
use tokenyard_core::{Error, ErrorKind};
use tokenyard_libfabric::Libfabric;
use users::{DRIVEN, PUTS, STORES, Spread, TWO_LEVELS, WORLDS, config, masked, parsed};

tokenyard_testkit::built_in_transport!(Libfabric);

/// The bytes of a message: each differs from those of every other message.
fn bytes(from: u32, to: u32, number: usize, length: usize) -> Vec<u8> {
    let seed = 31 * (7 * from + to) as usize + 1009 * number;
    (0..length).map(|at| (seed + at * (1 + number)) as u8).collect()
}

fn send(pipe: &mut Pipe, data: &[u8], to: u32) -> tokenyard_core::Result<()> {
    pipe.send(TensorRef::from_slice(data, 1, data.len()).unwrap(), to)
}

fn recv(pipe: &mut Pipe, length: usize, from: u32) -> tokenyard_core::Result<Vec<u8>> {
    let mut data = vec![0xa5_u8; length];
    pipe.recv(TensorMut::from_slice(&mut data, 1, length).unwrap(), from)?;
    Ok(data)
}

#[test]
fn messages_of_all_lengths_arrive_in_order_between_all_pairs_that_a_link_joins() {
    let lengths = [1000, 0, 1, 64, 4096, 3, 999, 512];
    for spread in WORLDS {
        let (Spread { ranks, domains, .. }, config) = (spread, spread.config());
        in_threads(ranks, &config, |world: &Arc<World>| {
            let options = PipeOptions { max_bytes: 4096, in_flight: 2 };
            let mut pipe = Pipe::open(world, &config, options).unwrap();
            let rank = pipe.rank();
            // Two are in flight, so the third send waits for the first receive of the other rank.
            for (number, length) in lengths.into_iter().enumerate() {
                for to in linked(rank, ranks, domains) {
                    send(&mut pipe, &bytes(rank, to, number, length), to).unwrap();
                }
                let Some(before) = number.checked_sub(1) else { continue };
                for from in linked(rank, ranks, domains) {
                    let found = recv(&mut pipe, lengths[before], from).unwrap();
                    assert_eq!(found, bytes(from, rank, before, lengths[before]), "{spread:?}");
                }
            }
            let last = lengths.len() - 1;
            for from in linked(rank, ranks, domains) {
                let found = recv(&mut pipe, lengths[last], from).unwrap();
                assert_eq!(found, bytes(from, rank, last, lengths[last]));
            }
            pipe.close().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn a_length_that_both_sides_do_not_share_is_an_error_on_both_and_the_pipe_goes_on() {
    for transports in [STORES, PUTS] {
        let config = config(transports);
        in_threads(2, &config, |world: &Arc<World>| {
            let mut pipe = Pipe::open(world, &config, PipeOptions::new(256)).unwrap();
            let other = 1 - pipe.rank();
            if pipe.rank() == 0 {
                send(&mut pipe, &[1; 100], other).unwrap();
                let error = pipe.flush().unwrap_err();
                assert_eq!((error.kind(), error.rank()), (ErrorKind::Mismatch, Some(1)));
                let text = error.to_string();
                assert!(text.contains("100 bytes were sent; 200 were expected"), "{text}");
                pipe.flush().unwrap();
                send(&mut pipe, &[2; 200], other).unwrap();
            } else {
                let error = recv(&mut pipe, 200, other).unwrap_err();
                assert_eq!((error.kind(), error.rank()), (ErrorKind::Mismatch, Some(0)));
                assert_eq!(recv(&mut pipe, 200, other).unwrap(), [2; 200]);
            }
            pipe.close().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn a_tensor_that_one_side_refuses_is_an_error_on_both_and_the_pipe_goes_on() {
    let config = config(PUTS);
    in_threads(2, &config, |world: &Arc<World>| {
        let mut pipe = Pipe::open(world, &config, PipeOptions::new(64)).unwrap();
        let other = 1 - pipe.rank();
        if pipe.rank() == 0 {
            let error = send(&mut pipe, &[0; 65], other).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
            send(&mut pipe, &[7; 8], other).unwrap();
            let error = pipe.flush().unwrap_err();
            assert_eq!((error.kind(), error.rank()), (ErrorKind::Refused, Some(1)));
            assert!(error.to_string().contains("found 80 bytes; expected at most 64"), "{error}");
        } else {
            let error = recv(&mut pipe, 8, other).unwrap_err();
            assert_eq!((error.kind(), error.rank()), (ErrorKind::Refused, Some(0)));
            assert!(error.to_string().contains("found 65 bytes; expected at most 64"), "{error}");
            let error = recv(&mut pipe, 80, other).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        }
        // No message goes anywhere: no other rank has to learn of it.
        for other in [pipe.rank(), 2, u32::MAX] {
            assert_eq!(send(&mut pipe, &[], other).unwrap_err().kind(), ErrorKind::InvalidInput);
        }
        pipe.close().unwrap();
    })
    .unwrap();
}

/// The sender that got its own error instead took the message for sent, and the receiver waited for it.
#[test]
fn a_send_that_is_refused_first_reports_an_earlier_message_and_can_be_made_again() {
    let config = config(STORES);
    in_threads(2, &config, |world: &Arc<World>| {
        let options = PipeOptions { max_bytes: 64, in_flight: 1 };
        let mut pipe = Pipe::open(world, &config, options).unwrap();
        let other = 1 - pipe.rank();
        if pipe.rank() == 0 {
            send(&mut pipe, &[1; 8], other).unwrap();
            for kind in [ErrorKind::Mismatch, ErrorKind::InvalidInput] {
                let error = send(&mut pipe, &[0; 65], other).unwrap_err();
                assert_eq!(error.kind(), kind, "{error}");
            }
        } else {
            for kind in [ErrorKind::Mismatch, ErrorKind::Refused] {
                let error = recv(&mut pipe, 9, other).unwrap_err();
                assert_eq!((error.kind(), error.rank()), (kind, Some(0)), "{error}");
            }
        }
        pipe.close().unwrap();
    })
    .unwrap();
}

#[test]
fn a_rank_without_a_tensor_refuses_its_side_of_a_message_and_the_pipe_goes_on() {
    for transports in [STORES, PUTS] {
        let config = config(transports);
        in_threads(2, &config, |world: &Arc<World>| {
            let mut pipe = Pipe::open(world, &config, PipeOptions::new(64)).unwrap();
            let other = 1 - pipe.rank();
            let why = |text: &str| Error::new(ErrorKind::InvalidInput, "read tensor", text);
            if pipe.rank() == 0 {
                let error = pipe.refuse_send(other, why("found no tensor"));
                assert_eq!(error.message(), "found no tensor", "{error}");
                // A reason without a word is one, too.
                let error = pipe.refuse_send(other, why(""));
                assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
                send(&mut pipe, &[7; 8], other).unwrap();
                let error = pipe.flush().unwrap_err();
                assert_eq!((error.kind(), error.rank()), (ErrorKind::Refused, Some(1)));
                assert!(error.to_string().contains("found no room"), "{error}");
            } else {
                for text in ["found no tensor", "read tensor"] {
                    let error = recv(&mut pipe, 8, other).unwrap_err();
                    assert_eq!((error.kind(), error.rank()), (ErrorKind::Refused, Some(0)));
                    assert!(error.to_string().contains(text), "{error}");
                }
                let error = pipe.refuse_recv(other, why("found no room"));
                assert_eq!(error.message(), "found no room", "{error}");
            }
            let error = pipe.refuse_send(pipe.rank(), why("found no tensor"));
            assert!(error.to_string().contains("expected another rank"), "{error}");
            pipe.close().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn a_rank_that_has_no_options_refuses_to_open_and_the_world_goes_on() {
    let config = config(STORES);
    in_threads(2, &config, |world: &Arc<World>| {
        let options = PipeOptions::new(64);
        if world.rank() == 1 {
            let why = Error::new(ErrorKind::InvalidInput, "read options", "found none");
            assert_eq!(Pipe::refuse_open(world, why).message(), "found none");
        } else {
            let error = Pipe::open(world, &config, options).unwrap_err();
            assert_eq!((error.kind(), error.rank()), (ErrorKind::Refused, Some(1)), "{error}");
        }
        Pipe::open(world, &config, options).unwrap().close().unwrap();
    })
    .unwrap();
}

#[test]
fn a_rank_that_no_link_leads_to_is_refused_by_name_on_this_rank_alone() {
    let config = TWO_LEVELS.config();
    in_threads(4, &config, |world: &Arc<World>| {
        let mut pipe = Pipe::open(world, &config, PipeOptions::new(64)).unwrap();
        let far = 3 - pipe.rank();
        let error = send(&mut pipe, &[1], far).unwrap_err();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Unsupported, Some(far)), "{error}");
        assert!(!pipe.is_closed());
        pipe.close().unwrap();
    })
    .unwrap();
}

#[test]
fn a_pipe_and_a_communicator_share_a_session_and_neither_disturbs_the_other() {
    let one = |inside| Spread { inside, ranks: 2, domains: 1 };
    for spread in [one(STORES), one(DRIVEN), TWO_LEVELS] {
        let (Spread { ranks, domains, .. }, config) = (spread, spread.config());
        in_threads(ranks, &config, |world: &Arc<World>| {
            let experts = 2 * ranks as usize;
            let shape = (ranks as usize, domains as usize);
            let case = Case { ranks: shape.0, domains: shape.1, experts, ..Case::default() };
            let all = SessionOptions {
                communicators: vec![options(&case)],
                pipes: vec![PipeOptions::new(256), PipeOptions::new(64)],
                ..SessionOptions::default()
            };
            let SessionUsers { mut communicators, pipes, .. } = all.open(world, &config).unwrap();
            let [mut wide, mut narrow] = <[Pipe; 2]>::try_from(pipes).unwrap();
            let mut comm = communicators.remove(0);
            let round = Round::new(&case, world.rank());
            let rank = world.rank();
            for to in linked(rank, ranks, domains) {
                send(&mut wide, &bytes(rank, to, 0, 200), to).unwrap();
            }
            round.run(&mut comm).unwrap();
            for other in linked(rank, ranks, domains) {
                send(&mut narrow, &bytes(rank, other, 1, 60), other).unwrap();
                let found = recv(&mut wide, 200, other).unwrap();
                assert_eq!(found, bytes(other, rank, 0, 200));
            }
            round.run(&mut comm).unwrap();
            comm.close().unwrap();
            for from in linked(rank, ranks, domains) {
                let found = recv(&mut narrow, 60, from).unwrap();
                assert_eq!(found, bytes(from, rank, 1, 60));
            }
            narrow.close().unwrap();
            wide.close().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn ranks_that_open_different_users_are_refused_by_name() {
    let config = config(STORES);
    in_threads(2, &config, |world: &Arc<World>| {
        let pipes = vec![PipeOptions::new(64); 1 + world.rank() as usize];
        let all = SessionOptions { pipes, ..SessionOptions::default() };
        let error = all.open(world, &config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        assert!(error.to_string().contains("users of the session"), "{error}");
    })
    .unwrap();
}

#[test]
fn options_that_make_no_pipe_are_refused_on_all_ranks_and_the_world_goes_on() {
    let config = config(STORES);
    in_threads(2, &config, |world: &Arc<World>| {
        let good = PipeOptions::new(64);
        for bad in [
            PipeOptions { max_bytes: 0, ..good },
            PipeOptions { max_bytes: u64::MAX, ..good },
            PipeOptions { in_flight: 0, ..good },
            PipeOptions { in_flight: 17, ..good },
        ] {
            // Rank 1 alone is wrong.
            let options = if world.rank() == 1 { bad } else { good };
            let error = Pipe::open(world, &config, options).unwrap_err();
            let kind = if world.rank() == 1 { ErrorKind::InvalidInput } else { ErrorKind::Refused };
            assert_eq!(error.kind(), kind, "{error}");
        }
        let unequal = PipeOptions::new(64 + u64::from(world.rank()));
        let error = Pipe::open(world, &config, unequal).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        Pipe::open(world, &config, good).unwrap().close().unwrap();
    })
    .unwrap();
}

#[test]
fn a_pipe_that_masks_losses_is_not_supported() {
    let config = masked();
    in_threads(2, &config, |world: &Arc<World>| {
        let error = Pipe::open(world, &config, PipeOptions::new(64)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("on_failure = \"mask\""), "{error}");
        assert!(error.to_string().contains("a pipe"), "{error}");
    })
    .unwrap();
}

#[test]
fn a_message_that_never_comes_ends_the_wait_and_names_the_rank() {
    let config = parsed("deadline_ms = 200\nlate_ms = 600", STORES);
    let meet = std::sync::Barrier::new(2);
    in_threads(2, &config, |world: &Arc<World>| {
        let mut pipe = Pipe::open(world, &config, PipeOptions::new(64)).unwrap();
        if pipe.rank() == 0 {
            let error = recv(&mut pipe, 8, 1).unwrap_err();
            assert_eq!((error.kind(), error.rank()), (ErrorKind::Deadline, Some(1)), "{error}");
            let text = error.to_string();
            assert!(text.contains("message") && text.contains("late_ms"), "{text}");
            assert!(pipe.is_closed());
            let text = recv(&mut pipe, 8, 1).unwrap_err().to_string();
            assert!(text.contains("the pipe was closed"), "{text}");
        }
        meet.wait();
    })
    .unwrap();
}
