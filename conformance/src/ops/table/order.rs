//! L2: fetches that overlap and end in another order, entries that are written anew, ranks that take no part or are
//! late, refusals, and exchanges beside them.

use anyhow::Result;
use tokenyard_core::ErrorKind;
use tokenyard_core::ops::table::TableOptions;

use super::end::TableEnd;
use super::values::OPTIONS;
use crate::ops::bodies::with_pauses;
use crate::ops::case::{CaseBody, EndCase};
use crate::ops::drawn::shuffled;
use crate::ops::end::OperationEnd;

const LENGTHS: &[usize] = &[120, 1, 0, 77];

pub(super) fn cases() -> Vec<EndCase<TableEnd>> {
    let case = |name, about, ranks, in_flight, body| EndCase {
        name,
        about,
        ranks,
        options: TableOptions { in_flight, ..OPTIONS },
        lengths: LENGTHS,
        body,
    };
    let alone = CaseBody::Alone;
    let any_order = "fetches in flight may be received in any order, another one on each rank";
    let one = "a rank fetches while the others make no call";
    let anew = "after a write, fetches give the entries of that write";
    let pauses = "a rank may be late with each half, and with each write";
    let refused = "entries that one rank cannot write are an error on all ranks, an index without an entry on its own, \
                   and the table goes on";
    let dropped = "a fetch that is never received ends without its entries, and the next ones go";
    let beside = "fetches and exchanges do not disturb each other";
    vec![
        case("any_order", any_order, 3, 5, alone(receive_in_any_order)),
        case("one_rank_alone", one, 3, 2, alone(one_rank_alone)),
        case("written_anew", anew, 3, 2, alone(write_anew)),
        case("pauses", pauses, 3, 2, alone(with_pauses)),
        case("dropped", dropped, 3, 2, alone(drop_fetches)),
        case("refused", refused, 3, 2, alone(refuse)),
        case("beside_exchanges", beside, 2, 4, CaseBody::BesideExchanges),
    ]
}

fn receive_in_any_order(end: &mut TableEnd) -> Result<()> {
    end.write_next()?;
    let rank = u64::from(end.place.rank);
    for turn in 0..8 {
        (0..end.in_flight()).try_for_each(|_| end.fetch_next())?;
        let all: Vec<usize> = (0..end.open_fetches()).collect();
        let mut left = all.clone();
        for fetch in shuffled(&all, turn << 8 | rank) {
            let at = left.iter().take_while(|open| **open != fetch).count();
            left.remove(at);
            end.recv_at(at)?;
        }
    }
    Ok(())
}

fn one_rank_alone(end: &mut TableEnd) -> Result<()> {
    end.write_next()?;
    for rank in 0..end.place.ranks {
        if end.place.rank == rank {
            for _ in 0..8 {
                end.fetch_next()?;
                end.recv_next()?;
            }
        }
        end.place.world.barrier("a rank has fetched")?;
    }
    Ok(())
}

fn write_anew(end: &mut TableEnd) -> Result<()> {
    for _ in 0..20 {
        end.write_next()?;
        end.fetch_next()?;
        end.fetch_next()?;
        end.recv_at(1)?;
        end.recv_at(0)?;
    }
    Ok(())
}

fn drop_fetches(end: &mut TableEnd) -> Result<()> {
    for _ in 0..8 {
        end.write_next()?;
        end.fetch_next()?;
        end.fetch_next()?;
        end.drop_next();
        end.fetch_next()?;
        end.recv_next()?;
        end.drop_next();
    }
    Ok(())
}

/// The last rank cannot write, or each rank fetches what is not there.
fn refuse(end: &mut TableEnd) -> Result<()> {
    let (rank, last) = (end.place.rank, end.place.ranks - 1);
    end.write_next()?;
    for _ in 0..3 {
        match rank == last {
            true => end.fail_to_write(ErrorKind::InvalidInput, None, true)?,
            false => end.fail_to_write(ErrorKind::Refused, Some(last), false)?,
        }
        let ranks = i64::from(end.place.ranks);
        let most = OPTIONS.max_entries as i64;
        // Rank 1 has one entry in layer 0, and rank 2 none.
        for index in [-1, most + 1, 2 * most, ranks * most, i64::MIN, i64::MAX] {
            end.fail_to_fetch(index)?;
        }
        // The entries of the write before are still there.
        end.fetch_next()?;
        end.recv_next()?;
    }
    Ok(())
}
