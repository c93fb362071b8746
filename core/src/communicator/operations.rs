use std::marker::PhantomData;
use std::sync::Arc;

use super::Communicator;
use super::abandoned::Sent;
use super::arguments::{Combine, Dispatch, Replay, Sizes};
use super::memory::check_memory;
use super::output::{CombineInput, Handle, Received, RegionClaim, RoutingClaim};
use super::refusal::RefusedCall;
use super::stream::Mode;
use super::tensor::{TensorMut, TensorRef, raw_or_none};
use crate::abi;
use crate::call::{CombineCall, DispatchCall};
use crate::host::NO_TENSOR;
use crate::moe::{DType, Layout, ScaleLayout};
use crate::session::reporter::{InCall, Sort};
use crate::{Error, ErrorKind, Result};

/// A dispatch that was sent. Finish it with [`Communicator::dispatch_recv`]; until then its inputs stay
/// borrowed, and the operation counts as open.
///
/// Inputs that are [named by their addresses](TensorRef::from_memory) are borrowed for any time that the
/// caller names, `'static` too; pass the owner of their memory to [`keeping`](Self::keeping). So a framework
/// can store a pending operation in an object of its own.
#[derive(Debug)]
#[must_use = "a dispatch that is never received leaves the other ranks waiting"]
pub struct PendingDispatch<'a> {
    pub(super) sent: Sent,
    arrival: Arrival,
    tokens: usize,
    worst_case: bool,
    has_weights: bool,
    /// The handle slot that it fills.
    slot: u32,
    inputs: PhantomData<TensorRef<'a>>,
}

/// A replay that was sent. Finish it with [`Communicator::replay_recv`]; until then its inputs stay borrowed,
/// and the operation counts as open. It holds the needed state of its handle, which may be dropped.
#[derive(Debug)]
#[must_use = "a replay that is never received leaves the other ranks waiting"]
pub struct PendingReplay<'a> {
    pub(super) sent: Sent,
    arrival: Arrival,
    inputs: PhantomData<TensorRef<'a>>,
}

/// How the rows of a dispatch arrive.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    layout: Layout,
    scale_layout: ScaleLayout,
    /// M of the dispatch.
    max_tokens: u32,
}

/// A combine that was sent. Finish it with [`Communicator::combine_recv`]; until then its tensors stay
/// borrowed, as for [`PendingDispatch`]. It holds the needed state of its handle, which may be dropped.
#[derive(Debug)]
#[must_use = "a combine that is never received leaves the other ranks waiting"]
pub struct PendingCombine<'a> {
    sent: Sent,
    arguments: PhantomData<Combine<'a>>,
}

macro_rules! keeping {
    ($($pending:ident),+) => {$(
        impl $pending<'_> {
            /// Holds a value, such as the tensors of another language, until the operation was received. If
            /// it never is, other ranks may still use its tensors: the value lives on until the communicator
            /// and every pending operation of it are dropped.
            pub fn keeping(mut self, owner: impl Send + 'static) -> Self {
                self.sent.owners.push(Box::new(owner));
                self
            }
        }
    )+};
}

keeping!(PendingDispatch, PendingReplay, PendingCombine);

macro_rules! layout {
    ($($pending:ident),+) => {$(
        impl $pending<'_> {
            /// The layout of the rows that arrive.
            pub fn layout(&self) -> Layout {
                self.arrival.layout
            }

            /// How their scales will lie in memory.
            pub fn scale_layout(&self) -> ScaleLayout {
                self.arrival.scale_layout
            }
        }
    )+};
}

layout!(PendingDispatch, PendingReplay);

impl Communicator {
    /// Sends tokens to the ranks of their experts and returns the rows that arrived here.
    ///
    /// # Errors
    /// `InvalidInput` (this rank's arguments), `Refused` (another rank's), `Full` (an arena): on all
    /// ranks, before a row moves, and the communicator stays usable. Errors of other kinds close the
    /// communicator.
    pub fn dispatch(&mut self, dispatch: &Dispatch<'_>) -> Result<(Received, Handle)> {
        let pending = self.send_dispatch(dispatch, Mode::default().at_once())?;
        self.dispatch_recv(pending)
    }

    /// The first half of [`dispatch`](Self::dispatch); the caller may compute before the second.
    ///
    /// # Errors
    /// As `dispatch`.
    pub fn dispatch_send<'a>(&mut self, dispatch: &Dispatch<'a>) -> Result<PendingDispatch<'a>> {
        self.send_dispatch(dispatch, Mode::default())
    }

    pub(super) fn send_dispatch<'a>(
        &mut self,
        dispatch: &Dispatch<'a>,
        mode: Mode<'_>,
    ) -> Result<PendingDispatch<'a>> {
        let (operation, _inside) = self.begin(Sort::Dispatch)?;
        let mut call = DispatchCall::blank(operation, 0, dispatch.layout);
        let checked = self
            .order(&mut call, &mode)
            .and_then(|()| mode.mark_dispatch(&mut call, dispatch.sizes))
            .and_then(|()| self.check_call_tokens(dispatch))
            .and_then(|()| self.check_packed_forms(dispatch.forms(), dispatch.layout))
            .and_then(|()| check_memory(&dispatch.arguments(), self.components.device))
            .and_then(|()| dispatch.check(&self.shape, &mut self.scratch));
        let slot = checked.and_then(|()| self.take_handle());
        let slot = match slot {
            Ok(slot) => slot,
            Err(error) => return Err(self.refuse_with(call, error)),
        };
        let worst_case = dispatch.sizes == Sizes::WorstCase;
        call.handle = slot;
        call.worst_case = worst_case;
        call.cast = dispatch.cast;
        call.max_tokens = dispatch.max_tokens.unwrap_or(self.shape.max_tokens);
        call.x = dispatch.x.raw();
        call.scales = raw_or_none(dispatch.scales.as_ref());
        call.topk_idx = dispatch.topk_idx.raw();
        call.topk_weights = raw_or_none(dispatch.topk_weights.as_ref());
        call.complete(dispatch.scale_layout, dispatch.source_index);
        // SAFETY: the pending operation borrows for `'a`, the life of all tensors; beyond that the
        // contract of `Stream::new` holds.
        if let Err(error) = unsafe { self.components.kernels().dispatch_send(&call) } {
            self.components.claims.give_handle(slot);
            return Err(self.end_failed(operation, error));
        }
        Ok(PendingDispatch {
            sent: self.sent(operation),
            arrival: Arrival {
                layout: dispatch.layout,
                scale_layout: dispatch.scale_layout,
                max_tokens: call.max_tokens,
            },
            tokens: dispatch.topk_idx.rows(),
            worst_case,
            has_weights: dispatch.topk_weights.is_some(),
            slot,
            inputs: PhantomData,
        })
    }

    /// Sends new rows with the routing of `handle`: no counting. The rows arrive in the places of
    /// the first dispatch, in a region of their own.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn replay(&mut self, handle: &Handle, replay: &Replay<'_>) -> Result<Received> {
        let pending = self.send_replay(handle, replay, Mode::default().at_once())?;
        self.replay_recv(pending)
    }

    /// The first half of [`replay`](Self::replay); finish it with
    /// [`replay_recv`](Self::replay_recv).
    ///
    /// # Errors
    /// As `dispatch`.
    pub fn replay_send<'a>(
        &mut self,
        handle: &Handle,
        replay: &Replay<'a>,
    ) -> Result<PendingReplay<'a>> {
        self.send_replay(handle, replay, Mode::default())
    }

    pub(super) fn send_replay<'a>(
        &mut self,
        handle: &Handle,
        replay: &Replay<'a>,
        mode: Mode<'_>,
    ) -> Result<PendingReplay<'a>> {
        let (operation, _inside) = self.begin(Sort::Replay)?;
        let mut call = DispatchCall::blank(operation, handle.routing.slot, handle.layout);
        call.is_replay = true;
        call.worst_case = handle.worst_case;
        let checked = self
            .order(&mut call, &mode)
            .and_then(|()| mode.check_replay())
            .and_then(|()| check_memory(&replay.arguments(), self.components.device))
            .and_then(|()| self.check_handle(handle))
            .and_then(|()| self.check_beside(replay.is_beside(&self.shape), "x of another width"))
            .and_then(|()| self.check_packed_forms(replay.forms(), handle.layout))
            .and_then(|()| replay.check(&self.shape, handle));
        if let Err(error) = checked {
            return Err(self.refuse_with(call, error));
        }
        call.cast = replay.cast;
        call.x = replay.x.raw();
        call.scales = raw_or_none(replay.scales.as_ref());
        call.topk_weights = raw_or_none(replay.topk_weights.as_ref());
        call.complete(replay.scale_layout, replay.source_index);
        // SAFETY: as in `send_dispatch`.
        if let Err(error) = unsafe { self.components.kernels().dispatch_send(&call) } {
            return Err(self.end_failed(operation, error));
        }
        Ok(PendingReplay {
            sent: self.sent(operation).of(handle),
            arrival: Arrival {
                layout: handle.layout,
                scale_layout: replay.scale_layout,
                max_tokens: handle.max_tokens,
            },
            inputs: PhantomData,
        })
    }

    /// Finishes [`replay_send`](Self::replay_send).
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn replay_recv(&mut self, pending: PendingReplay<'_>) -> Result<Received> {
        Ok(self.receive(pending.sent, pending.arrival)?.0)
    }

    /// Finishes [`dispatch_send`](Self::dispatch_send).
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn dispatch_recv(&mut self, pending: PendingDispatch<'_>) -> Result<(Received, Handle)> {
        let components = Arc::clone(&pending.sent.components);
        let Arrival { layout, max_tokens, .. } = pending.arrival;
        let (received, claim) = match self.receive(pending.sent, pending.arrival) {
            Ok(done) => done,
            Err(error) => {
                components.claims.give_handle(pending.slot);
                return Err(error);
            }
        };
        let keeps = layout != Layout::Flat && !components.takes(abi::TY_KERNELS_CAP_NO_REGION);
        let region = keeps.then_some(claim);
        let handle = Handle {
            routing: RoutingClaim::first(&components, pending.slot, region),
            tokens: pending.tokens,
            rows: received.rows(),
            received_tokens: received.tokens(),
            layout,
            max_tokens,
            worst_case: pending.worst_case,
            has_weights: pending.has_weights,
        };
        Ok((received, handle))
    }

    /// Arena memory for the expert outputs of `handle`, so that combine need not copy them. Where the
    /// handle's dispatch was in the order of a stream, the memory may be written on that stream only.
    ///
    /// # Errors
    /// `Full`, or a type that combine cannot sum. Local: no other rank takes part.
    pub fn combine_input(&mut self, handle: &Handle, dtype: DType) -> Result<CombineInput> {
        self.check_open()?;
        self.check_handle(handle)?;
        self.took_back |= self.take_back_regions();
        if !dtype.is_summable() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "combine input",
                format!("found type {dtype}; expected bf16, fp16 or fp32"),
            ));
        }
        let (region, raw) =
            self.components.kernels().combine_input(handle.routing.slot, dtype.code())?;
        Ok(CombineInput { raw, _claim: RegionClaim::new(&self.components, region) })
    }

    /// Sends the experts' outputs back and sums them per token.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn combine(&mut self, handle: &Handle, combine: Combine<'_>) -> Result<()> {
        let pending = self.send_combine(handle, combine, Mode::default().at_once())?;
        self.combine_recv(pending)
    }

    /// The first half of [`combine`](Self::combine).
    ///
    /// # Errors
    /// As `dispatch`.
    pub fn combine_send<'a>(
        &mut self,
        handle: &Handle,
        combine: Combine<'a>,
    ) -> Result<PendingCombine<'a>> {
        self.send_combine(handle, combine, Mode::default())
    }

    pub(super) fn send_combine<'a>(
        &mut self,
        handle: &Handle,
        combine: Combine<'a>,
        mode: Mode<'_>,
    ) -> Result<PendingCombine<'a>> {
        let checked = self
            .check_order(&mode)
            .and_then(|()| self.check_mode(&mode))
            .and_then(|()| check_memory(&combine.arguments(), self.components.device))
            .and_then(|()| self.check_handle(handle))
            .and_then(|()| self.check_combine_form(&combine, handle.layout))
            .and_then(|()| combine.check(&self.shape, handle));
        // The kernel set sends weights of a call itself, or a replay carries them.
        let (own, carried) = match self.sends_weights(handle.layout) {
            true => (combine.topk, None),
            false => (None, combine.topk),
        };
        let late_weights = match (checked, &carried) {
            (Ok(()), None) => None,
            (Ok(()), Some(topk)) => Some(self.bring_weights(handle, topk)?),
            (Err(why), None) => return Err(self.refuse_in(RefusedCall::Combine, why, &mode)),
            // The other ranks send their weights now.
            (Err(why), Some(_)) => {
                return Err(self.refuse_in(RefusedCall::Replay(handle.layout), why, &mode));
            }
        };
        let (operation, _inside) = self.begin(Sort::Combine)?;
        let mut call = CombineCall::blank(operation, handle.routing.slot);
        if let Err(error) = mode.mark_combine(&mut call, handle.layout) {
            return Err(self.refuse_combine(call, error));
        }
        call.weighted = combine.weighted;
        call.round_once = combine.round_once;
        call.sum_weights = combine.sum_weights;
        call.compression = combine.compression;
        call.beside =
            late_weights.as_ref().map_or(NO_TENSOR, |late_weights| late_weights.x().raw());
        call.topk_weights = own.map_or(NO_TENSOR, |topk| topk.weights.raw());
        call.topk_idx = own.map_or(NO_TENSOR, |topk| raw_or_none(topk.ids.as_ref()));
        call.x = combine.x.raw();
        call.weights = raw_or_none(combine.weights.as_ref());
        call.bias = [0, 1].map(|index| raw_or_none(combine.bias[index].as_ref()));
        call.out = combine.out.raw();
        let raw = |out: &Option<TensorMut<'_>>| out.as_ref().map_or(NO_TENSOR, TensorMut::raw);
        (call.out_weights, call.missing) = (raw(&combine.out_weights), raw(&combine.missing));
        call.complete();
        // SAFETY: the pending operation borrows for `'a`, the life of all tensors, until it is received; the
        // contract of `Stream::new` holds until the stream has passed it. A leaked pending operation is never
        // received: then no host memory is written, and the kernel set of a device waits for its kernels
        // before it copies or frees a `Buffer`.
        let result = unsafe { self.components.kernels().combine_send(&call) };
        match result {
            Ok(()) => {
                let sent = self.sent(operation).of(handle).with(late_weights);
                Ok(PendingCombine { sent, arguments: PhantomData })
            }
            Err(error) => Err(self.end_failed(operation, error)),
        }
    }

    /// Finishes [`combine_send`](Self::combine_send): the outputs are written.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn combine_recv(&mut self, pending: PendingCombine<'_>) -> Result<()> {
        let (operation, _inside) = self.begin_receive(&pending.sent)?;
        let result = self.components.kernels().combine_recv(operation);
        pending.sent.end();
        let result = result.and_then(|()| self.components.watchdog().confirm());
        match result {
            Ok(()) => {
                self.open_slots &= !self.slot_bit(operation);
                Ok(())
            }
            Err(error) => Err(self.end_failed(operation, error)),
        }
    }

    /// Starts an operation: the communicator is open, its slot is free, and dropped regions are
    /// returned.
    pub(super) fn begin(&mut self, sort: Sort) -> Result<(u64, InCall)> {
        self.check_open()?;
        let operation = self.next_operation;
        if self.open_slots & self.slot_bit(operation) != 0 {
            let in_flight = self.options.in_flight;
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "start operation",
                format!(
                    "operation {} was sent and not received; expected that before operation \
                     {operation}, because in_flight = {in_flight}",
                    operation - u64::from(in_flight),
                ),
            )
            .with_fix(
                "receive it first: call `recv` of what was sent, in deep_ep the hook that the earlier call \
                 returned; or open the communicator with a larger in_flight (deep_ep has 4)",
            ));
        }
        self.took_back |= self.take_back_regions();
        self.next_operation += 1;
        self.components.watchdog().begin(self.next_operation);
        self.open_slots |= self.slot_bit(operation);
        self.recorder.0.track.send(operation, sort);
        Ok((operation, InCall::new(&self.recorder)))
    }

    pub(super) fn slot_bit(&self, operation: u64) -> u32 {
        1 << (operation % u64::from(self.options.in_flight))
    }

    fn sent(&self, operation: u64) -> Sent {
        Sent::new(&self.components, operation, &self.abandoned)
    }

    /// Checks that an operation was sent here, and may still succeed.
    pub(super) fn check_sent(&mut self, sent: &Sent) -> Result<()> {
        if !Arc::ptr_eq(&sent.components, &self.components) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "receive operation",
                format!("operation {} was sent by another communicator", sent.operation),
            )
            .with_fix("receive it on the communicator that sent it"));
        }
        self.check_open()
    }

    /// The number of an operation that may be received here.
    fn begin_receive(&mut self, sent: &Sent) -> Result<(u64, InCall)> {
        self.check_sent(sent)?;
        self.recorder.0.track.receive(sent.operation);
        Ok((sent.operation, InCall::new(&self.recorder)))
    }

    /// Returns dropped regions to the kernel set; whether there were any.
    pub(super) fn take_back_regions(&self) -> bool {
        let mut any = false;
        while let Some(region) = self.components.claims.next_returned() {
            self.components.kernels().release(region);
            any = true;
        }
        any
    }

    fn take_handle(&self) -> Result<u32> {
        self.components.claims.take_handle().map_err(|all| {
            Error::new(
                ErrorKind::Full,
                "take handle",
                format!("all {all} handles of this communicator are alive"),
            )
            .with_fix("drop handles that are combined, or open the communicator with more handles")
        })
    }

    fn receive(&mut self, sent: Sent, arrival: Arrival) -> Result<(Received, RegionClaim)> {
        let (operation, _inside) = self.begin_receive(&sent)?;
        let result = self.components.kernels().dispatch_recv(operation);
        sent.end();
        let result = result.and_then(|raw| self.components.watchdog().confirm().map(|()| raw));
        match result {
            Ok(raw) => {
                self.open_slots &= !self.slot_bit(operation);
                let claim = RegionClaim::new(&self.components, raw.region);
                let second = RegionClaim::new(&self.components, raw.region);
                let Arrival { layout, scale_layout, max_tokens } = arrival;
                let received =
                    Received { raw, layout, scale_layout, operation, max_tokens, _claim: claim };
                Ok((received, second))
            }
            Err(error) => Err(self.end_failed(operation, error)),
        }
    }
}
