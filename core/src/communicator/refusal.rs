//! The end of an operation that does not succeed: this rank refuses its own input, or the operation
//! failed.

use super::course::Course;
use super::order::Mode;
use super::sort::Sort;
use crate::call::{CombineCall, DispatchCall};
use crate::moe::{Layout, ScaleLayout, SourceIndex};
use crate::refusal::CallRefusal;
use crate::{Error, ErrorKind, Result};

/// An operation whose arguments this rank refuses before the call. The layout must be that of the other
/// ranks' call: a different layout is a mismatch, as in a call that succeeds. See
/// [`Communicator::refuse`](super::Communicator::refuse).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusedCall {
    /// A dispatch of this layout.
    Dispatch(Layout),
    /// A replay of a handle of this layout.
    Replay(Layout),
    /// A combine. A combine with [weights](super::LateTopk) begins with a replay: refuse the replay.
    Combine,
}

impl Course {
    pub(super) fn refuse_in(&mut self, call: RefusedCall, why: Error, mode: &Mode<'_>) -> Error {
        // The kernel set may not take this order: then the refusal goes without it.
        let mode = if self.components.check_order(mode).is_ok() { mode } else { &Mode::default() };
        let sort = match call {
            RefusedCall::Dispatch(_) => Sort::Dispatch,
            RefusedCall::Replay(_) => Sort::Replay,
            RefusedCall::Combine => Sort::Combine,
        };
        let (operation, _inside) = match self.begin(sort) {
            Ok(begun) => begun,
            Err(error) => return error,
        };
        match call {
            RefusedCall::Dispatch(layout) => {
                let mut dispatch = DispatchCall::blank(operation, 0, layout);
                dispatch.order = mode.order();
                self.refuse_with(dispatch, why)
            }
            RefusedCall::Replay(layout) => {
                let mut replay = DispatchCall::blank(operation, 0, layout);
                replay.order = mode.order();
                replay.is_replay = true;
                self.refuse_with(replay, why)
            }
            RefusedCall::Combine => {
                let mut combine = CombineCall::blank(operation, 0);
                combine.order = mode.order();
                self.refuse_combine(combine, why)
            }
        }
    }

    /// Sends the other ranks the refusal of this rank's input, and returns the error.
    #[cold]
    pub(super) fn refuse_with(&mut self, call: DispatchCall<'_>, why: Error) -> Error {
        let detail = why.detail();
        let mut call = DispatchCall { refusal: Some(self.own_refusal(&detail)), ..call };
        call.complete(ScaleLayout::default(), SourceIndex::default());
        // SAFETY: a refused call carries no tensors.
        let sent = unsafe { self.components.kernels().dispatch_send(&call) };
        let end = sent.and_then(|()| {
            let received = self.components.kernels().dispatch_recv(call.operation)?;
            self.components.kernels().release(received.region);
            Ok(())
        });
        self.end_refused(call.operation, end, why)
    }

    /// This rank's refusal of its input.
    fn own_refusal<'a>(&self, why: &'a str) -> CallRefusal<'a> {
        CallRefusal { rank: self.rank(), is_full: false, why }
    }

    #[cold]
    pub(super) fn refuse_combine(&mut self, call: CombineCall<'_>, why: Error) -> Error {
        let detail = why.detail();
        let mut call = CombineCall { refusal: Some(self.own_refusal(&detail)), ..call };
        call.complete();
        // SAFETY: a refused call carries no tensors.
        let sent = unsafe { self.components.kernels().combine_send(&call) };
        let end = sent.and_then(|()| self.components.kernels().combine_recv(call.operation));
        self.end_refused(call.operation, end, why)
    }

    /// The kernel set must answer a refusal with `Refused`, or with `Full` where another rank reports
    /// that first; any other answer is fatal.
    fn end_refused(&mut self, operation: u64, end: Result<()>, why: Error) -> Error {
        match end {
            Err(error) if matches!(error.kind(), ErrorKind::Refused | ErrorKind::Full) => {
                self.ended(operation);
                why
            }
            Err(error) => self.end_failed(operation, error),
            Ok(()) => self.standing.end(Error::new(
                ErrorKind::Internal,
                "refuse operation",
                "the kernel set did not refuse a call that was refused",
            )),
        }
    }

    /// Decides whether the communicator survives a failed operation.
    #[cold]
    pub(crate) fn end_failed(&mut self, operation: u64, error: Error) -> Error {
        match error.kind() {
            // An error in this rank's own arguments that only the device could detect.
            ErrorKind::Refused if error.rank() == Some(self.rank()) => {
                self.ended(operation);
                Error::new(ErrorKind::InvalidInput, "check arguments", error.message())
                    .with_rank(self.rank())
            }
            ErrorKind::Refused | ErrorKind::Full => {
                self.ended(operation);
                error
            }
            _ => self.standing.fail(error),
        }
    }
}
