//! `tokenyard doctor`: what is slow or broken on this node for a job, what it costs, and the fix.
//!
//! `tokenyard-machine` reads, `tokenyard-doctor` judges. This module has the arguments. The others: `tried`
//! has the facts that only a running process can find, `asked` the demands of a config, `launched` the ranks
//! of the launcher. `text` and `columns` print; `distances` shows how far NICs are from GPUs, `matrix` how
//! all devices are linked, `worldwide` compares all ranks.
//!
//! Watched by `cli/tests/{doctor,doctor_topology}.rs` with their goldens; a rule itself is watched in `node/doctor`.

mod asked;
mod columns;
mod distances;
mod launched;
mod matrix;
mod text;
mod tried;
mod worldwide;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::Serialize;
use tokenyard_core::conditions::Conditions;
use tokenyard_core::config::Config;
use tokenyard_core::moe::Shape;
use tokenyard_doctor::{Finding, Job, Tried, Verdict, examine, unanswered};
use tokenyard_machine::{Counters, Machine, Topology, Tree, commands};

use crate::components::Components;
use crate::output::{self, People, print_document};
use crate::preload;
use launched::NodeRanks;

/// How long to wait for what a driver answers.
#[derive(Clone, Copy)]
struct Patience {
    /// The wait for nvidia-smi and the like.
    commands: Duration,
    /// The wait for the probes of all components together, which ask the drivers in this process.
    components: Duration,
}

/// The whole answer is to come within a second, unless a driver is slow.
const ALONE: Patience =
    Patience { commands: Duration::from_millis(700), components: Duration::from_secs(5) };
/// How far apart error counters are read, at least, where some port has counted something.
const BETWEEN_READINGS: Duration = Duration::from_millis(250);

const EXAMPLES: &str = "\
Examples:
  tokenyard doctor
  tokenyard doctor configs/verbs.toml --ranks 8
  tokenyard doctor configs/cpu.toml --json
  tokenyard doctor --quiet || echo \"look at this node\"
  tokenyard doctor --topology
  tokenyard doctor --root node/machine/trees/hgx-cx7.tree
  srun tokenyard doctor --world configs/verbs.toml

Exit codes: 0 all is well (or unknown), 1 something is slow, 2 something is broken.
They are the same with --quiet, --topology, --json and --world.
Every finding has its place in docs/findings.md.";

/// Arguments of `tokenyard doctor`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DoctorArgs {
    /// Judge for this config; without one, all that is there counts.
    config: Option<PathBuf>,
    /// Read the node below this folder, or from this recorded tree, in place of the running system.
    #[arg(long, value_name = "FOLDER")]
    root: Option<PathBuf>,
    /// Be one rank of the launcher's world, and compare all nodes; rank 0 prints.
    #[arg(long)]
    world: bool,
    /// Print only what is slow or broken, and nothing where nothing is.
    #[arg(long, short, conflicts_with = "topology")]
    quiet: bool,
    /// Print how all GPUs and NICs are linked, with NUMA nodes and cores, in place of the findings.
    #[arg(long, conflicts_with = "world")]
    topology: bool,
    /// Ranks that this node is to run; by default as many as the launcher starts here, else one for each GPU that is
    /// given to it, or for each of up to 4 cores.
    #[arg(long)]
    ranks: Option<u32>,
    /// Experts on all ranks together.
    #[arg(long, default_value_t = 32)]
    experts: u32,
    /// Experts that each token selects.
    #[arg(long, default_value_t = 4)]
    topk: u32,
    /// Elements of a token's row.
    #[arg(long, default_value_t = 1024)]
    hidden: u32,
    /// The most tokens of a rank.
    #[arg(long, default_value_t = 256)]
    max_tokens: u32,
    /// Print one JSON document as the last line of standard output; the rest goes to standard error.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct DoctorDocument<'a> {
    verdict: Verdict,
    findings: &'a [Finding],
    /// The facts of the node, by which it was judged.
    machine: &'a Machine,
    /// The distances from each NIC to each GPU.
    distances: Vec<distances::Pair<'a>>,
    /// How all devices are linked, with `--topology`.
    #[serde(skip_serializing_if = "Option::is_none")]
    topology: Option<&'a Topology>,
    tried: Option<&'a Tried>,
    /// How long reading and judging took.
    elapsed_ms: f64,
    conditions: Conditions,
}

/// The job that the node is judged for.
#[derive(Clone, Copy)]
struct Asked<'a> {
    config: Option<&'a Config>,
    /// Ranks of the node, where a launcher or an option says how many.
    ranks: Option<NodeRanks>,
}

/// A node that was examined.
struct Examined {
    machine: Machine,
    job: Job,
    tried: Option<Tried>,
    findings: Vec<Finding>,
    /// A probe has not come back: its thread is still inside a driver.
    is_stuck: bool,
}

pub(crate) fn main(args: &DoctorArgs) -> Result<ExitCode> {
    if args.world {
        return worldwide::main(args);
    }
    let start = Instant::now();
    let config = args.config.as_deref().map(Config::load).transpose()?;
    let asked = Asked { config: config.as_ref(), ranks: node_ranks(args, None) };
    preload::try_plugins(config.as_ref())?;
    let examined = examine_node(args, asked, ALONE)?;
    let Examined { machine, tried, findings, is_stuck, .. } = examined;
    let elapsed_ms = start.elapsed().as_secs_f64() * 1e3;
    let verdict = worst(&findings);
    let people = People::new(args.json);
    let topology = args.topology.then(|| matrix::of(args, &machine)).transpose()?;
    let distances = distances::of(&machine);
    if let Some(topology) = &topology {
        matrix::print(topology, people);
        text::conclude(&findings, people);
    } else {
        let show_distances = || distances::print(&machine, &distances, people);
        text::print(&findings, args.quiet, people, show_distances);
    }
    if args.json {
        let document = DoctorDocument {
            verdict,
            findings: &findings,
            machine: &machine,
            distances,
            topology: topology.as_ref().map(|found| &found.topology),
            tried: tried.as_ref(),
            elapsed_ms,
            conditions: Conditions::find(),
        };
        print_document("doctor", &document)?;
    }
    Ok(leave(verdict, is_stuck))
}

/// The exit code; with a thread that is stuck in a driver the process ends here. A driver's functions at
/// exit could wait for that thread.
fn leave(verdict: Verdict, is_stuck: bool) -> ExitCode {
    if is_stuck {
        let code = output::lost_code().filter(|_| verdict.exit_code() == 0);
        let code = code.unwrap_or(verdict.exit_code());
        // SAFETY: ends the process and runs nothing of it. All output is out: standard output was
        // flushed, standard error has no buffer.
        unsafe { nix::libc::_exit(code.into()) }
    }
    ExitCode::from(verdict.exit_code())
}

fn worst(findings: &[Finding]) -> Verdict {
    findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Ok)
}

/// Reads and judges the running system, or what `--root` names. Of that nothing can be tried, and this
/// program's components say nothing about it.
fn examine_node(args: &DoctorArgs, asked: Asked<'_>, patience: Patience) -> Result<Examined> {
    let Some(root) = &args.root else {
        return examine_system(args, asked, patience);
    };
    let tree = Tree::open(root).with_context(|| format!("--root: {}", root.display()))?;
    let machine = Machine::read(&tree);
    let job = job(args, &machine, asked)?;
    let findings = examine(&machine, &job, None, None);
    Ok(Examined { machine, job, tried: None, findings, is_stuck: false })
}

fn examine_system(args: &DoctorArgs, asked: Asked<'_>, patience: Patience) -> Result<Examined> {
    let config = asked.config;
    let (machine, components, tried) = std::thread::scope(|scope| {
        // A name server that does not answer is waited for meanwhile, and so is a driver.
        let tried = scope.spawn(|| tried::gather(config));
        let of = config.cloned();
        let components = scope
            .spawn(|| tried::within(patience.components, move || Components::find(of.as_ref())));
        (read_system(patience.commands), components.join(), tried.join())
    });
    let components =
        components.map_err(|_| anyhow!("waiting for the probes panicked"))?.transpose()?;
    let tried = tried.map_err(|_| anyhow!("trying this node panicked"))?;
    let mut job = job(args, &machine, asked)?;
    job.plugin_transport = match &components {
        Some(found) => {
            found.components.iter().any(|p| p.chosen && p.kind == "transport" && p.file.is_some())
        }
        // The components of plugins are unknown.
        None => config.is_some_and(|config| !config.plugins.is_empty()),
    };
    let facts = components.as_ref().map(asked::components);
    let mut findings = examine(&machine, &job, facts.as_ref(), Some(&tried));
    if facts.is_none() {
        findings.splice(0..0, unanswered(patience.components.as_millis()));
    }
    Ok(Examined { machine, job, tried: Some(tried), findings, is_stuck: facts.is_none() })
}

/// `--ranks`, else what `launched` counted of a world, else what the launcher's variables say.
fn node_ranks(args: &DoctorArgs, launched: Option<NodeRanks>) -> Option<NodeRanks> {
    let given = args.ranks.map(|count| NodeRanks { count, from: "--ranks" });
    given.or(launched).or_else(|| launched::ranks(&|name| std::env::var(name).ok()))
}

fn job(args: &DoctorArgs, machine: &Machine, Asked { config, ranks }: Asked<'_>) -> Result<Job> {
    let job = asked::job(&shape(args, machine, ranks)?, config)?;
    let Some(NodeRanks { count, from }) = ranks else {
        // The shape's ranks divide its experts, which 7 GPUs may not.
        let gpus = machine.given_gpus().len() as u64;
        return Ok(Job { ranks: job.ranks.max(gpus), ..job });
    };
    let (ranks, ranks_from) = (u64::from(count), from.to_owned());
    Ok(Job { ranks, ranks_from, drives: Some(ranks), ..job })
}

/// Reads the running system, and its error counters twice.
fn read_system(patience: Duration) -> Machine {
    let tree = Tree::system();
    let (start, first) = (Instant::now(), Counters::read(&tree));
    let outputs = commands::capture(patience);
    if first.has_some() {
        std::thread::sleep(BETWEEN_READINGS.saturating_sub(start.elapsed()));
    }
    let mut machine = Machine::read_with(&tree, &outputs);
    let later = Counters::read(&tree);
    let milliseconds = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
    machine.note_growth(&first, &later, milliseconds);
    machine
}

fn shape(
    args: &DoctorArgs,
    machine: &Machine,
    ranks: Option<NodeRanks>,
) -> tokenyard_core::Result<Shape> {
    let processors = machine.numa.iter().filter_map(|node| Some(node.processors.known()?.len()));
    let processors: usize = processors.sum();
    let some = match machine.gpus.iter().filter(|gpu| gpu.is_visible).count() {
        _ if ranks.is_some() => ranks.map_or(1, |ranks| ranks.count as usize),
        0 => processors.clamp(1, 4),
        gpus => gpus,
    };
    // Ranks that the experts can be divided among.
    let some = (1..=some as u32).rev().find(|ranks| args.experts.is_multiple_of(*ranks));
    Shape {
        ranks: args.ranks.or(some).unwrap_or(1),
        experts: args.experts,
        topk: args.topk,
        hidden: args.hidden,
        max_tokens: args.max_tokens,
    }
    .new()
}
