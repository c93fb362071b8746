//! The cost of an exchange on two levels, on paper: rows, bytes, commands, times and SMs of a rank.
//!
//! [`RankRows`] says how many rows a rank moves: exactly, from the routing of all ranks, or on average,
//! from the [`Gate`] that chooses experts. [`CostModel`] turns rows into bytes and commands by the
//! protocol of `docs/protocol.md`; `bench/tests/domains.rs` compares both with what a communicator
//! posts. [`Rates`] turns bytes into times and SMs. The page for readers is `docs/two-levels.md`; a test
//! compares times with figures that other libraries publish, and makes the table of the page.

mod cost;
mod gate;
#[cfg(test)]
mod published_tests;
mod rates;
mod rows;

pub use cost::{CostModel, LevelCost, OperationCost};
pub use gate::{Gate, UNIFORM};
pub use rates::{OperationTime, Rates, SM_GB_PER_S, sms_of};
pub use rows::RankRows;

/// D domains of S ranks, and the experts on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TwoLevels {
    /// D.
    pub domains: u32,
    /// S.
    pub domain_ranks: u32,
    /// E, a multiple of D * S.
    pub experts: u32,
    /// K.
    pub topk: u32,
}

impl TwoLevels {
    /// R = D * S.
    pub fn ranks(&self) -> u32 {
        self.domains * self.domain_ranks
    }

    /// El, the experts of one rank.
    pub fn local_experts(&self) -> u32 {
        self.experts / self.ranks()
    }
}
