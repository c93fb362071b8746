//! The oracle: the MoE exchange stated once more, as plainly as possible.
//!
//! It takes the inputs of all ranks and returns the expected outputs of all ranks, bit for bit. It has a
//! global view of all ranks, no communication, no device and **no code of the product**; clarity goes
//! before speed. It is the reference for every kernel set.
//!
//! | module | question it answers |
//! |---|---|
//! | [`case`] | which exchange is it? |
//! | [`inputs`] | what are the inputs of every rank? |
//! | [`routing`] | which rank gets which token, at which row? |
//! | [`cast`] | what do FP8 bytes and scales look like? |
//! | [`dispatch`] | what must a rank receive? |
//! | [`experts`] | what do the experts of a test do with their rows? |
//! | [`sum`] | how are rows added? |
//! | [`logfmt`] | what do encoded rows become? |
//! | [`combine`] | what must a rank get back? |
//! | [`compare`] | is this what it got? |
//!
//! Symbols: T tokens on a rank, H hidden size, K top-k, E experts, R ranks, M most tokens of a
//! rank, El = E/R experts of a rank, G = ceil(H/128) scale groups, N rows received (one per token
//! and rank), X rows of the expert-major layout. All bytes are little-endian, rows are contiguous.
//!
//! A process checks its own outputs only, and needs no communication for it:
//!
//! ```
//! use tokenyard_conformance::moe::oracle::{Case, Inputs, expected_dispatch, expected_round_trip};
//!
//! let case = Case { ranks: 2, experts: 4, hidden: 16, max_tokens: 3, ..Case::default() };
//! case.validate()?;
//! let inputs = Inputs::all(&case);
//! let received = expected_dispatch(&case, &inputs, 1);
//! assert_eq!(received.x.rows, received.rows);
//! // received.compare(|name| /* the bytes of the product's array of that name */)?;
//! let combined = expected_round_trip(&case, &inputs.ranks[1], 1);
//! assert!(combined.x.compare(&[0; 3 * 16 * 2]).is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod case;
pub mod cast;
pub mod combine;
pub mod compare;
pub mod dispatch;
pub mod experts;
pub mod inputs;
pub mod logfmt;
pub mod number;
pub mod rng;
pub mod routing;
pub mod sum;

pub use case::{Case, Combine, Input, Invalid, Layout, Routing, Scales, Sums, Tokens, Values};
pub use combine::{Combined, expected_capped_round_trip, expected_combine, expected_round_trip};
pub use compare::{Array, Mismatch};
pub use dispatch::{Received, expected_dispatch, scales_by_row};
pub use experts::{Arrived, ExpertOutput};
pub use inputs::{Inputs, RankInputs};
pub use number::{Elem, RowType};

#[cfg(test)]
mod tests;
