//! The rules of a pipe, stated once more without code of the product.

use anyhow::Result;

use crate::ops::drawn;

/// The way from one rank to another.
#[derive(Clone, Copy, Debug)]
pub(super) struct MessageWay {
    pub(super) from: u32,
    pub(super) to: u32,
}

impl MessageWay {
    /// The number of the bytes of a message.
    fn bytes(self, number: u64) -> u64 {
        (u64::from(self.from) << 8 | u64::from(self.to)) << 16 | number
    }
}

/// The bytes of a message.
pub(super) fn bytes(way: MessageWay, number: u64, length: usize) -> Vec<u8> {
    drawn::bytes(way.bytes(number), length)
}

/// Compares what arrived with the bytes of the message.
///
/// # Errors
/// The first byte that differs.
pub(super) fn check(way: MessageWay, number: u64, found: &[u8]) -> Result<()> {
    let MessageWay { from, to } = way;
    drawn::check(way.bytes(number), found, || {
        format!("message {number} of {} bytes from rank {from} to rank {to}", found.len())
    })
}

/// The ranks that a link joins with this one: those of its domain, and those of its place in other domains.
pub fn linked(rank: u32, ranks: u32, domains: u32) -> Vec<u32> {
    let size = ranks / domains;
    let joins = |other: &u32| {
        *other != rank && (*other / size == rank / size || *other % size == rank % size)
    };
    (0..ranks).filter(joins).collect()
}

/// All ranks in an order in which a link joins each with the next.
pub(super) fn chain(ranks: u32, domains: u32) -> Vec<u32> {
    let size = ranks / domains;
    let of_domain = |domain: u32| {
        let place = move |at: u32| if domain.is_multiple_of(2) { at } else { size - 1 - at };
        (0..size).map(move |at| domain * size + place(at))
    };
    (0..domains).flat_map(of_domain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_differ_and_a_byte_of_another_one_is_found() {
        let way = MessageWay { from: 1, to: 0 };
        let message = bytes(way, 3, 64);
        check(way, 3, &message).unwrap();
        for (other, number) in
            [(way, 4), (MessageWay { from: 0, to: 1 }, 3), (MessageWay { from: 2, to: 0 }, 3)]
        {
            let equal =
                bytes(other, number, 64).iter().zip(&message).filter(|(a, b)| a == b).count();
            assert!(equal < 4, "{other:?} {number}: {equal} bytes are equal");
        }
        let mut broken = message;
        broken[63] ^= 1;
        let error = check(way, 3, &broken).unwrap_err().to_string();
        assert!(error.contains("message 3 of 64 bytes from rank 1 to rank 0: byte 63"), "{error}");
    }

    #[test]
    fn a_chain_goes_over_links_alone() {
        assert_eq!(linked(3, 6, 2), [0, 4, 5]);
        assert_eq!(linked(1, 3, 1), [0, 2]);
        assert_eq!(linked(1, 2, 2), [0]);
        for (ranks, domains) in [(3, 1), (6, 2), (12, 4)] {
            let chain = chain(ranks, domains);
            assert_eq!(chain.len(), ranks as usize);
            assert!(
                chain.windows(2).all(|two| linked(two[0], ranks, domains).contains(&two[1])),
                "{chain:?}"
            );
        }
    }
}
