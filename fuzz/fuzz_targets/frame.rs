//! Any bytes as a frame of the bootstrap: an error of kind `Protocol`, or a frame whose header says
//! exactly these bytes. A frame that parses must still fail the check of its MAC: the fuzzer does not
//! hold the key.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tokenyard_core::ErrorKind;
use tokenyard_core::bootstrap::Secret;
use tokenyard_core::bootstrap::frame::{Frame, HEADER_BYTES, MAC_BYTES};
use tokenyard_core::bootstrap::seal::{Direction, Key, Opener, Transcript};

fuzz_target!(|bytes: &[u8]| {
    let frame = match Frame::parse(bytes) {
        Ok(frame) => frame,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Protocol);
            assert!(!error.to_string().contains('\n'), "{error}");
            return;
        }
    };
    assert_eq!(HEADER_BYTES + frame.payload.len() + MAC_BYTES, bytes.len());
    let again = [&frame.header.encode()[..], frame.payload, frame.mac].concat();
    assert_eq!(again, bytes, "a header has one form");
    let mut opener = Opener::new(key(), Direction::ToHub, frame.header.sender);
    let error = opener.open(&frame).expect_err("nobody can seal without the key");
    assert_eq!(error.kind(), ErrorKind::Protocol);
});

fn key() -> Key {
    let secret = Secret::from_text("a secret of a fuzz target").expect("long enough");
    let transcript =
        Transcript { job: [1; 16], hub_nonce: [2; 32], spoke_nonce: [3; 32], rank: 1, ranks: 2 };
    Key::derive(&secret, &transcript)
}
