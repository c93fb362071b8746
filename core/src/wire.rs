//! The addresses that ranks exchange: one encoding for all transports, over serde and postcard.
//!
//! ```text
//! magic (4 bytes) | version (4) | the value, by postcard | FNV-1a of all before (8)
//! ```
//!
//! Little-endian. Every byte that arrives is checked, because it comes from another process: bytes of a wrong
//! length, or in another encoding than this one, are refused. The checksum detects accidents, not attacks.
//! The reader of a value checks its meaning.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, ErrorKind, Result};

const HEAD: usize = 8;
const SUM: usize = 8;

/// A kind of messages between ranks.
#[derive(Clone, Copy, Debug)]
pub struct Wire {
    /// The operation in errors: `read endpoint`.
    pub operation: &'static str,
    /// First bytes.
    pub magic: [u8; 4],
    /// A new number for each change of the value's fields.
    pub version: u32,
}

impl Wire {
    /// The bytes of a value.
    pub fn write(&self, value: &impl Serialize) -> Vec<u8> {
        let mut out = [self.magic, self.version.to_le_bytes()].concat();
        // A value of numbers, lists and texts can always be written into memory.
        out.extend(postcard::to_stdvec(value).unwrap_or_default());
        with_checksum(out)
    }

    /// Reads a peer's bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`], with the values found and expected.
    pub fn read<T: Serialize + DeserializeOwned>(&self, data: &[u8]) -> Result<T> {
        if let Some(found) = data.first_chunk::<4>().filter(|found| **found != self.magic) {
            let (found, expected) = (found.escape_ascii(), self.magic.escape_ascii());
            return Err(self.refuse(format!("found magic {found}; expected {expected}")));
        }
        let cut = data.len().checked_sub(SUM).filter(|end| *end >= HEAD);
        let Some((rest, sum)) = cut.map(|end| data.split_at(end)) else {
            let least = HEAD + SUM;
            return Err(
                self.refuse(format!("found {} bytes; expected at least {least}", data.len()))
            );
        };
        let (head, body) = rest.split_at(HEAD);
        let version = head.last_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        self.check(version == self.version, || {
            format!("found version {version}; expected {}", self.version)
        })?;
        if sum != checksum(rest).to_le_bytes() {
            return Err(self.refuse("the bytes do not fit their checksum: they were damaged"));
        }
        let value: T = postcard::from_bytes(body)
            .map_err(|error| self.refuse(format!("found a value that cannot be read: {error}")))?;
        if self.write(&value) != data {
            return Err(self.refuse("found a value in another form than it is written in"));
        }
        Ok(value)
    }

    /// The error for bytes, or a value, of a peer.
    pub(crate) fn refuse(&self, message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Protocol, self.operation, message)
            .with_fix("run the same version of tokenyard on all ranks")
    }

    /// Refuses a value that breaks a rule.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] with the message, for the operation of this format.
    pub fn check(&self, holds: bool, message: impl FnOnce() -> String) -> Result<()> {
        if holds { Ok(()) } else { Err(self.refuse(message())) }
    }
}

/// Appends the checksum. A function of its own for fuzzers, which could not guess it.
pub fn with_checksum(mut data: Vec<u8>) -> Vec<u8> {
    data.extend(checksum(&data).to_le_bytes());
    data
}

fn checksum(data: &[u8]) -> u64 {
    data.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests fail by panic")]
mod tests {
    use super::*;

    const WIRE: Wire = Wire { operation: "read test", magic: *b"TYTS", version: 3 };

    type Value = (u32, Vec<(u64, String)>);

    fn sample() -> Value {
        (7, vec![(u64::MAX, "one".into()), (0, String::new())])
    }

    #[test]
    fn a_value_survives_the_trip() {
        let bytes = WIRE.write(&sample());
        assert_eq!(WIRE.read::<Value>(&bytes).unwrap(), sample());
    }

    #[test]
    fn every_truncation_every_extension_and_every_altered_bit_is_refused() {
        let good = WIRE.write(&sample());
        let refused = |bytes: &[u8]| WIRE.read::<Value>(bytes).unwrap_err();
        for end in 0..good.len() {
            assert_eq!(refused(&good[..end]).kind(), ErrorKind::Protocol, "{end} bytes");
        }
        refused(&[good.as_slice(), &[0]].concat());
        for bit in 0..8 * good.len() {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            refused(&bytes);
        }
    }

    /// The refusal of a body whose checksum fits.
    fn of_body(body: &[u8]) -> String {
        let mut bytes = [WIRE.magic, WIRE.version.to_le_bytes()].concat();
        bytes.extend(body);
        WIRE.read::<Value>(&with_checksum(bytes)).unwrap_err().to_string()
    }

    #[test]
    fn a_wrong_head_and_a_body_in_another_form_are_named() {
        let other =
            |wire: Wire| WIRE.read::<Value>(&wire.write(&sample())).unwrap_err().to_string();
        assert!(
            other(Wire { magic: *b"TYXX", ..WIRE }).contains("found magic TYXX; expected TYTS")
        );
        assert!(other(Wire { version: 4, ..WIRE }).contains("found version 4; expected 3"));
        assert!(of_body(&[]).contains("cannot be read"));
        // Seven, as a number of two bytes.
        assert!(of_body(&[0x87, 0, 0]).contains("in another form"));
        // A list with an announced length beyond memory.
        assert!(of_body(&[7, 0xff, 0xff, 0xff, 0xff, 0x0f]).contains("cannot be read"));
        // Bytes after the value.
        assert!(of_body(&[7, 0, 9]).contains("in another form"));
    }
}
