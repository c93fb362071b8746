//! `tokenyard doctor`.

use std::process::ExitCode;

use anyhow::Result;

/// Arguments of `tokenyard doctor`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) fn main(_args: &Args) -> Result<ExitCode> {
    Ok(ExitCode::SUCCESS)
}
