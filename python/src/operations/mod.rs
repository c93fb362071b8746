//! The operations: arguments in, core's call, results out.
//!
//! Arguments are read with the GIL, into tensors that keep what they point to. The call runs without it. An argument
//! that this module cannot read is refused through the communicator, so that the other ranks learn it.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use tokenyard_core::communicator::{
    Communicator, Dispatch, Handle as CoreHandle, OnStream, PendingCombine as CorePendingCombine,
    PendingDispatch as CorePendingDispatch, PendingReplay as CorePendingReplay, RefusedCall,
    Replay, Sizes, Statistics, Stream, TensorMut, TensorRef,
};
use tokenyard_core::moe::{Layout, RowCap, ScaleLayout, SourceIndex};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::argument::{Argument, Word};
use crate::errors::{invalid, raise};
use crate::options;
use crate::output::{Handle, Received};
use crate::owned::Owned;
use crate::shared::Shared;
use crate::tensor::Tensor;

type Object<'a, 'py> = &'a Bound<'py, PyAny>;
type Maybe<'a, 'py> = Option<Object<'a, 'py>>;
type KeptHandle = Arc<Owned<CoreHandle>>;

/// The objects that an operation needs until it was received.
#[derive(Default)]
struct Inputs {
    tensors: Vec<Tensor>,
}

impl Inputs {
    /// Keeps a tensor, and gives it to core.
    fn keep(&mut self, tensor: Tensor) -> Result<TensorRef<'static>> {
        // SAFETY: `self` keeps the tensor's memory, and outlives the operation, which keeps it. That no thread
        // writes the memory until then is asked of the caller.
        let reference = unsafe { tensor.get()? };
        self.tensors.push(tensor);
        Ok(reference)
    }

    fn optional(&mut self, tensor: Option<Tensor>) -> Result<Option<TensorRef<'static>>> {
        tensor.map(|tensor| self.keep(tensor)).transpose()
    }

    fn keep_column(&mut self, tensor: Tensor) -> Result<TensorRef<'static>> {
        // SAFETY: as in `keep`.
        let reference = unsafe { tensor.get_column()? };
        self.tensors.push(tensor);
        Ok(reference)
    }

    fn keep_mut(&mut self, tensor: Tensor) -> Result<TensorMut<'static>> {
        // SAFETY: as in `keep`, and that no thread uses it until then.
        let reference = unsafe { tensor.get_mut()? };
        self.tensors.push(tensor);
        Ok(reference)
    }

    fn keep_column_mut(&mut self, tensor: Tensor) -> Result<TensorMut<'static>> {
        // SAFETY: as in `keep_mut`.
        let reference = unsafe { tensor.get_column_mut()? };
        self.tensors.push(tensor);
        Ok(reference)
    }
}

fn optional(name: &'static str, object: Maybe<'_, '_>) -> Result<Option<Tensor>> {
    object.map_or(Ok(None), |object| Tensor::optional(name, object))
}

fn read_handle(object: Object<'_, '_>) -> Result<KeptHandle> {
    if let Ok(handle) = object.cast::<Handle>() {
        return Ok(handle.get().core());
    }
    let found = object.get_type().name().map_or("an object".into(), |name| name.to_string());
    Err(invalid(format!("handle: found {found}; expected a tokenyard.Handle")))
}

/// The stream that a caller names.
pub(crate) fn stream(raw: Option<usize>) -> Option<Stream> {
    // SAFETY: the docs of the calls that take a stream ask this of the caller: a stream of the device that they work
    // on, which lives as long as what the calls gave.
    raw.map(|raw| unsafe { Stream::new(raw as *mut std::ffi::c_void) })
}

/// The stream of a call, whether the host waits there, and the multiprocessors, as Python gave them.
pub(crate) struct StreamArguments {
    pub(crate) raw: Option<Argument<usize>>,
    pub(crate) without_sync: Argument<bool>,
    pub(crate) sms: Argument<u32>,
}

impl StreamArguments {
    /// A stream alone.
    fn alone(raw: Option<Argument<usize>>) -> Self {
        Self { raw, without_sync: Argument::Fits(false), sms: Argument::Fits(0) }
    }

    fn read(&self) -> Result<CallStream> {
        let raw = self.raw.as_ref().map(|raw| raw.get("stream")).transpose()?;
        let (without_sync, sms) = (self.without_sync.get("without_sync")?, self.sms.get("sms")?);
        if raw.is_none() && without_sync {
            return Err(invalid("without_sync: found True without a stream; expected both"));
        }
        if raw.is_none() && sms != 0 {
            return Err(invalid(format!("sms: found {sms} without a stream; expected both")));
        }
        Ok(CallStream { raw, without_sync, sms })
    }

    /// The stream for the refusal of a call.
    fn of_refusal(&self) -> CallStream {
        self.read().unwrap_or(CallStream::NONE)
    }
}

/// The stream of a call, whether the host waits there, and the multiprocessors of its kernels, or 0.
#[derive(Clone, Copy)]
pub(crate) struct CallStream {
    pub(crate) raw: Option<usize>,
    pub(crate) without_sync: bool,
    pub(crate) sms: u32,
}

impl CallStream {
    /// No stream.
    pub(crate) const NONE: Self = Self { raw: None, without_sync: false, sms: 0 };

    /// A stream alone.
    pub(crate) fn of(raw: usize) -> Self {
        Self { raw: Some(raw), ..Self::NONE }
    }

    fn on<'a>(
        self,
        comm: &'a mut Communicator,
        counted: Statistics<'static>,
    ) -> Option<OnStream<'a>> {
        let on = comm.on(stream(self.raw)?).with_statistics(counted).with_sms(self.sms);
        Some(if self.without_sync { on.without_sync() } else { on })
    }
}

/// Tensors of a device that a call adds numbers to.
#[derive(Clone, Copy)]
pub(crate) struct Counted<'a, 'py> {
    pub(crate) expert_totals: Maybe<'a, 'py>,
    pub(crate) waited_ns: Maybe<'a, 'py>,
}

impl Counted<'_, '_> {
    fn read(self, stream: CallStream, kept: &mut Inputs) -> Result<Statistics<'static>> {
        let counted = Statistics {
            expert_totals: kept.optional(optional("expert_totals", self.expert_totals)?)?,
            waited_ns: kept.optional(optional("waited_ns", self.waited_ns)?)?,
        };
        let is_there = counted.expert_totals.is_some() || counted.waited_ns.is_some();
        match is_there && stream.raw.is_none() {
            true => Err(invalid(
                "expert_totals, waited_ns: found some without a stream; expected both or neither",
            )),
            false => Ok(counted),
        }
    }
}

/// In the order of a stream, or of none.
macro_rules! in_order {
    ($comm:expr, $stream:expr, $call:ident($($argument:expr),*)) => {
        in_order!($comm, $stream, Statistics::default(), $call($($argument),*))
    };
    ($comm:expr, $stream:expr, $counted:expr, $call:ident($($argument:expr),*)) => {
        match $stream.raw {
            None => Communicator::$call($comm, $($argument),*),
            Some(_) => match $stream.on($comm, $counted) {
                Some(mut on) => OnStream::$call(&mut on, $($argument),*),
                None => Communicator::$call($comm, $($argument),*),
            },
        }
    };
}

// Below the macro, which they use.
mod combine;
mod outputs;

use combine::Combined;
pub(crate) use combine::{CombineArguments, Sums, combine, combine_input, combine_send};
pub(crate) use outputs::{
    Given, Giving, copy_out, count_routing, expert_counts, give, release_after,
};

/// An operation between its halves.
struct Waiting<P: Send> {
    shared: Arc<Shared>,
    stream: CallStream,
    pending: Mutex<Option<P>>,
}

impl<P: Send> Waiting<P> {
    fn new(shared: &Arc<Shared>, stream: CallStream, pending: P) -> Self {
        Self { shared: Arc::clone(shared), stream, pending: Mutex::new(Some(pending)) }
    }

    fn take(&self) -> Option<P> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Receives it with `call`. Its inputs are free afterwards.
    fn recv<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Communicator, P) -> Result<R> + Send,
    ) -> PyResult<R> {
        let Some(pending) = self.take() else {
            return Err(raise(py, &received_before("receive operation")));
        };
        self.shared.comm.call(py, |comm| call(comm, pending))
    }

    /// Asks something of it before it is received.
    fn look<R: Send>(
        &self,
        py: Python<'_>,
        ask: impl FnOnce(&mut Communicator, &P) -> Result<R> + Send,
    ) -> PyResult<R> {
        self.shared.comm.call(py, |comm| {
            let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
            let pending = pending.as_ref().ok_or_else(|| received_before("see output"))?;
            ask(comm, pending)
        })
    }
}

pub(crate) fn received_before(operation: &'static str) -> Error {
    let text = "the operation was received before; expected one that was not";
    Error::new(ErrorKind::InvalidInput, operation, text)
}

impl<P: Send> Drop for Waiting<P> {
    fn drop(&mut self) {
        // In a forked child, the copies of the locks may be locked for ever.
        if !self.shared.comm.is_mine() {
            std::mem::forget(self.take());
        }
    }
}

/// A dispatch that was sent. `recv()` finishes it; until then its tensors must not be written, and the operation counts
/// as open. One that is never received leaves the other ranks waiting.
#[pyclass(frozen, module = "tokenyard")]
pub(crate) struct PendingDispatch(Waiting<CorePendingDispatch<'static>>);

#[pymethods]
impl PendingDispatch {
    /// The second half of `dispatch`: returns what it returns. Once.
    fn recv(&self, py: Python<'_>) -> PyResult<(Received, Handle)> {
        let (received, handle) = self.0.recv(py, Communicator::dispatch_recv)?;
        Ok((Received::new(received, &self.0.shared, self.0.stream.raw), Handle::new(handle)))
    }

    /// The arrays of what `recv()` will return, which exist already: their addresses may be passed on, their contents
    /// come with `recv()`. None where their places are not fixed before. Local.
    fn output(&self, py: Python<'_>) -> PyResult<Option<Received>> {
        let place = self.0.look(py, |comm, pending| {
            let layout = pending.layout();
            Ok(comm.dispatch_output(pending)?.map(|place| (place, layout)))
        })?;
        let Waiting { shared, stream, .. } = &self.0;
        Ok(place.map(|(place, layout)| Received::arriving(place, layout, shared, stream.raw)))
    }
}

/// A replay that was sent. See `PendingDispatch`.
#[pyclass(frozen, module = "tokenyard")]
pub(crate) struct PendingReplay(Waiting<CorePendingReplay<'static>>);

#[pymethods]
impl PendingReplay {
    /// The second half of `replay`: returns what it returns. Once.
    fn recv(&self, py: Python<'_>) -> PyResult<Received> {
        let received = self.0.recv(py, Communicator::replay_recv)?;
        Ok(Received::new(received, &self.0.shared, self.0.stream.raw))
    }

    /// As `PendingDispatch.output`.
    fn output(&self, py: Python<'_>) -> PyResult<Option<Received>> {
        let place = self.0.look(py, |comm, pending| {
            let layout = pending.layout();
            Ok(comm.replay_output(pending)?.map(|place| (place, layout)))
        })?;
        let Waiting { shared, stream, .. } = &self.0;
        Ok(place.map(|(place, layout)| Received::arriving(place, layout, shared, stream.raw)))
    }
}

/// A combine that was sent. See `PendingDispatch`.
#[pyclass(frozen, module = "tokenyard")]
pub(crate) struct PendingCombine {
    waiting: Waiting<CorePendingCombine<'static>>,
    outputs: Combined,
}

#[pymethods]
impl PendingCombine {
    /// The second half of `combine`: returns what it returns. Once.
    fn recv(&self, py: Python<'_>) -> PyResult<(Py<PyAny>, Option<Py<PyAny>>)> {
        self.waiting.recv(py, Communicator::combine_recv)?;
        Ok(self.outputs.clone_ref(py))
    }
}

/// How a dispatch arranges what arrives, as Python gave it.
pub(crate) struct Order<'a> {
    pub(crate) alignment: Argument<u32>,
    pub(crate) zero_padding: Argument<bool>,
    pub(crate) worst_case: Argument<bool>,
    pub(crate) max_tokens: Option<Argument<u32>>,
    pub(crate) max_rows: Option<Argument<u64>>,
    pub(crate) overflow: Word<'a>,
}

impl Order<'_> {
    fn cap(&self) -> Result<Option<RowCap>> {
        let overflow = options::overflow(&self.overflow)?;
        let rows = self.max_rows.as_ref().map(|rows| rows.get("max_rows")).transpose()?;
        Ok(rows.map(|rows| RowCap { rows, overflow }))
    }
}

/// The forms of packed arrays, as Python gave them.
pub(crate) struct Forms<'a> {
    pub(crate) scale_layout: Word<'a>,
    pub(crate) source_index: Word<'a>,
}

impl Forms<'_> {
    fn read(&self) -> Result<(ScaleLayout, SourceIndex)> {
        Ok((options::scale_layout(&self.scale_layout)?, options::source_index(&self.source_index)?))
    }
}

/// The arguments of a dispatch, as Python gave them.
pub(crate) struct DispatchArguments<'a, 'py> {
    pub(crate) x: Object<'a, 'py>,
    pub(crate) topk_idx: Object<'a, 'py>,
    pub(crate) topk_weights: Maybe<'a, 'py>,
    pub(crate) scales: Maybe<'a, 'py>,
    pub(crate) layout: Word<'a>,
    pub(crate) cast: Option<Word<'a>>,
    pub(crate) order: Order<'a>,
    pub(crate) forms: Forms<'a>,
    pub(crate) stream: StreamArguments,
    pub(crate) counted: Counted<'a, 'py>,
}

/// A dispatch that is ready to be called.
struct ReadyDispatch {
    stream: CallStream,
    call: Dispatch<'static>,
    counted: Statistics<'static>,
    kept: Inputs,
}

impl DispatchArguments<'_, '_> {
    fn layout(&self) -> Result<Layout> {
        let Order { alignment, zero_padding, .. } = &self.order;
        options::layout(&self.layout, alignment, zero_padding)
    }

    fn read(&self) -> Result<ReadyDispatch> {
        let stream = self.stream.read()?;
        let mut kept = Inputs::default();
        let counted = self.counted.read(stream, &mut kept)?;
        let (scale_layout, source_index) = self.forms.read()?;
        let call = Dispatch {
            x: kept.keep(Tensor::read("x", self.x)?)?,
            scales: kept.optional(optional("scales", self.scales)?)?,
            topk_idx: kept.keep(Tensor::read("topk_idx", self.topk_idx)?.into_ids()?)?,
            topk_weights: kept.optional(optional("topk_weights", self.topk_weights)?)?,
            layout: self.layout()?,
            cast: options::cast(self.cast.as_ref())?,
            sizes: match self.order.worst_case.get("worst_case")? {
                true => Sizes::WorstCase,
                false => Sizes::Exact,
            },
            max_tokens: self.order.max_tokens.as_ref().map(|m| m.get("max_tokens")).transpose()?,
            cap: self.order.cap()?,
            scale_layout,
            source_index,
        };
        Ok(ReadyDispatch { stream, call, counted, kept })
    }

    /// Takes part in the others' call with a refusal, where the arguments cannot be read, and returns what to raise.
    fn refuse(&self, py: Python<'_>, shared: &Shared, why: Error) -> PyErr {
        // Ranks may differ in all of a layout but its name.
        let named = || options::layout(&self.layout, &Argument::Fits(1), &Argument::Fits(false));
        let call =
            RefusedCall::Dispatch(self.layout().or_else(|_| named()).unwrap_or(Layout::Flat));
        refuse(py, shared, self.stream.of_refusal(), call, why)
    }
}

/// Refuses an operation that cannot be asked for, and returns what to raise.
pub(crate) fn refuse(
    py: Python<'_>,
    shared: &Shared,
    stream: CallStream,
    call: RefusedCall,
    why: Error,
) -> PyErr {
    let refused =
        shared.comm.call::<()>(py, |comm| Err(in_order!(comm, stream, refuse(call, why))));
    refused.err().unwrap_or_else(|| raise(py, &invalid("the call was refused")))
}

pub(crate) fn dispatch(
    py: Python<'_>,
    shared: &Arc<Shared>,
    arguments: &DispatchArguments<'_, '_>,
) -> PyResult<(Received, Handle)> {
    let ReadyDispatch { stream, call, counted, kept: _kept } =
        arguments.read().map_err(|why| arguments.refuse(py, shared, why))?;
    let (received, handle) =
        shared.comm.call(py, |comm| in_order!(comm, stream, counted, dispatch(&call)))?;
    Ok((Received::new(received, shared, stream.raw), Handle::new(handle)))
}

pub(crate) fn dispatch_send(
    py: Python<'_>,
    shared: &Arc<Shared>,
    arguments: &DispatchArguments<'_, '_>,
) -> PyResult<PendingDispatch> {
    let ReadyDispatch { stream, call, counted, kept } =
        arguments.read().map_err(|why| arguments.refuse(py, shared, why))?;
    let pending =
        shared.comm.call(py, |comm| in_order!(comm, stream, counted, dispatch_send(&call)))?;
    Ok(PendingDispatch(Waiting::new(shared, stream, pending.keeping(kept))))
}

/// The arguments of a replay, as Python gave them.
pub(crate) struct ReplayArguments<'a, 'py> {
    pub(crate) handle: Object<'a, 'py>,
    pub(crate) x: Object<'a, 'py>,
    pub(crate) topk_weights: Maybe<'a, 'py>,
    pub(crate) scales: Maybe<'a, 'py>,
    pub(crate) cast: Option<Word<'a>>,
    pub(crate) forms: Forms<'a>,
    pub(crate) stream: StreamArguments,
}

/// A replay that is ready to be called.
struct ReadyReplay {
    stream: CallStream,
    handle: KeptHandle,
    call: Replay<'static>,
    kept: Inputs,
}

impl ReplayArguments<'_, '_> {
    fn read(&self) -> Result<ReadyReplay> {
        let stream = self.stream.read()?;
        let handle = read_handle(self.handle)?;
        let mut kept = Inputs::default();
        let (scale_layout, source_index) = self.forms.read()?;
        let call = Replay {
            x: kept.keep(Tensor::read("x", self.x)?)?,
            scales: kept.optional(optional("scales", self.scales)?)?,
            topk_weights: kept.optional(optional("topk_weights", self.topk_weights)?)?,
            cast: options::cast(self.cast.as_ref())?,
            scale_layout,
            source_index,
        };
        handle.get()?;
        Ok(ReadyReplay { stream, handle, call, kept })
    }

    fn refuse(&self, py: Python<'_>, shared: &Shared, why: Error) -> PyErr {
        let handle = read_handle(self.handle).ok();
        let layout = handle.and_then(|handle| handle.get().ok().map(CoreHandle::layout));
        let call = RefusedCall::Replay(layout.unwrap_or(Layout::Flat));
        refuse(py, shared, self.stream.of_refusal(), call, why)
    }
}

pub(crate) fn replay(
    py: Python<'_>,
    shared: &Arc<Shared>,
    arguments: &ReplayArguments<'_, '_>,
) -> PyResult<Received> {
    let ReadyReplay { stream, handle, call, kept: _kept } =
        arguments.read().map_err(|why| arguments.refuse(py, shared, why))?;
    let received =
        shared.comm.call(py, |comm| in_order!(comm, stream, replay(handle.get()?, &call)))?;
    Ok(Received::new(received, shared, stream.raw))
}

pub(crate) fn replay_send(
    py: Python<'_>,
    shared: &Arc<Shared>,
    arguments: &ReplayArguments<'_, '_>,
) -> PyResult<PendingReplay> {
    let ReadyReplay { stream, handle, call, kept } =
        arguments.read().map_err(|why| arguments.refuse(py, shared, why))?;
    let pending =
        shared.comm.call(py, |comm| in_order!(comm, stream, replay_send(handle.get()?, &call)))?;
    Ok(PendingReplay(Waiting::new(shared, stream, pending.keeping(kept))))
}
