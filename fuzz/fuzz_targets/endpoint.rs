//! Any bytes as an endpoint of the libfabric backend: an error of kind `Protocol` on one line, or
//! an endpoint that has these bytes as its only form.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tokenyard_core::ErrorKind;
use tokenyard_libfabric::check_endpoint;

fuzz_target!(|bytes: &[u8]| {
    if let Err(error) = check_endpoint(bytes) {
        assert_eq!(error.kind(), ErrorKind::Protocol);
        assert!(!error.to_string().contains('\n'), "{error}");
    }
});
