//! What is measured, as it travels from the launching process to the ranks and back: JSON lines.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::{exchange, gpu, link, proxy, scaling, steady};

/// A scenario that `tokenyard bench` knows.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// What [`run`](crate::run) measures.
#[derive(Clone, Debug)]
pub struct Plan {
    /// In this order.
    pub scenarios: Vec<Scenario>,
    /// Numbers of ranks of `exchange` and `steady`, each 1 to 64.
    pub ranks: Vec<u32>,
    /// Sizes of `exchange`, one or several; the other scenarios have small sizes of their own.
    pub sizes: Vec<Sizes>,
    /// Samples of `exchange` per variant, at least 1.
    pub samples: u32,
}

impl Plan {
    pub(crate) fn check(&self) -> Result<()> {
        ensure!(self.samples > 0, "check bench: found 0 samples; expected at least 1");
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

/// What one group of ranks does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Job {
    /// See [`exchange`].
    Exchange(exchange::Task),
    /// See [`steady`].
    Steady(steady::Task),
    /// See [`scaling`].
    Scaling(scaling::Task),
    /// See [`mod@link`].
    Link(link::Task),
    /// See [`gpu`].
    Gpu(gpu::Task),
    /// See [`proxy`]; one task per line.
    Proxy(Vec<proxy::Task>),
}

/// What one rank found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Output {
    /// Of rank 0 only: so many of so many steps are done.
    Progress(u64, u64),
    /// See [`exchange`].
    Exchange(Vec<exchange::Samples>),
    /// See [`steady`].
    Steady(steady::Figures),
    /// See [`scaling`].
    Scaling(Vec<scaling::Figures>),
    /// See [`mod@link`].
    Link(link::Figures),
    /// See [`gpu`].
    Gpu(gpu::Figures),
    /// See [`proxy`].
    Proxy(Vec<proxy::Row>),
}
