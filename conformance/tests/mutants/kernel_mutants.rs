//! Broken kernel sets, and the exchange that catches each.

use half::bf16;
use tokenyard_conformance::moe::exchange::{self, InputTensors, Placed};
use tokenyard_conformance::moe::oracle::{
    Case, Combine, Input, Inputs, Layout, RowType, Scales, Sums,
};
use tokenyard_core::abi;
use tokenyard_core::call::{CombineCall, DispatchCall};
use tokenyard_core::communicator::{Cast, Communicator};
use tokenyard_core::moe::{ScaleLayout, SourceIndex};

use crate::altered_kernels::Alteration;
use crate::faulty_shm::Fault as _;
use crate::l0::Intact;
use crate::{assert_caught, config, failures};

/// A whole exchange, every element checked.
pub(crate) fn run_exchange(kernels: &str, case: &Case) -> Vec<String> {
    let config = config(kernels, Intact::NAME);
    let inputs = Inputs::all(case);
    failures(case.ranks as u32, &config, |world| {
        let mut comm = Communicator::open(world, &config, exchange::options(case))?;
        exchange::check(&mut comm, case, &inputs, Placed::Outside)
    })
}

/// Two dispatches, then a replay of the second.
fn run_replay(kernels: &str, case: &Case) -> Vec<String> {
    let config = config(kernels, Intact::NAME);
    let first = Case { seed: case.seed + 1, ..case.clone() };
    let (other, inputs) = (Inputs::all(&first), Inputs::all(case));
    failures(case.ranks as u32, &config, |world| {
        let mut comm = Communicator::open(world, &config, exchange::options(case))?;
        let rank = comm.rank() as usize;
        let earlier = InputTensors::new(&first, rank, other.ranks[rank].clone());
        let (_earlier, _handle) = comm.dispatch(&earlier.dispatch()?)?;
        let tensors = InputTensors::new(case, rank, inputs.ranks[rank].clone());
        let (received, handle) = comm.dispatch(&tensors.dispatch()?)?;
        exchange::check_received(case, &inputs, rank, &received)?;
        drop(received);
        let again = comm.replay(&handle, &tensors.replay()?)?;
        exchange::check_received(case, &inputs, rank, &again)
            .map_err(|error| error.context("after replay"))
    })
}

type Run = fn(&str, &Case) -> Vec<String>;

pub(crate) fn caught<A: Alteration>(run: Run, case: &Case, why: &str) {
    case.validate().unwrap();
    let name = case.to_string();
    assert_caught(A::NAME, &name, why, |broken| {
        run(if broken { A::NAME } else { Unaltered::NAME }, case)
    });
}

/// The unbroken kernel set.
#[derive(Default)]
pub(crate) struct Unaltered;
impl Alteration for Unaltered {
    const NAME: &'static str = "unaltered";
}

/// Counts one row too many for the first expert, as where a count includes its successor's first row.
#[derive(Default)]
pub(crate) struct OffByOneCount;
impl Alteration for OffByOneCount {
    const NAME: &'static str = "off_by_one_count";

    fn received(&mut self, received: &mut abi::TyReceived) {
        // SAFETY: `[E/R, 1]` i32 of a region that this rank holds.
        unsafe { *received.expert_counts.data.cast::<i32>() += 1 };
    }
}

#[test]
fn an_off_by_one_count_is_caught() {
    caught::<OffByOneCount>(run_exchange, &Case::default(), "counts");
}

/// Exchanges the first two rows, as where rows are placed when they arrive.
#[derive(Default)]
pub(crate) struct SwappedRows;
impl Alteration for SwappedRows {
    const NAME: &'static str = "swapped_rows";

    fn received(&mut self, received: &mut abi::TyReceived) {
        let row = received.x.shape[1] as usize * size_of::<bf16>();
        let first = received.x.data;
        // SAFETY: `[rows, H]` bf16 of a region that this rank holds; the case has many rows for it.
        unsafe { std::ptr::swap_nonoverlapping(first, first.add(row), row) };
    }
}

#[test]
fn rows_in_order_of_arrival_are_caught() {
    caught::<SwappedRows>(run_exchange, &Case::default(), "after dispatch: x");
}

/// Casts with power-of-two scales whatever the caller asks for.
#[derive(Default)]
pub(crate) struct RoundedScales;
impl Alteration for RoundedScales {
    const NAME: &'static str = "rounded_scales";

    fn dispatch(&mut self, dispatch: &mut DispatchCall<'_>) {
        if dispatch.cast == Cast::Fp8 {
            dispatch.cast = Cast::Fp8Round;
        }
    }
}

#[test]
fn rounded_scales_are_caught() {
    let case = Case { input: Input::Cast(RowType::Bf16, Scales::F32), ..Case::default() };
    caught::<RoundedScales>(run_exchange, &case, "after dispatch");
}

/// Leaves scales by rows, whatever the caller asks for.
#[derive(Default)]
pub(crate) struct ScalesByRow;
impl Alteration for ScalesByRow {
    const NAME: &'static str = "scales_by_row";

    fn dispatch(&mut self, dispatch: &mut DispatchCall<'_>) {
        dispatch.format.scale_layout = ScaleLayout::RowMajor;
    }
}

/// The same, but calls them columns.
#[derive(Default)]
pub(crate) struct RowsAsColumns;
impl Alteration for RowsAsColumns {
    const NAME: &'static str = "rows_as_columns";

    fn dispatch(&mut self, dispatch: &mut DispatchCall<'_>) {
        dispatch.format.scale_layout = ScaleLayout::RowMajor;
    }

    fn received(&mut self, received: &mut abi::TyReceived) {
        let experts = received.expert_counts.shape[0];
        let [rows, columns] = received.scales.shape;
        received.scales.shape = [experts * columns, rows / experts];
        received.scales.stride = [(rows / experts) as i64, 1];
    }
}

/// Sources with their ranks, whatever the caller asks for.
#[derive(Default)]
pub(crate) struct RanksInSources;
impl Alteration for RanksInSources {
    const NAME: &'static str = "ranks_in_sources";

    fn dispatch(&mut self, dispatch: &mut DispatchCall<'_>) {
        dispatch.format.source_index = SourceIndex::RankAndToken;
    }
}

#[test]
fn forms_of_packed_arrays_that_are_not_as_the_call_asks_are_caught() {
    let input = Input::Cast(RowType::Bf16, Scales::F32);
    let case = Case { input, layout: Layout::Packed, hidden: 384, ..Case::default() };
    let columns = Case { scale_columns: true, ..case.clone() };
    caught::<ScalesByRow>(run_exchange, &columns, "expected ColumnMajor");
    caught::<RowsAsColumns>(run_exchange, &columns, "after dispatch: scales");
    let tokens = Case { source_tokens: true, ..case };
    caught::<RanksInSources>(run_exchange, &tokens, "after dispatch: source");
}

/// Sums without the bias, rounds, adds the bias and rounds again.
#[derive(Default)]
pub(crate) struct RoundsTwice(Option<(Tensor, Tensor)>);

/// Moves a tensor's address to the call that ends the operation.
struct Tensor(abi::TyTensor);

// SAFETY: only an address and a shape; used between send and receive, while the tensor is valid.
unsafe impl Send for Tensor {}

impl Alteration for RoundsTwice {
    const NAME: &'static str = "rounds_twice";

    fn combine(&mut self, combine: &mut CombineCall<'_>) {
        self.0 = Some((Tensor(combine.bias[0]), Tensor(combine.out)));
        combine.bias[0].data = std::ptr::null_mut();
    }

    fn combined(&mut self) {
        let Some((Tensor(bias), Tensor(out))) = self.0.take() else { return };
        let (bias, elements) = (bias.data.cast::<bf16>(), (out.shape[0] * out.shape[1]) as usize);
        let out = out.data.cast::<bf16>();
        for at in 0..elements {
            // SAFETY: both are `[T, H]` bf16, contiguous, valid until the receive returns.
            unsafe {
                let sum = out.add(at).read().to_f32() + bias.add(at).read().to_f32();
                out.add(at).write(bf16::from_f32(sum));
            }
        }
    }
}

#[test]
fn rounding_twice_is_caught() {
    let combine = Combine { row: RowType::Bf16, biases: 1, weighted: false, sums: Sums::ByRank };
    caught::<RoundsTwice>(run_exchange, &Case { combine, ..Case::default() }, "after combine");
}

/// Sums without the weights.
#[derive(Default)]
pub(crate) struct Unweighted;
impl Alteration for Unweighted {
    const NAME: &'static str = "unweighted";

    fn combine(&mut self, combine: &mut CombineCall<'_>) {
        combine.weighted = false;
    }
}

#[test]
fn a_sum_without_its_weights_is_caught() {
    let combine = Combine { row: RowType::Bf16, biases: 0, weighted: true, sums: Sums::ByRank };
    let layout = Layout::ExpertMajor { alignment: 4, zero_padding: true };
    let case = Case { combine, layout, topk: 3, ..Case::default() };
    caught::<Unweighted>(run_exchange, &case, "after combine");
}

/// Returns rows, but not their weights.
#[derive(Default)]
pub(crate) struct WeightsNotReturned;
impl Alteration for WeightsNotReturned {
    const NAME: &'static str = "weights_not_returned";

    fn combine(&mut self, combine: &mut CombineCall<'_>) {
        combine.weights.data = std::ptr::null_mut();
        combine.out_weights.data = std::ptr::null_mut();
    }
}

#[test]
fn weights_that_do_not_come_back_are_caught() {
    caught::<WeightsNotReturned>(run_exchange, &Case::default(), "weights");
}

/// Uses the placement of the first dispatch for a replay of any dispatch.
#[derive(Default)]
pub(crate) struct StaleReplay;
impl Alteration for StaleReplay {
    const NAME: &'static str = "stale_replay";

    fn dispatch(&mut self, dispatch: &mut DispatchCall<'_>) {
        if dispatch.is_replay {
            dispatch.handle = 0;
        }
    }
}

#[test]
fn a_replay_with_a_stale_placement_is_caught() {
    caught::<StaleReplay>(run_replay, &Case::default(), "after replay");
}
