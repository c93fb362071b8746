//! `tokenyard config check`: judges a config without starting anything.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde::Serialize;
use tokenyard_core::config::{ComponentChoice, Config};
use tokenyard_core::host::{Registry, discover};
use tokenyard_core::topology::Discover;
use tokenyard_core::{Error, ErrorKind};

use crate::output::{People, Style, plural, print_document};
use crate::{components, preload};

const EXAMPLES: &str = "\
Examples:
  tokenyard config check configs/cpu.toml
  tokenyard config check my-fabric.toml --ranks 8 --json

Plugins are loaded; every chosen component reads its own table and is asked whether it can run here.
Exit codes: 0 the config is right, 1 it is wrong, and every error is printed with its line, 2 the
file cannot be read.";

/// Arguments of `tokenyard config`.
#[derive(Debug, clap::Args)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, clap::Subcommand)]
enum ConfigCommand {
    /// Judges every key of a config, those of its components too, and starts nothing.
    Check(CheckArgs),
}

/// Arguments of `tokenyard config check`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
struct CheckArgs {
    /// The config file.
    config: PathBuf,
    /// Ranks that will use it: judges `topology.domains` too.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: Option<u32>,
    /// Print one JSON document as the last line of standard output; the rest goes to standard error.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct CheckDocument {
    ok: bool,
    #[serde(flatten)]
    judgement: Judgement,
}

/// The judgement on a config.
#[derive(Debug, Default, Serialize)]
struct Judgement {
    /// The choices of the config; absent where it does not say which components it chooses.
    #[serde(skip_serializing_if = "Option::is_none")]
    chosen: Option<Chosen>,
    /// Errors; each names file and line.
    errors: Vec<String>,
    /// Notes that are no errors: a component that cannot run on this node, a table that no
    /// component reads.
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Chosen {
    kernels: String,
    scale_up: Option<String>,
    scale_out: Vec<String>,
    topology: String,
    /// Plugin files that were loaded.
    plugins: Vec<PathBuf>,
}

pub(crate) fn main(args: &ConfigArgs) -> Result<ExitCode> {
    let ConfigCommand::Check(args) = &args.command;
    // `run` starts this command as a process, which must not outlive it.
    let is_started_by_run = tokenyard_launch::adopt()?;
    let (config, errors) = Config::judge(&args.config);
    if config.is_none() {
        // A file that cannot be read is an error, not a judgement.
        tokenyard_core::files::open(&args.config).context("read config")?;
    }
    // `run` tries them itself where this process ends early.
    if !is_started_by_run {
        preload::try_plugins(config.as_ref())?;
    }
    let mut judgement =
        config.map(|config| judge(&config, args.ranks)).transpose()?.unwrap_or_default();
    judgement.errors.splice(0..0, errors.iter().map(Error::to_string));
    let ok = judgement.errors.is_empty();
    print(args, &judgement, People::new(args.json));
    if args.json {
        print_document("config check", &CheckDocument { ok, judgement })?;
    }
    Ok(ExitCode::from(u8::from(!ok)))
}

/// Judges the choice of components, and lets each component judge its own table.
fn judge(config: &Config, ranks: Option<u32>) -> Result<Judgement> {
    let mut judgement = Judgement::default();
    let (registry, broken) = components::load(Some(config), |_| ())?;
    let refused = broken.into_iter();
    let refused = refused.map(|file| format!("{}:{}: {}", config.name, file.line, file.error));
    judgement.errors.extend(refused);
    if let Some(Err(error)) = ranks.map(|ranks| config.check_ranks(ranks)) {
        judgement.errors.push(error.to_string());
    }
    let mut ask = |choice: &ComponentChoice, asked: Result<(), Error>| match asked {
        Ok(()) => {}
        // The component's own message names the line of the key.
        Err(error) if error.kind() == ErrorKind::Config => judgement.errors.push(error.to_string()),
        Err(error) => judgement.notes.push(format!("{} cannot run here: {error}", choice.name)),
    };
    let kernels = registry.choose_kernels(&config.kernels);
    ask(&config.kernels, kernels.and_then(|p| p.probe(&config.kernels.table)).map(drop));
    for choice in config.scale_up.iter().chain(&config.scale_out) {
        let component = registry.choose_transport(choice);
        ask(choice, component.and_then(|component| component.probe(&choice.table)).map(drop));
    }
    let first = Discover { rank: 0, ranks: ranks.unwrap_or(1), local_rank: 0 };
    let topology = registry.choose_topology(&config.topology);
    ask(
        &config.topology,
        topology
            .and_then(|component| discover(&component, &config.topology.table, &first))
            .map(drop),
    );
    let known: Vec<&str> = registry.components().iter().map(|component| component.name).collect();
    for table in config.unused_tables.iter().filter(|table| !known.contains(&&*table.component)) {
        judgement.notes.push(format!(
            "{}:{}: [{}.{}] is the table of no component; available: {}",
            config.name,
            table.line,
            table.section,
            table.component,
            known.join(", ")
        ));
    }
    judgement.chosen = Some(Chosen {
        kernels: config.kernels.name.clone(),
        scale_up: config.scale_up.as_ref().map(|choice| choice.name.clone()),
        scale_out: config.scale_out.iter().map(|choice| choice.name.clone()).collect(),
        topology: config.topology.name.clone(),
        plugins: files(&registry),
    });
    Ok(judgement)
}

/// The plugin files of the components, each once.
fn files(registry: &Registry) -> Vec<PathBuf> {
    let mut files: Vec<_> =
        registry.components().into_iter().filter_map(|component| component.file).collect();
    files.sort();
    files.dedup();
    files
}

fn print(args: &CheckArgs, judgement: &Judgement, people: People) {
    for error in &judgement.errors {
        people.error(error);
    }
    for note in &judgement.notes {
        people.prose(format_args!("{} {note}", people.paint(Style::Warn, "note:")));
    }
    let file = args.config.display();
    match (&judgement.chosen, judgement.errors.len()) {
        (Some(chosen), 0) => {
            let Chosen { kernels, scale_up, scale_out, topology, plugins } = chosen;
            let out = if scale_out.is_empty() { "none".into() } else { scale_out.join(", ") };
            people.say(format_args!(
                "{file}: {}: kernels {kernels}, scale-up {}, scale-out {out}, topology {topology}, \
                 {} plugin file{}",
                people.paint(Style::Good, "ok"),
                scale_up.as_deref().unwrap_or("none"),
                plugins.len(),
                plural(plugins.len())
            ));
        }
        (_, errors) => people.say(format_args!("{file}: {errors} error{}", plural(errors))),
    }
}
