//! Figures of operations as CSV, for spreadsheets and scripts.

use std::io::Write;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::report::BenchReport;

/// One line: an operation on CPUs or GPUs. Times are in microseconds, of the slowest rank.
#[derive(Serialize)]
struct Line<'a> {
    operation: &'a str,
    variant: String,
    ranks: u32,
    tokens: u32,
    hidden: u32,
    topk: u32,
    experts: u32,
    /// Multiprocessors; empty on CPUs.
    sms: Option<u32>,
    samples: usize,
    min_us: f64,
    median_us: f64,
    p99_us: f64,
    /// Bytes of rows per rank on CPUs, bytes through the busiest port on GPUs, in the median.
    gb_per_s: f64,
    /// The fraction of the ceiling that the same run measured.
    ratio: f64,
}

/// Three decimals: a nanosecond, a megabyte per second.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

impl BenchReport {
    /// Writes a header and one line per exchange (CPUs) and operation (GPUs) to `out`:
    /// comma-separated, by RFC 4180. Other scenarios have no lines.
    ///
    /// # Errors
    /// Writing to `out` failed.
    pub fn write_csv(&self, out: impl Write) -> Result<()> {
        let mut csv = csv::Writer::from_writer(out);
        for row in &self.exchange {
            csv.serialize(Line {
                operation: row.phase,
                variant: row.variant.to_owned(),
                ranks: row.ranks,
                tokens: row.sizes.tokens,
                hidden: row.sizes.hidden,
                topk: row.sizes.topk,
                experts: row.sizes.experts,
                sms: None,
                samples: row.figures.samples,
                min_us: rounded(row.figures.min_ms * 1e3),
                median_us: rounded(row.figures.ms * 1e3),
                p99_us: rounded(row.figures.p99_ms * 1e3),
                gb_per_s: rounded(row.figures.gb_per_s),
                ratio: rounded(row.figures.ratio),
            })?;
        }
        for (gpu, sizes) in self.gpu.iter().filter_map(|gpu| Some((gpu, gpu.sizes?))) {
            for row in &gpu.rows {
                let phase = row.case.phase.to_string();
                // A line may be read without its report.
                let over = if gpu.stand_ins.is_empty() { "" } else { ", over stand-ins" };
                let is_void = row.levels.as_ref().is_some_and(|levels| levels.is_void);
                let void = if is_void { ", void" } else { "" };
                csv.serialize(Line {
                    operation: &phase,
                    variant: format!("{}, {} routing{over}{void}", row.case, row.routing),
                    ranks: gpu.ranks,
                    tokens: row.case.tokens,
                    hidden: sizes.hidden,
                    topk: sizes.topk,
                    experts: sizes.experts,
                    sms: Some(row.sms),
                    samples: row.samples,
                    min_us: rounded(row.min_us),
                    median_us: rounded(row.us),
                    p99_us: rounded(row.p99_us),
                    gb_per_s: rounded(row.link_gb_s),
                    ratio: rounded(row.ratio),
                })?;
            }
        }
        csv.flush().context("write CSV")
    }
}
