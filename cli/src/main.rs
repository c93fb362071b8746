//! The `tokenyard` command.
//!
//! A command is a file or a folder of its name. It parses, calls a library and prints; rules belong to the libraries.
//! Watched by the tests in these files, and `cli/tests`, which run the binary.

#[cfg(feature = "full")]
mod bench;
#[cfg(feature = "full")]
mod completions;
mod components;
mod config;
mod conformance;
#[cfg(feature = "full")]
mod doctor;
mod explain;
mod launched;
mod layout;
mod memory;
mod output;
mod plugins;
mod preload;
mod progress;
mod run;
#[cfg(feature = "full")]
mod shape;
mod signals;
mod version;
#[cfg(feature = "full")]
mod warm;
mod warnings;
mod welcome;
mod writable;

use std::process::ExitCode;

use anyhow::Result;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use tokenyard_launch::interrupt::Interrupted;

use output::{People, SCHEMA_VERSION, error_text};

/// Moves the tokens of Mixture-of-Experts models between ranks, on any fabric.
#[derive(Debug, Parser)]
#[command(name = "tokenyard", subcommand_required = false, max_term_width = 80)]
struct Cli {
    /// Print the version.
    #[arg(short = 'V', long)]
    version: bool,
    /// With --version: print the build of the program, and drivers and libraries of this node.
    #[arg(short, long, requires = "version")]
    verbose: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Dispatches, runs experts and combines, every element checked.
    Run(run::RunArgs),
    /// Measures an exchange against a ceiling of the same run.
    #[cfg(feature = "full")]
    Bench(Box<bench::BenchArgs>),
    /// Tests whether a config's components do what the rules require.
    Conformance(conformance::ConformanceArgs),
    /// Judges a config without starting anything.
    Config(config::ConfigArgs),
    /// Lists the components that a config can name.
    Plugins(plugins::PluginsArgs),
    /// Shows for each component what it needs on this node, has and lacks.
    #[cfg(feature = "full")]
    Doctor(doctor::DoctorArgs),
    /// Finds the cause of a job's failure, and which rank waits for which, from the reports of its
    /// ranks.
    Explain(explain::ExplainArgs),
    /// Prints the memory that a shape costs, per buffer.
    #[cfg(feature = "full")]
    Shape(shape::ShapeArgs),
    /// Compiles a config's kernels before the first communicator needs them.
    #[cfg(feature = "full")]
    Warm(warm::WarmArgs),
    /// Prints the build of the program, and versions of drivers and libraries of this node.
    Version(version::VersionArgs),
    /// Writes the completions of a shell.
    #[cfg(feature = "full")]
    Completions(completions::CompletionsArgs),
    /// Loads a config's plugins, to test whether loading succeeds.
    #[command(hide = true)]
    LoadPlugins(preload::PreloadArgs),
}

impl Command {
    /// Whether this process is to start ranks.
    fn starts_ranks(&self) -> bool {
        match self {
            Self::Run(args) => args.starts_ranks(),
            #[cfg(feature = "full")]
            Self::Bench(args) => args.starts_ranks(),
            Self::Conformance(args) => args.starts_ranks(),
            _ => false,
        }
    }

    fn run(self) -> Result<ExitCode> {
        match self {
            Self::Run(args) => run::main(&args),
            #[cfg(feature = "full")]
            Self::Bench(args) => bench::main(&args),
            Self::Conformance(args) => conformance::main(&args),
            Self::Config(args) => config::main(&args),
            Self::Plugins(args) => plugins::main(&args),
            #[cfg(feature = "full")]
            Self::Doctor(args) => doctor::main(&args),
            Self::Explain(args) => explain::main(&args),
            #[cfg(feature = "full")]
            Self::Shape(args) => shape::main(&args),
            #[cfg(feature = "full")]
            Self::Warm(args) => warm::main(&args),
            Self::Version(args) => version::main(&args),
            #[cfg(feature = "full")]
            Self::Completions(args) => completions::main(&args, command_line()),
            Self::LoadPlugins(args) => preload::main(&args),
        }
    }
}

fn main() -> ExitCode {
    // SAFETY: no code has run yet that could have started a thread.
    unsafe { tokenyard_core::bootstrap::take_secret_from_environment() };
    tokenyard_cpu::link();
    tokenyard_topology::link();
    #[cfg(feature = "full")]
    tokenyard_cuda::link();
    #[cfg(feature = "full")]
    tokenyard_rocm::link();
    output::init_log();
    let code = match parse() {
        Ok(Cli { command: Some(command), version: false, .. }) => {
            let done = signals::answer(command.starts_ranks()).and_then(|()| command.run());
            done.unwrap_or_else(|error| refuse(&error))
        }
        Ok(Cli { version: true, verbose, .. }) => {
            version::flag(verbose);
            ExitCode::SUCCESS
        }
        Ok(_) => {
            welcome::print();
            ExitCode::SUCCESS
        }
        // Clap reports help and version as errors too.
        Err(error) => {
            output::note(error.print());
            if let Some(fix) = left_out(&error).or_else(|| shape_of_config(&error)) {
                People::errors().prose(fix);
            }
            ExitCode::from(error.exit_code() as u8)
        }
    };
    output::exit_code(code)
}

/// Commands that a build without the feature `full` leaves out.
const OF_FULL: [&str; 5] = ["bench", "completions", "doctor", "shape", "warm"];

/// The fix, where the command that was asked for is one that this build leaves out.
fn left_out(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(found)) = error.get(ContextKind::InvalidSubcommand) else {
        return None;
    };
    let is_left_out = cfg!(not(feature = "full")) && OF_FULL.contains(&&**found);
    is_left_out.then(|| {
        format!(
            "\nThis program was built without the feature `full`, which has {} and the kernel sets for GPUs.\n\
             Fix: cargo xtask install PREFIX builds all of it; or cargo run --release --features full -- {found}",
            OF_FULL.join(", ")
        )
    })
}

/// The fix, where `shape` got a config, as the other commands take one.
fn shape_of_config(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(found)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let is_shape = std::env::args_os().nth(1).is_some_and(|word| word == "shape");
    (is_shape && error.kind() == ErrorKind::UnknownArgument && !found.starts_with('-')).then(|| {
        format!(
            "\n`shape` reads no config, and computes from options alone. --kernels names the kernel set: that of \
             `use` in [kernels] of {found}.\n\
             Fix: tokenyard shape --kernels cuda --ranks 8 --experts 256 --topk 8 --hidden 7168 --max-tokens 4096"
        )
    })
}

fn parse() -> Result<Cli, clap::Error> {
    Cli::from_arg_matches(&command_line().try_get_matches()?)
}

/// All commands and their arguments.
fn command_line() -> clap::Command {
    with_negative_numbers(Cli::command())
}

/// `--steps -5` is a number out of range, and no unknown argument.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| match arg.get_action().takes_values() {
        // A list may begin with a negative number, but is not a number.
        true if arg.get_value_delimiter().is_some() => arg.allow_hyphen_values(true),
        true if !arg.is_positional() => arg.allow_negative_numbers(true),
        _ => arg,
    });
    command.mut_subcommands(with_negative_numbers)
}

/// Prints the reason of a command's failure.
fn refuse(error: &anyhow::Error) -> ExitCode {
    let text = error_text(error);
    match error.downcast_ref::<run::WrongConfig>() {
        Some(wrong) => wrong.0.iter().for_each(|error| People::errors().error(error)),
        None => People::errors().error(&text),
    }
    // A program that asked for a document gets one in every case.
    if std::env::args_os().any(|word| word == "--json") {
        let document = serde_json::json!({ "schema_version": SCHEMA_VERSION, "error": text });
        let _ = output::print_json(&document);
    }
    match error.downcast_ref::<Interrupted>() {
        Some(interrupted) => ExitCode::from(interrupted.exit_code()),
        None => ExitCode::from(2),
    }
}
