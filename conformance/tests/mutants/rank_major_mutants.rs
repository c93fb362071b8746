//! Broken kernel sets whose rows are rank-major, and the exchange that catches each; and kernel sets that lack a
//! capability.

use anyhow::{Context, ensure};
use tokenyard_conformance::moe::exchange::{self, InputTensors, Placed};
use tokenyard_conformance::moe::oracle::{Case, Inputs, Layout, Tokens};
use tokenyard_core::ErrorKind;
use tokenyard_core::abi;
use tokenyard_core::call::{CombineCall, DispatchCall};
use tokenyard_core::communicator::{CallForm, Communicator, CommunicatorOptions};
use tokenyard_core::kernels::KernelNeeds;
use tokenyard_core::moe::DType;

use crate::altered_kernels::Alteration;
use crate::faulty_shm::Fault as _;
use crate::kernel_mutants::{caught, run_exchange};
use crate::l0::Intact;
use crate::{config, failures};

/// Every block has rows of no token.
fn case(zero_padding: bool) -> Case {
    let layout = Layout::RankMajor { zero_padding };
    Case { layout, tokens: Tokens::Exactly(vec![7, 12]), ..Case::default() }
}

/// The number of rows in each block, and M.
fn blocks(received: &abi::TyReceived) -> (Vec<usize>, usize) {
    let ranks = received.source_counts.shape[0] as usize;
    let counts = received.source_counts.data.cast::<i32>();
    // SAFETY: `[R, 1]` i32 of a region that this rank holds.
    let counts = (0..ranks).map(|source| unsafe { counts.add(source).read() } as usize);
    (counts.collect(), received.x.shape[0] as usize / ranks)
}

/// Bytes of a row.
fn width(tensor: &abi::TyTensor) -> usize {
    tensor.shape[1] as usize * DType::from_code(tensor.dtype).map_or(0, DType::bytes)
}

/// Spoils one thing in an output.
#[derive(Default)]
pub(crate) struct Spoiled<const THING: usize>;

/// The rows of the last block, which lie one place further.
pub(crate) const ROW_FURTHER: usize = 0;
/// Numbers and values behind the last row of the last block: 0, or 1 where they are 0.
pub(crate) const ID_BEHIND: usize = 1;
pub(crate) const SOURCE_BEHIND: usize = 2;
pub(crate) const X_BEHIND: usize = 3;
pub(crate) const WEIGHT_BEHIND: usize = 4;
/// The number of rows in the totals: that of all experts.
pub(crate) const ROWS_IN_TOTALS: usize = 5;

impl<const THING: usize> Alteration for Spoiled<THING> {
    const NAME: &'static str = [
        "row_further",
        "id_behind",
        "source_behind",
        "x_behind",
        "weight_behind",
        "rows_in_totals",
    ][THING];

    fn received(&mut self, received: &mut abi::TyReceived) {
        let (counts, most) = blocks(received);
        let last = counts.len() - 1;
        let (first, behind) = (last * most, last * most + counts[last]);
        let fill = |tensor: &abi::TyTensor, byte: u8| {
            let width = width(tensor);
            // SAFETY: the case has room for a row behind those of a block, in a region that this rank holds.
            unsafe { tensor.data.add(behind * width).write_bytes(byte, width) };
        };
        match THING {
            ROW_FURTHER => {
                let (x, width) = (received.x.data, width(&received.x));
                // SAFETY: as above.
                unsafe { x.add(first * width).copy_to(x.add((first + 1) * width), width) };
            }
            ID_BEHIND => fill(&received.ids, 0),
            SOURCE_BEHIND => fill(&received.source, 0),
            X_BEHIND => fill(&received.x, 1),
            WEIGHT_BEHIND => fill(&received.weights, 1),
            // SAFETY: two i64 of a region that this rank holds.
            _ => unsafe { *received.totals.data.cast::<i64>().add(1) += 1 },
        }
    }
}

#[test]
fn a_row_one_place_further_and_another_number_of_rows_are_caught() {
    for zero_padding in [true, false] {
        let case = case(zero_padding);
        caught::<Spoiled<ROW_FURTHER>>(run_exchange, &case, "after dispatch: x");
        caught::<Spoiled<ROWS_IN_TOTALS>>(run_exchange, &case, "after dispatch: totals");
    }
}

#[test]
fn ids_and_sources_that_name_something_behind_the_last_row_are_caught() {
    for zero_padding in [true, false] {
        let case = case(zero_padding);
        caught::<Spoiled<ID_BEHIND>>(run_exchange, &case, "after dispatch: ids");
        caught::<Spoiled<SOURCE_BEHIND>>(run_exchange, &case, "after dispatch: source");
    }
}

#[test]
fn padding_that_is_not_zero_is_caught_where_it_was_asked_for() {
    caught::<Spoiled<X_BEHIND>>(run_exchange, &case(true), "after dispatch: x");
    caught::<Spoiled<WEIGHT_BEHIND>>(run_exchange, &case(true), "after dispatch: weights");
    let open = case(false);
    for name in [Spoiled::<X_BEHIND>::NAME, Spoiled::<WEIGHT_BEHIND>::NAME] {
        let found = run_exchange(name, &open);
        assert!(found.is_empty(), "{name}: rows behind the counts are unspecified: {found:#?}");
    }
}

/// Lays blocks out for the communicator's M, whatever that of the call is.
#[derive(Default)]
pub(crate) struct WiderBlocks;
impl Alteration for WiderBlocks {
    const NAME: &'static str = "wider_blocks";

    fn dispatch(&mut self, dispatch: &mut DispatchCall<'_>) {
        dispatch.max_tokens *= 2;
    }
}

/// As [`run_exchange`], on a communicator whose M is twice that of the call.
fn run_call_tokens(kernels: &str, case: &Case) -> Vec<String> {
    let (config, options) = (config(kernels, Intact::NAME), exchange::options(case));
    let options = CommunicatorOptions { max_tokens: 2 * options.max_tokens, ..options };
    let inputs = Inputs::all(case);
    failures(case.ranks as u32, &config, |world| {
        let mut comm = Communicator::open(world, &config, options)?;
        exchange::check(&mut comm, case, &inputs, Placed::Outside)
    })
}

#[test]
fn blocks_as_wide_as_the_communicator_allows_are_caught() {
    for zero_padding in [true, false] {
        caught::<WiderBlocks>(run_call_tokens, &case(zero_padding), "after dispatch: x");
    }
}

/// Takes the rows of a combine one after the other, whatever block they are in.
#[derive(Default)]
pub(crate) struct RowsInOrder {
    counts: Vec<usize>,
    most: usize,
    rows: Vec<u64>,
}
impl Alteration for RowsInOrder {
    const NAME: &'static str = "rows_in_order";

    fn received(&mut self, received: &mut abi::TyReceived) {
        (self.counts, self.most) = blocks(received);
    }

    fn combine(&mut self, combine: &mut CombineCall<'_>) {
        let (width, rows) = (width(&combine.x), combine.x.shape[0] as usize);
        self.rows = vec![0; rows * width / 8];
        let altered = self.rows.as_mut_ptr().cast::<u8>();
        let most = self.most;
        let places = self.counts.iter().enumerate().flat_map(|(source, count)| {
            let first = source * most;
            first..first + count
        });
        for (token, place) in places.enumerate() {
            // SAFETY: tokens and places are below the rows of `[R*M, H]`, of which the copy has as many.
            unsafe {
                let from = combine.x.data.add(token * width);
                from.copy_to_nonoverlapping(altered.add(place * width), width);
            }
        }
        combine.x.data = altered;
    }
}

#[test]
fn a_combine_that_takes_rows_in_the_order_of_tokens_is_caught() {
    for zero_padding in [true, false] {
        caught::<RowsInOrder>(
            run_exchange,
            &case(zero_padding),
            "after combine: combined combined_x",
        );
    }
}

/// A kernel set that does not take the layout.
#[derive(Default)]
pub(crate) struct WithoutRankMajor;
impl Alteration for WithoutRankMajor {
    const NAME: &'static str = "without_rank_major";

    fn needs(&mut self, needs: &mut KernelNeeds) {
        needs.capabilities &= !abi::TY_KERNELS_CAP_RANK_MAJOR;
    }
}

#[test]
fn core_refuses_the_layout_for_a_kernel_set_without_it_by_name_and_the_communicator_goes_on() {
    let config = config(WithoutRankMajor::NAME, Intact::NAME);
    let flat = Case { layout: Layout::Flat, ..case(false) };
    let inputs = Inputs::all(&flat);
    let failed = failures(2, &config, |world| {
        let mut comm = Communicator::open(world, &config, exchange::options(&flat))?;
        ensure!(
            !comm.takes(CallForm::RankMajor),
            "found a set that declares the layout; expected one without it"
        );
        let rank = comm.rank() as usize;
        for zero_padding in [false, true] {
            let tensors = InputTensors::new(&case(zero_padding), rank, inputs.ranks[rank].clone());
            let error = comm.dispatch(&tensors.dispatch()?).err();
            let error =
                error.context("found an output; expected an error that names the layout")?;
            let text = error.to_string();
            let is_named =
                text.contains("layout: found rank-major") && text.contains(WithoutRankMajor::NAME);
            ensure!(
                error.kind() == ErrorKind::Unsupported && is_named,
                "found {:?}, `{text}`; expected Unsupported, which names the layout and the set",
                error.kind()
            );
        }
        exchange::check(&mut comm, &flat, &inputs, Placed::Outside)
    });
    assert!(failed.is_empty(), "{failed:#?}");
}

/// A kernel set whose combines may read the output of their dispatch.
#[derive(Default)]
pub(crate) struct NeedsRegions;
impl Alteration for NeedsRegions {
    const NAME: &'static str = "needs_regions";

    fn needs(&mut self, needs: &mut KernelNeeds) {
        needs.capabilities &= !abi::TY_KERNELS_CAP_NO_REGION;
    }
}

#[test]
fn a_handle_holds_the_place_of_its_output_only_where_rows_go_to_several_experts() {
    let config = config(NeedsRegions::NAME, Intact::NAME);
    for (layout, holds) in [
        (Layout::Flat, false),
        (Layout::RankMajor { zero_padding: false }, false),
        (Layout::Packed, true),
    ] {
        let case = Case { layout, ..case(false) };
        let inputs = Inputs::all(&case);
        let failed = failures(2, &config, |world| {
            let mut comm = Communicator::open(world, &config, exchange::options(&case))?;
            let rank = comm.rank() as usize;
            let tensors = InputTensors::new(&case, rank, inputs.ranks[rank].clone());
            let mut dispatch = || -> anyhow::Result<_> {
                let (received, handle) = comm.dispatch(&tensors.dispatch()?)?;
                Ok((received.x().address() as usize, handle))
            };
            let (first, _handle) = dispatch()?;
            let (second, _other) = dispatch()?;
            ensure!(
                (first != second) == holds,
                "{layout}: found outputs at {first:#x} and {second:#x}; expected {}",
                if holds { "two places" } else { "one place" }
            );
            Ok(())
        });
        assert!(failed.is_empty(), "{failed:#?}");
    }
}
