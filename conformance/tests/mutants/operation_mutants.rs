//! Broken kernel sets below a pipe, a gather, sums or a table, and broken transports below them, with the case that
//! catches each.

use std::time::Duration;

use tokenyard_core::kernels::KernelShape;
use tokenyard_core::{ErrorKind, Result, abi};

use crate::altered_kernels::Alteration;
use crate::completion_mutants::{EarlyGet, StalledGet};
use crate::faulty_shm::Fault;
use crate::kernel_mutants::Unaltered;
use crate::l0::Intact;
use crate::payload_mutants::CutPut;
use crate::pipe_mutants::run_case;
use crate::{assert_caught, config_within};

fn run(kernels: &str, transport: &str, case: &str) -> Vec<String> {
    let is_whole = kernels == Unaltered::NAME && transport == Intact::NAME;
    run_case(&config_within(if is_whole { 60_000 } else { 1500 }, kernels, transport), case)
}

fn caught<A: Alteration>(case: &str, why: &str) {
    assert_caught(A::NAME, case, why, |broken| {
        run(if broken { A::NAME } else { Unaltered::NAME }, Intact::NAME, case)
    });
}

const NO_TEXT: abi::TyStr = abi::TyStr { data: std::ptr::null(), bytes: 0 };

/// Raises the credit of a message before it copies the bytes out: it copies them once more, later. For one peer.
#[derive(Default)]
pub(crate) struct CopyAfterCredit {
    /// The address of the window.
    window: usize,
    received: u64,
}

impl Alteration for CopyAfterCredit {
    const NAME: &'static str = "copy_after_credit";

    fn planned(&mut self, _: &KernelShape, plan: &abi::TyPlan) {
        // SAFETY: the plan of a pipe has one window.
        self.window = unsafe { (*plan.windows).pointer as usize };
    }

    fn message_received(&mut self, shape: &KernelShape, message: &abi::TyMessage) {
        let (number, in_flight) = (self.received, u64::from(shape.in_flight));
        self.received += 1;
        // One rank is late, so the other one has sent the next message meanwhile.
        if shape.rank == 1 {
            std::thread::sleep(Duration::from_millis(20));
        }
        // As `docs/pipes.md` says: two credits, then messages with their records, and the slot of each rank.
        let slot = u64::from(message.peer) * in_flight + number % in_flight;
        let pitch = 512 + 2 * (256 + shape.message_bytes.next_multiple_of(64));
        let record = (self.window as u64 + slot * pitch + 512) as *const u8;
        // SAFETY: within the window. The peer may write there at the same time, which is the fault.
        unsafe {
            // Where no message has this number, the slot is elsewhere, and the mutant is none.
            let found = record.cast::<u64>().read_volatile();
            if message.bytes > 0 && (found == number || found == number + in_flight) {
                let bytes = message.bytes as usize;
                std::ptr::copy_nonoverlapping(record.add(256), message.data.cast(), bytes);
            }
        }
    }
}

#[test]
fn a_credit_before_the_copy_is_caught() {
    caught::<CopyAfterCredit>("l1/pipe/in_flight_1", "bytes from rank 0 to rank 1: byte ");
}

/// Does not pass a refusal on: a message or shards without bytes go instead.
#[derive(Default)]
pub(crate) struct SilentRefusal;
impl Alteration for SilentRefusal {
    const NAME: &'static str = "silent_refusal";

    fn message(&mut self, message: &mut abi::TyMessage) {
        message.refusal = NO_TEXT;
    }

    fn shards(&mut self, gather: &mut abi::TyGather) {
        gather.refusal = NO_TEXT;
    }

    fn reduce(&mut self, reduce: &mut abi::TyReduce) {
        reduce.refusal = NO_TEXT;
    }
}

#[test]
fn a_refusal_that_is_not_passed_on_is_caught() {
    for case in ["l2/pipe/refused", "l2/gather/refused", "l2/reduce/refused"] {
        caught::<SilentRefusal>(case, "of kind Mismatch, about rank Some(");
    }
}

/// Writes the shards of all ranks one rank further.
#[derive(Default)]
pub(crate) struct RotatedShards;
impl Alteration for RotatedShards {
    const NAME: &'static str = "rotated_shards";

    fn gathered(&mut self, shape: &KernelShape, gather: &abi::TyGather) {
        for at in 0..gather.count {
            // SAFETY: the outputs of a call, which are written.
            let out = unsafe {
                let part = *gather.parts.add(at);
                match part.bytes {
                    0 => continue,
                    bytes => std::slice::from_raw_parts_mut(part.data.cast::<u8>(), bytes as usize),
                }
            };
            out.rotate_right(out.len() / shape.ranks as usize);
        }
    }
}

#[test]
fn shards_in_another_order_of_ranks_are_caught() {
    caught::<RotatedShards>("l1/gather/lengths", "call 0: shard 0 of 1000 bytes of rank 0: byte ");
}

/// Sums without the factor.
#[derive(Default)]
pub(crate) struct NoScale;
impl Alteration for NoScale {
    const NAME: &'static str = "no_scale";

    fn reduce(&mut self, reduce: &mut abi::TyReduce) {
        reduce.scale = 1.0;
    }
}

#[test]
fn sums_without_their_factor_are_caught() {
    caught::<NoScale>("l1/reduce/lengths", "call 1: sum 0: element 0: found ");
}

/// Sends parts as they are, where they are to be rounded.
#[derive(Default)]
pub(crate) struct NeverRounded;
impl Alteration for NeverRounded {
    const NAME: &'static str = "never_rounded";

    fn reduce(&mut self, reduce: &mut abi::TyReduce) {
        reduce.precision = abi::TY_PRECISION_FP32;
    }
}

#[test]
fn parts_that_are_not_rounded_are_caught() {
    caught::<NeverRounded>("l1/reduce/lengths", "call 2: sum 0: element ");
}

/// Takes an all-reduce for a reduce-scatter.
#[derive(Default)]
pub(crate) struct NeverGathered;
impl Alteration for NeverGathered {
    const NAME: &'static str = "never_gathered";

    fn reduce(&mut self, reduce: &mut abi::TyReduce) {
        reduce.flags = 0;
    }
}

#[test]
fn an_all_reduce_that_passes_for_a_reduce_scatter_is_caught() {
    caught::<NeverGathered>(
        "l2/reduce/refused",
        "found success; expected an error of kind Mismatch",
    );
}

/// Makes reduce-scatters of the numbers that are left out for gathers.
#[derive(Default)]
pub(crate) struct OddNumbers;
impl Alteration for OddNumbers {
    const NAME: &'static str = "odd_numbers";

    fn reduce(&mut self, reduce: &mut abi::TyReduce) {
        reduce.operation += 1;
    }
}

#[test]
fn the_number_of_a_gather_is_refused_for_a_reduce_scatter() {
    caught::<OddNumbers>("l1/reduce/lengths", "number: found 1; expected an even one");
}

/// Writes sums one place further.
#[derive(Default)]
pub(crate) struct RotatedSums;
impl Alteration for RotatedSums {
    const NAME: &'static str = "rotated_sums";

    fn reduced(&mut self, reduce: &abi::TyReduce) {
        for at in 0..reduce.count {
            // SAFETY: the outputs of a call, which are written; each element has two bytes at least.
            let out = unsafe {
                let sums = *reduce.tensors.add(at);
                std::slice::from_raw_parts_mut(sums.data, 2 * sums.shape[0] as usize)
            };
            out.rotate_right(out.len().min(4));
        }
    }
}

#[test]
fn sums_at_other_places_are_caught() {
    caught::<RotatedSums>("l1/reduce/lengths", "call 0: sum 0: element 0: found ");
}

/// Writes the entries of a fetch one place further.
#[derive(Default)]
pub(crate) struct RotatedEntries;
impl Alteration for RotatedEntries {
    const NAME: &'static str = "rotated_entries";

    fn fetched(&mut self, _: &KernelShape, fetch: &abi::TyFetch, end: Result<()>) -> Result<()> {
        for part in fetch.parts.iter().filter(|part| part.bytes > 0) {
            // SAFETY: the outputs of a fetch, which are written.
            let out = unsafe {
                std::slice::from_raw_parts_mut(part.data.cast::<u8>(), part.bytes as usize)
            };
            out.rotate_right(out.len() / fetch.count as usize);
        }
        end
    }
}

#[test]
fn entries_at_other_places_are_caught() {
    caught::<RotatedEntries>("l1/table/lengths", "place 0: entry ");
}

/// Writes the entries of all layers to the first.
#[derive(Default)]
pub(crate) struct FirstLayerAlone;
impl Alteration for FirstLayerAlone {
    const NAME: &'static str = "first_layer_alone";

    fn entries(&mut self, entries: &mut abi::TyEntries) {
        entries.layer = 0;
    }
}

#[test]
fn entries_of_another_layer_are_caught() {
    caught::<FirstLayerAlone>("l1/table/in_flight_3", "layer ");
}

/// Reports no index that has no entry.
#[derive(Default)]
pub(crate) struct NoIndexIsWrong;
impl Alteration for NoIndexIsWrong {
    const NAME: &'static str = "no_index_is_wrong";

    fn fetched(&mut self, _: &KernelShape, _: &abi::TyFetch, end: Result<()>) -> Result<()> {
        end.or_else(|error| match error.kind() {
            ErrorKind::Refused => Ok(()),
            _ => Err(error),
        })
    }
}

#[test]
fn an_index_without_an_entry_that_is_no_error_is_caught() {
    caught::<NoIndexIsWrong>("l2/table/refused", "index -1: found success");
}

/// The case finds this transport, and not one that is whole.
fn transport_caught<F: Fault>(case: &str, why: &str) {
    assert_caught(F::NAME, case, why, |broken| {
        run(Unaltered::NAME, if broken { F::NAME } else { Intact::NAME }, case)
    });
}

#[test]
fn a_cut_put_of_shards_is_caught() {
    transport_caught::<CutPut>("l1/gather/large", "shard 0 of 1048581 bytes of rank 1: byte 5:");
}

#[test]
fn a_get_that_is_done_before_its_bytes_came_is_caught() {
    transport_caught::<EarlyGet>("l1/table/in_flight_1", "place 0: entry ");
}

/// Each of two ranks waits for the other, whose entries do not come, and says so.
#[test]
fn a_get_that_never_ends_is_an_error_about_the_rank_that_it_reads() {
    let found = run(Unaltered::NAME, StalledGet::NAME, "l1/table/lengths");
    for (rank, other) in [(0, 1), (1, 0)] {
        let says = |error: &&String| error.starts_with(&format!("rank {rank}:"));
        let error = found.iter().find(says).unwrap();
        let waits = format!("rank {other} did not finish phase `queue room`");
        assert!(error.contains(&waits), "{error}");
    }
}
