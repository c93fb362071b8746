//! The exchanges of a communicator: with the owners of experts, and on the rail where there are several domains.
//!
//! The host composes operations of both, see `tokenyard_core::host`. Here rows pass between them. Rows that a
//! dispatch has received on the rail are dispatched inside, with the source domains as groups. The sums of a
//! combine inside are the rows of the combine on the rail. The host waits for nothing between the two: see
//! `engine/step.rs`.

use tokenyard_core::abi;
use tokenyard_core::call::{AgreeCall, CombineCall, DispatchCall, ExchangeKind};
use tokenyard_core::host::NO_TENSOR;
use tokenyard_core::moe::{Cast, DType, Holder, Layout, REGION_ALIGN};
use tokenyard_core::refusal::{is_refusal, unless_refused};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::driver::RelaxedCapture;
use crate::engine::agree::{agree, agreed};
use crate::engine::outcome::{Refusal, ticket};
use crate::engine::step::{Former, Step, queue_behind};
use crate::engine::waits::{KEEP_TENSORS, see_end};
use crate::moe::args::Crossing;
use crate::moe::combine::SumPlace;
use crate::moe::deferred::Grouped;
use crate::moe::dispatch::{Beside, StepPlace};
use crate::moe::exchanger::Exchanger;
use crate::moe::loaded::summable;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Exchanges {
    /// The exchange with the owners of experts: all ranks, or the ranks of this domain.
    pub(crate) owners: Exchanger,
    /// The exchange between several domains.
    pub(crate) rail: Option<Rail>,
}

/// The exchange between domains.
#[derive(Debug)]
pub(crate) struct Rail {
    pub(crate) between: Exchanger,
    /// By slot of the caller's operations: the rows that an operation holds until it is received.
    held: Vec<Option<Held>>,
}

/// Rows in the arena of the rail.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant, reason = "one per slot, and an operation allocates nothing")]
enum Held {
    /// Those that a dispatch receives, with room for the most that may come.
    Received(abi::TyReceived),
    /// The sums of a combine inside, and their weights. Until the combine on the rail, the host has not waited for it.
    Sums { region: u64, x: abi::TyTensor, weights: abi::TyTensor },
}

// SAFETY: tensors describe memory of the rail's arena, which its engine holds; they are used where that is.
unsafe impl Send for Held {}

impl Rail {
    pub(crate) fn new(between: Exchanger) -> Self {
        let slots = between.moe.exchange.in_flight.max(2) as usize;
        Self { between, held: vec![None; slots] }
    }

    fn slot(&mut self, operation: u64) -> &mut Option<Held> {
        let slots = self.held.len() as u64;
        &mut self.held[(operation % slots) as usize]
    }

    fn release(&mut self, operation: u64) {
        match self.slot(operation).take() {
            Some(Held::Received(received)) => self.between.engine.release(received.region),
            Some(Held::Sums { region, .. }) => self.between.engine.release(region),
            None => {}
        }
    }

    /// The exchange's own number of an operation; the operation also takes the next number. A dispatch uses
    /// the first number for its rows, and the second to agree whether the domains go on. A combine agrees by
    /// the first and moves its rows by the second.
    fn number(operation: u64) -> u64 {
        2 * operation
    }
}

fn internal<T>(message: &str) -> Result<T> {
    Err(Error::new(ErrorKind::Internal, "exchange among domains", message))
}

impl Exchanges {
    /// # Safety
    /// The call's tensors are valid until the operation is received.
    pub(crate) unsafe fn dispatch_send(&mut self, call: &DispatchCall<'_>) -> Result<()> {
        let Self { owners, rail } = self;
        // SAFETY: by this function's contract.
        let sent = unsafe {
            match (call.exchange, rail) {
                (ExchangeKind::Owners, None) => {
                    return owners.dispatch().send(call, &StepPlace::default());
                }
                (ExchangeKind::Rail, None) => return internal("there is one domain"),
                (ExchangeKind::Owners, Some(rail)) => {
                    let _relaxed = owners.engine.relax(call.order)?;
                    forward(owners, rail, call)
                }
                (ExchangeKind::Rail, Some(rail)) => {
                    let _relaxed = owners.engine.relax(call.order)?;
                    cross(rail, call)
                }
            }
        };
        self.abort_on_fatal(sent)
    }

    pub(crate) fn dispatch_output(&mut self, operation: u64) -> Result<abi::TyReceived> {
        self.owners.dispatch().output(operation)
    }

    pub(crate) fn dispatch_recv(&mut self, operation: u64) -> Result<abi::TyReceived> {
        let received = self.owners.dispatch().receive(operation);
        if let Some(rail) = &mut self.rail {
            // No kernel reads the rows of this rail any more.
            rail.release(operation);
        }
        self.abort_on_fatal(received)
    }

    /// # Safety
    /// The call's tensors are valid until the operation is received.
    pub(crate) unsafe fn combine_send(&mut self, call: &CombineCall<'_>) -> Result<()> {
        let Self { owners, rail } = self;
        // SAFETY: by this function's contract.
        let sent = unsafe {
            match (call.exchange, rail) {
                (ExchangeKind::Owners, None) => {
                    return owners.combine().send(call, &SumPlace::default());
                }
                (ExchangeKind::Rail, None) => return internal("there is one domain"),
                (ExchangeKind::Owners, Some(rail)) => {
                    let _relaxed = owners.engine.relax(call.order)?;
                    sum_inside(owners, rail, call)
                }
                (ExchangeKind::Rail, Some(rail)) => {
                    let _relaxed = owners.engine.relax(call.order)?;
                    return_sums(owners, rail, call)
                }
            }
        };
        self.abort_on_fatal(sent)
    }

    pub(crate) fn combine_recv(&mut self, operation: u64) -> Result<()> {
        let Some(rail) = &mut self.rail else { return self.owners.combine().receive(operation) };
        let received = rail.between.combine().receive(Rail::number(operation) + 1);
        rail.release(operation);
        self.abort_on_fatal(received)
    }

    /// A round without rows.
    pub(crate) fn agree(&mut self, call: &AgreeCall<'_>) -> Result<()> {
        let Self { owners, rail } = self;
        let (ExchangeKind::Rail, Some(rail)) = (call.exchange, rail) else {
            return internal("a round without rows is for the rail");
        };
        // The caller's stream may capture a graph, in which case the operation was refused.
        let _relaxed = RelaxedCapture::enter(rail.between.engine.order.context())?;
        let number = Rail::number(call.operation) + u64::from(!call.is_combine);
        let refusal = call.refusal.as_ref().map(Refusal::passed_on);
        let agreed = follow_sums(owners, rail, call).and_then(|step| {
            agree(&mut rail.between.engine, number, call.signature(), refusal.as_ref(), &step)
        });
        self.abort_on_fatal(agreed)
    }

    pub(crate) fn each(&mut self) -> impl Iterator<Item = &mut Exchanger> {
        let between = self.rail.as_mut().map(|rail| &mut rail.between);
        [&mut self.owners].into_iter().chain(between)
    }

    pub(crate) fn flush(&mut self) -> Result<()> {
        self.each().try_for_each(|Exchanger { engine, .. }| {
            engine.flush().and_then(|()| engine.waits.flush_puts(&engine.member))
        })
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        self.owners.engine.order.stream.synchronize()?;
        self.rail.as_ref().map_or(Ok(()), |rail| rail.between.engine.order.stream.synchronize())
    }

    /// The times of an operation that has ended.
    pub(crate) fn trace(&self, operation: u64) -> Result<abi::TyTrace> {
        if self.rail.is_some() {
            let message =
                "an operation of several domains is several exchanges, which keep times apart";
            return Err(Error::new(ErrorKind::Unsupported, "trace operation", message));
        }
        self.owners.engine.trace(operation)
    }

    pub(crate) fn gpu_ring(&mut self, level: u64) -> Option<abi::TyGpuRing> {
        self.each().find(|one| one.engine.member.level == level)?.engine.gpu_ring()
    }

    /// Ends the kernels of both exchanges after an error that closes the communicator.
    fn abort_on_fatal<T>(&mut self, result: Result<T>) -> Result<T> {
        let result = self.each().fold(result, |result, one| one.engine.abort_on_fatal(result));
        let Err(error) = &result else { return result };
        if is_refusal(error) || self.rail.is_none() {
            return result;
        }
        // A caller that receives the error may free its tensors, which kernels of either exchange may use.
        let is_over = |one: &Exchanger| see_end(&|| one.engine.order.stream.is_idle());
        let running = self.each().filter(|one| !is_over(one)).count();
        result.map_err(|error| if running == 0 { error } else { error.with_fix(KEEP_TENSORS) })
    }
}

/// Between domains: rows go to their forwarders, in the order of tokens whatever the caller's layout. The exchange is
/// queued, in regions for the most rows that may come, so that their number decides no place.
///
/// # Safety
/// As [`Exchanges::dispatch_send`].
unsafe fn cross(rail: &mut Rail, call: &DispatchCall<'_>) -> Result<()> {
    let operation = Rail::number(call.operation);
    let order = call.order.waiting();
    let crossing =
        DispatchCall { operation, layout: Layout::Flat, worst_case: true, order, ..*call };
    let deferred = StepPlace { step: Step::DEFERRED, ..StepPlace::default() };
    // SAFETY: by this function's contract.
    unsafe { rail.between.dispatch().send(&crossing, &deferred)? };
    let received = rail.between.dispatch().arrives(operation)?;
    *rail.slot(call.operation) = Some(Held::Received(received));
    Ok(())
}

/// Inside a domain: the dispatch of the rows that arrive over the rail. Then the host waits for both.
///
/// # Safety
/// As [`Exchanges::dispatch_send`].
unsafe fn forward(owners: &mut Exchanger, rail: &mut Rail, call: &DispatchCall<'_>) -> Result<()> {
    if call.refusal.is_some() {
        // SAFETY: by this function's contract.
        return unsafe { owners.dispatch().send(call, &StepPlace::default()) };
    }
    let number = Rail::number(call.operation);
    let Some(Held::Received(received)) = *rail.slot(call.operation) else {
        return internal("no rows come over the rail");
    };
    let grouped = Grouped {
        sources: received.source.data as u64,
        counts: received.source_counts.data as u64,
    };
    let forwarded = DispatchCall {
        cast: Cast::None,
        x: received.x,
        scales: received.scales,
        topk_idx: received.ids,
        topk_weights: received.weights,
        // N of the rail is T here. Its high half is zero.
        tokens: received.totals.data as *const u32,
        ..*call
    };
    let former = Former::of(&rail.between.engine, number);
    let beside = rail.between.moe.runs.as_ref().map(|runs| Beside {
        crossing: runs.inside(call.cast != Cast::None),
        ticket: ticket(number),
    });
    let step = Step { former, deferred: false };
    let place = StepPlace { step, grouped: Some(grouped), beside };
    if beside.is_none() {
        queue_behind(&owners.engine, &rail.between.engine, number)?;
    }
    // SAFETY: the received rows are held until the operation is received.
    let launched = unsafe { owners.dispatch().launch(&forwarded, &place) };
    let came = unless_refused(rail.between.dispatch().concluded(number))?;
    let sent = launched.and_then(|launched| owners.dispatch().settle(launched));
    match (came, &sent) {
        (Some(tokens), Ok(())) if !call.is_replay => {
            owners.moe.routing.handle(call.handle).tokens = tokens as u32;
        }
        (None, Ok(())) => return internal("ranks of a domain went on after a refusal on a rail"),
        (_, Err(_)) => rail.release(call.operation),
        _ => {}
    }
    sent
}

/// Inside a domain: the sums for the rows that this forwarder had forwarded. The exchange is queued.
///
/// # Safety
/// As [`Exchanges::combine_send`].
unsafe fn sum_inside(
    owners: &mut Exchanger,
    rail: &mut Rail,
    call: &CombineCall<'_>,
) -> Result<()> {
    if call.refusal.is_some() {
        // SAFETY: by this function's contract.
        return unsafe { owners.combine().send(call, &SumPlace::default()) };
    }
    let (out, out_weights) = match make_room(rail, call) {
        Ok(Held::Sums { x, weights, .. }) => (x, weights),
        Ok(Held::Received(_)) => return internal("sums are no rows that came"),
        Err(error) => {
            let refusal = owners.engine.objection(ErrorKind::Full, error.detail());
            let refused = owners.combine().refuse(call, &refusal);
            // Its own reason says more than the text that the other ranks receive.
            return refused.map_err(|e| if e.kind() == ErrorKind::Full { error } else { e });
        }
    };
    if rail.between.moe.runs.is_some() {
        // Kernels on the rail wait for those of this exchange, so they must not start before them.
        let mode = rail.between.engine.mode(call.order.waiting())?;
        rail.between.engine.order.enter(&mode)?;
    }
    let (bias, missing) = ([NO_TENSOR; 2], NO_TENSOR);
    let inner = CombineCall { bias, out, out_weights, missing, ..*call };
    // SAFETY: by this function's contract; the sums are held until the operation is received.
    let sent = unsafe {
        let place = SumPlace { step: Step::DEFERRED, crossing: sums(rail, call.operation) };
        owners.combine().send(&inner, &place)
    };
    let summed = sent.and_then(|()| owners.combine().ends(call.operation));
    if summed.is_err() {
        rail.release(call.operation);
    }
    summed
}

/// The place of the round between the two exchanges of a combine: behind the sums inside, if they are queued.
fn follow_sums(owners: &Exchanger, rail: &mut Rail, call: &AgreeCall<'_>) -> Result<Step> {
    let sums = matches!(rail.slot(call.operation), Some(Held::Sums { .. }));
    if !call.is_combine || !sums || call.refusal.is_some() {
        return Ok(Step::default());
    }
    // Over puts inside, sums are made by a second kernel, for which the one on the rail might leave no room.
    if rail.between.moe.runs.is_some() && !owners.moe.exchange.path.puts() {
        return Ok(Step {
            former: Former::beside(&owners.engine, call.operation),
            ..Step::DEFERRED
        });
    }
    queue_behind(&rail.between.engine, &owners.engine, call.operation)?;
    Ok(Step { former: Former::of(&owners.engine, call.operation), ..Step::DEFERRED })
}

/// Between domains: the sums return to the sources of their rows. Then the host waits for both exchanges, and for the
/// round between them.
///
/// # Safety
/// As [`Exchanges::combine_send`].
unsafe fn return_sums(
    owners: &mut Exchanger,
    rail: &mut Rail,
    call: &CombineCall<'_>,
) -> Result<()> {
    let (x, weights) = match *rail.slot(call.operation) {
        Some(Held::Sums { x, weights, .. }) => (x, weights),
        _ => (NO_TENSOR, NO_TENSOR),
    };
    let round = Rail::number(call.operation);
    let outer = CombineCall {
        operation: round + 1,
        weighted: false,
        round_once: false,
        sum_weights: false,
        order: call.order.waiting(),
        x,
        weights,
        ..*call
    };
    if call.refusal.is_some() {
        // SAFETY: by this function's contract.
        return unsafe { rail.between.combine().send(&outer, &SumPlace::default()) };
    }
    let step = Step { former: Former::of(&rail.between.engine, round), ..Step::DEFERRED };
    // SAFETY: by this function's contract; the sums are held until the operation is received.
    let sent = unsafe {
        let place = SumPlace { step, crossing: sums(rail, call.operation) };
        rail.between.combine().send(&outer, &place)
    };
    let summed = unless_refused(owners.combine().concluded(call.operation))?;
    let agreed = unless_refused(agreed(&mut rail.between.engine, round))?;
    let returned = sent.and_then(|()| rail.between.combine().agreed(outer.operation));
    if returned.is_err() {
        rail.release(call.operation);
    } else if summed.is_none() || agreed.is_none() {
        return internal("ranks of a rail went on after a refusal");
    }
    returned
}

/// The runs by which the sums of an operation cross.
fn sums(rail: &Rail, operation: u64) -> Crossing {
    rail.between.moe.runs.as_ref().map(|runs| runs.of_sums(operation)).unwrap_or_default()
}

/// Reserves memory for the sums of the rows that this forwarder had forwarded, and for the rows that return
/// to this rank. If there is no room, other ranks learn of it before rows move.
fn make_room(rail: &mut Rail, call: &CombineCall<'_>) -> Result<Held> {
    let between = &mut rail.between;
    let holder = Holder::Combine(call.operation);
    let rows = between.moe.routing.handles[call.handle as usize].received;
    let widths = between.moe.combine_widths(call);
    let bytes = widths.map(|width| (rows * width).next_multiple_of(REGION_ALIGN));
    let region = between.engine.places.arena.allocate(bytes[0] + bytes[1], holder)?;
    match between.engine.places.arena.allocate(between.moe.landing(call).iter().sum(), holder) {
        Ok(landing) => between.engine.places.arena.release(landing.id),
        Err(error) => {
            between.engine.places.arena.release(region.id);
            return Err(error);
        }
    }
    let (_, element) = summable(call.x.dtype);
    let tensor = |at: u64, dtype: u32, columns: u64| abi::TyTensor {
        data: (between.engine.places.address(&region) + at) as *mut u8,
        dtype,
        reserved: 0,
        shape: [rows, columns],
        stride: [columns as i64, 1],
    };
    let weights = match widths[1] {
        0 => NO_TENSOR,
        width => tensor(bytes[0], DType::F32.code(), width / 4),
    };
    let x = tensor(0, call.x.dtype, widths[0] / element);
    let held = Held::Sums { region: region.id, x, weights };
    *rail.slot(call.operation) = Some(held);
    Ok(held)
}
