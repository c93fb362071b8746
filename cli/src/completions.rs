//! `tokenyard completions`: the completions of a shell.

use std::process::ExitCode;

use anyhow::Result;
use clap_complete::Shell;

use crate::output;

const EXAMPLES: &str = "\
Examples:
  tokenyard completions bash > /etc/bash_completion.d/tokenyard
  tokenyard completions zsh > \"${fpath[1]}/_tokenyard\"
  tokenyard completions fish > ~/.config/fish/completions/tokenyard.fish";

/// Arguments of `tokenyard completions`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

pub(crate) fn main(args: &CompletionsArgs, mut command: clap::Command) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "tokenyard", &mut script);
    output::note(std::io::Write::write_all(&mut std::io::stdout(), &script));
    Ok(ExitCode::SUCCESS)
}
