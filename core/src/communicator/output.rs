use std::sync::Arc;

use super::components::Components;
use super::tensor::{TensorMut, TensorRef};
use crate::abi;
use crate::moe::{Layout, ScaleLayout};

/// A claim on an arena region; the region is freed when the last claim is dropped.
#[derive(Debug)]
pub(crate) struct RegionClaim {
    components: Arc<Components>,
    region: u64,
}

impl RegionClaim {
    pub(crate) fn new(components: &Arc<Components>, region: u64) -> Self {
        components.claims.claim(region);
        Self { components: Arc::clone(components), region }
    }
}

impl Drop for RegionClaim {
    fn drop(&mut self) {
        self.components.claims.unclaim(self.region);
    }
}

/// The output of a dispatch on this rank. It lies in the arena until it is dropped; it may be dropped
/// on any thread.
#[derive(Debug)]
pub struct Received {
    pub(crate) raw: abi::TyReceived,
    pub(crate) layout: Layout,
    pub(crate) scale_layout: ScaleLayout,
    pub(crate) operation: u64,
    /// M of the dispatch: the factor in `source`.
    pub(crate) max_tokens: u32,
    /// Held for its drop.
    pub(super) _claim: RegionClaim,
}

// SAFETY: the raw tensors point into the region that `_claim` holds. No other code writes it while the output
// lives: peers write only between a grant and its rows, both inside the dispatch.
unsafe impl Send for Received {}
// SAFETY: `&self` only reads.
unsafe impl Sync for Received {}

macro_rules! optional {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {$(
        $(#[$doc])*
        pub fn $name(&self) -> Option<TensorRef<'_>> {
            // SAFETY: the region is claimed for as long as `self` lives.
            (!self.raw.$name.data.is_null()).then(|| unsafe {
                TensorRef::from_raw(self.raw.$name, &self._claim.components)
            })
        }
    )+};
}

impl Received {
    /// True if it lies in the arena of a communicator.
    pub(super) fn is_of(&self, components: &Components) -> bool {
        std::ptr::eq(&*self._claim.components, components)
    }

    /// The layout of the rows.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// How [`scales`](Self::scales) lie in memory.
    pub fn scale_layout(&self) -> ScaleLayout {
        self.scale_layout
    }

    /// Tokens received, N; with worst-case sizes the most that can arrive.
    pub fn tokens(&self) -> usize {
        self.raw.tokens as usize
    }

    /// Rows of [`x`](Self::x): N (flat), X (expert-major), E/R * R*M (packed) or R*M (rank-major); with
    /// worst-case sizes the most.
    pub fn rows(&self) -> usize {
        self.raw.rows as usize
    }

    /// `[rows, H]`.
    pub fn x(&self) -> TensorRef<'_> {
        // SAFETY: the region is claimed for as long as `self` lives.
        unsafe { TensorRef::from_raw(self.raw.x, &self._claim.components) }
    }

    /// `[rows, H]`, to be changed in place: experts may write their outputs here, and combine then
    /// needs no copy.
    pub fn x_mut(&mut self) -> TensorMut<'_> {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { TensorMut::from_raw(self.raw.x, &self._claim.components) }
    }

    optional! {
        /// `[rows, S]`: f32 or packed UE8M0 (i32) after a cast, else the sender's bytes. Column-major
        /// `[E/R * S, R*M]`: S columns of each expert.
        scales,
        /// i32 local expert ids, or -1: `[N, K]` (flat), or `[rows, K]` with -1 where no token is (rank-major).
        ids,
        /// f32: `[N, K]` (flat), `[rows, K]` (rank-major), else `[rows, 1]`.
        weights,
        /// i32 `source rank * M + source token`, M that of the call: `[N, 1]`, or `[rows, 1]` (packed, rank-major).
        /// The token alone where the call asked for that.
        source,
        /// `[N, K]` i32: row of each expert's copy, or -1 (expert-major).
        slots,
        /// `[E/R, 1]` i32: rows per local expert, without padding.
        expert_counts,
        /// `[E/R, 1]` i32: first row per local expert (expert-major).
        expert_starts,
        /// `[E/R, 1]` i32: the row after the last one of each local expert, padding left out
        /// (expert-major).
        expert_ends,
        /// `[R, 1]` i32: tokens per source rank.
        source_counts,
        /// `[R, 1]` i32: tokens of a source rank and of all ranks before it.
        source_ends,
        /// `[E/R, R]` i64: `count | begin << 32` (packed).
        ranges,
        /// `[2, 1]` i64: the true N and the true number of rows.
        totals,
        /// `[R, 1]` u8: 1 where rows of a source rank are left out because it was lost. Where such rows
        /// have places already, the places hold zeros, with ids, slots and source -1.
        lost,
        /// `[E/R, 1]` i32: rows of each local expert that were dropped; where rows are capped.
        dropped,
        /// `[1, 1]` i32: 1 where any row was dropped, else 0; where rows are capped.
        overflow,
    }

    /// The source ranks that `lost` marks, in order. The output's operation has ended on the device. If the device
    /// cannot be read, which the log says, all ranks count as lost.
    pub fn lost_ranks(&self) -> Vec<u32> {
        let Some(lost) = self.lost() else { return Vec::new() };
        let flags = lost.to_vec().unwrap_or_else(|error| {
            tracing::error!("the list of lost ranks cannot be read: {error}");
            vec![1; lost.rows()]
        });
        (0..).zip(flags).filter(|(_, flag)| *flag != 0).map(|(rank, _)| rank).collect()
    }
}

/// The routing of a dispatch, for its combine, or for a replay. Operations that were sent hold the needed
/// state of it.
#[derive(Debug)]
pub struct Handle {
    pub(super) routing: RoutingClaim,
    /// T of the dispatch on this rank.
    pub(super) tokens: usize,
    pub(super) rows: usize,
    pub(super) layout: Layout,
    /// M of the dispatch.
    pub(super) max_tokens: u32,
    pub(super) worst_case: bool,
    pub(super) has_weights: bool,
}

/// A claim on the slot of a handle. The slot is free once the last claim, of the handle or of an operation
/// that was sent, is dropped.
#[derive(Debug)]
pub(super) struct RoutingClaim {
    pub(super) components: Arc<Components>,
    pub(super) slot: u32,
    /// Combine reads slots and weights in this region; of a flat or rank-major output it reads nothing.
    region: Option<RegionClaim>,
}

impl RoutingClaim {
    /// The first claim on a slot that was taken.
    pub(super) fn first(
        components: &Arc<Components>,
        slot: u32,
        region: Option<RegionClaim>,
    ) -> Self {
        Self { components: Arc::clone(components), slot, region }
    }

    /// One more claim on the same slot.
    pub(super) fn again(&self) -> Self {
        self.components.claims.claim_handle(self.slot);
        let again = |claim: &RegionClaim| RegionClaim::new(&claim.components, claim.region);
        Self::first(&self.components, self.slot, self.region.as_ref().map(again))
    }
}

impl Handle {
    /// The layout of the dispatch's rows.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// T of the dispatch on this rank: the number of rows that combine writes.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The number of rows that combine takes on this rank.
    pub fn rows(&self) -> usize {
        self.rows
    }
}

impl Drop for RoutingClaim {
    fn drop(&mut self) {
        self.components.claims.give_handle(self.slot);
    }
}

/// Arena memory for expert outputs: rows written here need no copy before combine.
#[derive(Debug)]
pub struct CombineInput {
    pub(super) raw: abi::TyTensor,
    /// Held for its drop.
    pub(super) _claim: RegionClaim,
}

// SAFETY: as for `Received`.
unsafe impl Send for CombineInput {}
// SAFETY: `&self` only reads.
unsafe impl Sync for CombineInput {}

impl CombineInput {
    /// `[rows, H]`.
    pub fn tensor(&self) -> TensorRef<'_> {
        // SAFETY: the region is claimed for as long as `self` lives.
        unsafe { TensorRef::from_raw(self.raw, &self._claim.components) }
    }

    /// `[rows, H]`, to be written.
    pub fn tensor_mut(&mut self) -> TensorMut<'_> {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { TensorMut::from_raw(self.raw, &self._claim.components) }
    }
}
