//! Pipes of ranks that are threads, on a double of a device that copies at once.

use std::time::Duration;

use tokenyard_core::ErrorKind;

use super::*;
use crate::driver::host_device;
use crate::ops::ranks::{Ranks, shape};

const MOST: u64 = 150;
const LONG: Duration = Duration::from_secs(20);

/// Runs pipes of messages of up to [`MOST`] bytes on so many ranks.
fn run(ranks: u32, in_flight: u32, cap: Duration, body: impl Fn(u32, &mut Pipe) + Sync) {
    let shape = shape(ranks, in_flight, MOST, abi::TY_RUNS_PIPE);
    let bytes = RankPlaces::new(&shape).bytes().unwrap();
    Ranks::new(shape, bytes, cap).run(|shape, window, plan| {
        let context = host_device::context();
        // SAFETY: the ranks hold board and links until the body ends.
        let mut pipe = unsafe { Pipe::new(&context, &shape, window, plan).unwrap() };
        body(shape.rank, &mut pipe);
    });
}

fn message(peer: u32, bytes: &mut [u8], refusal: &str) -> abi::TyMessage {
    abi::TyMessage {
        size: size_of::<abi::TyMessage>(),
        data: bytes.as_mut_ptr().cast(),
        bytes: bytes.len() as u64,
        peer,
        reserved: 0,
        refusal: abi::TyStr { data: refusal.as_ptr(), bytes: refusal.len() },
    }
}

fn send(pipe: &mut Pipe, to: u32, bytes: &[u8], refusal: &str) -> Result<()> {
    let mut bytes = bytes.to_vec();
    // SAFETY: the bytes live until the call has returned, which copies them.
    unsafe { pipe.send(&message(to, &mut bytes, refusal)) }
}

fn recv(pipe: &mut Pipe, from: u32, length: usize, refusal: &str) -> Result<Vec<u8>> {
    let mut bytes = vec![0xee; length];
    // SAFETY: the bytes live until the call has returned.
    let received = unsafe { pipe.recv(&message(from, &mut bytes, refusal)) };
    if received.is_err() || !refusal.is_empty() {
        assert!(bytes.iter().all(|byte| *byte == 0xee), "{bytes:?}");
    }
    received.map(|()| bytes)
}

/// Checks that a call failed in this way, about this rank.
fn expect<T: std::fmt::Debug>(result: Result<T>, kind: ErrorKind, rank: u32) {
    let error = result.unwrap_err();
    assert_eq!((error.kind(), error.rank()), (kind, Some(rank)), "{error}");
}

#[test]
fn messages_between_all_pairs_arrive_in_order_while_as_many_as_fit_are_on_their_way() {
    for (ranks, in_flight) in [(2, 1), (3, 4)] {
        run(ranks, in_flight, LONG, |rank, pipe| {
            let of = |from: u32, number: u64| {
                let byte = (u64::from(from) * 71 + number * 13 + 1) as u8;
                vec![byte; (number * 37 % (MOST + 1)) as usize]
            };
            let peers: Vec<u32> = (0..ranks).filter(|peer| *peer != rank).collect();
            let ahead = u64::from(in_flight) - 1;
            for turn in 0..40 + ahead {
                for peer in &peers {
                    if turn < 40 {
                        send(pipe, *peer, &of(rank, turn), "").unwrap();
                    }
                }
                for peer in peers.iter().filter(|_| turn >= ahead) {
                    let expected = of(*peer, turn - ahead);
                    assert_eq!(recv(pipe, *peer, expected.len(), "").unwrap(), expected);
                }
            }
            pipe.flush().unwrap();
        });
    }
}

#[test]
fn what_one_end_of_a_message_refuses_the_other_learns_and_the_pipe_goes_on() {
    run(2, 2, LONG, |rank, pipe| {
        if rank == 0 {
            send(pipe, 1, &[1; 8], "gaps").unwrap();
            send(pipe, 1, &[2; 8], "").unwrap();
            // Slots of messages 0 and 1: the second was refused there.
            send(pipe, 1, &[3; 8], "").unwrap();
            expect(send(pipe, 1, &[4; 8], ""), ErrorKind::Refused, 1);
            send(pipe, 1, &[4; 8], "").unwrap();
            expect(pipe.flush(), ErrorKind::Mismatch, 1);
            pipe.flush().unwrap();
        } else {
            expect(recv(pipe, 0, 8, ""), ErrorKind::Refused, 0);
            recv(pipe, 0, 8, "no tensor").unwrap();
            expect(recv(pipe, 0, 9, ""), ErrorKind::Mismatch, 0);
            assert_eq!(recv(pipe, 0, 8, "").unwrap(), [4; 8]);
        }
    });
}

#[test]
fn a_receiver_that_does_not_come_ends_the_send_that_needs_its_slot() {
    run(2, 1, Duration::from_millis(100), |rank, pipe| {
        if rank == 0 {
            send(pipe, 1, &[1; 8], "").unwrap();
            expect(send(pipe, 1, &[2; 8], ""), ErrorKind::Deadline, 1);
        }
    });
}
