//! Broken kernel sets that take caps, and the exchange that catches each.

use anyhow::ensure;
use tokenyard_conformance::moe::exchange::{self, InputTensors, Placed};
use tokenyard_conformance::moe::oracle::{Case, Inputs, Layout, Tokens};
use tokenyard_core::abi;
use tokenyard_core::call::DispatchCall;
use tokenyard_core::communicator::{Communicator, Dispatch};
use tokenyard_core::kernels::KernelNeeds;
use tokenyard_core::moe::{Overflow, RowCap};

use crate::altered_kernels::Alteration;
use crate::faulty_shm::Fault as _;
use crate::kernel_mutants::{Unaltered, caught, run_exchange};
use crate::l0::Intact;
use crate::{config, failures};

/// Rank 0 drops rows of several experts.
fn case(layout: Layout) -> Case {
    Case { layout, tokens: Tokens::Full, max_rows: vec![9, 0], ..Case::default() }
}

/// Drops rows one row too late.
#[derive(Default)]
pub(crate) struct LateCap;
impl Alteration for LateCap {
    const NAME: &'static str = "late_cap";

    fn dispatch(&mut self, dispatch: &mut DispatchCall<'_>) {
        dispatch.cap = dispatch.cap.map(|cap| RowCap { rows: cap.rows + 1, ..cap });
    }
}

/// Drops nothing of worst-case sizes.
#[derive(Default)]
pub(crate) struct NoCap;
impl Alteration for NoCap {
    const NAME: &'static str = "no_cap";

    fn dispatch(&mut self, dispatch: &mut DispatchCall<'_>) {
        dispatch.cap = dispatch.cap.map(|_| RowCap::dropping(u64::MAX));
    }
}

/// Does not say that rows were dropped.
#[derive(Default)]
pub(crate) struct SilentOverflow;
impl Alteration for SilentOverflow {
    const NAME: &'static str = "silent_overflow";

    fn received(&mut self, received: &mut abi::TyReceived) {
        if !received.overflow.data.is_null() {
            // SAFETY: one i32 of a region that this rank holds.
            unsafe { received.overflow.data.cast::<i32>().write(0) };
        }
    }
}

/// Counts a dropped row for the wrong expert.
#[derive(Default)]
pub(crate) struct WrongExpert;
impl Alteration for WrongExpert {
    const NAME: &'static str = "wrong_expert";

    fn received(&mut self, received: &mut abi::TyReceived) {
        let dropped = received.dropped.data.cast::<i32>();
        if !dropped.is_null() {
            // SAFETY: `[E/R, 1]` i32 of a region that this rank holds; the case has several experts on a rank.
            unsafe {
                *dropped += 1;
                *dropped.add(1) -= 1;
            }
        }
    }
}

const GROUPED: Layout = Layout::ExpertMajor { alignment: 4, zero_padding: false };

#[test]
fn a_row_beyond_the_cap_is_caught() {
    for worst_case in [false, true] {
        for layout in [Layout::Flat, GROUPED] {
            let case = Case { worst_case, ..case(layout) };
            caught::<LateCap>(run_exchange, &case, "after dispatch: totals");
            caught::<NoCap>(run_exchange, &case, "after dispatch: totals");
        }
    }
}

#[test]
fn dropped_rows_that_are_not_counted_right_are_caught() {
    for layout in [Layout::Flat, GROUPED] {
        caught::<SilentOverflow>(run_exchange, &case(layout), "after dispatch: overflow");
        caught::<WrongExpert>(run_exchange, &case(layout), "after dispatch: dropped");
    }
}

/// A kernel set that takes no caps.
#[derive(Default)]
pub(crate) struct WithoutCaps;
impl Alteration for WithoutCaps {
    const NAME: &'static str = "without_caps";

    fn needs(&mut self, needs: &mut KernelNeeds) {
        needs.capabilities &= !abi::TY_KERNELS_CAP_ROW_CAP;
    }
}

/// Runs dispatches that core refuses on rank 0 and that the others, too, end; then one that works.
fn refused(kernels: &str, case: &Case, words: &[&str]) -> Vec<String> {
    let free = Case { max_rows: Vec::new(), ..case.clone() };
    let inputs = Inputs::all(&free);
    failures(2, &config(kernels, Intact::NAME), |world| {
        let mut comm =
            Communicator::open(world, &config(kernels, Intact::NAME), exchange::options(case))?;
        let rank = comm.rank() as usize;
        let tensors = InputTensors::new(case, rank, inputs.ranks[rank].clone());
        let dispatch = tensors.dispatch()?;
        let policies = [(9, Overflow::Drop), (9, Overflow::Error), (0, Overflow::Drop)];
        for (rows, overflow) in policies {
            let cap = (rank == 0).then_some(RowCap { rows, overflow });
            let error = comm.dispatch(&Dispatch { cap, ..dispatch }).err();
            let Some(error) = error else { continue };
            let text = error.to_string();
            ensure!(
                words.iter().any(|word| text.contains(word)),
                "found {text}; expected {words:?}"
            );
        }
        exchange::check(&mut comm, &free, &inputs, Placed::Outside)
    })
}

#[test]
fn caps_are_refused_by_name_where_the_set_or_the_layout_or_the_sizes_take_none() {
    let flat = Case { max_rows: Vec::new(), ..case(Layout::Flat) };
    let by_set = ["max_rows of a call: found some"];
    let cases = [
        (WithoutCaps::NAME, flat.clone(), &by_set[..]),
        (
            Unaltered::NAME,
            Case { layout: Layout::Packed, ..flat.clone() },
            &["with packed rows", "found 0"],
        ),
        (Unaltered::NAME, Case { worst_case: true, ..flat }, &["with worst-case sizes", "found 0"]),
    ];
    for (kernels, case, words) in cases {
        let failed = refused(kernels, &case, words);
        assert!(failed.is_empty(), "{failed:#?}");
    }
}
