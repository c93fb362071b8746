//! The bytes that ranks exchange while they connect. Little-endian; every byte that comes in is
//! checked, for it comes from another process.

use crate::{Error, ErrorKind, Result};

/// Version of the endpoint and of the records.
const VERSION: u32 = 1;
/// First bytes of a record.
const MAGIC: u32 = u32::from_le_bytes(*b"TYSM");
const INTRODUCTION: u32 = 1;
const REFUSAL: u32 = 2;
/// Bytes of a refusal's text that are kept.
const MOST_TEXT: usize = 400;

/// Most windows of a rank.
pub const MAX_WINDOWS: u32 = 64;
/// Longest record.
pub(super) const RECORD_BYTES: usize = 2048;

/// 128 random bits.
pub(super) type Secret = [u8; 16];

/// Fresh random bits from the operating system.
pub(super) fn secret() -> Result<Secret> {
    let mut bits = Secret::default();
    getrandom::fill(&mut bits).map_err(|e| {
        Error::new(ErrorKind::System, "draw a secret", "no random bits").with_source(e)
    })?;
    Ok(bits)
}

/// What a peer needs to reach a rank: crosses the bootstrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Name of the rank's listening socket.
    pub(super) name: Secret,
    /// What a caller must show, and what the rank shows when it calls.
    pub(super) token: Secret,
}

impl Endpoint {
    pub(super) fn draw() -> Result<Self> {
        Ok(Self { name: secret()?, token: secret()? })
    }

    /// As it crosses the bootstrap.
    pub fn to_bytes(self) -> Vec<u8> {
        [VERSION.to_le_bytes().as_slice(), &self.name, &self.token].concat()
    }

    /// Reads what a peer gave.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] for bytes of another form or version.
    pub fn parse(data: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("read endpoint", data);
        reader.version()?;
        let endpoint = Self { name: reader.array()?, token: reader.array()? };
        reader.end()?;
        Ok(endpoint)
    }
}

/// Where a window lies behind its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes before it.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

/// What a rank says about itself when it sends its descriptors: those of its windows in order of
/// registration, then that of its signals.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Introduction {
    /// The token of the rank it is for.
    pub(super) to: Secret,
    /// The token of the rank it is from.
    pub(super) from: Secret,
    /// Index of the sender in the team.
    pub(super) sender: u32,
    /// Ranks in the team.
    pub(super) ranks: u32,
    /// Signals of the sender.
    pub(super) signals: u32,
    /// Windows of the sender.
    pub(super) windows: Vec<Extent>,
}

/// One record of a connection between two ranks.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Record {
    Introduction(Introduction),
    /// Why the sender does not want to be connected: a text for people.
    Refusal(String),
}

impl Record {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(RECORD_BYTES);
        out.extend(MAGIC.to_le_bytes());
        out.extend(VERSION.to_le_bytes());
        match self {
            Self::Introduction(it) => {
                out.extend(INTRODUCTION.to_le_bytes());
                out.extend(it.to);
                out.extend(it.from);
                for field in [it.sender, it.ranks, it.signals, it.windows.len() as u32] {
                    out.extend(field.to_le_bytes());
                }
                for window in &it.windows {
                    out.extend(window.offset.to_le_bytes());
                    out.extend(window.bytes.to_le_bytes());
                }
            }
            Self::Refusal(text) => {
                out.extend(REFUSAL.to_le_bytes());
                out.extend(text.bytes().take(MOST_TEXT));
            }
        }
        out
    }

    pub(super) fn parse(data: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("read introduction", data);
        let magic = reader.u32()?;
        if magic != MAGIC {
            return Err(reader.fail(format!("found magic {magic:#x}; expected {MAGIC:#x}")));
        }
        reader.version()?;
        match reader.u32()? {
            INTRODUCTION => Ok(Self::Introduction(Introduction::parse(reader)?)),
            REFUSAL => {
                let text = &reader.rest[..reader.rest.len().min(MOST_TEXT)];
                Ok(Self::Refusal(String::from_utf8_lossy(text).into_owned()))
            }
            kind => Err(reader.fail(format!("found a record of kind {kind}; expected 1 or 2"))),
        }
    }
}

impl Introduction {
    fn parse(mut reader: Reader<'_>) -> Result<Self> {
        let mut it = Self {
            to: reader.array()?,
            from: reader.array()?,
            sender: reader.u32()?,
            ranks: reader.u32()?,
            signals: reader.u32()?,
            windows: Vec::new(),
        };
        let windows = reader.u32()?;
        if windows > MAX_WINDOWS {
            return Err(
                reader.fail(format!("found {windows} windows; expected at most {MAX_WINDOWS}"))
            );
        }
        for _ in 0..windows {
            it.windows.push(Extent { offset: reader.u64()?, bytes: reader.u64()? });
        }
        reader.end()?;
        Ok(it)
    }
}

/// Takes fields from the front of bytes that nobody has checked yet.
struct Reader<'a> {
    operation: &'static str,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn new(operation: &'static str, rest: &'a [u8]) -> Self {
        Self { operation, rest }
    }

    fn fail(&self, message: String) -> Error {
        Error::new(ErrorKind::Protocol, self.operation, message)
            .with_fix("run the same version of tokenyard on all ranks")
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let Some((field, rest)) = self.rest.split_first_chunk::<N>() else {
            return Err(self.fail(format!("found {} bytes; expected {N} more", self.rest.len())));
        };
        self.rest = rest;
        Ok(*field)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn version(&mut self) -> Result<()> {
        match self.u32()? {
            VERSION => Ok(()),
            found => Err(self.fail(format!("found version {found}; expected {VERSION}"))),
        }
    }

    fn end(&self) -> Result<()> {
        match self.rest.len() {
            0 => Ok(()),
            more => Err(self.fail(format!("found {more} bytes after the end"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn introduction(windows: usize) -> Record {
        Record::Introduction(Introduction {
            to: [1; 16],
            from: [2; 16],
            sender: 3,
            ranks: 4,
            signals: 5,
            windows: vec![Extent { offset: 4096, bytes: 8192 }; windows],
        })
    }

    #[test]
    fn endpoints_and_records_survive_the_trip() {
        let endpoint = Endpoint::draw().unwrap();
        assert_eq!(Endpoint::parse(&endpoint.to_bytes()).unwrap(), endpoint);
        assert_ne!(Endpoint::draw().unwrap(), endpoint);
        for record in
            [introduction(0), introduction(MAX_WINDOWS as usize), Record::Refusal("no".into())]
        {
            let bytes = record.to_bytes();
            assert!(bytes.len() <= RECORD_BYTES);
            assert_eq!(Record::parse(&bytes).unwrap(), record);
        }
    }

    #[test]
    fn every_truncation_and_every_extension_is_refused() {
        let endpoint = Endpoint::draw().unwrap().to_bytes();
        for end in 0..endpoint.len() {
            assert!(Endpoint::parse(&endpoint[..end]).is_err(), "{end} bytes");
        }
        assert!(Endpoint::parse(&[endpoint.as_slice(), &[0]].concat()).is_err());
        let record = introduction(2).to_bytes();
        for end in 0..record.len() {
            assert!(Record::parse(&record[..end]).is_err(), "{end} bytes");
        }
        assert!(Record::parse(&[record.as_slice(), &[0]].concat()).is_err());
    }

    #[test]
    fn wrong_version_magic_kind_and_window_count_are_named() {
        let found = |offset: usize, value: u32| {
            let mut bytes = introduction(1).to_bytes();
            bytes[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
            Record::parse(&bytes).unwrap_err().to_string()
        };
        assert!(found(0, 7).contains("magic 0x7"));
        assert!(found(4, 7).contains("found version 7; expected 1"));
        assert!(found(8, 7).contains("kind 7"));
        assert!(found(56, u32::MAX).contains("found 4294967295 windows; expected at most 64"));
    }

    #[test]
    fn a_refusal_of_any_bytes_is_a_bounded_text() {
        let mut bytes = Record::Refusal("x".repeat(5000)).to_bytes();
        bytes.extend([0xff; 100]);
        let Record::Refusal(text) = Record::parse(&bytes).unwrap() else { panic!("no refusal") };
        assert_eq!(text.len(), MOST_TEXT);
    }
}
