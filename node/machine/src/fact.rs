//! A value that may be unknown on a node, with the reason.

use serde::{Serialize, Serializer};

/// A value read from a node.
///
/// In JSON a known value is the value itself; any other is `{"unknown": "missing"}` and the like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fact<T> {
    /// Read and understood.
    Known(T),
    /// No such file, or the kernel has no value to give (a link that is down has no speed).
    #[default]
    Missing,
    /// The file is there, but this process may not read it.
    Denied,
    /// The file is there and holds nothing that its format allows.
    Garbled,
}

impl<T> Fact<T> {
    /// The value, if it is known.
    pub fn known(&self) -> Option<&T> {
        match self {
            Self::Known(value) => Some(value),
            _ => None,
        }
    }

    /// The value, if it is known, by value.
    pub fn get(self) -> Option<T> {
        match self {
            Self::Known(value) => Some(value),
            _ => None,
        }
    }

    /// The reason why the value is unknown, in words for people; nothing if it is known.
    pub fn why_unknown(&self) -> Option<&'static str> {
        match self {
            Self::Known(_) => None,
            Self::Missing => Some("missing"),
            Self::Denied => Some("denied"),
            Self::Garbled => Some("garbled"),
        }
    }

    /// Unknown for the same reason, of another type; missing if this one is known.
    pub(crate) fn unknown<U>(&self) -> Fact<U> {
        match self {
            Self::Known(_) | Self::Missing => Fact::Missing,
            Self::Denied => Fact::Denied,
            Self::Garbled => Fact::Garbled,
        }
    }

    /// Another value made of this one; `None` from `make` makes it [`Fact::Garbled`].
    pub fn and_then<U>(self, make: impl FnOnce(T) -> Option<U>) -> Fact<U> {
        match self {
            Self::Known(value) => make(value).map_or(Fact::Garbled, Fact::Known),
            other => other.unknown(),
        }
    }
}

impl<T: Serialize> Serialize for Fact<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Unknown {
            unknown: &'static str,
        }
        match self {
            Self::Known(value) => value.serialize(serializer),
            other => {
                Unknown { unknown: other.why_unknown().unwrap_or("missing") }.serialize(serializer)
            }
        }
    }
}
