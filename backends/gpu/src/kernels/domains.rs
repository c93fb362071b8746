//! Operations over one level, or over both: several domains are a composition of two exchanges.
//!
//! A dispatch goes *between* domains first: every row crosses to its forwarder in each domain that wants
//! it, the rank there on its source's rail. The received rows are then dispatched *inside* the domain,
//! with the source domains as groups, so that the order of received rows is that of one domain. A
//! combine goes the other way: inside, each forwarder sums the expert outputs of the rows that it had
//! forwarded, and rounds; between domains, sources sum one row per domain.
//!
//! All ranks agree. If a rail has refused an operation, its ranks refuse it inside their domains; if a
//! domain has refused it, its ranks refuse it on their rails. This takes one more round between domains,
//! without rows: a dispatch ends with it, and a combine begins with it, so that ranks out of step meet
//! on their rail.
//!
//! The host waits for the first of both exchanges, and for the second when it is received.

use tokenyard_core::abi;
use tokenyard_core::call::{CombineCall, DispatchCall};
use tokenyard_core::host::NO_TENSOR;
use tokenyard_core::moe::{Cast, DType, Holder, Layout, REGION_ALIGN};
use tokenyard_core::{Error, ErrorKind, Result};

use super::dispatch::Grouped;
use super::engine::Engine;
use super::loaded::summable;
use super::mode::CAPTURED;
use super::outcome::Refusal;

/// The engines of the communicator's operations.
#[derive(Debug)]
pub(super) struct Exchanges {
    /// The exchange with the owners of experts: all ranks, or the ranks of this domain.
    pub(super) owners: Engine,
    /// The exchange between several domains.
    pub(super) rail: Option<Rail>,
}

/// The exchange between domains.
#[derive(Debug)]
pub(super) struct Rail {
    pub(super) between: Engine,
    /// By slot of the caller's operations: the region that an operation holds until it is received.
    held: Vec<Option<u64>>,
}

impl Rail {
    pub(super) fn new(between: Engine) -> Self {
        let slots = between.exchange.in_flight.max(2) as usize;
        Self { between, held: vec![None; slots] }
    }

    fn slot(&mut self, operation: u64) -> &mut Option<u64> {
        let slots = self.held.len() as u64;
        &mut self.held[(operation % slots) as usize]
    }

    fn release(&mut self, operation: u64) {
        if let Some(region) = self.slot(operation).take() {
            self.between.release(region);
        }
    }

    /// The exchange's own number of an operation; the operation also takes the next number. A dispatch
    /// uses the first for its rows and the second for its result inside the domains; a combine uses
    /// the first for whether all take part and the second for its rows.
    fn number(operation: u64) -> u64 {
        2 * operation
    }
}

/// An objection of a rank: in the words for other ranks, and, if it is its own, in its own words.
struct Objection {
    refusal: Refusal,
    own: Option<Error>,
}

impl Objection {
    /// The objection of an exchange that ended with an error.
    ///
    /// # Errors
    /// The error, if it cannot be passed to other ranks.
    fn of(engine: &mut Engine, error: Error) -> Result<Self> {
        match engine.take_refusal(&error) {
            Some(refusal) => {
                let is_own = refusal.rank() == engine.exchange.world_rank();
                Ok(Self { refusal, own: is_own.then_some(error) })
            }
            None => Err(error),
        }
    }

    /// Whether the exchange has ended for good, on all ranks of its team.
    fn is_broken(&self) -> bool {
        !matches!(self.refusal.kind, ErrorKind::Refused | ErrorKind::Full)
    }
}

/// The error on which all have agreed; for a rank's own objection, its own words.
fn agreed(error: Error, own: Option<Error>) -> Error {
    match own {
        Some(own) if own.kind() == error.kind() && own.rank().or(error.rank()) == error.rank() => {
            own
        }
        _ => error,
    }
}

fn internal<T>(message: &str) -> Result<T> {
    Err(Error::new(ErrorKind::Internal, "agree among domains", message))
}

/// Rows that are being returned, in the arena of the rail.
struct Partials {
    region: u64,
    x: abi::TyTensor,
    weights: abi::TyTensor,
}

impl Exchanges {
    /// # Safety
    /// The call's tensors are valid until the operation is received.
    pub(super) unsafe fn dispatch_send(&mut self, call: &DispatchCall<'_>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe {
            match &mut self.rail {
                None => self.owners.dispatch_send(call, None),
                Some(rail) => {
                    let _relaxed = self.owners.relax(call.order)?;
                    let sent = dispatch_both(&mut self.owners, rail, call);
                    self.abort_on_fatal(sent)
                }
            }
        }
    }

    pub(super) fn dispatch_output(&self, operation: u64) -> Result<abi::TyReceived> {
        self.owners.dispatch_output(operation)
    }

    pub(super) fn dispatch_recv(&mut self, operation: u64) -> Result<abi::TyReceived> {
        let received = self.owners.dispatch_recv(operation);
        if let Some(rail) = &mut self.rail {
            // No kernel reads the rows of this rail any more.
            rail.release(operation);
        }
        self.abort_on_fatal(received)
    }

    /// # Safety
    /// The call's tensors are valid until the operation is received.
    pub(super) unsafe fn combine_send(&mut self, call: &CombineCall<'_>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe {
            match &mut self.rail {
                None => self.owners.combine_send(call),
                Some(rail) => {
                    let _relaxed = self.owners.relax(call.order)?;
                    let sent = combine_both(&mut self.owners, rail, call);
                    self.abort_on_fatal(sent)
                }
            }
        }
    }

    pub(super) fn combine_recv(&mut self, operation: u64) -> Result<()> {
        let Some(rail) = &mut self.rail else { return self.owners.combine_recv(operation) };
        let received = rail.between.combine_recv(Rail::number(operation) + 1);
        rail.release(operation);
        self.abort_on_fatal(received)
    }

    pub(super) fn each(&mut self) -> impl Iterator<Item = &mut Engine> {
        let between = self.rail.as_mut().map(|rail| &mut rail.between);
        [&mut self.owners].into_iter().chain(between)
    }

    pub(super) fn flush(&mut self) -> Result<()> {
        self.each().try_for_each(|engine| {
            engine.flush().and_then(|()| engine.launcher.flush_puts(&engine.exchange))
        })
    }

    pub(super) fn synchronize(&self) -> Result<()> {
        self.owners.order.stream.synchronize()?;
        self.rail.as_ref().map_or(Ok(()), |rail| rail.between.order.stream.synchronize())
    }

    /// The times of an operation that has ended.
    pub(super) fn trace(&self, operation: u64) -> Result<abi::TyTrace> {
        if self.rail.is_some() {
            let message =
                "an operation of several domains is several exchanges, which keep times apart";
            return Err(Error::new(ErrorKind::Unsupported, "trace operation", message));
        }
        self.owners.trace(operation)
    }

    pub(super) fn gpu_ring(&mut self, level: u64) -> Option<abi::TyGpuRing> {
        self.each().find(|engine| engine.exchange.level == level)?.gpu_ring()
    }

    /// Ends the kernels of both exchanges after an error that closes the communicator.
    fn abort_on_fatal<T>(&mut self, result: Result<T>) -> Result<T> {
        self.each().fold(result, |result, engine| engine.abort_on_fatal(result))
    }
}

/// # Safety
/// As [`Exchanges::dispatch_send`].
unsafe fn dispatch_both(
    inside: &mut Engine,
    rail: &mut Rail,
    call: &DispatchCall<'_>,
) -> Result<()> {
    // SAFETY: by this function's contract.
    let came = unsafe { cross(rail, call) };
    let (sent, mut first) = match came {
        Ok(received) => {
            *rail.slot(call.operation) = Some(received.region);
            let grouped = Grouped {
                sources: received.source.data as u64,
                counts: received.source_counts.data as u64,
            };
            // SAFETY: the received rows are held until the operation is received.
            (unsafe { inside.dispatch_send(&hand_on(call, &received), Some(grouped)) }, None)
        }
        Err(error) => {
            let objection = Objection::of(&mut rail.between, error)?;
            (inside.refuse_dispatch(call, &objection.refusal), Some(objection))
        }
    };
    let mut inner = None;
    if let Err(error) = sent {
        if first.as_ref().is_some_and(Objection::is_broken) {
            return Err(error);
        }
        let objection = match Objection::of(inside, error) {
            Ok(objection) => objection,
            Err(error) => {
                rail.release(call.operation);
                return Err(error);
            }
        };
        inner = Some(objection);
    }
    let refusal = inner.as_ref().map(|objection| &objection.refusal);
    let number = Rail::number(call.operation) + 1;
    let Err(error) = rail.between.agree(number, call.signature, refusal) else {
        return if inner.is_none() { Ok(()) } else { internal("ranks went on after a refusal") };
    };
    if inner.is_none() && rail.between.take_refusal(&error).is_some() {
        // Inside this domain rows are on their way. They arrive, and are delivered to no caller.
        let received = inside.dispatch_recv(call.operation)?;
        inside.release(received.region);
    }
    rail.release(call.operation);
    let own = first.take().and_then(|o| o.own).or(inner.and_then(|o| o.own));
    Err(agreed(error, own))
}

/// Between domains: rows go to their forwarders, in the order of tokens whatever the caller's layout.
///
/// # Safety
/// As [`Exchanges::dispatch_send`].
unsafe fn cross(rail: &mut Rail, call: &DispatchCall<'_>) -> Result<abi::TyReceived> {
    let operation = Rail::number(call.operation);
    let order = call.order.waiting();
    let crossing =
        DispatchCall { operation, layout: Layout::Flat, worst_case: false, order, ..*call };
    // SAFETY: by this function's contract.
    unsafe { rail.between.dispatch_send(&crossing, None)? };
    rail.between.dispatch_recv(operation)
}

/// The dispatch of the rows that arrived over the rail.
fn hand_on<'a>(call: &DispatchCall<'a>, received: &abi::TyReceived) -> DispatchCall<'a> {
    DispatchCall {
        cast: Cast::None,
        x: received.x,
        scales: received.scales,
        topk_idx: received.ids,
        topk_weights: received.weights,
        ..*call
    }
}

/// # Safety
/// As [`Exchanges::combine_send`].
unsafe fn combine_both(inside: &mut Engine, rail: &mut Rail, call: &CombineCall<'_>) -> Result<()> {
    let number = Rail::number(call.operation);
    let (partials, objects, mut own) = match why_not(inside, call)? {
        Some(why) => (None, Some(inside.objection(ErrorKind::Refused, why)), None),
        None => match make_room(rail, call) {
            Ok(partials) => (Some(partials), None, None),
            Err(error) => {
                (None, Some(inside.objection(ErrorKind::Full, error.detail())), Some(error))
            }
        },
    };
    *rail.slot(call.operation) = partials.as_ref().map(|partials| partials.region);
    let asked = rail.between.agree(number, call.signature, objects.as_ref());
    let summed = match (asked, &partials) {
        (Ok(()), Some(partials)) => {
            let inner = CombineCall {
                bias: [NO_TENSOR; 2],
                out: partials.x,
                out_weights: partials.weights,
                missing: NO_TENSOR,
                ..*call
            };
            // SAFETY: by this function's contract; partial rows are held until the operation is received.
            let sent = unsafe { inside.combine_send(&inner) };
            sent.and_then(|()| inside.combine_recv(call.operation))
        }
        (Ok(()), None) => return internal("ranks went on after a refusal"),
        (Err(error), _) => {
            let objection = Objection::of(&mut rail.between, error)?;
            let refused = inside.refuse_combine(call, &objection.refusal);
            if objection.is_broken() {
                return refused;
            }
            refused
        }
    };
    let outer = CombineCall {
        operation: number + 1,
        weighted: false,
        round_once: false,
        sum_weights: false,
        order: call.order.waiting(),
        x: partials.as_ref().map_or(NO_TENSOR, |partials| partials.x),
        weights: partials.as_ref().map_or(NO_TENSOR, |partials| partials.weights),
        ..*call
    };
    let sent = match summed {
        // SAFETY: as above.
        Ok(()) => unsafe { rail.between.combine_send(&outer) },
        Err(error) => {
            let objection = Objection::of(inside, error)?;
            own = own.or(objection.own);
            rail.between.refuse_combine(&outer, &objection.refusal)
        }
    };
    sent.map_err(|error| {
        rail.release(call.operation);
        agreed(error, own)
    })
}

/// The reason why this rank does not take part in a combine, if it does not.
fn why_not(inside: &Engine, call: &CombineCall<'_>) -> Result<Option<String>> {
    if let Some(text) = call.refusal {
        return Ok(Some(text.to_owned()));
    }
    Ok(inside.mode(call.order.waiting())?.captured.then(|| CAPTURED.to_owned()))
}

/// Memory for the sums of the rows that this forwarder had forwarded, and for the rows that return to
/// this rank: other ranks learn of a rank without room before rows move.
fn make_room(rail: &mut Rail, call: &CombineCall<'_>) -> Result<Partials> {
    let between = &mut rail.between;
    let holder = Holder::Combine(call.operation);
    let rows = between.routing.handles[call.handle as usize].received;
    let widths = between.combine_widths(call);
    let bytes = widths.map(|width| (rows * width).next_multiple_of(REGION_ALIGN));
    let region = between.places.arena.allocate(bytes[0] + bytes[1], holder)?;
    match between.places.arena.allocate(between.landing(call).iter().sum(), holder) {
        Ok(landing) => between.places.arena.release(landing.id),
        Err(error) => {
            between.places.arena.release(region.id);
            return Err(error);
        }
    }
    let (_, element) = summable(call.x.dtype);
    let tensor = |at: u64, dtype: u32, columns: u64| abi::TyTensor {
        data: (between.places.address(&region) + at) as *mut u8,
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
    Ok(Partials { region: region.id, x, weights })
}
