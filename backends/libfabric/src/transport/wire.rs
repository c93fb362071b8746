//! The bytes that ranks exchange before they connect. Little-endian; every byte that comes in is
//! checked, for it comes from another process. A checksum ends them, because there is no other way to
//! tell a damaged address, and the provider `shm` crashes on one. Registration keys are in them: they
//! are never logged.

use std::fmt;

use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::datum::MAX_PEERS;
use crate::config::MAX_RAILS;

const MAGIC: u32 = u32::from_le_bytes(*b"TYLF");
const VERSION: u32 = 2;
/// Longest provider name.
const MAX_PROVIDER: usize = 32;
/// Longest address of a NIC.
const MAX_ADDRESS: usize = 80;
/// Most windows of a rank, that of the mailboxes not counted.
pub(super) const MAX_WINDOWS: u32 = 12;

const LONGEST: usize = 4 * 6
    + 4
    + MAX_PROVIDER
    + 16 * (MAX_WINDOWS as usize + 1)
    + MAX_RAILS * (4 + MAX_ADDRESS + 8 * (MAX_WINDOWS as usize + 1))
    + 8;
const _: () = assert!(LONGEST <= abi::TY_ENDPOINT_BYTES);

/// What a peer needs to reach a rank.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Endpoint {
    /// Index of the rank in its team.
    pub(super) rank: u32,
    /// Ranks in the team.
    pub(super) ranks: u32,
    /// Its provider with all layers, for example `tcp;ofi_rxm`.
    pub(super) provider: String,
    /// Its windows in order of registration, then the mailboxes.
    pub(super) windows: Vec<Extent>,
    /// Its rails.
    pub(super) rails: Vec<RailEndpoint>,
}

/// A window, alike on all rails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// What a remote address of the first byte is: 0 for providers that count from there.
    pub(super) base: u64,
    pub(super) bytes: u64,
}

/// One NIC.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct RailEndpoint {
    /// In the provider's own form.
    pub(super) address: Vec<u8>,
    /// A key per window.
    pub(super) keys: Vec<u64>,
}

// Without the keys.
impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("rank", &self.rank)
            .field("ranks", &self.ranks)
            .field("provider", &self.provider)
            .field("windows", &self.windows)
            .field("rails", &self.rails.len())
            .finish()
    }
}

impl Endpoint {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(LONGEST);
        let number = |out: &mut Vec<u8>, value: usize| out.extend((value as u32).to_le_bytes());
        for field in [MAGIC, VERSION, self.rank, self.ranks] {
            number(&mut out, field as usize);
        }
        number(&mut out, self.windows.len());
        number(&mut out, self.rails.len());
        number(&mut out, self.provider.len());
        out.extend(self.provider.as_bytes());
        for window in &self.windows {
            out.extend(window.base.to_le_bytes());
            out.extend(window.bytes.to_le_bytes());
        }
        for rail in &self.rails {
            number(&mut out, rail.address.len());
            out.extend(&rail.address);
            rail.keys.iter().for_each(|key| out.extend(key.to_le_bytes()));
        }
        out.extend(checksum(&out).to_le_bytes());
        out
    }

    pub(super) fn parse(data: &[u8]) -> Result<Self> {
        let mut reader = Reader { rest: data };
        reader.exactly("magic", MAGIC)?;
        reader.exactly("version", VERSION)?;
        let rank = reader.u32()?;
        let ranks = reader.between("ranks in the team", 1, MAX_PEERS as usize)? as u32;
        if rank >= ranks {
            return Err(fail(format!("found rank {rank} of {ranks}; expected less")));
        }
        let windows = reader.between("windows", 1, MAX_WINDOWS as usize + 1)?;
        let rails = reader.between("rails", 1, MAX_RAILS)?;
        let provider = reader.between("bytes of a provider's name", 1, MAX_PROVIDER)?;
        let provider = reader.bytes(provider)?;
        let Some(provider) = std::str::from_utf8(provider).ok().filter(|name| is_name(name)) else {
            return Err(fail("the provider's name is not one; expected a-z, 0-9, _, -, ;".into()));
        };
        let windows = (0..windows).map(|_| reader.extent()).collect::<Result<Vec<_>>>()?;
        let rails = (0..rails).map(|_| reader.rail(windows.len())).collect::<Result<_>>()?;
        let found = reader.u64()?;
        if !reader.rest.is_empty() {
            return Err(fail(format!("found {} bytes after the end", reader.rest.len())));
        }
        let expected = checksum(&data[..data.len() - size_of::<u64>()]);
        if found != expected {
            return Err(fail("the bytes do not fit their checksum: they were damaged".into()));
        }
        Ok(Self { rank, ranks, provider: provider.to_owned(), windows, rails })
    }
}

/// Checks the bytes of an endpoint without connecting to it. For fuzzing.
///
/// # Errors
/// [`ErrorKind::Protocol`]: what was found and what was expected.
pub fn check_endpoint(data: &[u8]) -> Result<()> {
    let endpoint = Endpoint::parse(data)?;
    debug_assert_eq!(endpoint.to_bytes(), data, "an endpoint has one form");
    Ok(())
}

/// FNV-1a: against accidents, not against anybody.
fn checksum(data: &[u8]) -> u64 {
    data.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn is_name(name: &str) -> bool {
    name.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || b"_-;".contains(&c))
}

fn fail(message: String) -> Error {
    Error::new(ErrorKind::Protocol, "read endpoint", message)
        .with_fix("run the same version of tokenyard on all ranks")
}

/// Takes fields from the front of bytes that nobody has checked yet.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8]> {
        let Some((field, rest)) = self.rest.split_at_checked(count) else {
            return Err(fail(format!("found {} bytes; expected {count} more", self.rest.len())));
        };
        self.rest = rest;
        Ok(field)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut field = [0; N];
        field.copy_from_slice(self.bytes(N)?);
        Ok(field)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn exactly(&mut self, what: &str, expected: u32) -> Result<()> {
        match self.u32()? {
            found if found == expected => Ok(()),
            found => Err(fail(format!("found {what} {found:#x}; expected {expected:#x}"))),
        }
    }

    fn between(&mut self, what: &str, low: usize, high: usize) -> Result<usize> {
        match self.u32()? as usize {
            found if (low..=high).contains(&found) => Ok(found),
            found => Err(fail(format!("found {found} {what}; expected {low} to {high}"))),
        }
    }

    fn extent(&mut self) -> Result<Extent> {
        let window = Extent { base: self.u64()?, bytes: self.u64()? };
        match window.base.checked_add(window.bytes) {
            Some(_) => Ok(window),
            None => Err(fail("found a window that wraps around the address space".into())),
        }
    }

    fn rail(&mut self, windows: usize) -> Result<RailEndpoint> {
        let bytes = self.between("bytes of an address", 1, MAX_ADDRESS)?;
        let address = self.bytes(bytes)?.to_vec();
        let keys = (0..windows).map(|_| self.u64()).collect::<Result<_>>()?;
        Ok(RailEndpoint { address, keys })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(windows: usize, rails: usize) -> Endpoint {
        let rail = |n: usize| RailEndpoint {
            address: vec![n as u8; MAX_ADDRESS],
            keys: (0..windows as u64).collect(),
        };
        Endpoint {
            rank: 3,
            ranks: 4,
            provider: "tcp".into(),
            windows: vec![Extent { base: 4096, bytes: 8192 }; windows],
            rails: (0..rails).map(rail).collect(),
        }
    }

    /// The error for the sample with `value` written at `offset`.
    fn altered(offset: usize, value: &[u8]) -> String {
        let mut bytes = sample(2, 1).to_bytes();
        bytes[offset..offset + value.len()].copy_from_slice(value);
        Endpoint::parse(&bytes).unwrap_err().to_string()
    }

    #[test]
    fn endpoints_survive_the_trip_and_fit() {
        for (windows, rails) in [(1, 1), (3, 2), (MAX_WINDOWS as usize + 1, MAX_RAILS)] {
            let endpoint = sample(windows, rails);
            let bytes = endpoint.to_bytes();
            assert!(bytes.len() <= abi::TY_ENDPOINT_BYTES, "{}", bytes.len());
            assert_eq!(Endpoint::parse(&bytes).unwrap(), endpoint);
            check_endpoint(&bytes).unwrap();
        }
    }

    #[test]
    fn every_truncation_and_every_extension_is_refused() {
        let bytes = sample(2, 2).to_bytes();
        for end in 0..bytes.len() {
            assert!(Endpoint::parse(&bytes[..end]).is_err(), "{end} bytes");
        }
        let longer = Endpoint::parse(&[bytes.as_slice(), &[0]].concat()).unwrap_err();
        assert!(longer.to_string().contains("1 bytes after the end"), "{longer}");
    }

    #[test]
    fn every_altered_bit_is_refused() {
        let good = sample(1, 1).to_bytes();
        for bit in 0..8 * good.len() {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Endpoint::parse(&bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn every_field_that_is_out_of_range_is_named() {
        let four = |value: u32| value.to_le_bytes();
        for (offset, value, words) in [
            (0, four(7), "found magic 0x7"),
            (4, four(1), "found version 0x1; expected 0x2"),
            (8, four(4), "found rank 4 of 4"),
            (12, four(0), "found 0 ranks in the team"),
            (12, four(1025), "found 1025 ranks in the team; expected 1 to 1024"),
            (16, four(0), "found 0 windows"),
            (16, four(14), "found 14 windows; expected 1 to 13"),
            (20, four(0), "found 0 rails"),
            (20, four(17), "found 17 rails; expected 1 to 16"),
            (24, four(0), "bytes of a provider's name"),
            (24, four(33), "found 33 bytes of a provider's name"),
            (63, four(0), "found 0 bytes of an address"),
            (63, four(81), "found 81 bytes of an address; expected 1 to 80"),
        ] {
            let text = altered(offset, &value);
            assert!(text.contains(words), "{offset}: {text}");
        }
        assert!(altered(28, b"t/p").contains("provider's name is not one"));
        assert!(altered(28, &[0xff; 3]).contains("provider's name is not one"));
        assert!(altered(31, &[0xff; 16]).contains("wraps around"));
    }

    #[test]
    fn keys_are_not_shown() {
        let mut endpoint = sample(1, 1);
        endpoint.rails[0].keys = vec![0x5ec_4e7];
        let text = format!("{endpoint:?}");
        assert!(!text.contains(&0x5ec_4e7_u64.to_string()) && !text.contains("5ec"), "{text}");
    }
}
