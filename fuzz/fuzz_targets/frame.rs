//! Any bytes where the bootstrap reads what others wrote: in the clear before a handshake, and opened
//! behind one, from a rank that holds the secret and sends nonsense. An error of kind `Protocol`, or
//! something within its bounds.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tokenyard_core::bootstrap::frame::{Head, Kind};
use tokenyard_core::bootstrap::message::check;
use tokenyard_core::bootstrap::noise::{MAX_GREETING, Preamble};
use tokenyard_core::{ErrorKind, Result};

fuzz_target!(|bytes: &[u8]| {
    if let Some((first, _)) = bytes.split_first_chunk() {
        if let Some(preamble) = refused_or(Preamble::parse(first)) {
            assert!(usize::from(preamble.bytes) <= MAX_GREETING);
            assert_eq!(&preamble.encode(), first, "a preamble has one form");
        }
    }
    if let Some((head, payload)) = refused_or(Head::parse(bytes)) {
        assert!(head.bytes as usize <= head.kind.payload_limit());
        assert!(payload.len() <= head.bytes as usize);
        refused_or(check(head.kind, payload));
    }
    for kind in Kind::ALL {
        refused_or(check(kind, bytes));
    }
});

fn refused_or<T>(result: Result<T>) -> Option<T> {
    if let Err(error) = &result {
        assert_eq!(error.kind(), ErrorKind::Protocol);
        assert!(!error.to_string().contains('\n'), "{error}");
    }
    result.ok()
}
