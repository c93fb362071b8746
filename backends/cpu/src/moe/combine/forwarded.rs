//! A combine inside one of several domains: the sums for the rows that this rank had forwarded.
//!
//! The direct exchange sums the rows of its own tokens. This one makes a row for each row that came over the
//! rail, in the same order. The combine on the rail then returns these rows.

use tokenyard_core::call::CombineCall;
use tokenyard_core::host::NO_TENSOR;
use tokenyard_core::moe::{Holder, REGION_ALIGN};
use tokenyard_core::{Result, abi};

use crate::engine::ends::Exposed;
use crate::engine::slots::leave_if_refused;
use crate::moe::combine::left_out::write_left_out;
use crate::moe::combine::partials::{forget_lost_partials, wait_partials};
use crate::moe::combine::sums::Sum;
use crate::moe::combine::{end_combine, post_combine, send_sums, unstage};
use crate::moe::operation::{CombineOp, Offsets, Sums};
use crate::moe::runner::{Rail, Runner};

/// Sums this domain's part of the rows that came over the rail.
///
/// # Safety
/// The call's tensors are valid until the operation is received.
pub(crate) unsafe fn combine_inside(
    owners: &mut Runner,
    rail: &mut Rail,
    call: &CombineCall<'_>,
) -> Result<()> {
    let slot = owners.order.open_slot(call.operation)?;
    for group in owners.exchange.member.domains.all() {
        let source = rail.runner.exchange.member.rank_of(group);
        owners.routing.gone[group as usize] = owners.order.losses().is_given_up(source);
    }
    let mut sums = None;
    let room = |op: &CombineOp| make_room(&rail.runner, op).map(|room| sums = Some(room));
    // SAFETY: by this function's contract.
    let entered = unsafe { post_combine(owners, call, slot, room) };
    let summed = entered.and_then(|op| {
        let at = sums.map_or(Offsets::default(), |sums: Sums| sums.at);
        let summed = sum_all(owners, &rail.runner, slot, &op, at)
            .and_then(|()| end_combine(owners, slot, &op));
        match summed {
            Ok(()) => unstage(owners, &op),
            Err(_) => owners.order.exposed = Some(Exposed { region: op.staging }),
        }
        summed
    });
    match (&summed, sums.and_then(|sums| sums.region)) {
        (Ok(()), _) => rail.sums = sums,
        (Err(_), Some(region)) => owners.places.arena().release(region.id),
        (Err(_), None) => {}
    }
    leave_if_refused(&owners.places, &mut owners.order, slot, call.operation, summed)
}

/// Allocates memory for the sums. It also ensures that there is memory for the rows that return over the rail,
/// because ranks of other rails would not learn of a rank without memory.
fn make_room(rail: &Runner, op: &CombineOp) -> Result<Sums> {
    let widths = rail.routing.widths(op);
    let bytes = |rows: u64| {
        let weights = if op.has_weights { rows * widths.weights } else { 0 };
        [rows * widths.x, weights].map(|bytes: u64| bytes.next_multiple_of(REGION_ALIGN))
    };
    let mut arena = rail.places.arena();
    let holder = Holder::Combine(op.operation);
    let mut take = |bytes: [u64; 2]| match bytes[0] + bytes[1] {
        0 => Ok(None),
        all => arena.allocate(all, holder).map(Some),
    };
    let sums = bytes(rail.routing.handles[op.handle].tokens);
    let region = take(sums)?;
    let back = if rail.places.stores() { 0 } else { rail.routing.landed_before(op.handle, 1) };
    let landing = take(bytes(back));
    for region in [landing.as_ref().ok().copied().flatten(), region.filter(|_| landing.is_err())] {
        region.iter().for_each(|region| arena.release(region.id));
    }
    landing?;
    let x = region.map_or(0, |region| region.offset);
    Ok(Sums { region, at: Offsets { x, weights: x + sums[0] } })
}

fn sum_all(
    owners: &mut Runner,
    rail: &Runner,
    slot: usize,
    op: &CombineOp,
    at: Offsets,
) -> Result<()> {
    // The rows of other domains come first, because other ranks wait for them.
    let domains = owners.exchange.member.domains;
    for group in domains.others().chain([domains.mine]) {
        if owners.routing.is_source_gone(group) {
            continue;
        }
        let first = rail.routing.handles[op.handle].recv.row_base(group);
        let here = at.row(first.into(), owners.routing.widths(op));
        wait_partials(owners, slot, op, group)?;
        sum_group(owners, op, group, here)?;
        while forget_lost_partials(owners, group) {
            sum_group(owners, op, group, here)?;
        }
        if owners.order.losses().are_masked() {
            write_left_out(owners, rail, slot, group);
        }
    }
    Ok(())
}

fn sum_group(owners: &Runner, op: &CombineOp, group: u32, here: Offsets) -> Result<()> {
    let leg = &owners.routing.handles[op.handle].legs[group as usize];
    let first = owners.exchange.member.domains.place(group, 0) as usize;
    let weights = if op.has_weights {
        owners.places.arena_area.at(here.weights).cast()
    } else {
        std::ptr::null_mut()
    };
    let sum = Sum {
        send: &leg.send,
        topk: &leg.topk,
        shape: owners.exchange.shape,
        partials: &owners.routing.partials[first..][..owners.exchange.shape.ranks as usize],
        biases: [std::ptr::null(); 2],
        out: owners.places.arena_area.at(here.x),
        out_weights: weights,
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
pub(crate) unsafe fn combine_on_rail(rail: &mut Rail, call: &CombineCall<'_>) -> Result<()> {
    let sums = rail.sums.take();
    let runner = &mut rail.runner;
    if call.refusal.is_some() {
        let region = sums.and_then(|sums| sums.region);
        // SAFETY: by this function's contract.
        return unsafe { send_sums(runner, call, region) };
    }
    runner.routing.open_handle(call.handle);
    let rows = runner.routing.handles[call.handle as usize].tokens;
    let at = sums.map_or(Offsets::default(), |sums| sums.at);
    let tensor = |offset: u64, tensor: abi::TyTensor| match tensor.data.is_null() {
        true => tensor,
        false => abi::TyTensor {
            data: runner.places.arena_area.at(offset),
            shape: [rows, tensor.shape[1]],
            ..tensor
        },
    };
    let call = CombineCall {
        x: tensor(at.x, call.x),
        weights: tensor(at.weights, call.weights),
        weighted: false,
        beside: NO_TENSOR,
        ..*call
    };
    // SAFETY: as above; the sums are held until the operation is received.
    unsafe { send_sums(runner, &call, sums.and_then(|sums| sums.region)) }
}
