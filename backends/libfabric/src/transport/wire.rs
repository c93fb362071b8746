//! The endpoints that ranks exchange before they connect. They come from another process, so every
//! field is checked. Only the checksum detects a damaged address, on which the provider `shm`
//! crashes. Endpoints contain registration keys, which are never logged.

use std::fmt;

use serde::{Deserialize, Serialize};
use tokenyard_core::wire::Wire;
use tokenyard_core::{Result, abi};

use super::datum::MAX_PEERS;
use crate::config::MAX_RAILS;

const WIRE: Wire = Wire { operation: "read endpoint", magic: *b"TYLF", version: 3 };
/// Longest provider name.
const MAX_PROVIDER: usize = 32;
/// Longest address of a NIC.
const MAX_ADDRESS: usize = 80;
/// Most windows of a rank, without the mailboxes.
pub(super) const MAX_WINDOWS: u32 = 12;

/// A number takes at most 10 bytes, a small number fewer.
const LONGEST: usize = 64
    + MAX_PROVIDER
    + 20 * (MAX_WINDOWS as usize + 1)
    + MAX_RAILS * (4 + MAX_ADDRESS + 10 * (MAX_WINDOWS as usize + 1));
const _: () = assert!(LONGEST <= abi::TY_ENDPOINT_BYTES);

/// The data that a peer needs to reach a rank.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
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

/// A window, the same on all rails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Extent {
    /// The remote address of its first byte: 0 for providers that address by offset.
    pub(super) base: u64,
    pub(super) bytes: u64,
}

/// One NIC.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RailEndpoint {
    /// Its address, in the provider's format.
    pub(super) address: Vec<u8>,
    /// A key per window.
    pub(super) keys: Vec<u64>,
}

// The keys are omitted.
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
        WIRE.write(self)
    }

    pub(super) fn parse(data: &[u8]) -> Result<Self> {
        let it: Self = WIRE.read(data)?;
        let (rank, ranks) = (it.rank, it.ranks);
        between("ranks in the team", ranks as usize, 1, MAX_PEERS as usize)?;
        WIRE.check(rank < ranks, || format!("found rank {rank} of {ranks}; expected less"))?;
        between("windows", it.windows.len(), 1, MAX_WINDOWS as usize + 1)?;
        between("rails", it.rails.len(), 1, MAX_RAILS)?;
        between("bytes of a provider's name", it.provider.len(), 1, MAX_PROVIDER)?;
        WIRE.check(is_name(&it.provider), || {
            "the provider's name is not one; expected a-z, 0-9, _, -, ;".into()
        })?;
        let wraps = it.windows.iter().any(|w| w.base.checked_add(w.bytes).is_none());
        WIRE.check(!wraps, || "found a window that wraps around the address space".into())?;
        for rail in &it.rails {
            between("bytes of an address", rail.address.len(), 1, MAX_ADDRESS)?;
            let (found, expected) = (rail.keys.len(), it.windows.len());
            WIRE.check(found == expected, || {
                format!("found {found} keys of a rail; expected {expected}, one per window")
            })?;
        }
        Ok(it)
    }
}

fn between(what: &str, found: usize, low: usize, high: usize) -> Result<()> {
    WIRE.check((low..=high).contains(&found), || {
        format!("found {found} {what}; expected {low} to {high}")
    })
}

/// Checks the bytes of an endpoint without connecting to it. For fuzzing.
///
/// # Errors
/// [`ErrorKind::Protocol`](tokenyard_core::ErrorKind::Protocol): the error names the found and the
/// expected value.
pub fn check_endpoint(data: &[u8]) -> Result<()> {
    Endpoint::parse(data).map(drop)
}

fn is_name(name: &str) -> bool {
    name.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || b"_-;".contains(&c))
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
    fn every_field_that_is_out_of_range_is_named() {
        type Change = fn(&mut Endpoint);
        let changes: [(&str, Change); 13] = [
            ("found rank 4 of 4", |it| it.rank = 4),
            ("found 0 ranks in the team", |it| it.ranks = 0),
            ("found 1025 ranks in the team; expected 1 to 1024", |it| it.ranks = 1025),
            ("found 0 windows", |it| it.windows.clear()),
            ("found 14 windows; expected 1 to 13", |it| it.windows = vec![it.windows[0]; 14]),
            ("found 0 rails", |it| it.rails.clear()),
            ("found 17 rails; expected 1 to 16", |it| it.rails = vec![it.rails[0].clone(); 17]),
            ("found 0 bytes of a provider's name", |it| it.provider.clear()),
            ("provider's name is not one", |it| it.provider = "t/p".into()),
            ("found 0 bytes of an address", |it| it.rails[0].address.clear()),
            ("found 81 bytes of an address", |it| it.rails[0].address = vec![0; 81]),
            ("found 1 keys of a rail; expected 2", |it| it.rails[0].keys.truncate(1)),
            ("wraps around", |it| it.windows[1].base = u64::MAX),
        ];
        for (expected, change) in changes {
            let mut it = sample(2, 1);
            change(&mut it);
            let text = Endpoint::parse(&it.to_bytes()).unwrap_err().to_string();
            assert!(text.contains(expected), "{text}; expected {expected}");
        }
    }

    #[test]
    fn keys_are_not_shown() {
        let mut endpoint = sample(1, 1);
        endpoint.rails[0].keys = vec![0x5ec_4e7];
        let text = format!("{endpoint:?}");
        assert!(!text.contains(&0x5ec_4e7_u64.to_string()) && !text.contains("5ec"), "{text}");
    }
}
