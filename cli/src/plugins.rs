//! `tokenyard plugins`: the parts that a config can name.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;
use tokenyard_core::capabilities::Declared;
use tokenyard_core::config::Config;
use tokenyard_doctor::bytes;

use crate::output::{Cell, People, SCHEMA_VERSION, Style, Table, print_json};
use crate::parts::{Missing, Part, Parts};
use crate::preload;

const EXAMPLES: &str = "\
Examples:
  tokenyard plugins
  tokenyard plugins configs/cpu.toml --json

Exit codes: 0 all plugins could be loaded, 1 a plugin failed the handshake or is not there, 2 the
config is wrong.";

/// Arguments of `tokenyard plugins`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Also load the plugins that this config names.
    config: Option<PathBuf>,
    /// Print one JSON document as the last line of standard output; the rest goes to standard error.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Document<'a> {
    schema_version: u32,
    command: &'static str,
    #[serde(flatten)]
    parts: &'a Parts,
}

pub(crate) fn main(args: &Args) -> Result<ExitCode> {
    let config = args.config.as_deref().map(Config::load).transpose()?;
    preload::try_plugins(config.as_ref())?;
    let parts = Parts::find(config.as_ref())?;
    print(&parts, People::new(args.json));
    if args.json {
        print_json(&Document {
            schema_version: SCHEMA_VERSION,
            command: "plugins",
            parts: &parts,
        })?;
    }
    Ok(ExitCode::from(u8::from(!parts.broken.is_empty() || !parts.missing.is_empty())))
}

fn print(parts: &Parts, people: People) {
    let mut table = Table::folded(&["kind", "name", "works", "from", "version", "about"]);
    for part in &parts.parts {
        let works = match part.why_not {
            None => Cell::styled(Style::Good, "yes"),
            Some(_) => Cell::styled(Style::Warn, "no"),
        };
        let from = part.file.as_ref().map_or("built in".into(), |f| f.display().to_string());
        // Versions look like numbers and are not.
        let version = format!("v{}", part.version);
        let cells = [part.kind.into(), part.name.into(), works, from.into(), version.into()];
        table.row(cells.into_iter().chain([part.about.into()]));
    }
    people.say(table.render(people));
    for part in &parts.parts {
        if let Some(capabilities) = &part.capabilities {
            print_capabilities(part, capabilities, people);
        }
    }
    for part in &parts.parts {
        if let Some(why_not) = &part.why_not {
            let no = people.paint(Style::Warn, "cannot run here:");
            people.say(format_args!("\n{} {} {no} {why_not}", part.kind, part.name));
        }
    }
    for file in &parts.broken {
        let path = file.path.display();
        let bad = people.paint(Style::Bad, "not loaded:");
        people.say(format_args!("\n{path} {bad} {}", file.error));
    }
    for missing in &parts.missing {
        let bad = people.paint(Style::Bad, "not found:");
        let Missing { kind, name, found, fix } = missing;
        people.say(format_args!("\n{kind} {name} {bad} {found}. Fix: {fix}"));
    }
}

fn print_capabilities(part: &Part, declared: &Declared, people: People) {
    let names = |names: &[&str]| {
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    };
    people.say(format_args!(
        "\ntransport {}\n  yes: {}\n  no: {}\n  memory: {}\n  at most {} ranks, {} lanes, {} signals,\n    \
         {} commands of a lane, {} windows, {} a put",
        part.name,
        names(&declared.flags),
        names(&declared.missing()),
        declared.memory.join(", "),
        declared.max_peers,
        declared.max_lanes,
        declared.max_signals,
        declared.max_queue_depth,
        declared.max_windows,
        bytes(declared.largest_put)
    ));
}
