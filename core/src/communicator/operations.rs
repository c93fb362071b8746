//! The operations of a communicator: dispatch, replay and combine, and their outputs.

use std::marker::PhantomData;
use std::sync::Arc;

use super::Communicator;
use super::abandoned::Sent;
use super::arguments::{Combine, Dispatch, LateTopk, Replay, Sizes};
use super::memory::check_memory;
use super::order::Mode;
use super::output::{CombineInput, Handle, Received, RegionClaim, RoutingClaim};
use super::pending::{Arrival, PendingCombine, PendingDispatch, PendingReplay};
use super::refusal::RefusedCall;
use super::sort::Sort;
use super::tensor::{TensorMut, raw_or_none};
use crate::abi;
use crate::call::{CombineCall, DispatchCall};
use crate::host::NO_TENSOR;
use crate::moe::dispatch::arriving::Arriving;
use crate::moe::dispatch::copy_out::{CopyOut, Outputs};
use crate::moe::{DType, Layout, ScaleLayout};
use crate::{Error, ErrorKind, Result};

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
        let (operation, _inside) = self.course.begin(Sort::Dispatch)?;
        let mut call = DispatchCall::blank(operation, 0, dispatch.layout);
        let components = &self.course.components;
        let checked = components
            .order(&mut call, &mode)
            .and_then(|()| mode.mark_dispatch(&mut call, dispatch.sizes))
            .and_then(|()| components.check_call_tokens(dispatch))
            .and_then(|()| components.check_layout(dispatch.layout))
            .and_then(|()| components.check_row_cap(dispatch))
            .and_then(|()| components.check_packed_forms(dispatch.forms(), dispatch.layout))
            .and_then(|()| check_memory(&dispatch.arguments(), self.course.components.user.device))
            .and_then(|()| dispatch.check(&components.shape, &mut self.scratch));
        let slot = checked.and_then(|()| components.take_handle());
        let slot = match slot {
            Ok(slot) => slot,
            Err(error) => return Err(self.course.refuse_with(call, error)),
        };
        let worst_case = dispatch.sizes == Sizes::WorstCase;
        call.handle = slot;
        call.worst_case = worst_case;
        call.cast = dispatch.cast;
        call.cap = dispatch.cap;
        call.max_tokens = dispatch.max_tokens.unwrap_or(components.shape.max_tokens);
        call.x = dispatch.x.raw();
        call.scales = raw_or_none(dispatch.scales.as_ref());
        call.topk_idx = dispatch.topk_idx.raw();
        call.topk_weights = raw_or_none(dispatch.topk_weights.as_ref());
        call.complete(dispatch.scale_layout, dispatch.source_index);
        // SAFETY: the pending operation borrows for `'a`, the life of all tensors; beyond that the
        // contract of `Stream::new` holds.
        if let Err(error) = unsafe { self.course.components.kernels().dispatch_send(&call) } {
            self.course.components.claims.give_handle(slot);
            return Err(self.course.end_failed(operation, error));
        }
        Ok(PendingDispatch {
            sent: self.course.sent(operation),
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
        let (operation, _inside) = self.course.begin(Sort::Replay)?;
        let mut call = DispatchCall::blank(operation, handle.routing.slot, handle.layout);
        call.is_replay = true;
        call.worst_case = handle.worst_case;
        let components = &self.course.components;
        let checked = components
            .order(&mut call, &mode)
            .and_then(|()| mode.check_replay())
            .and_then(|()| check_memory(&replay.arguments(), self.course.components.user.device))
            .and_then(|()| components.check_handle(handle))
            .and_then(|()| {
                components.check_beside(replay.is_beside(&components.shape), "x of another width")
            })
            .and_then(|()| components.check_packed_forms(replay.forms(), handle.layout))
            .and_then(|()| replay.check(&components.shape, handle));
        if let Err(error) = checked {
            return Err(self.course.refuse_with(call, error));
        }
        call.cast = replay.cast;
        call.x = replay.x.raw();
        call.scales = raw_or_none(replay.scales.as_ref());
        call.topk_weights = raw_or_none(replay.topk_weights.as_ref());
        call.complete(replay.scale_layout, replay.source_index);
        // SAFETY: as in `send_dispatch`.
        if let Err(error) = unsafe { self.course.components.kernels().dispatch_send(&call) } {
            return Err(self.course.end_failed(operation, error));
        }
        Ok(PendingReplay {
            sent: self.course.sent(operation).of(handle),
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
        let keeps =
            !layout.has_a_row_per_token() && !components.user.takes(abi::TY_KERNELS_CAP_NO_REGION);
        let region = keeps.then_some(claim);
        let handle = Handle {
            routing: RoutingClaim::first(&components, pending.slot, region),
            tokens: pending.tokens,
            rows: received.rows(),
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
        self.course.check_open()?;
        self.course.components.check_handle(handle)?;
        self.course.take_back_regions();
        if !dtype.is_summable() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "combine input",
                format!("found type {dtype}; expected bf16, fp16 or fp32"),
            ));
        }
        let (region, raw) =
            self.course.components.kernels().combine_input(handle.routing.slot, dtype.code())?;
        Ok(CombineInput { raw, _claim: RegionClaim::new(&self.course.components, region) })
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
        let components = &self.course.components;
        let checked = components
            .check_order(&mode)
            .and_then(|()| components.check_mode(&mode))
            .and_then(|()| check_memory(&combine.arguments(), self.course.components.user.device))
            .and_then(|()| components.check_handle(handle))
            .and_then(|()| components.check_combine_form(&combine, handle.layout))
            .and_then(|()| combine.check(&components.shape, handle));
        // The kernel set sends weights of a call itself, or a replay carries them.
        let (own, carried) = match self.sends_weights(handle.layout) {
            true => (combine.topk, None),
            false => (None, combine.topk),
        };
        let late_weights = match (checked, &carried) {
            (Ok(()), None) => None,
            (Ok(()), Some(topk)) => Some(self.bring_weights(handle, topk)?),
            (Err(why), None) => {
                return Err(self.course.refuse_in(RefusedCall::Combine, why, &mode));
            }
            // The other ranks send their weights now.
            (Err(why), Some(_)) => {
                return Err(self.course.refuse_in(RefusedCall::Replay(handle.layout), why, &mode));
            }
        };
        let (operation, _inside) = self.course.begin(Sort::Combine)?;
        let mut call = CombineCall::blank(operation, handle.routing.slot);
        if let Err(error) = mode.mark_combine(&mut call, handle.layout) {
            return Err(self.course.refuse_combine(call, error));
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
        let result = unsafe { self.course.components.kernels().combine_send(&call) };
        match result {
            Ok(()) => {
                let sent = self.course.sent(operation).of(handle).with(late_weights);
                Ok(PendingCombine { sent, arguments: PhantomData })
            }
            Err(error) => Err(self.course.end_failed(operation, error)),
        }
    }

    /// Sends the weights of a combine to the ranks of the experts.
    fn bring_weights(&mut self, handle: &Handle, topk: &LateTopk<'_>) -> Result<Received> {
        let mut late_weights = std::mem::take(&mut self.late_weights);
        let received = late_weights
            .fill(self.shape(), handle.tokens(), topk)
            .and_then(|x| self.replay(handle, &Replay::new(x)));
        self.late_weights = late_weights;
        received
    }

    /// Finishes [`combine_send`](Self::combine_send): the outputs are written.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn combine_recv(&mut self, pending: PendingCombine<'_>) -> Result<()> {
        let (operation, _inside) = self.course.begin_receive(&pending.sent)?;
        let result = self.course.components.kernels().combine_recv(operation);
        pending.sent.end();
        let result = result.and_then(|()| self.course.components.user.watchdog().confirm());
        match result {
            Ok(()) => {
                self.course.ended(operation);
                Ok(())
            }
            Err(error) => Err(self.course.end_failed(operation, error)),
        }
    }

    fn receive(&mut self, sent: Sent, arrival: Arrival) -> Result<(Received, RegionClaim)> {
        let (operation, _inside) = self.course.begin_receive(&sent)?;
        let result = self.course.components.kernels().dispatch_recv(operation);
        sent.end();
        let result =
            result.and_then(|raw| self.course.components.user.watchdog().confirm().map(|()| raw));
        match result {
            Ok(raw) => {
                self.course.ended(operation);
                let claim = RegionClaim::new(&self.course.components, raw.region);
                let second = RegionClaim::new(&self.course.components, raw.region);
                let Arrival { layout, scale_layout, max_tokens } = arrival;
                let received =
                    Received { raw, layout, scale_layout, operation, max_tokens, _claim: claim };
                Ok((received, second))
            }
            Err(error) => Err(self.course.end_failed(operation, error)),
        }
    }

    /// The place of the output of a dispatch that was sent; `None` where it is not fixed before the receive,
    /// for example where ranks may be left out (`on_failure = "mask"`). Local: no other rank takes part.
    ///
    /// # Errors
    /// A closed communicator; an operation of another communicator.
    pub fn dispatch_output(&mut self, pending: &PendingDispatch<'_>) -> Result<Option<Arriving>> {
        self.output_of(&pending.sent, pending.scale_layout())
    }

    /// The place of the output of a replay that was sent, as for a dispatch.
    ///
    /// # Errors
    /// As [`dispatch_output`](Self::dispatch_output).
    pub fn replay_output(&mut self, pending: &PendingReplay<'_>) -> Result<Option<Arriving>> {
        self.output_of(&pending.sent, pending.scale_layout())
    }

    fn output_of(&mut self, sent: &Sent, scale_layout: ScaleLayout) -> Result<Option<Arriving>> {
        self.course.check_sent(sent)?;
        let raw = self.course.components.kernels().dispatch_output(sent.operation)?;
        Ok(raw.map(|raw| Arriving::new(raw, &self.course.components, scale_layout)))
    }

    /// Copies arrays of an output to memory of the caller, who may drop the output then: its place in
    /// the arena becomes free at once. The handle needs nothing of a flat or rank-major output; the
    /// handles of other layouts hold their output's place until they are dropped. Local: no other rank takes part.
    ///
    /// Behind [`Communicator::on`] the copies are queued on the stream.
    ///
    /// # Errors
    /// Room of another type or shape, too small, in another memory, or for an array that the output
    /// does not have: then nothing is copied. Errors of the device.
    pub fn copy_out(&mut self, received: &Received, outputs: &mut Outputs<'_>) -> Result<()> {
        self.course.check_open()?;
        CopyOut { components: &self.course.components, stream: None }.arrays(received, outputs)
    }

    /// The rows of each local expert of an output, for the host: `[E/R]`. Where the kernel set gives them, without a
    /// wait for the rows; else once the output's operation has ended. Local.
    ///
    /// # Errors
    /// An output of another communicator; errors of the device.
    pub fn expert_counts(&mut self, received: &Received) -> Result<Vec<u32>> {
        self.course.expert_counts(received)
    }

    /// Takes part in the operation that the other ranks call now, with a refusal. Returns the error: `why`,
    /// or the one that ended the communicator. For callers that check arguments before core can, such as
    /// bindings of another language: without this call the other ranks would wait for this rank.
    ///
    /// All ranks get an error for the operation, nothing is moved, and the communicator stays usable.
    /// Collective, as the operation is.
    pub fn refuse(&mut self, call: RefusedCall, why: Error) -> Error {
        self.course.refuse_in(call, why, &Mode::default())
    }

    /// Whether a combine of this layout takes weights and ids of its own in one operation. Where it does not, a replay
    /// carries them first.
    pub fn sends_weights(&self, layout: Layout) -> bool {
        layout == Layout::Packed
            && self.course.components.user.takes(abi::TY_KERNELS_CAP_PACKED_SUMS)
    }
}
