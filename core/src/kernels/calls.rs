//! The calls of an open kernel set as values.
//!
//! [`kernel_calls`] is the only list of them. From it come [`KernelCall`], the host's side of the C form
//! (`host/kernels/loaded.rs`) and the component's (`export/kernels.rs`). [`KernelCall::make`] meets the methods.

use super::{Copies, KernelSet};
use crate::call::{AgreeCall, CombineCall, DispatchCall};
use crate::{Result, abi};

/// Expands a macro with the list: per slot of the table, each call with its argument, its name in messages, and its
/// tag. Arguments of `submit` have a [C form](crate::call::CForm); those of the other slots are structures of the ABI,
/// which the call fills in.
macro_rules! kernel_calls {
    ($expand:ident) => {
        $expand! { 'a
            submit {
                DispatchSend(DispatchCall<'a>) = "dispatch_send", TY_SUBMIT_DISPATCH;
                CombineSend(CombineCall<'a>) = "combine_send", TY_SUBMIT_COMBINE;
                Agree(AgreeCall<'a>) = "agree", TY_SUBMIT_AGREE;
                CopyOut(Copies<'a>) = "copy_out", TY_SUBMIT_COPIES;
                CountRouting(abi::TyRoutingCounts) = "count_routing", TY_SUBMIT_ROUTING_COUNTS;
                SetMask(abi::TyMask) = "masks", TY_SUBMIT_MASK;
                ReleaseAfter(abi::TyReleaseAfter) = "release_after", TY_SUBMIT_RELEASE_AFTER;
                Send(abi::TyMessage) = "send", TY_SUBMIT_SEND;
                Recv(abi::TyMessage) = "recv", TY_SUBMIT_RECV;
                GatherSend(abi::TyGather) = "gather_send", TY_SUBMIT_GATHER;
                WriteEntries(abi::TyEntries) = "write_entries", TY_SUBMIT_ENTRIES;
                FetchSend(abi::TyFetch) = "fetch_send", TY_SUBMIT_FETCH;
                ReduceSend(abi::TyReduce) = "reduce_send", TY_SUBMIT_REDUCE;
            }
            finish {
                DispatchRecv(abi::TyDispatchOutput) = "dispatch_recv", TY_FINISH_DISPATCH;
                CombineRecv(abi::TyCombineEnd) = "combine_recv", TY_FINISH_COMBINE;
                GatherRecv(abi::TyGather) = "gather_recv", TY_FINISH_GATHER;
                FetchRecv(abi::TyFetch) = "fetch_recv", TY_FINISH_FETCH;
                ReduceRecv(abi::TyReduce) = "reduce_recv", TY_FINISH_REDUCE;
            }
            query {
                DispatchOutput(abi::TyDispatchOutput) = "dispatch_output", TY_QUERY_DISPATCH_OUTPUT;
                CombineInput(abi::TyCombineInput) = "combine_input", TY_QUERY_COMBINE_INPUT;
                ExpertCounts(abi::TyExpertCounts) = "expert_counts", TY_QUERY_EXPERT_COUNTS;
                Masks(abi::TyMasks) = "masks", TY_QUERY_MASKS;
                GpuRing(abi::TyGpuRing) = "gpu_ring", TY_QUERY_GPU_RING;
                Counters(abi::TyCounters) = "counters", TY_QUERY_COUNTERS;
                Trace(abi::TyOperationTrace) = "trace", TY_QUERY_TRACE;
            }
        }
    };
}
pub(crate) use kernel_calls;

macro_rules! call {
    ($life:lifetime
        submit { $($submit:ident($argument:ty) = $submit_name:literal, $submit_tag:ident;)* }
        finish { $($finish:ident($end:ty) = $finish_name:literal, $finish_tag:ident;)* }
        query { $($query:ident($answer:ty) = $query_name:literal, $query_tag:ident;)* }
    ) => {
        /// A call: its arguments, or the place of its results.
        #[derive(Debug)]
        pub(crate) enum KernelCall<$life> {
            $($submit(&$life $argument),)*
            $($finish(&$life mut $end),)*
            $($query(&$life mut $answer),)*
        }

        impl KernelCall<'_> {
            /// The name in messages.
            pub(crate) fn name(&self) -> &'static str {
                match self {
                    $(Self::$submit(_) => $submit_name,)*
                    $(Self::$finish(_) => $finish_name,)*
                    $(Self::$query(_) => $query_name,)*
                }
            }
        }
    };
}
kernel_calls!(call);

impl KernelCall<'_> {
    /// Makes the call. A query that finds nothing leaves its result as it is.
    ///
    /// # Errors
    /// Those of the method.
    ///
    /// # Safety
    /// As the method; memory that a structure names is valid for the call.
    pub(crate) unsafe fn make<K: KernelSet>(self, kernels: &mut K) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe {
            match self {
                Self::DispatchSend(call) => kernels.dispatch_send(call)?,
                Self::CombineSend(call) => kernels.combine_send(call)?,
                Self::Agree(call) => kernels.agree(call)?,
                Self::CopyOut(copies) => kernels.copy_out(copies)?,
                Self::CountRouting(counts) => kernels.count_routing(counts)?,
                Self::SetMask(mask) => kernels.set_mask(mask.rank, mask.is_masked != 0)?,
                Self::ReleaseAfter(after) => kernels.release_after(after.stream)?,
                Self::Send(message) => kernels.send(message)?,
                Self::Recv(message) => kernels.recv(message)?,
                Self::GatherSend(gather) => kernels.gather_send(gather)?,
                Self::GatherRecv(gather) => kernels.gather_recv(gather)?,
                Self::ReduceSend(reduce) => kernels.reduce_send(reduce)?,
                Self::ReduceRecv(reduce) => kernels.reduce_recv(reduce)?,
                Self::WriteEntries(entries) => kernels.write_entries(entries)?,
                Self::FetchSend(fetch) => kernels.fetch_send(fetch)?,
                Self::FetchRecv(fetch) => kernels.fetch_recv(fetch)?,
                Self::DispatchRecv(end) => end.received = kernels.dispatch_recv(end.operation)?,
                Self::CombineRecv(end) => kernels.combine_recv(end.operation)?,
                Self::DispatchOutput(output) => {
                    let fixed = kernels.dispatch_output(output.operation)?;
                    fixed.into_iter().for_each(|fixed| output.received = fixed);
                }
                Self::CombineInput(input) => {
                    (input.region, input.tensor) =
                        kernels.combine_input(input.handle, input.dtype)?;
                }
                Self::ExpertCounts(abi::TyExpertCounts { operation, counts, count, .. }) => {
                    let counts = std::slice::from_raw_parts_mut(*counts, *count as usize);
                    kernels.expert_counts(*operation, counts)?;
                }
                Self::Masks(abi::TyMasks { masks, count, .. }) => {
                    let masks = std::slice::from_raw_parts_mut(*masks, *count as usize);
                    let all = kernels.masks()?;
                    masks.iter_mut().zip(all).for_each(|(at, mask)| *at = mask.into());
                }
                Self::GpuRing(ring) => {
                    let given = kernels.gpu_ring(ring.level)?;
                    given.into_iter().for_each(|given| *ring = given);
                }
                Self::Counters(counters) => {
                    kernels.counters().into_iter().for_each(|given| *counters = given);
                }
                Self::Trace(of) => of.trace = kernels.trace(of.operation)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::abi;

    macro_rules! tags {
        ($life:lifetime
            submit { $($submit:ident($argument:ty) = $submit_name:literal, $submit_tag:ident;)* }
            finish { $($finish:ident($end:ty) = $finish_name:literal, $finish_tag:ident;)* }
            query { $($query:ident($answer:ty) = $query_name:literal, $query_tag:ident;)* }
        ) => {
            /// Names and values, per slot of the table.
            const TAGS: [&[(&str, u32)]; 3] = [
                &[$((stringify!($submit_tag), abi::$submit_tag),)*],
                &[$((stringify!($finish_tag), abi::$finish_tag),)*],
                &[$((stringify!($query_tag), abi::$query_tag),)*],
            ];
        };
    }
    kernel_calls!(tags);

    #[test]
    fn each_tag_of_the_header_is_in_the_list() {
        let declared = include_str!("../../../abi/src/calls.rs").lines().filter_map(|line| {
            let (name, _) = line.strip_prefix("pub const ")?.split_once(": u32")?;
            Some(name)
        });
        let listed = TAGS.iter().flat_map(|slot| slot.iter().map(|(name, _)| *name));
        assert_eq!(declared.collect::<Vec<_>>(), listed.collect::<Vec<_>>());
    }

    #[test]
    fn the_tags_of_a_slot_count_its_calls_in_the_order_of_the_list() {
        for (slot, name) in TAGS.iter().zip(["TY_SUBMIT_", "TY_FINISH_", "TY_QUERY_"]) {
            for (number, (tag, value)) in (1..).zip(slot.iter()) {
                assert!(tag.starts_with(name), "{tag} is in the slot of {name}");
                assert_eq!(*value, number, "{tag}");
            }
        }
    }
}
