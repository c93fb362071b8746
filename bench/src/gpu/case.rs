//! The cases of an exchange, in the words of the command line and of reports.

use std::fmt;
use std::path::PathBuf;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::job::Sizes;

/// The operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Rows to the ranks of their experts.
    Dispatch,
    /// Rows back, and their sums.
    Combine,
    /// A dispatch and the combine of its handle, of bf16 rows in memory of the caller.
    Pair,
}

/// How the host queues operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Calls {
    /// Each call waits for the outcome: sizes are exact.
    #[default]
    Waiting,
    /// No call waits: sizes of the worst case.
    NoSync,
    /// As no-sync, in a CUDA graph of several operations.
    Graph,
    /// As no-sync, with send and receive as calls of their own; times are of the sends.
    Sends,
}

impl Calls {
    /// Whether calls wait for outcomes.
    pub fn wait(self) -> bool {
        self == Self::Waiting
    }
}

/// The element type of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Rows {
    /// FP8 e4m3, quantised already, one scale per 128 channels.
    Fp8,
    /// bf16.
    Bf16,
    /// bf16, cast to FP8 by the dispatch.
    Cast,
}

/// The layout of received rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// One per token and rank.
    Flat,
    /// One per token and expert, groups at multiples of 128 rows.
    ExpertMajor,
    /// One per token and expert, in a block per expert.
    Packed,
    /// One per token and rank, in a block per source.
    RankMajor,
}

/// The experts that tokens select.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Routing {
    /// K at random.
    Uniform,
    /// As `Uniform`, but every token selects one and the same expert too.
    Skewed,
    /// The routing that a framework recorded: `topk_idx` of the file. Rows are generated.
    Recorded(PathBuf),
}

/// The place where a combine finds the expert outputs, and other variations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Manner {
    /// A dispatch that counts; a combine of rows where the dispatch left them.
    #[default]
    Plain,
    /// Dispatch: with the routing of a handle, nothing is counted.
    Replay,
    /// Dispatch: rows, scales, ids and weights are copied to memory of the caller.
    Copied,
    /// Combine: rows are in memory of the caller, outside the arena.
    Outside,
}

/// Sizes that are the same for every operation of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fixed {
    /// H.
    pub hidden: u32,
    /// K.
    pub topk: u32,
    /// E.
    pub experts: u32,
}

impl Fixed {
    /// The sizes of an exchange of this many tokens.
    pub(super) fn sizes(self, tokens: u32) -> Sizes {
        let Self { hidden, topk, experts } = self;
        Sizes { tokens, hidden, topk, experts }
    }
}

/// One operation, but for its sizes and its SM count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// The operation.
    pub phase: Phase,
    /// The element type of rows.
    pub rows: Rows,
    /// The layout in which they arrive.
    pub layout: Layout,
    /// The variation.
    pub manner: Manner,
    /// How the host queues it.
    #[serde(default)]
    pub calls: Calls,
    /// T of the rank with the most tokens.
    pub tokens: u32,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
            Self::Pair => "dispatch and combine",
        })
    }
}

impl fmt::Display for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fp8 => "fp8",
            Self::Bf16 => "bf16",
            Self::Cast => "bf16 cast to fp8",
        })
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flat => "flat",
            Self::ExpertMajor => "expert-major",
            Self::Packed => "packed",
            Self::RankMajor => "rank-major",
        })
    }
}

impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Skewed => f.write_str("skewed"),
            Self::Recorded(file) => write!(f, "{}", file.display()),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { phase, rows, layout, .. } = self;
        match self.manner {
            Manner::Plain => write!(f, "{phase} {rows} {layout}"),
            Manner::Replay => write!(f, "replayed {phase} {rows} {layout}"),
            Manner::Copied => write!(f, "{phase} {rows} {layout}, copied out"),
            Manner::Outside => write!(f, "{phase} {rows} {layout}, rows outside"),
        }?;
        f.write_str(match self.calls {
            Calls::Waiting => "",
            Calls::NoSync => ", no sync",
            Calls::Graph => ", in a graph",
            Calls::Sends => ", sends alone",
        })
    }
}
