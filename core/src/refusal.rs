//! Refusals: why a rank takes no part in an operation, in words that every rank gets.
//!
//! A refusal is an answer of all ranks, so it passes from exchange to exchange: as an argument of a call, and as an
//! error of one. Both forms say the same.

use crate::{Error, ErrorKind, Result, abi};

/// A refusal, and the rank that refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallRefusal<'a> {
    /// World rank.
    pub rank: u32,
    /// It has no room; else it refuses its input.
    pub is_full: bool,
    /// Its reason.
    pub why: &'a str,
}

const FULL: &str = "has no room: ";
const REFUSED: &str = "refused its input: ";

impl<'a> CallRefusal<'a> {
    /// None, as it crosses the ABI.
    pub(crate) const NONE: abi::TyRefusal = abi::TyRefusal {
        text: abi::TyStr { data: std::ptr::null(), bytes: 0 },
        rank: 0,
        is_full: 0,
    };

    /// The refusal of a call, if it has one.
    ///
    /// # Safety
    /// The text is valid for `'a`, or empty.
    pub(crate) unsafe fn from_abi(raw: &abi::TyRefusal) -> Option<Self> {
        if raw.text.bytes == 0 {
            return None;
        }
        // SAFETY: by this function's contract.
        let bytes = unsafe { std::slice::from_raw_parts(raw.text.data, raw.text.bytes) };
        // The host cuts texts between characters. Another host may not, and its refusal counts too.
        let why = std::str::from_utf8(bytes).unwrap_or("for a reason that is not UTF-8");
        Some(Self { rank: raw.rank, is_full: raw.is_full != 0, why })
    }

    /// As it crosses the ABI. Its text must live as long.
    pub(crate) fn as_abi(&self) -> abi::TyRefusal {
        // A refusal has a text, whatever its reason.
        let why = if self.why.is_empty() { "for no reason" } else { self.why };
        let text = abi::TyStr { data: why.as_ptr(), bytes: why.len() };
        abi::TyRefusal { text, rank: self.rank, is_full: self.is_full.into() }
    }

    /// The error that callers of a kernel set get.
    #[cold]
    pub fn error(&self) -> Error {
        let Self { rank, is_full, why } = *self;
        let (kind, word) =
            if is_full { (ErrorKind::Full, FULL) } else { (ErrorKind::Refused, REFUSED) };
        Error::new(kind, "enter operation", format!("rank {rank} {word}{why}")).with_rank(rank)
    }
}

/// Whether ranks go on after an error: it is a refusal, which all of them get.
pub fn is_refusal(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Refused | ErrorKind::Full)
}

/// The result of an exchange, unless it was refused: the next one has passed that on.
///
/// # Errors
/// One that is no refusal.
pub fn unless_refused<T>(ended: Result<T>) -> Result<Option<T>> {
    match ended {
        Ok(result) => Ok(Some(result)),
        Err(error) if is_refusal(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The refusal behind an error of an exchange.
#[derive(Debug)]
pub(crate) struct Objection {
    rank: u32,
    is_full: bool,
    why: String,
    error: Error,
}

impl Objection {
    /// The objection of an exchange of rank `here` that ended with `error`.
    ///
    /// # Errors
    /// The error, where it is none that all ranks get.
    pub(crate) fn of(error: Error, here: u32) -> Result<Self> {
        if !is_refusal(&error) {
            return Err(error);
        }
        let is_full = error.kind() == ErrorKind::Full;
        let rank = error.rank().unwrap_or(here);
        let start = format!("rank {rank} {}", if is_full { FULL } else { REFUSED });
        let message = error.message();
        let why = message.strip_prefix(&start).unwrap_or(message).to_owned();
        Ok(Self { rank, is_full, why, error })
    }

    /// In the form for calls.
    pub(crate) fn refusal(&self) -> CallRefusal<'_> {
        CallRefusal { rank: self.rank, is_full: self.is_full, why: &self.why }
    }

    /// The error on which all ranks agree. One that an earlier exchange gave for the same rank says as much or
    /// more: this rank's own, in its own words.
    pub(crate) fn into_error(self, earlier: Option<Self>) -> Error {
        match earlier {
            Some(earlier) if (earlier.rank, earlier.is_full) == (self.rank, self.is_full) => {
                earlier.error
            }
            _ => self.error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BAD: CallRefusal<'_> = CallRefusal { rank: 3, is_full: false, why: "expert 9" };

    #[test]
    fn a_refusal_stays_the_same_from_exchange_to_exchange() {
        for refusal in [BAD, CallRefusal { rank: 0, is_full: true, why: "rank 0 has no room: x" }] {
            // SAFETY: the text is static.
            assert_eq!(unsafe { CallRefusal::from_abi(&refusal.as_abi()) }, Some(refusal));
            let passed = Objection::of(refusal.error(), 7).unwrap();
            assert_eq!(passed.refusal(), refusal);
            assert_eq!(passed.into_error(None).to_string(), refusal.error().to_string());
        }
    }

    #[test]
    fn a_reason_is_a_text_of_any_bytes_and_no_text_is_no_refusal() {
        // SAFETY: an empty text.
        assert_eq!(unsafe { CallRefusal::from_abi(&CallRefusal::NONE) }, None);
        let text = abi::TyStr { data: b"\xff".as_ptr(), bytes: 1 };
        let odd = abi::TyRefusal { text, ..CallRefusal::NONE };
        // SAFETY: the text is static.
        assert!(unsafe { CallRefusal::from_abi(&odd) }.is_some());
        let nothing = CallRefusal { why: "", ..BAD }.as_abi();
        // SAFETY: as above.
        assert!(unsafe { CallRefusal::from_abi(&nothing) }.is_some());
    }

    #[test]
    fn an_own_objection_keeps_its_words_where_all_agree_on_it() {
        let own = || {
            let full = Error::new(ErrorKind::Full, "allocate", "4 of 5 bytes");
            Objection::of(full.with_fix("drop some"), 2).unwrap()
        };
        assert_eq!(own().refusal(), CallRefusal { rank: 2, is_full: true, why: "4 of 5 bytes" });
        let heard = |refusal: CallRefusal<'_>| Objection::of(refusal.error(), 2).unwrap();
        let agreed = heard(own().refusal()).into_error(Some(own()));
        assert_eq!(agreed.fix(), Some("drop some"));
        assert_eq!(heard(BAD).into_error(Some(own())).rank(), Some(3));
        let broken = Error::new(ErrorKind::Protocol, "enter", "torn");
        assert_eq!(Objection::of(broken, 2).unwrap_err().kind(), ErrorKind::Protocol);
    }
}
