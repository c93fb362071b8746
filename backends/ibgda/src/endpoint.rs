//! The endpoint, by which a peer reaches this rank: that of `verbs`, with another name. Its queue pairs are
//! those of the host, one for each queue, and then those of kernels.

use tokenyard_core::Result;
use tokenyard_core::wire::Wire;
use tokenyard_verbs::endpoint::{Endpoint, SignalArea};

pub(crate) const WIRE: Wire = Wire { operation: "read endpoint", magic: *b"TYIG", version: 1 };

/// Parses the bytes of a peer.
///
/// # Errors
/// [`ErrorKind::Protocol`](tokenyard_core::ErrorKind::Protocol), naming the field.
pub fn parse(data: &[u8]) -> Result<Endpoint> {
    let endpoint = Endpoint::parse_of(&WIRE, data)?;
    let atomic = matches!(endpoint.signals, SignalArea::Atomic { .. });
    WIRE.check(atomic, || "found immediate signals; expected atomic ones".to_owned())?;
    Ok(endpoint)
}

/// The place and the key of a rank's signals.
pub(crate) fn signals(endpoint: &Endpoint) -> (u64, u32) {
    match endpoint.signals {
        SignalArea::Atomic { address, key } => (address, key.0),
        SignalArea::Immediate => (0, 0),
    }
}

#[cfg(test)]
mod tests {
    use tokenyard_core::ErrorKind;
    use tokenyard_verbs::endpoint::{Key, RemoteQp};

    use super::*;

    #[test]
    fn only_an_endpoint_of_this_transport_with_atomic_signals_is_taken() {
        let endpoint = Endpoint {
            sender: 1,
            receiver: 0,
            ranks: 2,
            link_layer: 1,
            mtu: 5,
            reads: 16,
            lid: 3,
            gid: [7; 16],
            signal_count: 100,
            signals: SignalArea::Atomic { address: 4096, key: Key(9) },
            queue_pairs: vec![RemoteQp { number: 17, psn: 5 }],
            windows: Vec::new(),
        };
        let found = parse(&endpoint.to_bytes_of(&WIRE)).unwrap();
        assert_eq!((signals(&found), &found), ((4096, 9), &endpoint));
        let immediate = Endpoint { signals: SignalArea::Immediate, ..endpoint.clone() };
        for (bytes, expected) in [
            (endpoint.to_bytes(), "found magic TYVB; expected TYIG"),
            (immediate.to_bytes_of(&WIRE), "immediate signals"),
        ] {
            let error = parse(&bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
