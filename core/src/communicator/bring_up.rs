//! The opening of communicators: users of a session that run dispatches and combines.

use std::sync::Arc;

use super::Communicator;
use super::claims::Claims;
use super::components::Components;
use super::course::Course;
use super::sort;
use crate::bootstrap::World;
use crate::config::Config;
use crate::kernels::kernel_shape;
use crate::moe::combine::late_weights::LateWeights;
use crate::moe::{Shape, TopkScratch};
use crate::session::opening::{OpenedUser, UserSpec, open_one, refuse_open};
use crate::{Error, ErrorKind, Result};

/// A caller's options for a communicator; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommunicatorOptions {
    /// E, a multiple of the number of ranks.
    pub experts: u32,
    /// K, 1 to 32.
    pub topk: u32,
    /// H in elements.
    pub hidden: u32,
    /// M: the most tokens of a rank in one operation.
    pub max_tokens: u32,
    /// Operations that may be sent and not yet received, 1 to 16.
    pub in_flight: u32,
    /// Handles that may live at once, 1 to 1024.
    pub handles: u32,
}

impl CommunicatorOptions {
    /// Options for a shape, with 2 operations in flight and 8 handles.
    pub fn new(experts: u32, topk: u32, hidden: u32, max_tokens: u32) -> Self {
        Self { experts, topk, hidden, max_tokens, in_flight: 2, handles: 8 }
    }

    fn shape(&self, ranks: u32) -> Result<Shape> {
        for (name, value, most) in
            [("in_flight", self.in_flight, 16), ("handles", self.handles, 1024)]
        {
            if value == 0 || value > most {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    "open communicator",
                    format!("found {name} = {value}; expected 1 to {most}"),
                ));
            }
        }
        Shape {
            ranks,
            experts: self.experts,
            topk: self.topk,
            hidden: self.hidden,
            max_tokens: self.max_tokens,
        }
        .new()
    }

    pub(crate) fn spec(&self, ranks: u32) -> Result<UserSpec> {
        let shape = kernel_shape(&self.shape(ranks)?, 1, self.in_flight, self.handles);
        Ok(UserSpec {
            name: "communicator",
            shape,
            capability: 0,
            operations: sort::NAMES,
            agreement: self.agreement(),
        })
    }

    fn agreement(&self) -> Vec<(String, String)> {
        [
            ("experts", self.experts),
            ("topk", self.topk),
            ("hidden", self.hidden),
            ("max_tokens", self.max_tokens),
            ("in_flight", self.in_flight),
            ("handles", self.handles),
        ]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value.to_string()))
        .collect()
    }
}

impl Communicator {
    /// Opens a communicator on all ranks of `world`. Collective. Where losses are masked, ranks that wait to
    /// come back do so here, and a rank that is lost meanwhile is left out.
    ///
    /// # Errors
    /// Every disagreement of [`Config`], components and ranks, on every rank, with the fix. An error of one rank
    /// alone is [`ErrorKind::Refused`] on the others, and the world goes on. [`ErrorKind::Transport`] names a
    /// component that does not return from a call within `late_ms`; this rank then leaves the world.
    pub fn open(world: &Arc<World>, config: &Config, options: CommunicatorOptions) -> Result<Self> {
        let ranks = world.ranks();
        let opened = open_one(world, config, move || options.spec(ranks))?;
        Self::made(opened, config, &options)
    }

    /// The communicator of a user that was opened.
    pub(crate) fn made(
        opened: OpenedUser,
        config: &Config,
        options: &CommunicatorOptions,
    ) -> Result<Self> {
        let OpenedUser { user, standing, report, .. } = opened;
        let shape = options.shape(standing.world.ranks())?;
        let components = Components { user, claims: Claims::new(options.handles), shape };
        Ok(Self {
            report,
            course: Course::new(standing, Arc::new(components), options.in_flight),
            config: config.clone(),
            options: *options,
            scratch: TopkScratch::new(&shape),
            late_weights: LateWeights::default(),
        })
    }

    /// Takes part in the bring-up that the other ranks begin, with a refusal, where this rank has no options to
    /// [`open`](Self::open) one with. For callers that read arguments before core can. Returns `why`.
    pub fn refuse_open(world: &World, why: Error) -> Error {
        refuse_open(world, why)
    }
}
