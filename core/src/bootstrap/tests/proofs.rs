//! Processes at the door of rank 0 whose proof is wrong, or cannot be read.

use tokio::net::TcpStream;

use super::super::frame::Kind;
use super::super::link::{read_raw, write_frame};
use super::super::message::{Hello, Proof, Refusal};
use super::super::rendezvous::read_notice;
use super::super::seal::{Direction, Key, Opener, Sealer, Transcript, random};
use super::masking::without_rank_1;
use super::*;

/// A proof that rank 0 would take.
fn proof() -> Vec<u8> {
    Proof {
        deadline_ms: DEADLINE.as_millis() as u64,
        late_ms: LATE.as_millis() as u64,
        on_failure: OnFailure::Mask,
        pid: 7,
        host: "here".into(),
    }
    .encode()
}

/// Claims rank 1 of three with this proof, and a key of this secret. Returns what rank 0 says to that,
/// and whether it proves that it is rank 0.
fn claim(meeting: &Meeting, proof: &[u8], secret: &Secret) -> (Refusal, String, bool) {
    let address = read_notice(&meeting.path()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let talk = async {
        let mut stream = TcpStream::connect((&*address.host, address.port)).await.unwrap();
        let mut sealer = Sealer::new(Key::public(), Direction::ToHub, u32::MAX);
        let mut public = Opener::new(Key::public(), Direction::FromHub, 0);
        let (rank, ranks, spoke_nonce) = (1, 3, random().unwrap());
        let hello = Hello { job: address.job, nonce: spoke_nonce, rank, ranks }.encode();
        write_frame(&mut stream, &mut sealer, (Kind::Hello, 0), &hello).await.unwrap();
        let Ok(raw) = read_raw(&mut stream, &[Kind::Challenge]).await else {
            panic!("expected a challenge")
        };
        let hub_nonce = raw.open(&mut public).unwrap().try_into().unwrap();
        let transcript = Transcript { job: address.job, hub_nonce, spoke_nonce, rank, ranks };
        let key = Key::derive(secret, &transcript);
        let mut sealer = Sealer::new(key.clone(), Direction::ToHub, rank);
        write_frame(&mut stream, &mut sealer, (Kind::Proof, 0), proof).await.unwrap();
        let Ok(raw) = read_raw(&mut stream, &[Kind::Refused]).await else {
            panic!("expected a refusal")
        };
        let proven = raw.open(&mut Opener::new(key, Direction::FromHub, 0));
        let is_proven = proven.is_ok();
        let payload = proven.or_else(|_| raw.open(&mut public)).unwrap();
        let (refusal, why) = Refusal::decode(payload).unwrap();
        (refusal, why, is_proven)
    };
    runtime.block_on(talk)
}

#[test]
fn a_process_whose_proof_cannot_be_read_is_told_why_and_its_rank_stays_free_for_another() {
    without_rank_1(|meeting, world| {
        world.admit(Ask::First).unwrap();
        std::thread::scope(|scope| {
            if world.rank() == 0 {
                let (right, shared) = (proof(), Secret::none());
                let mut unknown_mode = right.clone();
                unknown_mode[16] = 7;
                let longer = [&right[..], &[0]].concat();
                for (proof, says) in [
                    (&right[..5], "found 5 bytes, expected 8 more"),
                    (&unknown_mode, "found on_failure 7, expected 0 or 1"),
                    (&longer, "found 1 bytes behind the payload"),
                    (&[], "found 0 bytes, expected 8 more"),
                ] {
                    let (refusal, why, is_proven) = claim(meeting, proof, &shared);
                    assert!(refusal == Refusal::Claim && is_proven, "{refusal:?}: {why}");
                    assert!(why.contains(says), "{why}");
                }
                let other = Secret::from_text("the secret of another job").unwrap();
                let (refusal, why, is_proven) = claim(meeting, &right, &other);
                assert!(refusal == Refusal::Secret && !is_proven, "{refusal:?}: {why}");
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
