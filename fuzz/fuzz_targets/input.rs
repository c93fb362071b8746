//! Any bytes as an input file: a one-line error of kind `InvalidInput`, or a file whose tokens can
//! be dealt out to ranks. The first byte chooses between the bytes as they are and bytes behind a
//! well-formed header, so that the values behind the header are reached too.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tokenyard_conformance::moe::input::InputFile;
use tokenyard_core::{Error, ErrorKind, Result};

fuzz_target!(|bytes: &[u8]| {
    let Some((way, bytes)) = bytes.split_first() else { return };
    let file = if way % 2 == 0 { bytes.to_vec() } else { framed(bytes) };
    check(InputFile::parse(&file).map(|input| {
        for ranks in [1, 2, 3, 64] {
            for experts in [None, Some(1), Some(64)] {
                check(input.case(ranks, experts).map(|case| {
                    check(input.inputs(&case).map(|inputs| assert_eq!(inputs.ranks.len(), ranks)));
                }));
            }
        }
    }));
});

/// Two tokens whose values are the bytes, as far as they go.
fn framed(bytes: &[u8]) -> Vec<u8> {
    let header = concat!(
        r#"{"__metadata__":{"num_experts":"6"},"#,
        r#""x":{"dtype":"BF16","shape":[2,8],"data_offsets":[0,32]},"#,
        r#""topk_idx":{"dtype":"I32","shape":[2,2],"data_offsets":[32,48]},"#,
        r#""topk_weights":{"dtype":"F32","shape":[2,2],"data_offsets":[48,64]}}"#,
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    let mut data = [0; 64];
    for (to, from) in data.iter_mut().zip(bytes) {
        *to = *from;
    }
    file.extend_from_slice(&data);
    file
}

fn check(result: Result<()>) {
    if let Err(error) = result {
        refused(&error);
    }
}

fn refused(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(!error.to_string().contains('\n'), "{error}");
}
