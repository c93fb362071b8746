//! `tokenyard doctor`: what each part needs on this node, has and lacks, and what to do.
//!
//! `facts` looks at the node and tries what can be tried; `rules` judges, as pure functions.

mod facts;
mod rules;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;
use tokenyard_core::conditions::Conditions;
use tokenyard_core::config::Config;
use tokenyard_core::moe::Shape;
use tokenyard_cpu::kernels::CpuConfig;

use crate::output::{Cell, People, SCHEMA_VERSION, Style, Table, print_json};
use crate::parts::{Part, Parts};
use facts::Facts;
use rules::{Finding, Verdict, Wanted};

const EXAMPLES: &str = "\
Examples:
  tokenyard doctor
  tokenyard doctor configs/cpu.toml --ranks 8
  tokenyard doctor configs/cpu.toml --json

Exit codes: 0 all is well, 1 something will be slow or may fail, 2 something cannot work.";

/// Arguments of `tokenyard doctor`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Judge this config; without one, the parts of this program.
    config: Option<PathBuf>,
    /// Ranks that this node is to run.
    #[arg(long, default_value_t = 4)]
    ranks: u32,
    /// Experts on all ranks together.
    #[arg(long, default_value_t = 32)]
    experts: u32,
    /// Experts that each token selects.
    #[arg(long, default_value_t = 4)]
    topk: u32,
    /// Elements of a token's row.
    #[arg(long, default_value_t = 1024)]
    hidden: u32,
    /// The most tokens that a rank brings.
    #[arg(long, default_value_t = 256)]
    max_tokens: u32,
    /// Print one JSON document as the last line of standard output; the rest goes to standard error.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Document<'a> {
    schema_version: u32,
    command: &'static str,
    verdict: Verdict,
    findings: &'a [Finding],
    facts: &'a Facts,
    conditions: Conditions,
}

pub(crate) fn main(args: &Args) -> Result<ExitCode> {
    let config = args.config.as_deref().map(Config::load).transpose()?;
    let shape = Shape {
        ranks: args.ranks,
        experts: args.experts,
        topk: args.topk,
        hidden: args.hidden,
        max_tokens: args.max_tokens,
    }
    .new()?;
    let parts = Parts::find(config.as_ref())?;
    let facts = Facts::gather(config.as_ref());
    let mut findings = rules::parts(&parts, config.as_ref());
    findings.extend(rules::node(&facts, &wanted(&shape, &parts, config.as_ref())?));
    let verdict = findings.iter().map(|f| f.verdict).max().unwrap_or(Verdict::Ok);
    print(&findings, verdict, People::new(args.json));
    if args.json {
        print_json(&Document {
            schema_version: SCHEMA_VERSION,
            command: "doctor",
            verdict,
            findings: &findings,
            facts: &facts,
            conditions: Conditions::find(),
        })?;
    }
    Ok(ExitCode::from(verdict as u8))
}

/// What the shape and the config ask of this node.
fn wanted(shape: &Shape, parts: &Parts, config: Option<&Config>) -> Result<Wanted> {
    let table = config.map(|c| &c.kernels).filter(|k| k.name == "cpu").map(|k| &k.table);
    // A table that is wrong is a finding of its own: the part's probe names it.
    let kernels = table.map_or_else(|| Ok(CpuConfig::default()), |t| t.parse("cpu"));
    let kernels = kernels.unwrap_or_default();
    let from_plugin = |p: &Part| p.chosen && p.kind == "transport" && p.file.is_some();
    // A split that the ranks do not allow is found when they open the yard.
    let domains = config.and_then(|c| c.domains).filter(|d| shape.ranks.is_multiple_of(*d));
    let from_plugin = parts.parts.iter().any(from_plugin);
    Wanted::new(shape, domains.unwrap_or(1), &kernels, from_plugin)
}

fn print(findings: &[Finding], verdict: Verdict, people: People) {
    let mut table = Table::new(&["verdict", "what", "found", "wanted"]);
    for finding in findings {
        let verdict = Cell::styled(style(finding.verdict), finding.verdict.name());
        let texts = [&finding.what, &finding.found, &finding.wanted].map(|t| t.as_str().into());
        table.row(std::iter::once(verdict).chain(texts));
    }
    people.say(table.render(people));
    for finding in findings {
        if let Some(fix) = &finding.fix {
            let what = people.paint(style(finding.verdict), &finding.what);
            people.say(format_args!("\n{what}: {fix}"));
        }
    }
    let words = match verdict {
        Verdict::Ok => "all is well",
        Verdict::Warn => "it works, but look at the warnings",
        Verdict::Broken => "it cannot work like this",
    };
    people.say(format_args!("\n{}", people.paint(style(verdict), words)));
}

fn style(verdict: Verdict) -> Style {
    match verdict {
        Verdict::Ok => Style::Good,
        Verdict::Warn => Style::Warn,
        Verdict::Broken => Style::Bad,
    }
}
