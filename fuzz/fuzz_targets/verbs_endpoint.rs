//! Any bytes as an endpoint of the verbs backend, with a checksum that fits: an error of kind `Protocol`, or an
//! endpoint whose bytes are exactly these.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tokenyard_core::ErrorKind;
use tokenyard_core::wire::with_checksum;
use tokenyard_verbs::endpoint::Endpoint;

fuzz_target!(|bytes: &[u8]| {
    let bytes = with_checksum(bytes.to_vec());
    match Endpoint::parse(&bytes) {
        Ok(endpoint) => assert_eq!(endpoint.to_bytes(), bytes, "an endpoint has one form"),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Protocol);
            assert!(!error.to_string().contains('\n'), "{error}");
        }
    }
});
