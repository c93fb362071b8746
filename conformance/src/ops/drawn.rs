//! Bytes, orders and pauses that follow from numbers, and look random.

use std::time::Duration;

use anyhow::{Result, ensure};

/// Fills the memory for bytes before they come, so that those that do not come show.
pub(super) const FILLER: u8 = 0xa5;

/// The longest pause of a rank.
const PAUSE_US: u64 = 3000;

fn mixed(number: u64) -> u64 {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// A number below `most` that follows from `number`.
fn below(number: u64, most: u64) -> u64 {
    (mixed(number) >> 33) % most
}

/// The byte at a place of the bytes `of`, a number below 2^32. It differs from those of other bytes, and at other
/// places.
fn byte(of: u64, at: usize) -> u8 {
    (mixed(of << 32 | at as u64) >> 56) as u8
}

/// So many of the bytes `of`.
pub(super) fn bytes(of: u64, length: usize) -> Vec<u8> {
    (0..length).map(|at| byte(of, at)).collect()
}

/// Compares what arrived with the bytes `of`. `what` names them.
///
/// # Errors
/// The first byte that differs.
pub(super) fn check(of: u64, found: &[u8], what: impl Fn() -> String) -> Result<()> {
    for (at, found_byte) in found.iter().enumerate() {
        let expected = byte(of, at);
        ensure!(
            *found_byte == expected,
            "{}: byte {at}: found {found_byte:#04x}; expected {expected:#04x}",
            what()
        );
    }
    Ok(())
}

/// These in an order that follows from `number`.
pub(super) fn shuffled<T: Copy>(all: &[T], number: u64) -> Vec<T> {
    let mut shuffled = all.to_vec();
    for at in (1..shuffled.len()).rev() {
        let draw = number.wrapping_mul(64).wrapping_add(at as u64);
        shuffled.swap(at, below(draw, at as u64 + 1) as usize);
    }
    shuffled
}

/// Waits for a while, or not at all, as follows from `number`.
pub(super) fn pause(number: u64) {
    if below(number, 2) == 0 {
        std::thread::sleep(Duration::from_micros(below(!number, PAUSE_US)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_other_numbers_differ_and_a_wrong_byte_is_found() {
        let what = || "these".to_owned();
        let some = bytes(0x0100_0003, 64);
        check(0x0100_0003, &some, what).unwrap();
        for other in [0x0100_0004, 0x0001_0003, 0x0200_0003] {
            let equal = bytes(other, 64).iter().zip(&some).filter(|(a, b)| a == b).count();
            assert!(equal < 4, "{other}: {equal} bytes are equal");
        }
        let mut broken = some;
        broken[63] ^= 1;
        let error = check(0x0100_0003, &broken, what).unwrap_err().to_string();
        assert!(error.starts_with("these: byte 63: found"), "{error}");
    }

    #[test]
    fn an_order_has_all_and_differs_by_number() {
        let all = [0, 1, 2, 3, 4, 5];
        let orders = [0, 1, 2].map(|number| shuffled(&all, number));
        for order in &orders {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, all);
        }
        assert!(orders[0] != orders[1] || orders[1] != orders[2], "{orders:?}");
    }
}
