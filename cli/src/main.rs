//! The `tokenyard` command.

mod bench;
mod conformance;
mod doctor;
mod explain;
mod memory;
mod output;
mod parts;
mod plugins;
mod run;
mod shape;
mod signals;
mod warm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use output::{People, SCHEMA_VERSION, error_text};

/// Moves the tokens of Mixture-of-Experts models between ranks, on any fabric.
#[derive(Debug, Parser)]
#[command(name = "tokenyard", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Dispatches, runs experts and combines, every element checked.
    Run(run::Args),
    /// Measures an exchange against a ceiling of the same run.
    Bench(Box<bench::Args>),
    /// Shows what a config's parts do and do not do right.
    Conformance(conformance::Args),
    /// Lists the parts that a config can name.
    Plugins(plugins::Args),
    /// Says what each part needs on this node, has and lacks.
    Doctor(doctor::Args),
    /// Says who waits for whom in a job, and who is the culprit, from its ranks' reports.
    Explain(explain::Args),
    /// Prints the memory that a shape costs, per buffer.
    Shape(shape::Args),
    /// Compiles a config's kernels before the first yard needs them.
    Warm(warm::Args),
}

fn main() -> ExitCode {
    // SAFETY: nothing has run yet that could have started a thread.
    unsafe { tokenyard_core::bootstrap::take_secret_from_environment() };
    tokenyard_cpu::link();
    tokenyard_cuda::link();
    tokenyard_faulty::link();
    output::init_log();
    let command = Cli::parse().command;
    let result = signals::answer().and_then(|()| match command {
        Command::Run(args) => run::main(&args),
        Command::Bench(args) => bench::main(&args),
        Command::Conformance(args) => conformance::main(&args),
        Command::Plugins(args) => plugins::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        Command::Explain(args) => explain::main(&args),
        Command::Shape(args) => shape::main(&args),
        Command::Warm(args) => warm::main(&args),
    });
    result.unwrap_or_else(|error| {
        let error = error_text(&error);
        People::errors().say(format_args!("tokenyard: {error}"));
        // A program that asked for a document gets one, whatever happened.
        if std::env::args_os().any(|word| word == "--json") {
            let document = serde_json::json!({ "schema_version": SCHEMA_VERSION, "error": error });
            let _ = output::print_json(&document);
        }
        ExitCode::from(2)
    })
}
