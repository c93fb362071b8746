//! The rules of a pipe, stated once more without code of the product.

use anyhow::{Result, ensure};

/// The way from one rank to another.
#[derive(Clone, Copy, Debug)]
pub(super) struct MessageWay {
    pub(super) from: u32,
    pub(super) to: u32,
}

/// Bits that follow from a number, and look random.
fn mixed(number: u64) -> u64 {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// A number below `most` that follows from `number`.
pub(super) fn below(number: u64, most: u64) -> u64 {
    (mixed(number) >> 33) % most
}

/// The byte at a place of a message. It differs from those of other messages, of other ways, and at other places.
fn byte(way: MessageWay, number: u64, at: usize) -> u8 {
    let message = (u64::from(way.from) << 8 | u64::from(way.to)) << 16 | number;
    (mixed(message << 32 | at as u64) >> 56) as u8
}

/// The bytes of a message.
pub(super) fn bytes(way: MessageWay, number: u64, length: usize) -> Vec<u8> {
    (0..length).map(|at| byte(way, number, at)).collect()
}

/// Compares what arrived with the bytes of the message.
///
/// # Errors
/// The first byte that differs.
pub(super) fn check(way: MessageWay, number: u64, found: &[u8]) -> Result<()> {
    for (at, found_byte) in found.iter().enumerate() {
        let expected = byte(way, number, at);
        ensure!(
            *found_byte == expected,
            "message {number} of {} bytes from rank {} to rank {}: byte {at}: found {found_byte:#04x}; expected \
             {expected:#04x}",
            found.len(),
            way.from,
            way.to,
        );
    }
    Ok(())
}

/// The ranks that a link joins with this one: those of its domain, and those of its place in other domains.
pub(super) fn linked(rank: u32, ranks: u32, domains: u32) -> Vec<u32> {
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
