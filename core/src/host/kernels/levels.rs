//! Operations over two levels: each is composed of two direct exchanges of the kernel set.
//!
//! A dispatch goes over the *rail* first: every row crosses to its forwarder in each domain that wants it, the rank
//! there with its source's index. These rows are dispatched to the *owners* inside the domain, with the source
//! domains as groups, so that the order of received rows is that of one domain. A combine goes the other way:
//! inside, each forwarder gets the sums for the rows that it had forwarded; over the rail, sources sum one
//! row per domain.
//!
//! A set with a queue may return from an exchange before that has ended. The next one then follows it on the device,
//! where it finds T and refusals, so no host waits between the levels; the last one returns what came of all. A set
//! without a queue waits in each call.
//!
//! A refusal in one exchange is passed to the next, and a round without rows on the rail carries it from domain to
//! domain. Where losses are masked a rail may be cut, so another round inside tells all ranks of a domain what one
//! of them has learned. So all ranks that still have a path to each other end an operation alike.

use super::OpenKernels;
use crate::call::{AgreeCall, CombineCall, DispatchCall, ExchangeKind};
use crate::kernels::KernelCall;
use crate::refusal::{CallRefusal, Objection};
use crate::{Error, ErrorKind, Result};

/// This rank, and whether losses are masked.
#[derive(Clone, Copy, Debug)]
pub(super) struct TwoLevels {
    rank: u32,
    masked: bool,
}

fn internal<T>(text: &str) -> Result<T> {
    Err(Error::new(ErrorKind::Internal, "agree among domains", text))
}

fn refusal_of(objection: &Option<Objection>) -> Option<CallRefusal<'_>> {
    objection.as_ref().map(Objection::refusal)
}

impl OpenKernels {
    /// From now on, operations are composed of an exchange on the rail and one inside the domain. `masked`: ranks
    /// go on without lost ones.
    pub(crate) fn compose(&mut self, rank: u32, masked: bool) {
        self.levels = Some(TwoLevels { rank, masked });
    }

    /// Starts a dispatch.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// Tensors stay valid and unchanged until the operation was received, and a stream that is named
    /// has passed it.
    pub unsafe fn dispatch_send(&mut self, dispatch: &DispatchCall<'_>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe {
            match self.levels {
                None => self.dispatch_one(dispatch),
                Some(levels) => self.dispatch_both(levels, dispatch),
            }
        }
    }

    /// Starts a combine.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// Tensors stay valid until the operation was received, and a stream that is named has passed it.
    pub unsafe fn combine_send(&mut self, combine: &CombineCall<'_>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe {
            match self.levels {
                None => self.combine_one(combine),
                Some(levels) => self.combine_both(levels, combine),
            }
        }
    }

    /// # Safety
    /// As [`dispatch_send`](Self::dispatch_send).
    unsafe fn dispatch_one(&mut self, dispatch: &DispatchCall<'_>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.make(KernelCall::DispatchSend(dispatch)) }
    }

    /// # Safety
    /// As [`combine_send`](Self::combine_send).
    unsafe fn combine_one(&mut self, combine: &CombineCall<'_>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.make(KernelCall::CombineSend(combine)) }
    }

    /// # Safety
    /// As [`dispatch_send`](Self::dispatch_send).
    unsafe fn dispatch_both(&mut self, levels: TwoLevels, call: &DispatchCall<'_>) -> Result<()> {
        let rail = DispatchCall { exchange: ExchangeKind::Rail, ..*call };
        // SAFETY: by this function's contract.
        let outer = levels.objection(unsafe { self.dispatch_one(&rail) })?;
        let owners = DispatchCall { refusal: refusal_of(&outer), ..*call };
        // SAFETY: by this function's contract.
        let inner = levels.objection(unsafe { self.dispatch_one(&owners) })?;
        if outer.is_some() && inner.is_none() {
            return internal("ranks of a domain went on after a refusal on a rail");
        }
        let operation = call.operation;
        let Some(agreed) = self.agree_on_both(levels, round(operation, &inner))? else {
            return match inner {
                None => Ok(()),
                Some(_) => internal("ranks of other domains went on after a refusal"),
            };
        };
        if inner.is_none() {
            // Inside this domain rows are on their way. They arrive, and are delivered to no caller.
            let received = self.dispatch_recv(operation)?;
            self.release(received.region);
        }
        Err(agreed.into_error(outer.or(inner)))
    }

    /// # Safety
    /// As [`combine_send`](Self::combine_send).
    unsafe fn combine_both(&mut self, levels: TwoLevels, call: &CombineCall<'_>) -> Result<()> {
        // SAFETY: by this function's contract.
        let inner = levels.objection(unsafe { self.combine_one(call) })?;
        let agree = AgreeCall { is_combine: true, ..round(call.operation, &inner) };
        let agreed = self.agree_on_both(levels, agree)?;
        let refusal = refusal_of(&agreed);
        let rail = CombineCall { exchange: ExchangeKind::Rail, refusal, ..*call };
        // SAFETY: by this function's contract.
        match levels.objection(unsafe { self.combine_one(&rail) })? {
            Some(outer) => Err(outer.into_error(inner)),
            None if inner.is_none() && agreed.is_none() => Ok(()),
            None => internal("ranks of a rail went on after a refusal"),
        }
    }

    /// Passes on a refusal, and learns those of others: between domains, and where a rail may be cut, inside.
    fn agree_on_both(
        &mut self,
        levels: TwoLevels,
        round: AgreeCall<'_>,
    ) -> Result<Option<Objection>> {
        let between = self.agree(levels, &round)?;
        if !levels.masked {
            return Ok(between);
        }
        let (exchange, refusal) = (ExchangeKind::Owners, refusal_of(&between));
        self.agree(levels, &AgreeCall { exchange, refusal, ..round })
    }

    fn agree(&mut self, levels: TwoLevels, round: &AgreeCall<'_>) -> Result<Option<Objection>> {
        // SAFETY: a call without memory of the caller.
        let agreed = unsafe { self.make(KernelCall::Agree(round)) };
        levels.objection(agreed)
    }
}

/// A round on the rail.
fn round(operation: u64, known: &Option<Objection>) -> AgreeCall<'_> {
    AgreeCall {
        operation,
        exchange: ExchangeKind::Rail,
        is_combine: false,
        refusal: refusal_of(known),
    }
}

impl TwoLevels {
    /// The objection that an exchange ended with, if it did.
    ///
    /// # Errors
    /// An error that closes the communicator.
    fn objection(&self, end: Result<()>) -> Result<Option<Objection>> {
        match end {
            Ok(()) => Ok(None),
            Err(error) => Objection::of(error, self.rank).map(Some),
        }
    }
}
