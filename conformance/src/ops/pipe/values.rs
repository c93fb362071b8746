//! L1: the bytes of messages, of each length, between all pairs, with few and many in flight.

use anyhow::Result;
use tokenyard_core::ops::pipe::PipeOptions;

use super::end::PipeEnd;
use crate::ops::bodies::stream;
use crate::ops::case::{CaseBody, EndCase};

/// Most bytes of a message, where a case does not ask for more.
const MOST: usize = 4099;

/// Lengths about those of a cache line, and the most.
const LENGTHS: &[usize] = &[0, 1, 63, 64, 65, 999, 4096, MOST];

/// More than fits a length of 20 bits, and several puts where a transport takes no large ones.
const LARGE: usize = (1 << 20) + 5;

pub(super) fn cases() -> Vec<EndCase<PipeEnd>> {
    let options = PipeOptions::new(MOST as u64);
    let case = |name, ranks, in_flight, body: fn(&mut PipeEnd) -> Result<()>| EndCase {
        name,
        about: "messages arrive in order, each byte of them",
        ranks,
        options: PipeOptions { in_flight, ..options },
        lengths: LENGTHS,
        body: CaseBody::Alone(body),
    };
    vec![
        case("lengths", 2, 4, |end| stream(end, 2 * LENGTHS.len() as u64)),
        case("pairs", 3, 4, |end| stream(end, LENGTHS.len() as u64)),
        case("one_way", 2, 4, one_way),
        case("in_flight_1", 2, 1, |end| stream(end, 40)),
        case("in_flight_2", 2, 2, |end| stream(end, 40)),
        case("in_flight_16", 2, 16, |end| stream(end, 80)),
        EndCase {
            name: "large",
            about: "a message may need several puts",
            ranks: 2,
            options: PipeOptions { max_bytes: LARGE as u64, in_flight: 1 },
            lengths: &[LARGE, 1],
            body: CaseBody::Alone(|end| stream(end, 4)),
        },
    ]
}

/// Nothing but credits comes back.
fn one_way(end: &mut PipeEnd) -> Result<()> {
    for _ in 0..40 {
        for at in 0..end.peers.len() {
            let peer = end.peers[at];
            if peer < end.place.rank {
                end.recv(peer)?;
            } else {
                end.send(peer)?;
            }
        }
    }
    Ok(())
}
