//! A combine inside one of several domains: the sums for the rows that this rank had forwarded.
//!
//! The direct exchange sums the rows of its own tokens. This one makes a row for each row that came over the
//! rail, in the same order. The combine on the rail then returns these rows.

use tokenyard_core::call::CombineCall;
use tokenyard_core::kernels::two_levels::{Rail, Rows, SumRows, Sums, bytes_of};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::engine::ends::Exposed;
use crate::engine::slots::leave_if_refused;
use crate::moe::combine::left_out::write_left_out;
use crate::moe::combine::partials::{forget_lost_partials, wait_partials};
use crate::moe::combine::sums::Sum;
use crate::moe::combine::{combine_recv, combine_send, end_combine, post_combine, unstage};
use crate::moe::operation::{CombineOp, Widths};
use crate::moe::runner::Runner;

/// Sums this domain's part of the rows that came over the rail.
///
/// # Safety
/// The call's tensors are valid until the operation is received.
pub(crate) unsafe fn combine_inside(
    owners: &mut Runner,
    rail: &mut Rail<Runner>,
    call: &CombineCall<'_>,
) -> Result<()> {
    let slot = owners.order.open_slot(call.operation)?;
    for group in owners.exchange.member.domains.all() {
        let source = rail.between.exchange.member.rank_of(group);
        owners.routing.gone[group as usize] = owners.order.losses().is_given_up(source);
    }
    let room = |op: &CombineOp| make_room(rail, call, op);
    // SAFETY: by this function's contract.
    let entered = unsafe { post_combine(owners, call, slot, room) };
    let summed = entered.and_then(|op| {
        let summed = sum_all(owners, rail, slot, &op).and_then(|()| end_combine(owners, slot, &op));
        match summed {
            Ok(()) => unstage(owners, &op),
            Err(_) => owners.order.exposed = Some(Exposed { region: op.staging }),
        }
        summed
    });
    if summed.is_err() {
        release(rail, call.operation);
    }
    leave_if_refused(&owners.places, &mut owners.order, slot, call.operation, summed)
}

/// Takes room for the sums, and for the rows that return over the rail.
fn make_room(rail: &mut Rail<Runner>, call: &CombineCall<'_>, op: &CombineOp) -> Result<()> {
    let Runner { exchange, routing, places, .. } = &rail.between;
    let Widths { x, weights } = routing.widths(op);
    let widths = [x, if op.has_weights { weights } else { 0 }];
    let back = if places.stores() { 0 } else { routing.landed_before(op.handle, 1) };
    let needed = SumRows {
        operation: op.operation,
        rows: routing.handles[op.handle].tokens,
        widths,
        dtype: call.x.dtype,
        hidden: exchange.shape.hidden,
        landing: bytes_of(back, widths).iter().sum(),
    };
    let sums = Sums::reserve(&mut places.arena(), &needed, places.arena_area.at(0))?;
    rail.held.hold(op.operation, Rows::Sums(sums));
    Ok(())
}

/// Releases the sums of an operation, which no rank reads any more.
fn release(rail: &mut Rail<Runner>, operation: u64) {
    if let Some(region) = rail.held.take(operation) {
        rail.between.places.arena().release(region);
    }
}

fn sum_all(owners: &mut Runner, rail: &Rail<Runner>, slot: usize, op: &CombineOp) -> Result<()> {
    let Some(sums) = rail.held.sums(op.operation) else {
        return Err(Error::new(ErrorKind::Internal, "combine", "there is no room for sums"));
    };
    let Widths { x, weights } = owners.routing.widths(op);
    // The rows of other domains come first, because other ranks wait for them.
    let domains = owners.exchange.member.domains;
    for group in domains.others().chain([domains.mine]) {
        if owners.routing.is_source_gone(group) {
            continue;
        }
        let first = u64::from(rail.between.routing.handles[op.handle].recv.row_base(group));
        let out = sums.x.data.wrapping_add((first * x) as usize);
        let out_weights = match op.has_weights {
            true => sums.weights.data.wrapping_add((first * weights) as usize),
            false => std::ptr::null_mut(),
        };
        wait_partials(owners, slot, op, group)?;
        sum_group(owners, op, group, [out, out_weights])?;
        while forget_lost_partials(owners, group) {
            sum_group(owners, op, group, [out, out_weights])?;
        }
        if owners.order.losses().are_masked() {
            write_left_out(owners, &rail.between, slot, group);
        }
    }
    Ok(())
}

fn sum_group(owners: &Runner, op: &CombineOp, group: u32, out: [*mut u8; 2]) -> Result<()> {
    let leg = &owners.routing.handles[op.handle].legs[group as usize];
    let first = owners.exchange.member.domains.place(group, 0) as usize;
    let sum = Sum {
        send: &leg.send,
        taken: &leg.taken,
        topk: &leg.topk,
        shape: owners.exchange.shape,
        partials: &owners.routing.partials[first..][..owners.exchange.shape.ranks as usize],
        biases: [std::ptr::null(); 2],
        out: out[0],
        out_weights: out[1].cast(),
        missing: std::ptr::null_mut(),
        left_out: &[],
        row: op.partial,
        partial: op.partial,
        sums_weights: op.sums_weights,
    };
    // SAFETY: the region has room for these rows; partials were checked against their arena and
    // are complete: their entry, or their signals, were seen.
    unsafe { sum.run(&owners.launcher.pool) }
}

/// Returns the sums over the rail.
///
/// # Safety
/// The call's tensors are valid until the operation is received.
pub(crate) unsafe fn combine_on_rail(
    rail: &mut Rail<Runner>,
    call: &CombineCall<'_>,
) -> Result<()> {
    let sums = rail.held.sums(call.operation);
    // SAFETY: by this function's contract; the sums are held until the operation is received.
    let sent = unsafe { combine_send(&mut rail.between, &call.on_rail(sums.as_ref())) };
    if sent.is_err() {
        release(rail, call.operation);
    }
    sent
}

/// Receives what the rail returns.
pub(crate) fn recv_on_rail(rail: &mut Rail<Runner>, operation: u64) -> Result<()> {
    let received = combine_recv(&mut rail.between, operation);
    release(rail, operation);
    received
}
