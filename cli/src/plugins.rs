//! `tokenyard plugins`: the components that a config can name.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use tokenyard_core::capabilities::Declared;
use tokenyard_core::config::Config;
use tokenyard_machine::bytes;

use crate::components::{Component, Components, Missing};
use crate::output::{Cell, People, Style, Table, print_document};
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
pub(crate) struct PluginsArgs {
    /// Also load the plugins that this config names.
    config: Option<PathBuf>,
    /// Print one JSON document as the last line of standard output; the rest goes to standard error.
    #[arg(long)]
    json: bool,
}

pub(crate) fn main(args: &PluginsArgs) -> Result<ExitCode> {
    let config = args.config.as_deref().map(Config::load).transpose()?;
    preload::try_plugins(config.as_ref())?;
    let components = Components::find(config.as_ref())?;
    print(&components, People::new(args.json));
    if args.json {
        print_document("plugins", &components)?;
    }
    Ok(ExitCode::from(u8::from(!components.broken.is_empty() || !components.missing.is_empty())))
}

fn print(components: &Components, people: People) {
    let mut table = Table::folded(&["kind", "name", "works", "from", "version", "about"]);
    for component in &components.components {
        let works = match component.why_not {
            None => Cell::styled(Style::Good, "yes"),
            Some(_) => Cell::styled(Style::Warn, "no"),
        };
        let from = component.file.as_ref().map_or("built in".into(), |f| f.display().to_string());
        // A version looks like a number, but is text.
        let version = format!("v{}", component.version);
        let cells =
            [component.kind.into(), component.name.into(), works, from.into(), version.into()];
        table.row(cells.into_iter().chain([component.about.into()]));
    }
    people.say(table.render(people));
    for component in &components.components {
        if let Some(capabilities) = &component.capabilities {
            print_capabilities(component, capabilities, people);
        }
    }
    for component in &components.components {
        if let Some(why_not) = &component.why_not {
            let no = people.paint(Style::Warn, "cannot run here:");
            people.prose(format_args!("\n{} {} {no} {why_not}", component.kind, component.name));
        }
    }
    for file in &components.broken {
        let path = file.path.display();
        let bad = people.paint(Style::Bad, "not loaded:");
        people.prose(format_args!("\n{path} {bad} {}", file.error));
    }
    for missing in &components.missing {
        let bad = people.paint(Style::Bad, "not found:");
        let Missing { kind, name, found, fix } = missing;
        people.prose(format_args!("\n{kind} {name} {bad} {found}. Fix: {fix}"));
    }
}

fn print_capabilities(component: &Component, declared: &Declared, people: People) {
    let names = |names: &[&str]| {
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    };
    people.say(format_args!(
        "\ntransport {}\n  yes: {}\n  no: {}\n  memory: {}\n  at most {} ranks, {} queues, {} signals,\n    \
         {} commands of a queue, {} windows, {} a put",
        component.name,
        names(&declared.flags),
        names(&declared.missing()),
        declared.memory.join(", "),
        declared.max_peers,
        declared.max_queues,
        declared.max_signals,
        declared.max_queue_depth,
        declared.max_windows,
        bytes(declared.largest_put)
    ));
}
