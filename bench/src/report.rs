//! All figures of one run.

use std::fmt;

use serde::Serialize;

use crate::job::Sizes;
use crate::table::table;
use crate::{exchange, gpu, link, ops, proxy, scaling, steady};
use tokenyard_core::conditions::Conditions;
use tokenyard_core::config::Config;

/// Version of the JSON format; it grows with every incompatible change.
pub const SCHEMA_VERSION: u32 = 3;

/// The sizes to which requirements apply, and the defaults (E is free).
pub const NAMED_SIZES: Sizes = Sizes { tokens: 1024, hidden: 4096, topk: 4, experts: 32 };

/// The figures, for people (`Display`) and for programs (JSON).
#[derive(Clone, Debug, Default, Serialize)]
pub struct BenchReport {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The conditions: this machine and build.
    pub conditions: Conditions,
    /// The config file.
    pub config: String,
    /// Dispatch and combine against a plain copy.
    pub exchange: Vec<exchange::ExchangeRow>,
    /// Allocations and memory.
    pub steady: Vec<steady::SteadyRow>,
    /// Commands and bytes.
    pub scaling: Vec<scaling::ScalingRow>,
    /// One link, bare and with tokenyard on top.
    pub link: Vec<link::LinkRow>,
    /// Commands through proxy threads.
    pub proxy: Vec<proxy::ProxyRow>,
    /// Operations beside MoE.
    pub operations: Option<ops::OperationsReport>,
    /// Dispatch, combine and the link on GPUs.
    pub gpu: Option<gpu::GpuReport>,
    /// Commands of kernels through the ring of the host.
    pub ring: Option<gpu::ring::RingReport>,
    /// A transport whose kernels put, alone.
    pub nic: Option<gpu::nic::NicReport>,
}

impl BenchReport {
    /// A report of this machine, now, with no figures yet.
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            conditions: Conditions::find(),
            config: config.name.clone(),
            ..Self::default()
        }
    }

    /// Every required figure that was missed, in words.
    pub fn missed(&self) -> Vec<String> {
        let mut missed = Vec::new();
        for row in &self.exchange {
            if let Some(required) = row.required.filter(|required| row.figures.ratio < *required) {
                missed.push(format!(
                    "{} of {} rows, {} ranks: found {:.2} of the plain copy; required {required}",
                    row.phase, row.variant, row.ranks, row.figures.ratio
                ));
            }
        }
        for row in &self.steady {
            if row.allocations > 0 {
                missed.push(format!(
                    "steady, {} ranks: found {} allocations in {} steps; required 0",
                    row.ranks, row.allocations, row.counted_steps
                ));
            }
            let growth = row.heap_growth.max(row.resident_growth);
            if growth > steady::SLACK_BYTES {
                missed.push(format!(
                    "steady, {} ranks: memory grew by {growth} bytes in {} steps; required none \
                     (slack {})",
                    row.ranks,
                    row.grown_steps,
                    steady::SLACK_BYTES
                ));
            }
        }
        for row in self.scaling.iter().filter(|row| !row.as_predicted) {
            missed.push(format!(
                "scaling, {} ranks, T = {}: found {} commands and {} bytes; the formulas give other numbers",
                row.ranks, row.tokens, row.commands, row.bytes
            ));
        }
        for row in self.link.iter().filter(|row| !row.holds()) {
            missed.push(format!(
                "{} of {}: found {:.2} of the bare link; required {}",
                row.what,
                row.link,
                row.ratio,
                row.requirement()
            ));
        }
        for row in &self.proxy {
            if let Some(required) = row.required.filter(|rate| row.commands_per_s < *rate) {
                missed.push(format!(
                    "proxy, {} threads: found {:.2} million commands per second and thread; \
                     required {:.0}",
                    row.threads,
                    row.commands_per_s / 1e6,
                    required / 1e6
                ));
            }
            if row.allocations > 0 {
                missed.push(format!(
                    "proxy, {} threads: found {} allocations in {} batches; required 0",
                    row.threads, row.allocations, row.counted_batches
                ));
            }
        }
        missed.extend(self.operations.iter().flat_map(ops::OperationsReport::missed));
        missed.extend(self.gpu.iter().flat_map(gpu::GpuReport::missed));
        missed.extend(self.ring.iter().flat_map(gpu::ring::RingReport::missed));
        missed.extend(self.nic.iter().flat_map(gpu::nic::NicReport::missed));
        missed
    }

    /// A table for each number of ranks and tokens.
    fn exchange_tables(&self) -> String {
        let of = |row: &exchange::ExchangeRow| (row.ranks, row.sizes.tokens);
        let mut text = String::new();
        for rows in self.exchange.chunk_by(|a, b| of(a) == of(b)) {
            let mut lines = vec![heading("exchange phase plain min median p99 GB/s ratio need")];
            for row in rows {
                let figures = &row.figures;
                lines.push(vec![
                    row.variant.to_owned(),
                    row.phase.to_owned(),
                    short(figures.ceiling_ms * 1e3),
                    short(figures.min_ms * 1e3),
                    short(figures.ms * 1e3),
                    short(figures.p99_ms * 1e3),
                    short(figures.gb_per_s),
                    format!("{:.2}", figures.ratio),
                    row.required.map_or_else(|| "-".to_owned(), |ratio| ratio.to_string()),
                ]);
            }
            let (ranks, tokens) = of(&rows[0]);
            text += &format!("{ranks} ranks, T = {tokens}; times in us\n");
            text += &table(2, &lines);
            text.push('\n');
        }
        text + "plain: median of a plain copy of the same bytes. GB/s: per rank, by the median.\n\
                ratio: plain / exchange. need: the ratio that is required\n"
    }

    fn steady_table(&self) -> String {
        let mut lines = vec![heading(
            "steady ranks counted_steps allocations of_heartbeats grown_steps heap_growth \
             rss_growth us/step",
        )];
        for row in &self.steady {
            lines.push(vec![
                "flat bf16".to_owned(),
                row.ranks.to_string(),
                row.counted_steps.to_string(),
                row.allocations.to_string(),
                row.control_allocations.to_string(),
                row.grown_steps.to_string(),
                row.heap_growth.to_string(),
                row.resident_growth.to_string(),
                format!("{:.1}", row.step_us),
            ]);
        }
        table(1, &lines)
    }

    fn scaling_table(&self) -> String {
        let mut lines =
            vec![heading("scaling ranks T pairs commands bytes bytes/pair as_predicted us/step")];
        for row in &self.scaling {
            let path = match row.path {
                scaling::Path::Put => "put",
                scaling::Path::LoadStore => "load/store",
            };
            lines.push(vec![
                path.to_owned(),
                row.ranks.to_string(),
                row.tokens.to_string(),
                row.pairs.to_string(),
                row.commands.to_string(),
                row.bytes.to_string(),
                format!("{:.1}", row.bytes as f64 / row.pairs.max(1) as f64),
                if row.as_predicted { "yes" } else { "NO" }.to_owned(),
                format!("{:.0}", row.step_us),
            ]);
        }
        table(1, &lines)
    }

    fn link_table(&self) -> String {
        let mut lines = vec![heading("link unit bare ours ratio required")];
        for row in &self.link {
            lines.push(vec![
                row.what.to_owned(),
                row.unit.to_owned(),
                format!("{:.2}", row.bare),
                format!("{:.2}", row.ours),
                format!("{:.2}", row.ratio),
                row.requirement(),
            ]);
        }
        let links = self.link.first().map_or(String::new(), |row| {
            format!("bare link: {}\nours: {}\n", row.bare_link, row.link)
        });
        links + &table(2, &lines)
    }

    fn proxy_table(&self) -> String {
        let mut lines = vec![heading(
            "proxy threads batch M_commands/s/thread round_trip_us counted_batches allocations \
             required",
        )];
        for row in &self.proxy {
            lines.push(vec![
                "null engine".to_owned(),
                row.threads.to_string(),
                row.batch.to_string(),
                format!("{:.2}", row.commands_per_s / 1e6),
                format!("{:.2}", row.round_trip_us),
                row.counted_batches.to_string(),
                row.allocations.to_string(),
                row.required.map_or_else(|| "-".to_owned(), |rate| format!(">= {:.0}", rate / 1e6)),
            ]);
        }
        table(1, &lines)
    }
}

/// Two decimals of small values, none of large ones.
pub(crate) fn short(value: f64) -> String {
    let decimals = if value < 100.0 { 2 } else { 0 };
    format!("{value:.decimals$}")
}

pub(crate) fn heading(words: &str) -> Vec<String> {
    words.split_whitespace().map(|word| word.replace('_', " ")).collect()
}

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.conditions.line())?;
        writeln!(f, "config {}", self.config)?;
        let tables = [
            (self.exchange.is_empty(), self.exchange_tables()),
            (self.steady.is_empty(), self.steady_table()),
            (self.scaling.is_empty(), self.scaling_table()),
            (self.link.is_empty(), self.link_table()),
            (self.proxy.is_empty(), self.proxy_table()),
        ];
        for (_, table) in tables.iter().filter(|(empty, _)| !empty) {
            write!(f, "\n{table}")?;
        }
        self.operations.as_ref().map_or(Ok(()), |operations| write!(f, "\n{operations}"))?;
        self.ring.as_ref().map_or(Ok(()), |ring| write!(f, "\n{ring}"))?;
        self.nic.as_ref().map_or(Ok(()), |nic| write!(f, "\n{nic}"))?;
        self.gpu.as_ref().map_or(Ok(()), |gpu| write!(f, "\n{}", gpu::tables(gpu)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairs::PairFigures;

    fn report() -> BenchReport {
        BenchReport {
            schema_version: SCHEMA_VERSION,
            conditions: Conditions::default(),
            config: "a.toml".to_owned(),
            exchange: vec![exchange::ExchangeRow {
                ranks: 2,
                sizes: NAMED_SIZES,
                variant: "flat bf16",
                phase: "dispatch",
                bytes: 16_000_000,
                figures: PairFigures {
                    ceiling_ms: 2.0,
                    ms: 4.0,
                    min_ms: 3.5,
                    p99_ms: 6.0,
                    gb_per_s: 4.0,
                    ratio: 0.5,
                    fastest_ratio: 0.55,
                    samples: 30,
                },
                required: Some(0.6),
            }],
            steady: vec![steady::SteadyRow {
                ranks: 2,
                counted_steps: 1000,
                allocations: 0,
                control_allocations: 9,
                grown_steps: 10_000,
                heap_growth: 100,
                resident_growth: 0,
                step_us: 7.0,
            }],
            scaling: Vec::new(),
            link: Vec::new(),
            proxy: Vec::new(),
            gpu: None,
            operations: None,
            ring: None,
            nic: None,
        }
    }

    #[test]
    fn a_missed_ratio_is_named_with_what_was_required() {
        let mut report = report();
        let missed = report.missed();
        assert_eq!(missed.len(), 1, "{missed:?}");
        assert!(missed[0].contains("2 ranks: found 0.50 of the plain copy; required 0.6"));
        report.exchange[0].figures.ratio = 0.6;
        assert!(report.missed().is_empty());
    }

    #[test]
    fn allocations_and_growth_are_misses() {
        let mut report = report();
        report.exchange.clear();
        report.steady[0].allocations = 1;
        report.steady[0].resident_growth = steady::SLACK_BYTES + 1;
        assert_eq!(report.missed().len(), 2);
    }

    #[test]
    fn a_slow_proxy_and_one_that_allocates_are_misses() {
        let mut report = report();
        report.exchange.clear();
        report.proxy.push(proxy::ProxyRow {
            threads: 2,
            batch: 16,
            commands_per_s: 0.9e6,
            required: Some(proxy::REQUIRED_RATE),
            round_trip_us: 1.0,
            counted_batches: 1_000,
            allocations: 3,
        });
        let missed = report.missed();
        assert!(missed[0].contains("2 threads: found 0.90 million"), "{missed:?}");
        assert!(missed[1].contains("found 3 allocations in 1000 batches"), "{missed:?}");
        assert_eq!(missed.len(), 2);
        report.proxy[0].required = None;
        assert_eq!(report.missed().len(), 1);
    }

    #[test]
    fn each_number_of_tokens_has_a_table_within_80_columns() {
        let mut report = report();
        let mut large = report.exchange[0].clone();
        large.sizes.tokens = 8192;
        large.variant = "expert-major bf16";
        let figures = &mut large.figures;
        (figures.ceiling_ms, figures.min_ms) = (234.5, 200.25);
        (figures.ms, figures.p99_ms, figures.gb_per_s) = (345.6, 456.7, 10.0);
        report.exchange.push(large);
        let text = report.exchange_tables();
        assert_eq!(text.matches("; times in us").count(), 2, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    #[test]
    fn csv_has_a_header_and_a_line_per_exchange_in_microseconds() {
        let mut out = Vec::new();
        report().write_csv(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines[0],
            "operation,variant,ranks,tokens,hidden,topk,experts,sms,samples,min_us,median_us,p99_us,\
             gb_per_s,ratio"
        );
        assert_eq!(
            lines[1],
            "dispatch,flat bf16,2,1024,4096,4,32,,30,3500.0,4000.0,6000.0,4.0,0.5"
        );
        assert_eq!(lines.len(), 2);
    }

    #[test]
    fn only_scenarios_that_ran_are_shown() {
        let text = report().to_string();
        assert!(
            text.contains("2 ranks, T = 1024") && text.contains("flat bf16  dispatch"),
            "{text}"
        );
        assert!(text.contains("of heartbeats") && !text.contains("bytes/pair"), "{text}");
    }
}
