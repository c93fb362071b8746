//! `tokenyard bench plot`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;
use tokenyard_bench::gpu;

use crate::output::{People, print_document};
use crate::writable::Files;

const PLOT_EXAMPLE: &str = "\
Example:
  tokenyard bench plot dispatch.json combine.json --out both.svg
  tokenyard bench plot dispatch.json --peer 'dispatch fp8 flat:DeepEP V2=143' --out peers.svg";

/// Arguments of `tokenyard bench plot`.
#[derive(Debug, clap::Args)]
#[command(after_help = PLOT_EXAMPLE)]
pub(super) struct PlotArgs {
    /// Reports that `--out` has written
    #[arg(required = true, value_name = "REPORT.json")]
    reports: Vec<PathBuf>,
    /// The picture
    #[arg(long, value_name = "FILE.svg")]
    out: PathBuf,
    /// A line for another library's time of an operation; it may be given several times
    #[arg(long = "peer", value_name = "OPERATION:NAME=MICROSECONDS")]
    peers: Vec<gpu::plot::Peer>,
    /// Print one JSON document as the last line of standard output; the rest goes to standard error
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Plotted<'a> {
    reports: &'a [PathBuf],
    picture: &'a Path,
}

pub(super) fn plot(args: &PlotArgs) -> Result<ExitCode> {
    let files =
        args.reports.iter().fold(Files::default(), |files, file| files.reads("a report", file));
    let mut files = files;
    files.writes("--out", &args.out)?;
    let reports =
        args.reports.iter().map(|file| gpu::GpuReport::read(file)).collect::<Result<Vec<_>>>()?;
    gpu::plot::draw(&reports, &args.peers, &args.out)?;
    People::new(args.json).say(format_args!("drawn: {}", args.out.display()));
    if args.json {
        let document = Plotted { reports: &args.reports, picture: &args.out };
        print_document("bench plot", &document)?;
    }
    Ok(ExitCode::SUCCESS)
}
