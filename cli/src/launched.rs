//! Commands that start ranks, where a launcher has started them already.

use anyhow::{Result, bail};
use tokenyard_core::bootstrap::{environment, launched_world};

/// The wish for a world of its own.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StartRanks {
    /// Start ranks here although variables of a launcher say that this process is one of several ranks, as in a shell
    /// of a Slurm job.
    #[arg(long)]
    start_ranks: bool,
}

impl StartRanks {
    /// Refuses to start ranks in a process that torchrun or Slurm started as one of several: each of them would start
    /// a world of its own. A rank of mpirun does not get here.
    pub(crate) fn check(&self, command: &str) -> Result<()> {
        if self.start_ranks {
            return Ok(());
        }
        if let Some(found) = launched_world(&environment) {
            bail!(
                "start ranks: found {found}: a launcher started this process as one of several ranks, and each of \
                 them would start a world of its own; expected --as-rank. Fix: `tokenyard {command} ... --as-rank` \
                 is one rank of the launcher's world; --start-ranks starts a world here all the same"
            );
        }
        Ok(())
    }
}
