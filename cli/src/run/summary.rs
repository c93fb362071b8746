//! The result of a run, for people and for programs.

use anyhow::Result;
use serde::Serialize;
use tokenyard_conformance::moe::oracle::{Case, Input, Layout, Scales, Tokens};
use tokenyard_core::conditions::Conditions;
use tokenyard_core::config::Config;

use super::RunArgs;
use super::diagnosis::{Finding, Lost};
use super::message::{Clock, Opened, RankResult};
use crate::output::{Cell, People, Style, Table, plural, print_document};
use crate::progress;

const MIB: f64 = (1 << 20) as f64;

/// The result of a run.
pub(crate) struct Summary<'a> {
    args: &'a RunArgs,
    config: &'a Config,
    case: &'a Case,
    pub(crate) opened: Option<Opened>,
    /// The results by rank; those of ranks that did not finish are missing.
    pub(crate) ranks: Vec<RankResult>,
    /// Ranks without which the others went on.
    pub(crate) lost: Vec<Lost>,
    pub(crate) findings: Vec<Finding>,
}

/// The JSON document.
#[derive(Serialize)]
struct RunDocument<'a> {
    config: ConfigInfo<'a>,
    /// The choices, and their reasons; absent if the communicator did not open.
    communicator: Option<&'a serde_json::Value>,
    shape: ShapeInfo,
    seed: u64,
    steps: u32,
    ranks: Vec<RankInfo<'a>>,
    lost_ranks: &'a [Lost],
    /// The sum over all ranks and steps.
    tokens_missing_experts: u64,
    busiest_expert_over_mean: Option<f64>,
    check: Check,
    failures: &'a [Finding],
    conditions: Conditions,
}

#[derive(Serialize)]
struct ConfigInfo<'a> {
    file: &'a str,
    agreed: serde_json::Map<String, serde_json::Value>,
}

#[derive(Serialize)]
struct ShapeInfo {
    ranks: usize,
    experts: usize,
    topk: usize,
    hidden: usize,
    max_tokens: usize,
    layout: String,
    input: String,
    combine: String,
    /// Names the whole exchange; equal names mean equal data.
    exchange: String,
}

#[derive(Serialize)]
struct RankInfo<'a> {
    #[serde(flatten)]
    result: &'a RankResult,
    dispatch_gb_per_s: f64,
    combine_gb_per_s: f64,
}

#[derive(Serialize)]
struct Check {
    passed: bool,
    elements: u64,
}

impl<'a> Summary<'a> {
    pub(crate) fn new(args: &'a RunArgs, config: &'a Config, case: &'a Case) -> Self {
        Self {
            args,
            config,
            case,
            opened: None,
            ranks: Vec::new(),
            lost: Vec::new(),
            findings: Vec::new(),
        }
    }

    /// Prints the result for people and, on request, as JSON.
    pub(crate) fn print(&self, json: bool) -> Result<()> {
        self.print_table(People::new(json));
        for finding in &self.findings {
            People::errors().error(finding.line());
        }
        if json { print_document("run", &self.document()) } else { Ok(()) }
    }

    fn passed(&self) -> bool {
        self.findings.is_empty() && self.ranks.len() + self.lost.len() == self.case.ranks
    }

    fn elements(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.elements_checked).sum()
    }

    fn tokens_missing_experts(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.tokens_missing_experts).sum()
    }

    /// The number of tokens that lack an expert because ranks were lost, in words.
    fn missing_line(&self) -> String {
        let tokens: u64 = self.ranks.iter().map(|rank| rank.tokens).sum();
        format!(
            "without them: {} of {} tokens of the ranks that went on lack an expert",
            self.tokens_missing_experts(),
            tokens * u64::from(self.args.steps)
        )
    }

    /// A line with the bytes that crossed between domains, and the bytes of one row for each (token, other
    /// domain) and direction. There is no line if the bytes are not counted, or if ranks were lost, because
    /// their rows are not known.
    fn between_domains(&self) -> Option<String> {
        let total = self.total();
        let (bytes, rows) =
            (total.out_bytes.filter(|_| self.lost.is_empty())?, total.out_row_bytes);
        let of_rows = if rows > 0 { bytes as f64 / rows as f64 } else { 0.0 };
        Some(format!(
            "between domains: {bytes} bytes put; {rows} of one row for each (token, other domain), there and back: \
             {of_rows:.4} times"
        ))
    }

    /// Prints the exchange before it runs.
    pub(crate) fn print_head(&self) {
        let people = People::new(self.args.json);
        people.prose(progress::head(self.config));
        people.prose(self.headline());
    }

    fn print_table(&self, people: People) {
        if let Some(opened) = &self.opened {
            people.prose(components_line(opened));
            if let Some(line) = nics_line(&opened.report) {
                people.prose(line);
            }
        }
        if self.ranks.is_empty() {
            return;
        }
        people.say("");
        people.say(self.table().render(people));
        people.say("");
        people.prose(match self.clock() {
            Clock::Device => {
                "rows and MiB of a step; times of the operations alone, by the device's clock"
            }
            Clock::Host => "rows and MiB of a step; times of the calls alone, by the host's clock",
        });
        if let Some(line) = self.between_domains() {
            people.prose(line);
        }
        for lost in &self.lost {
            people.prose(format_args!("{} {}", people.paint(Style::Bad, "lost:"), lost.line()));
        }
        if !self.lost.is_empty() {
            people.prose(self.missing_line());
        }
        if self.passed() {
            let without = if self.lost.is_empty() { "" } else { " without lost rows" };
            let text = format!("all {} row elements equal the oracle's{without}", self.elements());
            people.prose(format_args!("check: {} ({text})", people.paint(Style::Good, "passed")));
        }
        if !Conditions::find().optimised {
            people.prose("note: this build is not optimised (no --release): the times mean little");
        }
    }

    fn headline(&self) -> String {
        let Case { ranks, experts, topk, hidden, max_tokens, .. } = self.case;
        let tokens = match &self.case.tokens {
            Tokens::Full => format!("{max_tokens} tokens each"),
            _ => format!("up to {max_tokens} tokens each"),
        };
        format!(
            "{ranks} rank{}, {tokens}, {} rows of {hidden}, top-{topk} of {experts} experts, {}, \
             {} step{}, seed {}",
            plural(*ranks),
            row_words(self.case.input),
            layout_words(self.case.layout),
            self.args.steps,
            plural(self.args.steps as usize),
            self.case.seed
        )
    }

    fn table(&self) -> Table {
        let mut table = Table::new(&[
            "rank",
            "tokens",
            "sent",
            "received",
            "MiB",
            "dispatch us",
            "GB/s",
            "combine us",
            "GB/s",
        ]);
        let steps = f64::from(self.args.steps.max(1));
        let line = |name: Cell, r: &RankResult| {
            [
                name,
                r.tokens.into(),
                format!("{:.0}", r.rows_sent as f64 / steps).into(),
                format!("{:.0}", r.rows_received as f64 / steps).into(),
                format!("{:.1}", r.bytes_received as f64 / steps / MIB).into(),
                format!("{:.0}", r.dispatch_us).into(),
                format!("{:.2}", gb_per_s(r.bytes_received, r.dispatch_us * steps)).into(),
                format!("{:.0}", r.combine_us).into(),
                format!("{:.2}", gb_per_s(r.bytes_returned, r.combine_us * steps)).into(),
            ]
        };
        for rank in &self.ranks {
            table.row(line(rank.rank.into(), rank));
        }
        if self.ranks.len() + self.lost.len() == self.case.ranks {
            table.row(line("all".into(), &self.total()));
        }
        table
    }

    /// The device's clock only where all ranks have times by it.
    fn clock(&self) -> Clock {
        self.ranks.iter().map(|rank| rank.clock).max().unwrap_or_default()
    }

    /// Sums, and the times of the slowest rank.
    fn total(&self) -> RankResult {
        let sum = |of: fn(&RankResult) -> u64| self.ranks.iter().map(of).sum();
        let slowest = |of: fn(&RankResult) -> f64| self.ranks.iter().map(of).fold(0.0, f64::max);
        RankResult {
            rank: 0,
            tokens: sum(|r| r.tokens),
            rows_sent: sum(|r| r.rows_sent),
            rows_received: sum(|r| r.rows_received),
            bytes_received: sum(|r| r.bytes_received),
            bytes_returned: sum(|r| r.bytes_returned),
            out_bytes: self.ranks.iter().map(|r| r.out_bytes).sum(),
            out_row_bytes: sum(|r| r.out_row_bytes),
            dispatch_us: slowest(|r| r.dispatch_us),
            combine_us: slowest(|r| r.combine_us),
            elements_checked: self.elements(),
            clock: self.clock(),
            lost: Vec::new(),
            tokens_missing_experts: self.tokens_missing_experts(),
        }
    }

    fn document(&self) -> RunDocument<'_> {
        let case = self.case;
        let steps = f64::from(self.args.steps.max(1));
        let agreed = self.config.agreement().into_iter().map(|(k, v)| (k, value(v))).collect();
        RunDocument {
            config: ConfigInfo { file: &self.config.name, agreed },
            communicator: self.opened.as_ref().map(|opened| &opened.report),
            shape: ShapeInfo {
                ranks: case.ranks,
                experts: case.experts,
                topk: case.topk,
                hidden: case.hidden,
                max_tokens: case.max_tokens,
                layout: case.layout.to_string(),
                input: case.input.to_string(),
                combine: case.combine.row.to_string(),
                exchange: case.to_string(),
            },
            seed: case.seed,
            steps: self.args.steps,
            ranks: self
                .ranks
                .iter()
                .map(|result| RankInfo {
                    result,
                    dispatch_gb_per_s: gb_per_s(result.bytes_received, result.dispatch_us * steps),
                    combine_gb_per_s: gb_per_s(result.bytes_returned, result.combine_us * steps),
                })
                .collect(),
            lost_ranks: &self.lost,
            tokens_missing_experts: self.tokens_missing_experts(),
            busiest_expert_over_mean: self.opened.as_ref().map(|opened| opened.busiest_over_mean),
            check: Check { passed: self.passed(), elements: self.elements() },
            failures: &self.findings,
            conditions: Conditions::find(),
        }
    }
}

/// A value of a config as JSON: a number becomes a number.
fn value(text: String) -> serde_json::Value {
    match serde_json::from_str(&text) {
        Ok(value @ (serde_json::Value::Number(_) | serde_json::Value::Bool(_))) => value,
        _ => text.into(),
    }
}

fn row_words(input: Input) -> String {
    match input {
        Input::Plain(row) => row.to_string(),
        Input::Cast(row, Scales::F32) => format!("{row} cast to fp8"),
        Input::Cast(row, Scales::RoundedF32) => format!("{row} cast to fp8 (rounded scales)"),
        Input::Cast(row, Scales::Ue8m0) => format!("{row} cast to fp8 (UE8M0 scales)"),
        Input::Opaque(_) => "fp8".to_owned(),
    }
}

fn layout_words(layout: Layout) -> String {
    match layout {
        Layout::Flat => "flat layout".to_owned(),
        Layout::ExpertMajor { alignment, .. } => {
            format!("expert-major layout (alignment {alignment})")
        }
        Layout::Packed => "packed layout".to_owned(),
        Layout::RankMajor { .. } => "rank-major layout".to_owned(),
    }
}

fn components_line(opened: &Opened) -> String {
    let report = &opened.report;
    let domains = report.get("domains").and_then(serde_json::Value::as_u64).unwrap_or(0);
    let text = |value: &serde_json::Value, key: &str| {
        value.get(key).and_then(|v| v.as_str()).unwrap_or("?").to_owned()
    };
    let level = |name: &str, key: &str| {
        let level = report.get(key).filter(|level| level.is_object())?;
        Some(format!("{name} {} ({})", text(level, "transport"), text(level, "path")))
    };
    let levels = [level("scale-up", "scale_up"), level("scale-out", "scale_out")];
    format!(
        "kernels {}, {}, {domains} domain{}, {}; the busiest expert has {:.1} times the mean load",
        text(report, "kernels"),
        levels.into_iter().flatten().collect::<Vec<_>>().join(", "),
        plural(domains as usize),
        text(report, "algorithm"),
        opened.busiest_over_mean
    )
}

/// The NICs of each rank, where there are any; of many ranks only the first. The NICs that a
/// transport chooses by its own table are not known here.
fn nics_line(report: &serde_json::Value) -> Option<String> {
    const MOST: usize = 16;
    let of_place = |place: &serde_json::Value| -> Option<String> {
        let nics = place.get("nics")?.as_array()?.iter();
        let names: Vec<&str> = nics.filter_map(serde_json::Value::as_str).collect();
        (!names.is_empty()).then(|| names.join(" + "))
    };
    let places = report.get("places")?.as_array()?.iter().enumerate();
    let ranks: Vec<String> =
        places.filter_map(|(rank, place)| Some(format!("{rank}: {}", of_place(place)?))).collect();
    let more = match ranks.len().saturating_sub(MOST) {
        0 => String::new(),
        more => format!("; and {more} ranks more, see --json"),
    };
    let shown = ranks.iter().take(MOST).cloned().collect::<Vec<_>>().join(", ");
    let levels = ["scale_up", "scale_out"].map(|level| report.get(level)?.get("placed_nics"));
    let are_used = levels.into_iter().flatten().any(|used| used.as_bool() == Some(true));
    let (head, tail) = match are_used {
        true => ("NICs by rank", ""),
        false => ("NICs near by rank", " (no transport of this config uses them)"),
    };
    (!ranks.is_empty()).then(|| format!("{head} {shown}{more}{tail}"))
}

/// 10^9 bytes per second; 0 where no time was measured.
fn gb_per_s(bytes: u64, us: f64) -> f64 {
    if us > 0.0 { bytes as f64 / us / 1e3 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nics_are_shown_by_rank_and_cut_short() {
        let place = |nics: &[&str]| serde_json::json!({ "host": "a", "nics": nics });
        let report = |places: Vec<serde_json::Value>| {
            let used = serde_json::json!({ "placed_nics": true });
            serde_json::json!({ "places": places, "scale_up": null, "scale_out": used })
        };
        let two = report(vec![
            place(&["mlx5_0", "mlx5_1"]),
            serde_json::Value::Null,
            place(&[]),
            place(&["mlx5_2"]),
        ]);
        assert_eq!(nics_line(&two).unwrap(), "NICs by rank 0: mlx5_0 + mlx5_1, 3: mlx5_2");
        let many = nics_line(&report(vec![place(&["n"]); 20])).unwrap();
        assert!(many.ends_with("15: n; and 4 ranks more, see --json"), "{many}");
        assert_eq!(nics_line(&report(vec![place(&[])])), None);
        let mut unused = two;
        unused["scale_out"]["placed_nics"] = false.into();
        let line = nics_line(&unused).unwrap();
        assert!(line.starts_with("NICs near by rank 0: mlx5_0"), "{line}");
        assert!(line.ends_with("3: mlx5_2 (no transport of this config uses them)"), "{line}");
    }
}
