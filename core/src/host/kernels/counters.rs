//! Checks of a kernel set's counters for reports.

use crate::{Error, ErrorKind, Result, abi};

/// Checks that counters can be read as atomic words of a world of `ranks`.
pub(super) fn check(counters: &abi::TyCounters, ranks: u32) -> Result<()> {
    let is_aligned = |address: usize| address.is_multiple_of(size_of::<u64>());
    let fits = is_aligned(counters.peers.addr()) && is_aligned(counters.raised.addr());
    let is_there = counters.signals == 0 || !counters.raised.is_null();
    if counters.ranks == ranks && is_there && fits {
        return Ok(());
    }
    let message = format!(
        "found counters of {} ranks at {:p}, {} signals of each at {:p}; expected {ranks} ranks, \
         nothing at null, and addresses that are multiples of 8",
        counters.ranks, counters.peers, counters.signals, counters.raised
    );
    Err(Error::new(ErrorKind::Plugin, "counters", message)
        .with_fix("use a kernel set that was made for this version"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_that_cannot_be_read_as_atomic_words_are_refused() {
        let at = |address: usize| std::ptr::without_provenance(address);
        let counters = |peers: usize, signals: u32, raised: usize| abi::TyCounters {
            size: size_of::<abi::TyCounters>(),
            ranks: 2,
            signals,
            queue_depth: [0; 2],
            peers: at(peers),
            raised: at(raised).cast(),
        };
        for good in [counters(4096, 3, 8192), counters(4096, 0, 0)] {
            assert!(check(&good, 2).is_ok());
            assert!(check(&good, 3).is_err(), "of another world");
        }
        for bad in [counters(4100, 3, 8192), counters(4096, 3, 8193), counters(4096, 3, 0)] {
            let error = check(&bad, 2).expect_err("not words").to_string();
            assert!(error.contains("addresses that are multiples of 8"), "{error}");
        }
    }
}
