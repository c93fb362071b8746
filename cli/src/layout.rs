//! The layouts of received tokens, by the names of the arguments.

use clap::ValueEnum;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LayoutName {
    /// One row per token and rank.
    Flat,
    /// One row per token and expert, grouped by expert.
    ExpertMajor,
    /// Fixed places per expert and source rank, with counts.
    Packed,
    /// One row per token and rank, in a block of M rows per source rank.
    RankMajor,
}
