//! MoE shapes, routing and layout: pure functions, with no memory of their own except their results. The folders
//! `dispatch`, `combine` and `count_routing` have what one operation needs alone, its calls over a communicator too.
//!
//! Symbols, as everywhere in the project: T tokens on this rank, H hidden size (elements), K top-k, E
//! experts, R ranks, M most tokens of a rank in one operation. Expert `e` lives on rank `e / (E/R)`. El
//! is short for E/R, the experts on one rank.
//!
//! The steps of one dispatch in this module:
//! 1. [`validate_topk`] checks the routing of this rank;
//! 2. [`SendPlan`] counts and lists the rows that this rank sends, and the places where combine finds
//!    the answers;
//! 3. the ranks exchange the counts, and [`RecvPlan`] turns those of all sources into places;
//! 4. [`RegionLayout`] gives the offsets of those places in the arena.
//!
//! The plans allocate in `new` for the worst case and never in `build`, so a steady step of a communicator
//! allocates nothing.
//!
//! Watched by the tests in these files; the oracle of the suite computes the same results by code of its own.

mod arena;
mod cap;
mod cast;
pub(crate) mod combine;
pub(crate) mod count_routing;
pub(crate) mod dispatch;
mod dtype;
pub mod logfmt;
mod memory;
mod packed_form;
mod quant;
mod recv_plan;
mod region;
mod replicas;
mod send_plan;
mod shape;
mod topk;

#[cfg(test)]
mod tests;

pub use arena::{Arena, Holder, Region};
pub use cap::{Overflow, RowCap};
pub use cast::{Cast, Compression};
pub use count_routing::RoutingCounts;
pub use dtype::DType;
pub use memory::{BufferSize, ControlLayout, RECORD_HEADER, RECORD_TEXT, buffers};
pub use packed_form::{ScaleLayout, SourceIndex};
pub use quant::{Packing, Quant, ScaleType};
pub use recv_plan::RecvPlan;
pub use region::{Layout, REGION_ALIGN, RegionLayout, RegionRows, RegionSpec, RowFormat, Span};
pub use replicas::{ReplicaPlan, plan_replicas};
pub use send_plan::{Fan, SendPlan};
pub use shape::{MAX_HIDDEN, MAX_TOPK, Shape};
pub use topk::{TopkScratch, local_experts, validate_topk};
