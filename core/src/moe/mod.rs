//! MoE shapes, routing and layout: pure functions, no memory of their own but what they return.
//!
//! Letters, as everywhere in the project: T tokens on this rank, H hidden size (elements), K top-k,
//! E experts, R ranks, M most tokens a rank may bring. Expert `e` lives on rank `e / (E/R)`.

mod dtype;
mod shape;

pub use dtype::DType;
pub use shape::{MAX_TOPK, Shape};
