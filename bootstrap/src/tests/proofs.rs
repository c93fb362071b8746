//! Processes at the door of rank 0 whose proof is wrong, or cannot be read.

use std::io::{Read, Write};
use std::net::TcpStream;

use super::super::frame::{FrameKind, read_frame, write_frame};
use super::super::message::{Proof, Refusal, encode};
use super::super::noise::{Handshake, Preamble};
use super::super::rendezvous::{Address, read_notice};
use super::masking::without_rank_1;
use super::*;

/// A proof that rank 0 would accept.
fn proof() -> Vec<u8> {
    encode(&Proof {
        rank: 1,
        ranks: 3,
        deadline_ms: DEADLINE.as_millis() as u64,
        late_ms: LATE.as_millis() as u64,
        on_failure: OnFailure::Mask,
        pid: 7,
        host: "here".into(),
    })
}

/// A joiner's first message, with this proof and this secret, and its side of the handshake.
fn first_message(address: &Address, proof: &[u8], secret: &Secret) -> (Handshake, Vec<u8>) {
    let mut handshake = Handshake::joiner(secret, &address.job).unwrap();
    let message = handshake.write(proof).unwrap();
    (handshake, message)
}

/// Sends `hello` to rank 0. Returns the answer: nothing where rank 0 refuses this process.
fn say(address: &Address, hello: &[u8]) -> (TcpStream, Vec<u8>) {
    let mut stream = TcpStream::connect((&*address.host, address.port)).unwrap();
    stream.set_read_timeout(Some(2 * LATE)).unwrap();
    stream.write_all(hello).unwrap();
    let mut preamble = [0; Preamble::BYTES];
    if stream.read_exact(&mut preamble).is_err() {
        return (stream, Vec::new());
    }
    let mut answer = vec![0; Preamble::parse(&preamble).unwrap().bytes.into()];
    stream.read_exact(&mut answer).unwrap();
    (stream, answer)
}

/// Claims rank 1 of three with this proof. Returns the refusal of rank 0.
fn claim(meeting: &Meeting, proof: &[u8]) -> (Refusal, String) {
    let address = read_notice(&meeting.path()).unwrap();
    let (mut handshake, hello) = first_message(&address, proof, &Secret::none());
    let (stream, answer) = say(&address, &hello);
    handshake.read(&answer).unwrap();
    let (mut sealer, mut opener) = handshake.finish().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        stream.set_nonblocking(true).unwrap();
        let mut stream = tokio::net::TcpStream::from_std(stream).unwrap();
        write_frame(&mut stream, &mut sealer, FrameKind::Confirm, &[]).await.unwrap();
        let refused =
            read_frame(&mut stream, &mut opener, &[FrameKind::Refused], || ()).await.unwrap();
        Refusal::decode(&refused.payload).unwrap()
    })
}

#[test]
fn a_process_whose_proof_cannot_be_read_learns_why_and_its_rank_stays_free_for_another() {
    without_rank_1(|meeting, world| {
        world.admit(Ask::First).unwrap();
        std::thread::scope(|scope| {
            if world.rank() == 0 {
                let right = proof();
                let mut unknown_mode = right.clone();
                unknown_mode[6] = 7;
                let longer = [&right[..], &[0]].concat();
                for (proof, says) in [
                    (&right[..5], "no such message"),
                    (&unknown_mode, "no such message"),
                    (&longer, "found 1 bytes behind the payload"),
                    (&[], "no such message"),
                ] {
                    let (refusal, why) = claim(meeting, proof);
                    assert!(refusal == Refusal::Claim && why.contains(says), "{refusal:?}: {why}");
                }
                let address = read_notice(&meeting.path()).unwrap();
                let other = Secret::from_text("the secret of another job").unwrap();
                let (_, hello) = first_message(&address, &right, &other);
                assert!(say(&address, &hello).1.is_empty(), "turned away");
                // The first message is right, but a process that repeats it cannot continue: a replay
                // may never hold the place of a handshake.
                let (mut handshake, hello) = first_message(&address, &right, &Secret::none());
                let (_stream, answer) = say(&address, &hello);
                handshake.read(&answer).unwrap();
                assert!(say(&address, &hello).1.is_empty(), "a replay is answered");
                assert!(!world.liveness().waits_to_return(1), "none of them waits to come back");
                scope.spawn(|| {
                    let back = meeting.join(1, 3).unwrap();
                    assert!(back.admit(Ask::First).unwrap().has(1));
                    back.barrier("all three").unwrap();
                });
            }
            wait_for("its wish to come back", 4 * LATE, || world.liveness().waits_to_return(1));
            assert!(world.admit(Ask::First).unwrap().has(1));
            world.barrier("all three").unwrap();
        });
    });
}
