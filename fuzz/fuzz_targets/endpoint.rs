//! Any bytes as an endpoint of the libfabric backend, with a checksum that fits: an error of kind `Protocol` on one
//! line, or an endpoint.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tokenyard_core::ErrorKind;
use tokenyard_core::wire::with_checksum;
use tokenyard_libfabric::check_endpoint;

fuzz_target!(|bytes: &[u8]| {
    if let Err(error) = check_endpoint(&with_checksum(bytes.to_vec())) {
        assert_eq!(error.kind(), ErrorKind::Protocol);
        assert!(!error.to_string().contains('\n'), "{error}");
    }
});
