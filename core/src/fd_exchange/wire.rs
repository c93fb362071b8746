//! The messages of ranks while they connect.

use serde::{Deserialize, Serialize};

use crate::wire::Wire;
use crate::{Error, ErrorKind, Result};

const ENDPOINT: Wire = Wire { operation: "read endpoint", magic: *b"TYSM", version: 2 };
const RECORD: Wire = Wire { operation: "read introduction", magic: *b"TYSR", version: 2 };
/// Most bytes of a refusal's text.
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

/// The data that a peer needs to reach a rank. It crosses the bootstrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Name of the rank's listening socket.
    pub(super) name: Secret,
    /// The token that a caller must present, and that the rank presents when it calls.
    pub(super) token: Secret,
}

impl Endpoint {
    pub(super) fn draw() -> Result<Self> {
        Ok(Self { name: secret()?, token: secret()? })
    }

    /// The bytes that cross the bootstrap.
    pub fn to_bytes(self) -> Vec<u8> {
        ENDPOINT.write(&self)
    }

    /// Reads a peer's bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] for bytes of another form or version.
    pub fn parse(data: &[u8]) -> Result<Self> {
        ENDPOINT.read(data)
    }
}

/// The place of a window in its descriptor's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Bytes before the window.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

/// A rank's introduction, sent with its descriptors: those of its windows in order of registration,
/// then that of its signals.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Introduction {
    /// The token of the receiving rank.
    pub(super) to: Secret,
    /// The token of the sending rank.
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
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Record {
    Introduction(Introduction),
    /// The reason why the sender refuses the connection, as text for display.
    Refusal(String),
}

impl Record {
    /// Cuts the text of a refusal to this length.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Refusal(text) if text.len() > MOST_TEXT => {
                RECORD.write(&Self::Refusal(text.chars().take(MOST_TEXT / 4).collect()))
            }
            _ => RECORD.write(self),
        }
    }

    pub(super) fn parse(data: &[u8]) -> Result<Self> {
        let record: Self = RECORD.read(data)?;
        if let Self::Introduction(Introduction { windows, .. }) = &record {
            let found = windows.len();
            RECORD.check(found <= MAX_WINDOWS as usize, || {
                format!("found {found} windows; expected at most {MAX_WINDOWS}")
            })?;
        }
        Ok(record)
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
    fn too_many_windows_are_named() {
        let text = Record::parse(&introduction(65).to_bytes()).unwrap_err().to_string();
        assert!(text.contains("found 65 windows; expected at most 64"), "{text}");
    }

    #[test]
    fn a_refusal_is_a_bounded_text() {
        let bytes = Record::Refusal("\u{1f98a}".repeat(5000)).to_bytes();
        assert!(bytes.len() <= RECORD_BYTES);
        let Record::Refusal(text) = Record::parse(&bytes).unwrap() else { panic!("no refusal") };
        assert_eq!(text.chars().count(), 100);
    }
}
