//! Dispatch and combine: their shapes, calls, routing and rows, over an [engine](crate::engine).
//!
//! `dispatch` and `combine` have the launches of each; `args` is the kernels' record, the twin of
//! `device/moe/moe_args.cuh`. Watched by the tests in these files, `tests/{args,region,exchange}.rs`, and L1 to L3 of
//! the suite on GPUs.

pub(crate) mod args;
pub(crate) mod blocks;
pub(crate) mod capabilities;
pub(crate) mod combine;
pub(crate) mod combine_tiling;
pub(crate) mod copies;
pub(crate) mod crossing;
pub(crate) mod deferred;
pub(crate) mod dispatch;
pub(crate) mod exchange;
pub(crate) mod exchanger;
pub(crate) mod exchanges;
pub(crate) mod faults;
pub(crate) mod foresight;
pub(crate) mod fused;
pub(crate) mod handle;
pub(crate) mod host_counts;
pub(crate) mod limits;
pub(crate) mod loaded;
pub(crate) mod moving;
pub(crate) mod operation;
pub(crate) mod push;
pub(crate) mod quotient;
pub(crate) mod received;
pub(crate) mod routing;
pub(crate) mod sizes;
pub(crate) mod spread;
pub(crate) mod state;
pub(crate) mod wanted;
