//! Jobs and figures, as JSON lines between the launching process and the ranks.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::{exchange, gpu, link, ops, proxy, scaling, steady};

/// A scenario of `tokenyard bench`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// Dispatch and combine against a plain copy.
    Exchange,
    /// Allocations and memory of steady steps.
    Steady,
    /// Commands and bytes of a step.
    Scaling,
    /// Commands through proxy threads.
    Proxy,
}

/// Sizes of one step; T is the same on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// T.
    pub tokens: u32,
    /// H.
    pub hidden: u32,
    /// K.
    pub topk: u32,
    /// E.
    pub experts: u32,
}

/// The plan of [`run`](crate::run).
#[derive(Clone, Debug)]
pub struct Plan {
    /// Scenarios, in the order in which they run.
    pub scenarios: Vec<Scenario>,
    /// Numbers of ranks of `exchange` and `steady`, each 1 to 64.
    pub ranks: Vec<u32>,
    /// Sizes of `exchange`, one or several; the other scenarios have small sizes of their own.
    pub sizes: Vec<Sizes>,
    /// Samples of `exchange` per variant, at least 1.
    pub samples: u32,
}

/// The most samples of a variant: more would take days.
pub const MAX_SAMPLES: u32 = 100_000;

impl Sizes {
    /// About how many bytes of memory one of `ranks` ranks takes for a step: tensors, outputs,
    /// windows, a plain copy of the rows, and the cost per expert. Each is rounded up.
    pub fn rank_bytes(&self, ranks: u32) -> u64 {
        let [tokens, hidden, topk, experts] =
            [self.tokens, self.hidden, self.topk, self.experts].map(u128::from);
        let rows = tokens * (2 + 3 * topk.min(ranks.into()) + 2 * topk);
        let bytes = rows * 2 * hidden + tokens * topk * 64 + experts * 128;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

impl Plan {
    /// About how many bytes of memory the largest of the plan's worlds takes.
    pub fn bytes(&self) -> u64 {
        let worlds = self.ranks.iter().flat_map(|ranks| {
            let all = u64::from(*ranks);
            self.sizes.iter().map(move |sizes| sizes.rank_bytes(*ranks).saturating_mul(all))
        });
        worlds.max().unwrap_or(0)
    }

    /// Refuses a plan that no rank would accept.
    ///
    /// # Errors
    /// A value is out of range; the error names it and the range.
    pub fn check(&self) -> Result<()> {
        ensure!(
            (1..=MAX_SAMPLES).contains(&self.samples),
            "check bench: found {} samples; expected 1 to {MAX_SAMPLES}",
            self.samples
        );
        for ranks in &self.ranks {
            ensure!(
                (1..=64).contains(ranks),
                "check bench: found {ranks} ranks; expected 1 to 64 (they share this machine)"
            );
            for sizes in &self.sizes {
                crate::workload::Workload::shape(sizes, *ranks)?;
            }
        }
        Ok(())
    }
}

/// The job of one group of ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Job {
    /// See [`exchange`].
    Exchange(exchange::ExchangeTask),
    /// See [`steady`].
    Steady(steady::SteadyTask),
    /// See [`scaling`].
    Scaling(scaling::ScalingTask),
    /// See [`mod@link`].
    Link(link::LinkTask),
    /// See [`ops`].
    Operations(ops::OperationsTask),
    /// See [`gpu`].
    Gpu(gpu::GpuTask),
    /// See [`proxy`]; one task per line.
    Proxy(Vec<proxy::ProxyTask>),
}

/// The output of one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Output {
    /// The steps that are done, and all steps; sent by rank 0 only.
    Progress(u64, u64),
    /// The call of a component that the rank is about to make, which may end it; empty once it has left it.
    Calls(String),
    /// See [`exchange`].
    Exchange(Vec<exchange::Samples>),
    /// See [`steady`].
    Steady(steady::SteadyFigures),
    /// See [`scaling`].
    Scaling(Vec<scaling::ScalingFigures>),
    /// See [`mod@link`].
    Link(link::LinkFigures),
    /// See [`ops`].
    Operations(Box<ops::OperationFigures>),
    /// See [`gpu`].
    Gpu(Box<gpu::GpuFigures>),
    /// See [`proxy`].
    Proxy(Vec<proxy::ProxyRow>),
}
