//! The calls of an open kernel set as values, with one place where each meets its method.

use std::ffi::c_void;

use super::{Copies, KernelSet, Trace};
use crate::call::{AgreeCall, CombineCall, DispatchCall};
use crate::{Result, abi};

/// A call, and the place of its result. Each is the method of [`KernelSet`] of its name.
#[derive(Debug)]
pub(crate) enum Call<'a> {
    DispatchSend(&'a DispatchCall<'a>),
    CombineSend(&'a CombineCall<'a>),
    Agree(&'a AgreeCall<'a>),
    CopyOut(&'a Copies<'a>),
    CountRouting(&'a abi::TyRoutingCounts),
    SetMask { rank: u32, is_masked: bool },
    ReleaseAfter(*mut c_void),
    DispatchRecv(u64, &'a mut abi::TyReceived),
    CombineRecv(u64),
    DispatchOutput(u64, &'a mut Option<abi::TyReceived>),
    CombineInput { handle: u32, dtype: u32, region: &'a mut u64, tensor: &'a mut abi::TyTensor },
    ExpertCounts(u64, &'a mut [u32]),
    Masks(&'a mut [u8]),
    GpuRing(u64, &'a mut Option<abi::TyGpuRing>),
    Counters(&'a mut Option<abi::TyCounters>),
    Trace(u64, &'a mut Trace),
}

impl Call<'_> {
    /// The name in messages.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::DispatchSend(_) => "dispatch_send",
            Self::CombineSend(_) => "combine_send",
            Self::Agree(_) => "agree",
            Self::CopyOut(_) => "copy_out",
            Self::CountRouting(_) => "count_routing",
            Self::SetMask { .. } | Self::Masks(_) => "masks",
            Self::ReleaseAfter(_) => "release_after",
            Self::DispatchRecv(..) => "dispatch_recv",
            Self::CombineRecv(_) => "combine_recv",
            Self::DispatchOutput(..) => "dispatch_output",
            Self::CombineInput { .. } => "combine_input",
            Self::ExpertCounts(..) => "expert_counts",
            Self::GpuRing(..) => "gpu_ring",
            Self::Counters(_) => "counters",
            Self::Trace(..) => "trace",
        }
    }

    /// Makes the call.
    ///
    /// # Errors
    /// Those of the method.
    ///
    /// # Safety
    /// As the method.
    pub(crate) unsafe fn make<K: KernelSet>(self, kernels: &mut K) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe {
            match self {
                Self::DispatchSend(call) => kernels.dispatch_send(call)?,
                Self::CombineSend(call) => kernels.combine_send(call)?,
                Self::Agree(call) => kernels.agree(call)?,
                Self::CopyOut(copies) => kernels.copy_out(copies)?,
                Self::CountRouting(counts) => kernels.count_routing(counts)?,
                Self::SetMask { rank, is_masked } => kernels.set_mask(rank, is_masked)?,
                Self::ReleaseAfter(stream) => kernels.release_after(stream)?,
                Self::DispatchRecv(operation, output) => {
                    *output = kernels.dispatch_recv(operation)?
                }
                Self::CombineRecv(operation) => kernels.combine_recv(operation)?,
                Self::DispatchOutput(operation, output) => {
                    *output = kernels.dispatch_output(operation)?;
                }
                Self::CombineInput { handle, dtype, region, tensor } => {
                    (*region, *tensor) = kernels.combine_input(handle, dtype)?;
                }
                Self::ExpertCounts(operation, counts) => {
                    kernels.expert_counts(operation, counts)?
                }
                Self::Masks(masks) => {
                    let all = kernels.masks()?;
                    masks.iter_mut().zip(all).for_each(|(at, mask)| *at = mask.into());
                }
                Self::GpuRing(level, ring) => *ring = kernels.gpu_ring(level)?,
                Self::Counters(counters) => *counters = kernels.counters(),
                Self::Trace(operation, trace) => *trace = kernels.trace(operation)?,
            }
        }
        Ok(())
    }
}
