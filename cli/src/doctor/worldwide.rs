//! `tokenyard doctor --world`: every rank examines its node, and all compare.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::Serialize;
use tokenyard_core::bootstrap::{Identity, Secret, World, WorldOptions};
use tokenyard_core::config::Config;
use tokenyard_doctor::world::{Fault, Skew, Summary, compare};
use tokenyard_doctor::{Finding, Verdict};

use super::launched::NodeRanks;
use super::{Asked, DoctorArgs, Examined, Patience, examine_node, leave, node_ranks, text, worst};
use crate::output::{People, print_document};
use crate::preload;

/// A preflight does not wait for checkpoints: a rank that does not come within this is named.
const LATEST: Duration = Duration::from_secs(60);
/// All ranks of a node ask its drivers at once, which answer one after the other.
const TOGETHER: Patience =
    Patience { commands: Duration::from_secs(10), components: Duration::from_secs(20) };
/// Looks at rank 0's clock; the one with the narrowest bound counts.
const LOOKS: u32 = 8;

#[derive(Serialize)]
struct WorldDocument<'a> {
    verdict: Verdict,
    findings: &'a [Finding],
    /// The summary of each rank, in order of rank.
    ranks: &'a [Summary],
    elapsed_ms: f64,
}

pub(super) fn main(args: &DoctorArgs) -> Result<ExitCode> {
    tokenyard_launch::adopt()?;
    let start = Instant::now();
    let config = args.config.as_deref().map(Config::load).transpose()?;
    preload::try_plugins(config.as_ref())?;
    let world = join(config.as_ref())?;
    // A rank that cannot go on sends the others the reason; they do not wait for it.
    let (summaries, is_stuck) = gather(args, config.as_ref(), &world)
        .inspect_err(|error| world.report_failure(&format!("{error:#}")))?;
    let findings = compare(&summaries);
    let verdict = worst(&findings);
    if world.rank() == 0 {
        text::print(&findings, args.quiet, People::new(args.json), || {});
        if args.json {
            let document = WorldDocument {
                verdict,
                findings: &findings,
                ranks: &summaries,
                elapsed_ms: start.elapsed().as_secs_f64() * 1e3,
            };
            print_document("doctor --world", &document)?;
        }
    }
    // No rank leaves while others still read.
    world.barrier("doctor: end")?;
    drop(world);
    Ok(leave(verdict, is_stuck))
}

fn join(config: Option<&Config>) -> Result<World> {
    let env = tokenyard_core::bootstrap::environment;
    let identity = Identity::resolve(config.map_or("env", |c| &c.world.bootstrap), &env)
        .context("--world wants to be one rank of a launcher's world (torchrun, srun, mpirun)")?;
    let mut options = match config {
        Some(config) => WorldOptions::configured(&config.world, identity),
        None => WorldOptions::new(identity),
    };
    options.secret = Secret::from_env(&env)?;
    options.late = options.late.min(LATEST.max(options.deadline));
    Ok(World::join(options)?)
}

/// The summaries of all ranks, and whether a probe of this one is stuck.
fn gather(
    args: &DoctorArgs,
    config: Option<&Config>,
    world: &World,
) -> Result<(Vec<Summary>, bool)> {
    let host = node_name(args, world.rank());
    let here = ranks_of_host(world, &host)?;
    // One rank of each node is a look at the nodes, which says nothing about the job.
    let launched = (here > 1).then_some(NodeRanks { count: here, from: "as launched" });
    let asked = Asked { config, ranks: node_ranks(args, launched) };
    let Examined { machine, job, findings, is_stuck, .. } = examine_node(args, asked, TOGETHER)?;
    let mut mine = Summary::of(&machine, &job, &host, env!("CARGO_PKG_VERSION"))
        .with_transport(&findings)
        .with_ranks(here);
    mine.faults = findings.iter().filter_map(fault).collect();
    mine.clock = clock(world)?;
    let bytes = serde_json::to_vec(&mine)?;
    let all = world.all_gather("doctor: summaries", &bytes)?;
    let read = |(rank, bytes): (usize, Vec<u8>)| {
        serde_json::from_slice(&bytes).with_context(|| {
            format!("rank {rank} sent a summary that this version of tokenyard does not read")
        })
    };
    let all = all.into_iter().enumerate().map(read).collect::<Result<_>>()?;
    Ok((all, is_stuck))
}

/// How many ranks of the world are on this rank's host.
fn ranks_of_host(world: &World, host: &str) -> Result<u32> {
    let hosts = world.all_gather("doctor: hosts", host.as_bytes())?;
    let here = hosts.iter().filter(|other| other.as_slice() == host.as_bytes()).count();
    Ok(u32::try_from(here)?)
}

/// The host's name. A recorded node is a node of its own for each rank that reads it.
fn node_name(args: &DoctorArgs, rank: u32) -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    match args.root.as_deref().and_then(Path::file_stem) {
        Some(name) => format!("{host}/{rank}/{}", name.to_string_lossy()),
        None => host,
    }
}

/// The facts that the others need. Whether ranks can meet shows by itself: they have met. An unknown fact counts
/// where it shows that a driver does not answer: much else is unknown then.
fn fault(finding: &Finding) -> Option<(Fault, String, String)> {
    let met = matches!(finding.id, "rendezvous" | "job-secret" | "processors");
    let fault = match finding.verdict {
        Verdict::Slow => Fault::Slow,
        Verdict::Broken => Fault::Broken,
        Verdict::Unknown if matches!(finding.id, "nvidia-smi" | "component") => Fault::Unknown,
        Verdict::Ok | Verdict::Unknown => return None,
    };
    (!met).then(|| (fault, finding.id.to_owned(), finding.subject.clone()))
}

/// This rank's clock against rank 0's. Rank 0 takes a stamp between two collectives that all ranks
/// are in, so the moment lies between this rank's entry to the first and its return from the second.
fn clock(world: &World) -> Result<Option<Skew>> {
    let mut best: Option<Skew> = None;
    for look in 0..LOOKS {
        let before = now();
        world.barrier(&format!("doctor: clock {look}"))?;
        let stamps = world.all_gather("doctor: stamp", &now().to_le_bytes())?;
        let after = now();
        let stamp = stamps.first().and_then(|bytes| bytes.as_slice().try_into().ok());
        let Some(stamp) = stamp.map(i64::from_le_bytes) else { continue };
        let skew = Skew::of(stamp, before, after);
        if best.is_none_or(|best| skew.error < best.error) {
            best = Some(skew);
        }
    }
    Ok(best.filter(|_| world.rank() > 0))
}

/// Microseconds since 1970.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_does_not_answer_is_reported_to_the_world_and_makes_it_unknown() {
        let unanswered = tokenyard_doctor::unanswered(5000);
        assert_eq!((unanswered.len(), unanswered[0].verdict), (1, Verdict::Unknown));
        assert_eq!(unanswered[0].found, "a probe did not answer in 5000 ms");
        let mut finding = unanswered[0].clone();
        assert!(matches!(fault(&finding), Some((Fault::Unknown, id, _)) if id == "component"));
        finding.id = "nvidia-smi";
        let faults = vec![fault(&finding).unwrap()];
        let summary = Summary { host: "a".into(), faults, ..Summary::default() };
        assert_eq!(worst(&compare(&[summary])), Verdict::Unknown);
        // Much else may be unknown on a node that is well.
        finding.id = "imex-channel";
        assert!(fault(&finding).is_none());
    }
}
