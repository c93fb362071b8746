//! A case of L1 or L2, before it has its level.

use std::sync::Arc;

use anyhow::{Context, Result};
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::Config;

use super::end::{self, OperationEnd};
use super::{OperationCase, bodies};
use crate::moe::exchange;

/// See the [module](self).
pub(super) struct EndCase<E: OperationEnd> {
    /// The name behind the word of the operation.
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    /// Ranks of a domain.
    pub(super) ranks: u32,
    pub(super) options: E::Options,
    /// How much goes at a time, in turn.
    pub(super) lengths: &'static [E::Length],
    pub(super) body: CaseBody<E>,
}

/// The work of all ranks.
pub(super) enum CaseBody<E> {
    Alone(fn(&mut E) -> Result<()>),
    BesideExchanges,
}

impl<E: OperationEnd> EndCase<E> {
    fn run(&self, world: &Arc<World>, config: &Config) -> Result<Option<String>> {
        let exchange = bodies::exchange(world, config);
        let beside = match self.body {
            CaseBody::Alone(_) => Vec::new(),
            CaseBody::BesideExchanges => vec![exchange::options(&exchange)],
        };
        let opened = end::open::<E>(world, config, self.options, self.lengths, beside)?;
        let (mut end, mut communicators) = match opened {
            Ok(opened) => opened,
            Err(why) => return Ok(Some(why)),
        };
        match self.body {
            CaseBody::Alone(body) => body(&mut end)?,
            CaseBody::BesideExchanges => {
                let comm = communicators.pop().context("find the communicator in the session")?;
                bodies::beside_exchanges(&mut end, comm, &exchange)?;
            }
        }
        end.close()?;
        Ok(None)
    }
}

impl<E: OperationEnd> From<EndCase<E>> for OperationCase {
    fn from(case: EndCase<E>) -> Self {
        Self {
            name: format!("{}/{}", E::WORD, case.name),
            about: case.about,
            ranks: case.ranks,
            body: Box::new(move |world, config| case.run(world, config)),
        }
    }
}
