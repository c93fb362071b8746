//! Ranks as threads of this process: a whole world for tests, without starting processes.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use tokenyard_core::bootstrap::{Identity, RankId, Rendezvous, Secret, World, WorldOptions};
use tokenyard_core::config::Config;

/// Runs `body` on every rank of a world of `ranks` threads; the results come in order of ranks.
///
/// # Errors
/// The rendezvous folder cannot be made, or a rank panicked or could not join.
pub fn in_threads<R: Send>(
    ranks: u32,
    config: &Config,
    body: impl Fn(&Arc<World>) -> R + Sync,
) -> Result<Vec<R>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("rendezvous");
    let secret = Secret::generate()?;
    let secret = secret.reveal().unwrap_or_default();
    let one = |rank: u32| -> Result<R> {
        let world = Arc::new(join(rank, ranks, &path, secret, config)?);
        Ok(body(&world))
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let one = &one;
                scope.spawn(move || one(rank))
            })
            .collect();
        threads
            .into_iter()
            .zip(0..)
            .map(|(thread, rank): (_, u32)| {
                thread.join().unwrap_or_else(|_| Err(anyhow!("rank {rank} panicked")))
            })
            .collect()
    })
}

fn join(rank: u32, ranks: u32, path: &Path, secret: &str, config: &Config) -> Result<World> {
    let place = RankId { rank, ranks, local_rank: rank };
    let identity = Identity::new(place, Rendezvous::File { path: path.to_owned() })?;
    let mut options = WorldOptions::configured(&config.world, identity);
    options.secret = Secret::from_text(secret)?;
    Ok(World::join(options)?)
}
