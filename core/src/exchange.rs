//! The exchange of bytes among the ranks of a team while their transports open, before endpoints exist.
//!
//! On the host's side, an [`Exchange`] is that of the world. It crosses the ABI as [`abi::TyExchange`],
//! and a component written in Rust sees it as an [`Exchange`] again.

use std::ffi::c_void;
use std::fmt::Debug;

use crate::bootstrap::World;
use crate::export::{guarded, read_error};
use crate::{Error, ErrorKind, Result, abi};

const OPERATION: &str = "exchange";

/// An all-gather among the ranks of a team while they open a transport. Used by the thread that opens it,
/// and only during `open`.
pub trait Exchange: Debug {
    /// The bytes of each rank of the team, in the team's order. Collective: all ranks pass equally many
    /// bytes, at most [`abi::TY_EXCHANGE_BYTES`], and call it equally often; so do the ranks of the same
    /// component's other teams.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`] where a rank passed another number of bytes; the bootstrap's error for a
    /// rank that does not arrive; [`ErrorKind::Unsupported`] where a tool opens the transport alone.
    fn all_gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>>;
}

/// The exchange of a transport that is opened alone, without ranks that could answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoExchange;

impl Exchange for NoExchange {
    fn all_gather(&self, _: &[u8]) -> Result<Vec<Vec<u8>>> {
        let message = "this host opens the transport alone, without an exchange among the ranks";
        Err(Error::new(ErrorKind::Unsupported, OPERATION, message))
    }
}

/// The exchange of the team of all ranks.
impl Exchange for World {
    fn all_gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.all_gather("transport exchange", mine)
    }
}

/// An exchange in its form for the ABI.
#[derive(Debug)]
pub(crate) struct Given<'a> {
    exchange: &'a dyn Exchange,
    ranks: usize,
}

impl<'a> Given<'a> {
    pub(crate) fn new(exchange: &'a dyn Exchange, ranks: usize) -> Self {
        Self { exchange, ranks }
    }

    /// Points to `self`.
    pub(crate) fn as_abi(&self) -> abi::TyExchange {
        abi::TyExchange {
            size: size_of::<abi::TyExchange>(),
            context: std::ptr::from_ref(self).cast_mut().cast(),
            all_gather: Some(all_gather),
        }
    }

    /// The team's bytes, rank after rank.
    fn gather(&self, mine: &[u8]) -> Result<Vec<u8>> {
        if mine.len() > abi::TY_EXCHANGE_BYTES {
            let most = abi::TY_EXCHANGE_BYTES;
            let message =
                format!("found {} bytes of this rank; expected at most {most}", mine.len());
            return Err(Error::new(ErrorKind::InvalidInput, OPERATION, message));
        }
        let all = self.exchange.all_gather(mine)?;
        if all.len() != self.ranks {
            let message = format!("found bytes of {} ranks; expected {}", all.len(), self.ranks);
            return Err(Error::new(ErrorKind::Internal, OPERATION, message));
        }
        let (found, expected) = (all.iter().position(|one| one.len() != mine.len()), mine.len());
        if let Some(peer) = found {
            let message = format!(
                "found {} bytes of peer {peer}; expected {expected}, as this rank gave",
                all[peer].len()
            );
            return Err(Error::new(ErrorKind::Mismatch, OPERATION, message)
                .with_fix("use the same version of the transport on all ranks"));
        }
        Ok(all.concat())
    }
}

unsafe extern "C" fn all_gather(
    context: *mut c_void,
    mine: *const u8,
    bytes: usize,
    all: *mut u8,
    error: *mut abi::TyError,
) -> i32 {
    guarded(OPERATION, error, || {
        // SAFETY: the context comes from `Given::as_abi`, which lives while `open` runs; the component passes
        // `bytes` bytes, and room for as many bytes of each rank (the ABI's promise).
        unsafe {
            let given = &*context.cast_const().cast::<Given<'_>>();
            let mine = if bytes == 0 { &[] } else { std::slice::from_raw_parts(mine, bytes) };
            let gathered = given.gather(mine)?;
            std::ptr::copy_nonoverlapping(gathered.as_ptr(), all, gathered.len());
        }
        Ok(())
    })
}

/// An exchange on the component's side.
#[derive(Debug)]
pub(crate) struct Taken<'a> {
    raw: Option<&'a abi::TyExchange>,
    ranks: usize,
}

impl Taken<'_> {
    /// # Safety
    /// `raw` is null or the host's exchange for a team of `ranks`, and valid while the value lives.
    pub(crate) unsafe fn new(raw: *const abi::TyExchange, ranks: usize) -> Self {
        // SAFETY: by this function's contract.
        Self { raw: unsafe { raw.as_ref() }, ranks }
    }
}

impl Exchange for Taken<'_> {
    fn all_gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let raw = self.raw.filter(|raw| raw.size >= size_of::<abi::TyExchange>());
        let Some((raw, slot)) = raw.and_then(|raw| Some((raw, raw.all_gather?))) else {
            let message = "the host offers no exchange";
            return Err(Error::new(ErrorKind::Unsupported, OPERATION, message)
                .with_fix("use a host of this version"));
        };
        let mut all = vec![0_u8; self.ranks * mine.len()];
        let mut error = crate::host::blank_error();
        // SAFETY: the host's service; `all` has room for the bytes of every rank.
        let status =
            unsafe { slot(raw.context, mine.as_ptr(), mine.len(), all.as_mut_ptr(), &mut error) };
        if status != abi::TY_OK {
            return Err(read_error(OPERATION, status, &error));
        }
        let of = |rank: usize| all[rank * mine.len()..][..mine.len()].to_vec();
        Ok((0..self.ranks).map(of).collect())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests fail by panic")]
mod tests {
    use super::*;

    /// Ranks whose bytes are known beforehand.
    #[derive(Debug)]
    struct Others(Vec<Vec<u8>>);

    impl Exchange for Others {
        fn all_gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
            Ok(std::iter::once(mine.to_vec()).chain(self.0.iter().cloned()).collect())
        }
    }

    fn through_the_abi(others: &[&[u8]], mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let others = Others(others.iter().map(|bytes| bytes.to_vec()).collect());
        let ranks = others.0.len() + 1;
        let given = Given::new(&others, ranks);
        let raw = given.as_abi();
        // SAFETY: `raw` belongs to this team and outlives the call.
        unsafe { Taken::new(&raw, ranks) }.all_gather(mine)
    }

    #[test]
    fn every_rank_s_bytes_cross_in_the_order_of_the_team() {
        let all = through_the_abi(&[b"one", b"two"], b"zer").unwrap();
        assert_eq!(all, [b"zer", b"one", b"two"]);
        assert_eq!(through_the_abi(&[b""], b"").unwrap(), [b"", b""]);
    }

    #[test]
    fn a_rank_that_gave_another_number_of_bytes_is_named() {
        let error = through_the_abi(&[b"one", b"three"], b"two").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        let text = error.to_string();
        assert!(text.contains("found 5 bytes of peer 2; expected 3"), "{text}");
    }

    #[test]
    fn more_bytes_than_the_host_takes_are_refused_before_they_are_sent() {
        let error = through_the_abi(&[], &vec![0; abi::TY_EXCHANGE_BYTES + 1]).unwrap_err();
        assert!(error.to_string().contains("expected at most 65536"), "{error}");
    }

    #[test]
    fn a_host_without_the_service_is_named() {
        // SAFETY: null stands for a host without an exchange.
        let taken = unsafe { Taken::new(std::ptr::null(), 2) };
        let text = taken.all_gather(b"x").unwrap_err().to_string();
        assert!(text.contains("the host offers no exchange"), "{text}");
        assert_eq!(NoExchange.all_gather(b"x").unwrap_err().kind(), ErrorKind::Unsupported);
    }
}
