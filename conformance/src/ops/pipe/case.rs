//! A case of L1 or L2.

use std::sync::Arc;

use anyhow::Result;
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::Config;
use tokenyard_core::ops::pipe::PipeOptions;

use super::end::PipeEnd;
use crate::ops::OperationCase;

/// See the [module](self).
pub(super) struct PipeCase {
    /// The name behind `pipe/`.
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    /// Ranks of a domain.
    pub(super) ranks: u32,
    pub(super) options: PipeOptions,
    /// The lengths of messages, in turn.
    pub(super) lengths: &'static [usize],
    pub(super) body: fn(&mut PipeEnd) -> Result<()>,
}

impl PipeCase {
    fn run(&self, world: &Arc<World>, config: &Config) -> Result<Option<String>> {
        let mut end = match PipeEnd::open(world, config, self.options, self.lengths)? {
            Ok(end) => end,
            Err(why) => return Ok(Some(why)),
        };
        (self.body)(&mut end)?;
        end.close()?;
        Ok(None)
    }
}

impl From<PipeCase> for OperationCase {
    fn from(case: PipeCase) -> Self {
        Self {
            name: format!("pipe/{}", case.name),
            about: case.about,
            ranks: case.ranks,
            body: Box::new(move |world, config| case.run(world, config)),
        }
    }
}
