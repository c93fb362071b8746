//! A caller: its streams, outputs and captures, and the steps that it takes.

use tokenyard_core::Result;
use tokenyard_core::call::CallOrder;
use tokenyard_core::moe::Region;

use super::{EngineModel, HANDLES, Sent, Sort, slot};
use crate::driver::stream_model::{self as model, Order};
use crate::driver::{Event, RawStream, Stream};

/// A step of a caller. Numbers choose among what there is; a step that a caller may not take is left out.
#[derive(Clone, Copy, Debug)]
pub(super) enum CallerStep {
    Dispatch {
        call: Call,
        units: u64,
    },
    Combine {
        call: Call,
        output: usize,
        copied: u64,
    },
    Receive {
        index: usize,
    },
    /// Rows for a combine are written.
    Lend {
        output: usize,
        units: u64,
    },
    /// An output is read on a stream; then its own stream may wait for that.
    Read {
        output: usize,
        stream: usize,
        returns: bool,
    },
    Drop {
        output: usize,
    },
    /// Names the streams of these bits.
    ReleaseAfter {
        streams: usize,
    },
    Work {
        stream: usize,
    },
    Wait {
        first: usize,
        then: usize,
    },
    Begin {
        stream: usize,
    },
    End {
        stream: usize,
    },
    Pass {
        stream: usize,
    },
    Flush,
}

/// The order of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) stream: Option<usize>,
    pub(super) no_sync: bool,
    /// A call that sends and receives; otherwise a call that sends.
    pub(super) at_once: bool,
}

/// An output with its handle, and the rows that return by it.
#[derive(Debug)]
struct HeldOutput {
    region: Region,
    lent: Option<Region>,
    stream: Option<RawStream>,
    handle: usize,
    /// The capture in which it was recorded.
    capture: Option<u64>,
    /// Whether a graph reads what is not of a graph: then it lives as long as the graph.
    is_kept: bool,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Caller {
    engine: EngineModel,
    streams: Vec<Stream>,
    mark: Event,
    open: Vec<Sent>,
    outputs: Vec<HeldOutput>,
    /// Captures that go on, with the streams on which they were started.
    captures: Vec<(u64, RawStream)>,
}

impl Caller {
    pub(super) fn new(streams: usize, puts: bool) -> Result<Self> {
        let context = model::reset();
        Ok(Self {
            streams: (0..streams).map(|_| Stream::new(&context)).collect::<Result<_>>()?,
            mark: Event::new(&context)?,
            engine: EngineModel::new(context, puts)?,
            open: Vec::new(),
            outputs: Vec::new(),
            captures: Vec::new(),
        })
    }

    fn name(&self, index: usize) -> RawStream {
        self.streams[index % self.streams.len()].name()
    }

    fn index(&self, output: usize) -> Option<usize> {
        output.checked_rem(self.outputs.len())
    }

    fn chain(&self, first: RawStream, then: RawStream) -> Result<()> {
        self.mark.record(first)?;
        self.mark.hold(then)
    }

    /// Whether an operation was sent on a stream, and not received.
    fn is_open(&self, stream: RawStream) -> bool {
        self.open.iter().any(|sent| sent.mode.stream == Some(stream))
    }

    /// Whether a stream may wait for another one, perhaps by joining its capture.
    fn may_wait(&self, first: RawStream, then: RawStream) -> bool {
        let [of_first, of_then] = [first, then].map(model::capture_of);
        first != then && (of_first == of_then || (of_then.is_none() && !self.is_open(then)))
    }

    pub(super) fn take(&mut self, step: CallerStep) -> Result<()> {
        match step {
            CallerStep::Dispatch { call, units } => self.dispatch(call, units),
            CallerStep::Combine { call, output, copied } => self.combine(call, output, copied),
            CallerStep::Receive { index } => match index.checked_rem(self.open.len()) {
                Some(index) => self.receive(index),
                None => Ok(()),
            },
            CallerStep::Lend { output, units } => self.lend(output, units),
            CallerStep::Read { output, stream, returns } => self.read(output, stream, returns),
            CallerStep::Drop { output } => {
                self.drop_output(output);
                Ok(())
            }
            CallerStep::ReleaseAfter { streams } => {
                let bits = (0..self.streams.len()).filter(|index| streams & (1 << index) != 0);
                let streams: Vec<_> = bits.map(|index| self.name(index)).collect();
                self.engine.release_after(&streams)
            }
            CallerStep::Work { stream } => {
                model::work(self.name(stream));
                Ok(())
            }
            CallerStep::Wait { first, then } => match [first, then].map(|index| self.name(index)) {
                [first, then] if self.may_wait(first, then) => self.chain(first, then),
                _ => Ok(()),
            },
            CallerStep::Begin { stream } => {
                self.begin_capture(self.name(stream));
                Ok(())
            }
            CallerStep::End { stream } => self.end_capture(self.name(stream)),
            CallerStep::Pass { stream } => {
                model::pass(self.name(stream));
                Ok(())
            }
            CallerStep::Flush if self.open.is_empty() => self.engine.flush(),
            CallerStep::Flush => Ok(()),
        }
    }

    /// The outputs that the caller holds.
    pub(super) fn outputs(&self) -> usize {
        self.outputs.len()
    }

    /// The order of a call, once the slot of the next operation is free.
    fn order(&mut self, call: Call) -> Result<CallOrder> {
        let next = self.engine.next;
        if let Some(index) = self.open.iter().position(|sent| slot(sent.operation) == slot(next)) {
            self.receive(index)?;
        }
        let stream = call.stream.map(|index| self.name(index).pointer());
        let no_sync = call.no_sync && stream.is_some();
        Ok(CallOrder { stream, no_sync, at_once: call.at_once, sms: 0 })
    }

    fn dispatch(&mut self, call: Call, units: u64) -> Result<()> {
        let order = self.order(call)?;
        let is_held = |handle: &usize| {
            self.outputs.iter().any(|output| output.handle == *handle)
                || self.open.iter().any(|sent| sent.handle == *handle)
        };
        let handle = (0..HANDLES).find(|handle| !is_held(handle));
        let before = self.before(call);
        let sent = self.engine.dispatch_send(order, handle, units)?;
        self.sent(sent, call, &before)
    }

    fn combine(&mut self, call: Call, output: usize, copied: u64) -> Result<()> {
        let order = self.order(call)?;
        let Some(index) = self.index(output) else { return Ok(()) };
        let is_recorded =
            call.stream.is_some_and(|index| model::capture_of(self.name(index)).is_some());
        let is_captured = |region: &Region| self.engine.places.arena.is_captured(region.id);
        let output = &self.outputs[index];
        let inputs: Vec<_> = [output.region].into_iter().chain(output.lent).collect();
        let of_graphs = inputs.iter().filter(|region| is_captured(region)).count();
        if !is_recorded && of_graphs > 0 {
            return Ok(());
        }
        // Few outputs of calls outside a capture are used in it: they are never dropped.
        if is_recorded && of_graphs < inputs.len() {
            if copied < 3 {
                return Ok(());
            }
            self.outputs[index].is_kept = true;
        }
        let copied = if inputs.len() > 1 { 0 } else { copied };
        let before = self.before(call);
        let handle = self.outputs[index].handle;
        let sent = self.engine.combine_send(order, handle, inputs, copied)?;
        self.sent(sent, call, &before)
    }

    /// The present work of the stream of a call.
    fn before(&self, call: Call) -> model::Past {
        call.stream.map_or_else(model::Past::default, |index| {
            let stream = self.name(index);
            let is_captured = model::capture_of(stream).is_some();
            model::end_of(stream, if is_captured { Order::Graph } else { Order::Eager })
        })
    }

    /// Checks an operation that was sent; then receives it if it is a whole call.
    fn sent(&mut self, sent: Option<Sent>, call: Call, before: &model::Past) -> Result<()> {
        let Some(sent) = sent else { return Ok(()) };
        let (capture, past) = model::node(sent.kernels[0]);
        assert!(before.is_within(&past), "(d) an operation beside the work before it");
        let of_call =
            sent.mode.stream.filter(|_| sent.mode.is_recorded()).and_then(model::capture_of);
        assert_eq!(capture, of_call, "(b) kernels belong to the capture of their call");
        self.open.push(sent);
        if call.at_once { self.receive(self.open.len() - 1) } else { Ok(()) }
    }

    fn receive(&mut self, index: usize) -> Result<()> {
        let sent = self.open.remove(index);
        let sent = self.engine.receive(sent)?;
        let order = if sent.mode.is_recorded() { Order::Graph } else { Order::Eager };
        let end = sent.mode.stream.map(|stream| model::end_of(stream, order));
        for kernel in &sent.kernels {
            let is_behind =
                end.as_ref().map_or_else(|| model::is_done(*kernel), |end| end.contains(*kernel));
            assert!(is_behind, "(d) the caller goes on beside kernel {kernel}");
        }
        if let Sort::Dispatch { region } = sent.sort {
            let capture = model::node(sent.kernels[0]).0;
            let (stream, handle) = (sent.mode.stream, sent.handle);
            let output = HeldOutput { region, lent: None, stream, handle, capture, is_kept: false };
            self.outputs.push(output);
        }
        Ok(())
    }

    fn lend(&mut self, output: usize, units: u64) -> Result<()> {
        let Some(index) = self.index(output) else { return Ok(()) };
        let HeldOutput { lent, stream, handle, .. } = &self.outputs[index];
        let (stream, handle) = (*stream, *handle);
        if lent.is_some() {
            return Ok(());
        }
        let lent = self.engine.combine_input(handle, units)?;
        match (&lent, stream) {
            (Some(region), Some(stream)) => self.engine.ledger.writes(model::work(stream), region),
            (Some(region), None) => self.engine.ledger.host_writes(region),
            (None, _) => {}
        }
        self.outputs[index].lent = lent;
        Ok(())
    }

    fn read(&mut self, output: usize, stream: usize, returns: bool) -> Result<()> {
        let reader = self.name(stream);
        let Some(output) = self.index(output).map(|index| &self.outputs[index]) else {
            return Ok(());
        };
        let owner = output.stream.unwrap_or(reader);
        // Within its order: eager, or the capture that goes on.
        if model::capture_of(owner) != output.capture {
            return Ok(());
        }
        if owner != reader {
            if !self.may_wait(owner, reader) {
                return Ok(());
            }
            self.chain(owner, reader)?;
        }
        model::work(reader);
        if returns && self.may_wait(reader, owner) { self.chain(reader, owner) } else { Ok(()) }
    }

    /// Drops an output, its handle and the rows that were lent, unless an operation or a graph uses them.
    fn drop_output(&mut self, output: usize) {
        let Some(index) = self.index(output) else { return };
        let HeldOutput { handle, is_kept, .. } = self.outputs[index];
        if is_kept || self.open.iter().any(|sent| sent.handle == handle) {
            return;
        }
        let output = self.outputs.remove(index);
        self.engine.returned.extend([output.region].into_iter().chain(output.lent).map(|r| r.id));
    }

    fn begin_capture(&mut self, stream: RawStream) {
        if model::capture_of(stream).is_none() && !self.is_open(stream) {
            model::begin(stream);
            self.captures.extend(model::capture_of(stream).map(|capture| (capture, stream)));
        }
    }

    /// Receives what was sent in a capture, joins its streams and ends it.
    fn end_capture(&mut self, stream: RawStream) -> Result<()> {
        let Some(index) = self.captures.iter().position(|(_, first)| *first == stream) else {
            return Ok(());
        };
        let (capture, _) = self.captures.swap_remove(index);
        let is_in = |stream: &RawStream| model::capture_of(*stream) == Some(capture);
        while let Some(index) =
            self.open.iter().position(|sent| sent.mode.stream.as_ref().is_some_and(is_in))
        {
            self.receive(index)?;
        }
        for branch in self
            .streams
            .iter()
            .map(Stream::name)
            .filter(|branch| *branch != stream && is_in(branch))
        {
            self.chain(branch, stream)?;
        }
        self.engine.halves_of = self.engine.halves_of.filter(|of| *of != capture);
        model::end(stream)
    }

    /// Ends everything, as a communicator does when it is closed.
    pub(super) fn close(mut self) -> Result<()> {
        while !self.open.is_empty() {
            self.receive(0)?;
        }
        while let Some((_, stream)) = self.captures.last() {
            self.end_capture(*stream)?;
        }
        (0..self.outputs.len()).for_each(|_| self.drop_output(0));
        self.engine.flush()?;
        self.engine.order.end()
    }
}
