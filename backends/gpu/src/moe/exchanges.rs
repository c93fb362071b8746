//! The exchanges of a communicator: with the owners of experts, and on the rail where there are several domains.
//!
//! The host composes operations of both, see `tokenyard_core::host`. Here rows pass between them. Rows that a
//! dispatch has received on the rail are dispatched inside, with the source domains as groups. The sums of a
//! combine inside are the rows of the combine on the rail. The host waits for nothing between the two: see
//! `engine/step.rs`. It waits until both have decided, and for rows only where a call names no stream.

use tokenyard_core::abi;
use tokenyard_core::call::{AgreeCall, CombineCall, DispatchCall};
use tokenyard_core::kernels::two_levels::{ExchangePair, Part, Rail, Rows, SumRows, Sums};
use tokenyard_core::moe::Cast;
use tokenyard_core::refusal::{is_refusal, unless_refused};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::driver::{RelaxedCapture, Stream};
use crate::engine::agree::{agree, agreed};
use crate::engine::outcome::{Refusal, ticket};
use crate::engine::step::{Former, Step, queue_behind};
use crate::engine::waits::{KEEP_TENSORS, see_end};
use crate::moe::args::Crossing;
use crate::moe::combine::SumPlace;
use crate::moe::deferred::Grouped;
use crate::moe::dispatch::{Beside, StepPlace};
use crate::moe::exchanger::Exchanger;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Exchanges {
    pub(crate) levels: ExchangePair<Exchanger>,
    /// For the round by which domains agree beside the rows of a dispatch; none where there is one domain.
    pub(crate) aside: Option<Stream>,
}

/// The exchange on the rail's own number of an operation; the operation also takes the next number. A dispatch uses
/// the first number for its rows, and the second to agree whether the domains go on. A combine moves its rows by the
/// second. It agrees by the first, unless it enters the rail beside the exchange inside, and passes on how that ends.
fn number(operation: u64) -> u64 {
    2 * operation
}

/// Releases the rows of an operation, which no kernel reads any more.
fn release(rail: &mut Rail<Exchanger>, operation: u64) {
    if let Some(region) = rail.held.take(operation) {
        rail.between.engine.release(region);
    }
}

/// Regions of the rail's arena that are taken back now are free behind the exchange inside, which uses them, too.
fn free_behind(rail: &mut Rail<Exchanger>, owners: &Exchanger, operation: u64) -> Result<()> {
    let inside = &owners.engine;
    let event = &inside.order.events[inside.slot(operation)];
    rail.between.engine.order.regions.free_behind(event, inside.order.stream.name())
}

fn internal<T>(message: &str) -> Result<T> {
    Err(Error::new(ErrorKind::Internal, "exchange among domains", message))
}

impl Exchanges {
    /// # Safety
    /// The call's tensors are valid until the operation is received.
    pub(crate) unsafe fn dispatch_send(&mut self, call: &DispatchCall<'_>) -> Result<()> {
        let part = self.levels.part(call.exchange)?;
        // SAFETY: by this function's contract.
        let sent = unsafe {
            match part {
                Part::Whole(owners) => {
                    return owners.dispatch().send(call, &StepPlace::default());
                }
                Part::Inside(owners, rail) => {
                    let _relaxed = owners.engine.relax(call.order)?;
                    forward(owners, rail, call)
                }
                Part::OnRail(owners, rail) => {
                    let _relaxed = owners.engine.relax(call.order)?;
                    cross(rail, call)
                }
            }
        };
        self.abort_on_fatal(sent)
    }

    pub(crate) fn dispatch_output(&mut self, operation: u64) -> Result<abi::TyReceived> {
        self.owners().dispatch().output(operation)
    }

    pub(crate) fn dispatch_recv(&mut self, operation: u64) -> Result<abi::TyReceived> {
        let ExchangePair { owners, rail } = &mut self.levels;
        let Some(rail) = rail else { return owners.dispatch().receive(operation) };
        let crossed = rail.between.dispatch().ended(number(operation));
        let received = owners.dispatch().receive(operation);
        let received = crossed.and(received).and_then(|received| {
            free_behind(rail, owners, operation)?;
            Ok(received)
        });
        release(rail, operation);
        self.abort_on_fatal(received)
    }

    /// # Safety
    /// The call's tensors are valid until the operation is received.
    pub(crate) unsafe fn combine_send(&mut self, call: &CombineCall<'_>) -> Result<()> {
        let part = self.levels.part(call.exchange)?;
        // SAFETY: by this function's contract.
        let sent = unsafe {
            match part {
                Part::Whole(owners) => {
                    return owners.combine().send(call, &SumPlace::default());
                }
                Part::Inside(owners, rail) => {
                    let _relaxed = owners.engine.relax(call.order)?;
                    sum_inside(owners, rail, call)
                }
                Part::OnRail(owners, rail) => {
                    let _relaxed = owners.engine.relax(call.order)?;
                    return_sums(owners, rail, call)
                }
            }
        };
        self.abort_on_fatal(sent)
    }

    pub(crate) fn combine_recv(&mut self, operation: u64) -> Result<()> {
        let ExchangePair { owners, rail } = &mut self.levels;
        let Some(rail) = rail else { return owners.combine().receive(operation) };
        let is_queued = !has_sums_beside(owners, rail);
        let summed = owners.combine().ended(operation, is_queued);
        let returned = rail.between.combine().receive(number(operation) + 1);
        let received = summed.and(returned).and_then(|()| free_behind(rail, owners, operation));
        release(rail, operation);
        self.abort_on_fatal(received)
    }

    /// A round without rows.
    pub(crate) fn agree(&mut self, call: &AgreeCall<'_>) -> Result<()> {
        let Part::OnRail(owners, rail) = self.levels.part(call.exchange)? else {
            return internal("a round without rows is for the rail");
        };
        // The caller's stream may capture a graph, in which case the operation was refused.
        let _relaxed = RelaxedCapture::enter(rail.between.engine.order.context())?;
        if call.is_combine && has_sums_beside(owners, rail) {
            return call.refusal.as_ref().map_or(Ok(()), |refusal| Err(refusal.error()));
        }
        let number = number(call.operation) + u64::from(!call.is_combine);
        let refusal = call.refusal.as_ref().map(Refusal::passed_on);
        let aside = self.aside.as_ref().map(Stream::name).filter(|_| !call.is_combine);
        let agreed = follow_sums(owners, rail, call).and_then(|step| {
            let step = Step { aside, ..step };
            agree(&mut rail.between.engine, number, call.signature(), refusal.as_ref(), &step)
        });
        self.abort_on_fatal(agreed)
    }

    pub(crate) fn owners(&mut self) -> &mut Exchanger {
        &mut self.levels.owners
    }

    pub(crate) fn flush(&mut self) -> Result<()> {
        self.levels.each().try_for_each(|Exchanger { engine, .. }| {
            engine.flush().and_then(|()| engine.waits.flush_puts(&engine.member))
        })
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        let ExchangePair { owners, rail } = &self.levels;
        owners.engine.order.stream.synchronize()?;
        rail.as_ref().map_or(Ok(()), |rail| rail.between.engine.order.stream.synchronize())
    }

    /// The times of an operation that has ended.
    pub(crate) fn trace(&self, operation: u64) -> Result<abi::TyTrace> {
        if self.levels.rail.is_some() {
            let message =
                "an operation of several domains is several exchanges, which keep times apart";
            return Err(Error::new(ErrorKind::Unsupported, "trace operation", message));
        }
        self.levels.owners.engine.trace(operation)
    }

    pub(crate) fn gpu_ring(&mut self, level: u64) -> Option<abi::TyGpuRing> {
        self.levels.each().find(|one| one.engine.member.level == level)?.engine.gpu_ring()
    }

    /// Ends the kernels of both exchanges after an error that closes the communicator.
    fn abort_on_fatal<T>(&mut self, result: Result<T>) -> Result<T> {
        let result =
            self.levels.each().fold(result, |result, one| one.engine.abort_on_fatal(result));
        let Err(error) = &result else { return result };
        if is_refusal(error) || self.levels.rail.is_none() {
            return result;
        }
        // A caller that receives the error may free its tensors, which kernels of either exchange may use.
        let is_over = |one: &Exchanger| see_end(&|| one.engine.order.stream.is_idle());
        let running = self.levels.each().filter(|one| !is_over(one)).count();
        result.map_err(|error| if running == 0 { error } else { error.with_fix(KEEP_TENSORS) })
    }
}

/// Between domains: rows go to their forwarders, in the order of tokens whatever the caller's layout. The exchange is
/// queued, in regions for the most rows that may come, so that their number decides no place.
///
/// # Safety
/// As [`Exchanges::dispatch_send`].
unsafe fn cross(rail: &mut Rail<Exchanger>, call: &DispatchCall<'_>) -> Result<()> {
    let operation = number(call.operation);
    let crossing = DispatchCall { operation, ..call.on_rail() };
    let deferred = StepPlace { step: Step::DEFERRED, ..StepPlace::default() };
    // SAFETY: by this function's contract.
    unsafe { rail.between.dispatch().send(&crossing, &deferred)? };
    let received = rail.between.dispatch().arrives(operation)?;
    rail.held.hold(call.operation, Rows::Received(received));
    Ok(())
}

/// Inside a domain: the dispatch of the rows that arrive over the rail. Then the host waits for both.
///
/// # Safety
/// As [`Exchanges::dispatch_send`].
unsafe fn forward(
    owners: &mut Exchanger,
    rail: &mut Rail<Exchanger>,
    call: &DispatchCall<'_>,
) -> Result<()> {
    if call.refusal.is_some() {
        // SAFETY: by this function's contract.
        return unsafe { owners.dispatch().send(call, &StepPlace::default()) };
    }
    let number = number(call.operation);
    let Some(received) = rail.held.received(call.operation) else {
        return internal("no rows come over the rail");
    };
    let grouped = Grouped {
        sources: received.source.data as u64,
        counts: received.source_counts.data as u64,
    };
    let forwarded = call.forwarded(&received);
    let former = Former::of(&rail.between.engine, number);
    let beside = rail.between.moe.runs.as_ref().map(|runs| Beside {
        crossing: runs.inside(call.cast != Cast::None),
        ticket: ticket(number),
    });
    let step = Step { former, ..Step::default() };
    let place = StepPlace { step, grouped: Some(grouped), beside };
    if beside.is_none() {
        queue_behind(&owners.engine, &rail.between.engine, number)?;
    }
    // SAFETY: the received rows are held until the operation is received.
    let launched = unsafe { owners.dispatch().launch(&forwarded, &place) };
    let came = unless_refused(rail.between.dispatch().counted(number))?;
    let sent = launched.and_then(|launched| owners.dispatch().settle(launched));
    match (came, &sent) {
        (Some(tokens), Ok(())) if !call.is_replay => {
            owners.moe.routing.handle(call.handle).tokens = tokens as u32;
        }
        (None, Ok(())) => return internal("ranks of a domain went on after a refusal on a rail"),
        (came, Err(_)) => {
            // Rows that are on their way still arrive in the region.
            let ended = came.map_or(Ok(()), |_| rail.between.dispatch().abandoned(number));
            release(rail, call.operation);
            ended?;
        }
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
    rail: &mut Rail<Exchanger>,
    call: &CombineCall<'_>,
) -> Result<()> {
    if call.refusal.is_some() {
        // SAFETY: by this function's contract.
        return unsafe { owners.combine().send(call, &SumPlace::default()) };
    }
    let held = match make_room(rail, call) {
        Ok(held) => held,
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
    let inside = owners.engine.order.stream.name();
    rail.between.engine.order.regions.hold(inside)?;
    let inner = call.inside(&held);
    // SAFETY: by this function's contract; the sums are held until the operation is received.
    let sent = unsafe {
        let place = SumPlace { step: Step::DEFERRED, crossing: sums(rail, call.operation) };
        owners.combine().send(&inner, &place)
    };
    let summed = sent.and_then(|()| match has_sums_beside(owners, rail) {
        // The wait for their end is queued when they are received: streams may share a queue of the device, where it
        // would hold up the exchange on the rail.
        true => Ok(()),
        false => owners.combine().ends(call.operation),
    });
    if summed.is_err() {
        release(rail, call.operation);
    }
    summed
}

/// Whether a combine enters the rail beside the exchange inside. Over puts inside, sums are made by a second kernel,
/// for which the one on the rail might leave no room.
fn has_sums_beside(owners: &Exchanger, rail: &Rail<Exchanger>) -> bool {
    rail.between.moe.runs.is_some() && !owners.moe.exchange.path.puts()
}

/// The place of the round between the two exchanges of a combine: behind the sums inside, if they are queued.
fn follow_sums(
    owners: &Exchanger,
    rail: &mut Rail<Exchanger>,
    call: &AgreeCall<'_>,
) -> Result<Step> {
    let held = rail.held.sums(call.operation);
    if !call.is_combine || held.is_none() || call.refusal.is_some() {
        return Ok(Step::default());
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
    rail: &mut Rail<Exchanger>,
    call: &CombineCall<'_>,
) -> Result<()> {
    let round = number(call.operation);
    let held = rail.held.sums(call.operation);
    let outer = CombineCall { operation: round + 1, ..call.on_rail(held.as_ref()) };
    if call.refusal.is_some() {
        // SAFETY: by this function's contract.
        return unsafe { rail.between.combine().send(&outer, &SumPlace::default()) };
    }
    let is_beside = has_sums_beside(owners, rail);
    let former = match is_beside {
        true => Former::beside(&owners.engine, call.operation),
        false => Former::of(&rail.between.engine, round),
    };
    let step = Step { former, ..Step::DEFERRED };
    // SAFETY: by this function's contract; the sums are held until the operation is received.
    let sent = unsafe {
        let place = SumPlace { step, crossing: sums(rail, call.operation) };
        rail.between.combine().send(&outer, &place)
    };
    let summed = unless_refused(owners.combine().agreed(call.operation))?;
    let agreed = match is_beside {
        true => Some(()),
        false => unless_refused(agreed(&mut rail.between.engine, round))?,
    };
    let returned = sent.and_then(|()| rail.between.combine().agreed(outer.operation));
    if returned.is_err() {
        let ended =
            summed.map_or(Ok(()), |()| owners.combine().abandoned(call.operation, !is_beside));
        release(rail, call.operation);
        ended?;
    } else if summed.is_none() || agreed.is_none() {
        return internal("ranks of a rail went on after a refusal");
    }
    returned
}

/// The runs by which the sums of an operation cross.
fn sums(rail: &Rail<Exchanger>, operation: u64) -> Crossing {
    rail.between.moe.runs.as_ref().map(|runs| runs.of_sums(operation)).unwrap_or_default()
}

/// Reserves memory for the sums of the rows that this forwarder had forwarded, and for the rows that return
/// to this rank. If there is no room, other ranks learn of it before rows move.
fn make_room(rail: &mut Rail<Exchanger>, call: &CombineCall<'_>) -> Result<Sums> {
    let Exchanger { engine, moe } = &mut rail.between;
    let needed = SumRows {
        operation: call.operation,
        rows: moe.routing.handles[call.handle as usize].received,
        widths: moe.combine_widths(call),
        dtype: call.x.dtype,
        hidden: moe.exchange.shape.hidden,
        landing: moe.landing(call).iter().sum(),
    };
    let base = engine.places.arena_at as *mut u8;
    let sums = Sums::reserve(&mut engine.places.arena, &needed, base)?;
    rail.held.hold(call.operation, Rows::Sums(sums));
    Ok(sums)
}
