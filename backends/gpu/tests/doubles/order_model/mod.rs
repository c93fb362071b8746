//! The calls by which an engine orders its operations, over a model of a driver: the same calls in the same sequence,
//! with nodes in the place of kernels. So the order of streams, events and captures is tested without a GPU.
//!
//! It mirrors, of one domain:
//! - `Engine::{mode, enter, leave, resume, refuse_recorded, release, take_back_late}` of `queue.rs`, and
//!   `Engine::{finish, flush}` of `ends.rs`;
//! - `MoeState::{unstage, renew}` and `Exchanger::combine_input`;
//! - `Dispatch::{launch, send_rows, settle, make_room, receive, refuse}` of `moe/dispatch.rs`, and the same parts of
//!   `moe/combine.rs`, with `stage`;
//! - `Communicator::{begin, take_back_regions, release_after}` of the core, which call them.

mod ledger;
mod steps;
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokenyard_core::Result;
use tokenyard_core::call::CallOrder;
use tokenyard_core::moe::{Holder, REGION_ALIGN, Region};

use crate::driver::stream_model::{self as model, Order};
use crate::driver::{Context, RawStream};
use crate::engine::mode::Mode;
use crate::engine::order::StreamOrder;
use crate::engine::places::Places;
use ledger::Ledger;

/// Operations that may be open.
const IN_FLIGHT: u64 = 2;
/// Room of the arena, in regions of the smallest size.
const UNITS: u64 = 10;
/// Handles of the communicator.
const HANDLES: usize = 5;

/// The state of a handle, as far as it concerns the order.
#[derive(Debug, Default)]
struct HandleModel {
    kept: Vec<Region>,
    /// The stream of its dispatch.
    stream: Option<RawStream>,
}

/// The rows that an operation moves.
#[derive(Clone, Debug)]
enum Sort {
    /// Rows to a region of this handle.
    Dispatch { region: Region },
    /// Rows out of these regions.
    Combine { inputs: Vec<Region> },
}

/// An operation that was sent.
#[derive(Debug)]
struct Sent {
    operation: u64,
    mode: Mode,
    handle: usize,
    sort: Sort,
    staging: Option<Region>,
    kernels: Vec<usize>,
}

/// See the [module](self).
#[derive(Debug)]
struct EngineModel {
    context: Arc<Context>,
    order: StreamOrder,
    places: Places,
    handles: Vec<HandleModel>,
    ledger: Ledger,
    /// Regions that are held by callers, with the streams on which they are used.
    held: BTreeMap<u64, (Region, Option<RawStream>)>,
    /// Regions that callers have dropped since the last call.
    returned: Vec<u64>,
    took_back: bool,
    next: u64,
    /// The capture that has halves of operations.
    halves_of: Option<u64>,
    /// Whether rows are put.
    puts: bool,
}

/// The capture in which a call records a half of an operation.
fn halves(mode: &Mode) -> Option<u64> {
    mode.stream.filter(|_| mode.is_recorded() && !mode.at_once).and_then(model::capture_of)
}

fn slot(operation: u64) -> usize {
    (operation % IN_FLIGHT) as usize
}

impl EngineModel {
    fn new(context: Arc<Context>, puts: bool) -> Result<Self> {
        let cap = Duration::from_secs(10);
        Ok(Self {
            order: StreamOrder::new(&context, IN_FLIGHT as usize, cap)?,
            context,
            places: Places::new(0, UNITS * REGION_ALIGN, "arena".to_owned()),
            handles: (0..HANDLES).map(|_| HandleModel::default()).collect(),
            ledger: Ledger::new(UNITS as usize),
            held: BTreeMap::new(),
            returned: Vec::new(),
            took_back: false,
            next: 0,
            halves_of: None,
            puts,
        })
    }

    /// The mode of a call that begins, and the number of its operation.
    fn begin(&mut self, order: CallOrder) -> Result<(u64, Mode)> {
        self.took_back |= self.take_back_regions();
        self.next += 1;
        let mode = Mode::of(order, &self.context)?;
        Ok((self.next - 1, Mode { at_once: mode.at_once && !self.puts, ..mode }))
    }

    fn take_back_regions(&mut self) -> bool {
        let returned = std::mem::take(&mut self.returned);
        returned.iter().for_each(|region| self.release(*region));
        !returned.is_empty()
    }

    fn release_after(&mut self, streams: &[RawStream]) -> Result<()> {
        let any = self.take_back_regions() | std::mem::take(&mut self.took_back);
        for stream in streams.iter().filter(|_| any) {
            self.ledger.released_after(*stream);
            self.order.regions.free_after(*stream)?;
        }
        Ok(())
    }

    fn release(&mut self, id: u64) {
        let (region, owner) = self.held[&id];
        if self.places.arena.is_captured(id) {
            self.ledger.comes_back(&region, owner, Order::Graph);
            self.order.regions.take_back_captured(id).expect("marks");
        } else {
            self.ledger.comes_back(&region, owner, Order::Eager);
            if !self.order.regions.take_back(id).expect("marks") {
                return;
            }
        }
        self.places.arena.release(id);
        self.held.remove(&id);
    }

    fn take_back_late(&mut self) {
        for region in self.order.regions.late() {
            self.release(region);
        }
    }

    /// Whether a call is refused because of the capture of its stream.
    fn cannot_capture(&self, mode: &Mode) -> Result<bool> {
        let waits = mode.captured && !mode.no_host_sync;
        let elsewhere =
            halves(mode).is_some_and(|capture| self.halves_of.is_some_and(|of| of != capture));
        let cannot = self.order.cannot_capture(mode)?.is_some();
        assert_eq!(cannot, waits || elsewhere, "captures refuse other calls than expected");
        Ok(cannot)
    }

    fn enter(&mut self, mode: &Mode) -> Result<()> {
        self.take_back_late();
        self.halves_of = halves(mode).or(self.halves_of);
        self.order.enter(mode)
    }

    fn renew(&mut self, handle: usize, mode: &Mode) {
        for region in std::mem::take(&mut self.handles[handle].kept) {
            // Nothing but its combine has used it, so the ledger learns of no stream.
            self.held.insert(region.id, (region, None));
            self.release(region.id);
        }
        self.handles[handle].stream = mode.stream;
    }

    fn give(&mut self, region: Region, stream: Option<RawStream>) {
        self.order.regions.give(region.id, stream);
        self.held.insert(region.id, (region, stream));
    }

    fn launch(&self, operation: u64) -> Result<usize> {
        let node = model::work(self.order.work());
        self.order.queued(slot(operation)).map(|()| node)
    }

    /// A kernel that sends.
    fn send(&mut self, operation: u64) -> Result<usize> {
        let node = self.launch(operation)?;
        self.ledger.sends(node);
        Ok(node)
    }

    /// A call that this rank refuses: its kernel takes a turn, unless the call is recorded.
    fn refuse(&mut self, operation: u64, mode: &Mode) -> Result<()> {
        if mode.is_recorded() {
            return mode.stream.map_or(Ok(()), |stream| {
                self.order.join(stream).and_then(|()| self.order.regions.marks.mark(stream))
            });
        }
        self.order.select_stream(None);
        let node = self.send(operation)?;
        self.refused(operation, mode, node);
        Ok(())
    }

    /// All ranks have refused a call whose kernel was launched.
    fn refused(&self, operation: u64, mode: &Mode, node: usize) {
        self.order.order_refused(slot(operation), mode);
        let is_behind = match mode.stream.filter(|_| !mode.captured) {
            Some(stream) => model::end_of(stream, Order::Eager).contains(node),
            None => model::is_done(node),
        };
        assert!(is_behind, "(d) work beside the kernel of a refused call");
    }

    /// Dispatches to a region of this many units; None if the call is refused.
    fn dispatch_send(
        &mut self,
        order: CallOrder,
        handle: Option<usize>,
        units: u64,
    ) -> Result<Option<Sent>> {
        let (operation, mode) = self.begin(order)?;
        let _relaxed = mode.relax(&self.context)?;
        let cannot = self.cannot_capture(&mode)?;
        let Some(handle) = handle.filter(|_| !cannot) else {
            return self.refuse(operation, &mode).map(|()| None);
        };
        self.enter(&mode)?;
        self.renew(handle, &mode);
        let bytes = units * REGION_ALIGN;
        let Ok([room, staging]) = self.room(operation, bytes, &mode) else {
            return self.refuse(operation, &mode).map(|()| None);
        };
        let node = self.send(operation)?;
        let Some(mut region) = room.filter(|region| region.bytes >= bytes) else {
            self.refused(operation, &mode, node);
            self.places.release(room.iter().chain(&staging));
            return Ok(None);
        };
        // The kernel writes the rows that come, and the rest is given back.
        if mode.waits() {
            self.places.arena.shrink(region.id, bytes);
            region.bytes = bytes;
        }
        for region in [region].iter().chain(&staging) {
            self.ledger.given(region, mode.is_recorded());
            self.ledger.writes(node, region);
        }
        self.give(region, mode.stream);
        let sort = Sort::Dispatch { region };
        Ok(Some(Sent { operation, mode, handle, sort, staging, kernels: vec![node] }))
    }

    /// Memory for the rows of a dispatch, and for the sources of puts. A call that waits reserves room for more rows
    /// than come, as far as there is room.
    fn room(&mut self, operation: u64, bytes: u64, mode: &Mode) -> Result<[Option<Region>; 2]> {
        let holder = Holder::Dispatch(operation);
        let staging = match self.puts {
            true => Some(self.places.allocate(REGION_ALIGN, holder, mode)?),
            false => None,
        };
        if mode.waits() {
            return Ok([self.places.arena.reserve(bytes + REGION_ALIGN, holder).ok(), staging]);
        }
        let region = self.places.allocate(bytes, holder, mode);
        if region.is_err() {
            self.places.release(&staging);
        }
        region.map(|region| [Some(region), staging])
    }

    /// Combines rows in these regions, or copies of rows in this many units; None if the call is refused.
    fn combine_send(
        &mut self,
        order: CallOrder,
        handle: usize,
        inputs: Vec<Region>,
        copied: u64,
    ) -> Result<Option<Sent>> {
        let (operation, mode) = self.begin(order)?;
        let _relaxed = mode.relax(&self.context)?;
        if self.cannot_capture(&mode)? {
            return self.refuse(operation, &mode).map(|()| None);
        }
        self.enter(&mode)?;
        let (mut staging, mut kernels) = (None, Vec::new());
        if copied > 0 {
            let bytes = copied * REGION_ALIGN;
            let Ok(region) = self.places.allocate(bytes, Holder::Combine(operation), &mode) else {
                return self.refuse(operation, &mode).map(|()| None);
            };
            self.ledger.given(&region, mode.is_recorded());
            // A copy of the driver, which no event follows.
            let node = model::work(self.order.work());
            self.ledger.sends(node);
            self.ledger.writes(node, &region);
            (staging, kernels) = (Some(region), vec![node]);
        }
        // Where rows are put, kernels wait for those that return, and sum them.
        for _ in 0..if self.puts { 3 } else { 1 } {
            kernels.push(self.send(operation)?);
        }
        let sent =
            Sent { operation, mode, handle, sort: Sort::Combine { inputs }, staging, kernels };
        self.note_reads(&sent);
        Ok(Some(sent))
    }

    /// The last kernel of a combine reads its rows.
    fn note_reads(&mut self, sent: &Sent) {
        let Some(last) = sent.kernels.last() else { return };
        if let Sort::Combine { inputs } = &sent.sort {
            inputs.iter().chain(&sent.staging).for_each(|region| self.ledger.uses(*last, region));
        }
    }

    /// Receives an operation; returns it with all its kernels.
    fn receive(&mut self, mut sent: Sent) -> Result<Sent> {
        assert!(self.order.resume(&sent.mode)?, "its capture goes on");
        let has_arrived = self.puts && matches!(sent.sort, Sort::Combine { .. });
        if !sent.mode.at_once && !has_arrived {
            let node = self.launch(sent.operation)?;
            self.ledger.receives(node, &sent.kernels);
            sent.kernels.push(node);
            match &sent.sort {
                Sort::Dispatch { region } => {
                    let used = [region].into_iter().chain(&sent.staging);
                    used.for_each(|region| self.ledger.uses(node, region));
                }
                Sort::Combine { .. } => self.note_reads(&sent),
            }
        }
        self.leave(&sent)?;
        if let Some(region) = sent.staging {
            match sent.mode.is_recorded() {
                true => {
                    self.order.regions.give(region.id, sent.mode.stream);
                    self.handles[sent.handle].kept.push(region);
                }
                false => self.places.arena.release(region.id),
            }
        }
        Ok(sent)
    }

    fn leave(&mut self, sent: &Sent) -> Result<()> {
        let slot = slot(sent.operation);
        let Some(stream) = sent.mode.stream else {
            while !self.order.events[slot].is_done()? {}
            return Ok(());
        };
        if sent.mode.is_recorded() {
            return self.order.join(stream);
        }
        self.order.leave(slot, stream)?;
        match sent.sort {
            Sort::Dispatch { .. } if !self.puts => Ok(()),
            _ => self.order.free_behind(slot),
        }
    }

    /// A region for the rows of a combine, if there is room.
    fn combine_input(&mut self, handle: usize, units: u64) -> Result<Option<Region>> {
        let stream = self.handles[handle].stream;
        let is_captured = stream.map_or(Ok(false), |stream| stream.is_captured(&self.context))?;
        let (bytes, holder) = (units * REGION_ALIGN, Holder::CombineInput(handle as u32));
        let room = match is_captured {
            true => self.places.arena.allocate_captured(bytes, holder),
            false => self.places.arena.allocate(bytes, holder),
        };
        let Ok(region) = room else { return Ok(None) };
        self.order.regions.lend(region.id, stream)?;
        self.ledger.given(&region, is_captured);
        self.held.insert(region.id, (region, stream));
        Ok(Some(region))
    }

    fn flush(&mut self) -> Result<()> {
        self.took_back |= self.take_back_regions();
        self.take_back_late();
        while !self.order.stream.is_idle()? {}
        self.order.regions.settle()?;
        self.ledger.flushed(self.held.values().map(|(region, _)| region));
        Ok(())
    }
}
