//! L1: the bytes of entries, of each width and number, with few and many fetches in flight.

use anyhow::Result;
use tokenyard_core::ops::table::TableOptions;

use super::end::TableEnd;
use crate::ops::bodies::stream;
use crate::ops::case::{CaseBody, EndCase};
use crate::ops::end::OperationEnd as _;

/// Most indices of a fetch.
const MOST: usize = 300;
const LENGTHS: &[usize] = &[MOST, 0, 1, 2, 64, 33];

/// Values and scales, on two layers.
pub(super) const OPTIONS: TableOptions = TableOptions {
    entry_bytes: 96,
    scale_bytes: 4,
    max_entries: 40,
    layers: 2,
    max_indices: MOST as u32,
    in_flight: 2,
};

/// An entry that needs several gets where a transport takes no large ones.
const LARGE: u64 = (1 << 20) + 5;

pub(super) fn cases() -> Vec<EndCase<TableEnd>> {
    let case = |name, ranks, options, body: fn(&mut TableEnd) -> Result<()>| EndCase {
        name,
        about: "each fetch gives the entries that its indices name, of any rank, each byte of them",
        ranks,
        options,
        lengths: LENGTHS,
        body: CaseBody::Alone(body),
    };
    let in_flight = |in_flight| TableOptions { in_flight, ..OPTIONS };
    let odd = TableOptions { entry_bytes: 33, scale_bytes: 0, layers: 5, ..OPTIONS };
    let large = TableOptions { entry_bytes: LARGE, max_entries: 2, max_indices: 3, ..in_flight(1) };
    vec![
        case("lengths", 2, OPTIONS, one_at_a_time),
        case("in_flight_1", 3, in_flight(1), one_at_a_time),
        case("in_flight_3", 3, in_flight(3), |end| stream(end, 40)),
        case("in_flight_32", 2, in_flight(32), |end| stream(end, 80)),
        case("odd_bytes", 2, odd, one_at_a_time),
        EndCase { lengths: &[3, 1], ..case("large", 2, large, |end| stream(end, 4)) },
    ]
}

/// Ranks write before each fetch.
fn one_at_a_time(end: &mut TableEnd) -> Result<()> {
    (0..3 * LENGTHS.len()).try_for_each(|_| {
        end.send_next()?;
        end.recv_next()
    })
}
