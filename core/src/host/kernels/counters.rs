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
    use std::ffi::c_void;
    use std::sync::{Arc, LazyLock, Mutex};

    use super::*;
    use crate::host::registry::KernelsRef;
    use crate::host::{Attended, OpenKernels};

    /// The calls of the thread under test, and what they were inside of each slot.
    static CALLS: LazyLock<Arc<Attended>> = LazyLock::new(Arc::default);
    static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

    fn look() {
        let call = CALLS.now().map_or("not watched".to_owned(), |call| call.to_string());
        SEEN.lock().unwrap().push(call);
    }

    unsafe extern "C" fn query(
        _: *mut c_void,
        tag: u32,
        _: *mut c_void,
        _: *mut abi::TyError,
    ) -> i32 {
        if tag != abi::TY_QUERY_COUNTERS {
            return abi::TY_UNSUPPORTED;
        }
        look();
        abi::TY_OK
    }

    unsafe extern "C" fn close(_: *mut c_void) {
        look();
    }

    #[test]
    fn a_kernel_set_that_stays_inside_of_counters_or_close_can_be_named() {
        // SAFETY: tables are made of integers, pointers and optional functions, for which zero is a value.
        let mut table: abi::TyKernelsTable = unsafe { std::mem::zeroed() };
        table.name = crate::export::static_str("acme");
        table.query = Some(query);
        let component = KernelsRef::judged(Box::leak(Box::new(table)));
        let instance = std::ptr::null_mut();
        let mut kernels = OpenKernels { component, instance, close, levels: None };
        Arc::clone(&CALLS).attend(|| {
            assert!(kernels.counters(2).unwrap().is_none());
            drop(kernels);
        });
        let says = |slot| format!("kernel set `acme` is inside of `{slot}`");
        assert_eq!(*SEEN.lock().unwrap(), [says("counters"), says("close")]);
    }

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
