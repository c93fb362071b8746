//! Writes the C header of the plugin ABI, or with `--check` says whether the checked-in one is up to date.
//! `cargo xtask header` runs it. It is a program of its own, so that other tasks build without a parser of Rust.
//!
//! Watched by the tests in these files; the steps `header` and `c-plugin` of `cargo xtask test` compile its output.

mod header;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = folder
        .ancestors()
        .nth(2)
        .context("find the repository: this package has no grandparent")?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => header::write(root),
        ["--check"] => header::check(root),
        found => bail!("found arguments `{}`, expected none, or --check", found.join(" ")),
    }
}
