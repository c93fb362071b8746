//! L1: the bytes of shards, of each length, of several tensors, with few and many calls in flight.

use anyhow::Result;
use tokenyard_core::ops::gather::GatherOptions;

use super::end::GatherEnd;
use crate::ops::bodies::stream;
use crate::ops::case::{CaseBody, EndCase};

/// Most bytes of a rank's shards, where a case does not ask for more.
const MOST: usize = 4099;

/// Several tensors, none, and some without bytes, with lengths about those of a cache line, and the most.
const LENGTHS: &[&[usize]] =
    &[&[1000], &[0], &[], &[1, 64, 3], &[MOST], &[512, 0, 513], &[63, 65], &[0, 0, 8]];

/// More than fits a length of 20 bits, and several puts where a transport takes no large ones.
const LARGE: usize = (1 << 20) + 5;

pub(super) fn cases() -> Vec<EndCase<GatherEnd>> {
    let case = |name, ranks, in_flight, body: fn(&mut GatherEnd) -> Result<()>| EndCase {
        name,
        about: "each rank gets the shards of all ranks in order, each byte of them",
        ranks,
        options: GatherOptions { max_bytes: MOST as u64, in_flight, reduces: false },
        lengths: LENGTHS,
        body: CaseBody::Alone(body),
    };
    vec![
        case("lengths", 2, 2, whole_calls),
        case("in_flight_1", 2, 1, |end| stream(end, 40)),
        case("in_flight_2", 3, 2, |end| stream(end, 40)),
        case("in_flight_32", 2, 32, |end| stream(end, 80)),
        EndCase {
            name: "large",
            about: "the shards of a rank may need several puts",
            ranks: 2,
            options: GatherOptions { max_bytes: LARGE as u64, in_flight: 1, reduces: false },
            lengths: &[&[LARGE], &[1], &[7, LARGE - 7]],
            body: CaseBody::Alone(|end| stream(end, 6)),
        },
    ]
}

fn whole_calls(end: &mut GatherEnd) -> Result<()> {
    (0..3 * LENGTHS.len()).try_for_each(|_| end.pass())
}
