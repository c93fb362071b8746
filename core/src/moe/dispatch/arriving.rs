//! Outputs between the halves of a dispatch.

use std::sync::Arc;

use crate::abi;
use crate::communicator::CallerMemory;
use crate::communicator::components::Components;
use crate::communicator::output::RegionClaim;
use crate::moe::{DType, ScaleLayout};

/// The place of a dispatch's output: addresses from which tensors can be built, and passed on, before the
/// dispatch was received. Until then other ranks write there: the caller may not read or write it. Afterwards
/// it is the output that [`Received`](crate::communicator::Received) describes; after a failed dispatch its contents
/// are undefined.
///
/// Its memory is not used again while it lives. It may be dropped on any thread.
#[derive(Debug)]
pub struct Arriving {
    raw: abi::TyReceived,
    device: Option<i32>,
    scale_layout: ScaleLayout,
    /// Held for its drop.
    _claim: RegionClaim,
}

// SAFETY: addresses, and a claim that any thread may drop.
unsafe impl Send for Arriving {}
// SAFETY: `&self` only reads addresses.
unsafe impl Sync for Arriving {}

macro_rules! optional {
    ($($name:ident),+ $(,)?) => {$(
        #[doc = concat!(
            "As [`Received::", stringify!($name), "`](crate::communicator::Received::", stringify!($name), ").",
        )]
        pub fn $name(&self) -> Option<CallerMemory> {
            self.memory(&self.raw.$name)
        }
    )+};
}

impl Arriving {
    pub(crate) fn new(
        raw: abi::TyReceived,
        components: &Arc<Components>,
        scale_layout: ScaleLayout,
    ) -> Self {
        let _claim = RegionClaim::new(components, raw.region);
        Self { raw, device: components.user.device, scale_layout, _claim }
    }

    /// As [`Received::scale_layout`](crate::communicator::Received::scale_layout).
    pub fn scale_layout(&self) -> ScaleLayout {
        self.scale_layout
    }

    fn memory(&self, raw: &abi::TyTensor) -> Option<CallerMemory> {
        let dtype = DType::from_code(raw.dtype).filter(|_| !raw.data.is_null())?;
        Some(CallerMemory {
            data: raw.data,
            dtype,
            shape: raw.shape.map(|n| n as usize),
            stride: raw.stride.map(|n| n as usize),
            device: self.device,
        })
    }

    optional! {
        x, scales, ids, weights, source, slots, expert_counts, expert_starts, expert_ends,
        source_counts, source_ends, ranges, totals, lost, dropped, overflow,
    }
}
