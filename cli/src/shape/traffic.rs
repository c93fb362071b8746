//! The cost of an exchange among several domains for a rank: bytes, commands, times and SMs, by the model of
//! `tokenyard_bench::levels`.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use serde::Serialize;
use tokenyard_bench::levels::{
    CostModel, Gate, LevelCost, OperationCost, OperationTime, RankRows, Rates, TwoLevels,
};
use tokenyard_core::bootstrap::MAX_RANKS;
use tokenyard_core::moe::{Layout, RowFormat};

use crate::output::{People, Style, Table};

/// The largest world of the table, if no larger one is asked for.
const MOST_RANKS: u32 = 2048;

/// Arguments about traffic among domains.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Traffic among several domains")]
pub(crate) struct TrafficArgs {
    /// T: tokens of each rank in an operation [default: M].
    #[arg(long)]
    tokens: Option<u32>,
    /// The routing of a recorded batch, for R ranks in D domains (docs/input-files.md).
    #[arg(long, conflicts_with_all = ["tokens", "groups"])]
    pub(super) input: Option<PathBuf>,
    /// Groups of experts that the gate chooses from (n_group of DeepSeek-V3); 1: any K experts.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    groups: u32,
    /// Groups that a token may use (topk_group of DeepSeek-V3).
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    topk_groups: u32,
    /// GB/s that the link of a rank to other domains carries.
    #[arg(long, default_value_t = 46.0, value_parser = rate)]
    out_gb_s: f64,
    /// GB/s that the link of a rank inside its domain carries.
    #[arg(long, default_value_t = 340.0, value_parser = rate)]
    inside_gb_s: f64,
    /// GB/s that one SM copies.
    #[arg(long, default_value_t = 45.0, value_parser = rate)]
    sm_gb_s: f64,
}

fn rate(text: &str) -> Result<f64, String> {
    let found = text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate > 0.0);
    found.ok_or_else(|| "expected a number above 0".to_owned())
}

/// The exchange that is asked about.
#[derive(Clone, Copy, Debug)]
pub(super) struct AskedExchange {
    pub(super) levels: TwoLevels,
    pub(super) max_tokens: u32,
    pub(super) layout: Layout,
    pub(super) row: RowFormat,
    /// Bytes of a row of the combine.
    pub(super) back_bytes: u32,
    pub(super) stores: bool,
}

impl AskedExchange {
    /// The model of a world of other domains.
    pub(super) fn model(&self, levels: TwoLevels) -> CostModel {
        CostModel {
            levels,
            layout: self.layout,
            row: self.row,
            back: RowFormat { x_bytes: self.back_bytes, scale_bytes: 0, weights: false },
            stores: self.stores,
            piece_bytes: tokenyard_cpu::kernels::PIECE_BYTES,
        }
    }
}

/// A world size, and what it costs one of its ranks on average.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Traffic {
    ranks: u32,
    domains: u32,
    experts: u32,
    /// Domains that have an expert of a token, and ranks.
    domains_per_token: f64,
    ranks_per_token: f64,
    dispatch: Operation,
    combine: Operation,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Operation {
    pub(super) out: Level,
    pub(super) inside: Level,
    pub(super) overlapped_us: f64,
    serial_us: f64,
    sms: f64,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Level {
    rows: f64,
    row_bytes: f64,
    record_bytes: f64,
    puts: f64,
    signals: f64,
    us: f64,
}

impl Level {
    fn new(cost: &LevelCost, us: f64) -> Self {
        let LevelCost { rows, row_bytes, record_bytes, puts, signals } = *cost;
        Self { rows, row_bytes, record_bytes, puts, signals, us }
    }

    pub(super) fn mb(&self) -> f64 {
        (self.row_bytes + self.record_bytes) / 1e6
    }
}

impl Operation {
    pub(super) fn new(cost: &OperationCost, rates: &Rates) -> Self {
        let time: OperationTime = rates.time(cost);
        Self {
            out: Level::new(&cost.out, time.out_us),
            inside: Level::new(&cost.inside, time.inside_us),
            overlapped_us: time.overlapped_us(),
            serial_us: time.serial_us(),
            sms: time.sms,
        }
    }
}

#[cfg(test)]
impl Traffic {
    /// Whether all that is printed is a number.
    pub(super) fn is_finite(&self) -> bool {
        [self.dispatch, self.combine].iter().all(|of| {
            let mb = of.out.mb() + of.inside.mb();
            [mb, of.overlapped_us, of.serial_us, of.sms].iter().all(|n| n.is_finite() && *n >= 0.0)
        })
    }
}

/// Numbers of domains: doubled up to [`MOST_RANKS`], and the one that is asked for.
fn world_sizes(levels: &TwoLevels) -> Vec<u32> {
    let fits = |domains: &u32| domains.saturating_mul(levels.domain_ranks) <= MOST_RANKS;
    let mut sizes: Vec<u32> = (0..31).map(|power| 1 << power).take_while(fits).collect();
    sizes.push(levels.domains);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// The largest number that divides both.
fn common_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

impl TrafficArgs {
    /// The traffic of each world size, domains as large as those that are asked for.
    pub(super) fn of(&self, asked: &AskedExchange) -> Result<Vec<Traffic>> {
        let gate = Gate { groups: self.groups, chosen: self.topk_groups };
        let levels = &asked.levels;
        ensure!(
            levels.ranks() <= MAX_RANKS,
            "found {} ranks in {} domains; expected at most {MAX_RANKS}",
            levels.ranks(),
            levels.domains
        );
        ensure!(
            self.topk_groups <= self.groups,
            "found --topk-groups {} of --groups {}; expected no more than there are",
            self.topk_groups,
            self.groups
        );
        ensure!(
            gate.parts_reached(levels.experts, levels.topk, levels.domains).is_some()
                && gate.parts_reached(levels.experts, levels.topk, levels.ranks()).is_some(),
            "found {} groups of {} experts, of which a token uses {}, on {} domains and {} ranks; \
             expected equal groups with room for {} experts, each of whole domains and ranks, or in \
             one of them",
            self.groups,
            levels.experts,
            self.topk_groups,
            levels.domains,
            levels.ranks(),
            levels.topk
        );
        let sizes = world_sizes(levels).into_iter();
        Ok(sizes.filter_map(|domains| self.of_size(asked, &gate, domains)).collect())
    }

    /// None where the groups do not fit so many domains.
    fn of_size(&self, asked: &AskedExchange, gate: &Gate, domains: u32) -> Option<Traffic> {
        let ranks = domains * asked.levels.domain_ranks;
        // More ranks than experts: there are copies of experts.
        let wide = |number: u32| u64::from(number);
        let step = wide(ranks) * wide(gate.groups) / wide(common_divisor(ranks, gate.groups));
        let experts = u32::try_from(wide(asked.levels.experts).next_multiple_of(step)).ok()?;
        let levels = TwoLevels { domains, experts, ..asked.levels };
        let topk = levels.topk;
        let tokens = f64::from(self.tokens.unwrap_or(asked.max_tokens));
        let rows = RankRows::expected(&levels, gate, tokens)?;
        let (model, rates) = (asked.model(levels), self.rates());
        Some(Traffic {
            ranks,
            domains,
            experts,
            domains_per_token: gate.parts_reached(experts, topk, domains)?,
            ranks_per_token: gate.parts_reached(experts, topk, ranks)?,
            dispatch: Operation::new(&model.dispatch(&rows), &rates),
            combine: Operation::new(&model.combine(&rows), &rates),
        })
    }

    pub(super) fn rates(&self) -> Rates {
        Rates { out: self.out_gb_s, inside: self.inside_gb_s, sm: self.sm_gb_s }
    }

    /// The subject of the tables.
    fn headline(&self, asked: &AskedExchange) -> String {
        let any = match (self.groups, self.topk_groups) {
            (groups, chosen) if groups > chosen => format!("of {chosen} of {groups} groups"),
            _ => "any".to_owned(),
        };
        format!(
            "\none rank on average: {} tokens, domains of {} ranks, top-{} experts\n({any}); GB/s: \
             {} between domains (out), {} inside, {} of an SM",
            self.tokens.unwrap_or(asked.max_tokens),
            asked.levels.domain_ranks,
            asked.levels.topk,
            self.out_gb_s,
            self.inside_gb_s,
            self.sm_gb_s
        )
    }

    pub(super) fn print(&self, asked: &AskedExchange, all: &[Traffic], people: People) {
        people.say(self.headline(asked));
        let mut table =
            Table::new(&["ranks", "domains", "experts", "domains/token", "ranks/token"]);
        for t in all {
            let per_token = [t.domains_per_token, t.ranks_per_token];
            let [domains, ranks] = per_token.map(|n| format!("{n:.2}").into());
            table.row([t.ranks.into(), t.domains.into(), t.experts.into(), domains, ranks]);
        }
        people.say(format_args!("\n{}", table.render(people)));
        operations("dispatch", all, |t| &t.dispatch, people);
        operations("combine", all, |t| &t.combine, people);
        people.say(
            "\noverlapped, serial: us with rows of both levels on their way at a time, and one\n    level \
             after the other; no launch, no wait, no gate less even. commands: puts\n    and signals. SMs: the \
             fewest that keep up with the slower link.\n    Formulas: docs/two-levels.md",
        );
    }
}

fn operations(name: &str, all: &[Traffic], of: fn(&Traffic) -> &Operation, people: People) {
    let head =
        ["ranks", "out MB", "commands", "inside MB", "commands", "overlapped", "serial", "SMs"];
    let mut table = Table::new(&head);
    for traffic in all {
        let found = of(traffic);
        let level = |level: &Level| {
            [format!("{:.2}", level.mb()), format!("{:.0}", level.puts + level.signals)]
        };
        let [out, out_commands] = level(&found.out);
        let [inside, inside_commands] = level(&found.inside);
        let whole = |us: f64| format!("{us:.0}");
        let cells = [out, out_commands, inside, inside_commands];
        let times = [whole(found.overlapped_us), whole(found.serial_us), whole(found.sms)];
        let cells = cells.into_iter().chain(times).map(Into::into);
        table.row(std::iter::once(traffic.ranks.into()).chain(cells));
    }
    people.say(format_args!("\n{}\n{}", people.paint(Style::Strong, name), table.render(people)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(domains: u32) -> AskedExchange {
        AskedExchange {
            levels: TwoLevels { domains, domain_ranks: 8, experts: 256, topk: 8 },
            max_tokens: 4096,
            layout: Layout::Flat,
            row: RowFormat { x_bytes: 7168, scale_bytes: 224, weights: true },
            back_bytes: 14336,
            stores: true,
        }
    }

    fn args(groups: u32, topk_groups: u32) -> TrafficArgs {
        TrafficArgs {
            tokens: None,
            input: None,
            groups,
            topk_groups,
            out_gb_s: 46.0,
            inside_gb_s: 340.0,
            sm_gb_s: 45.0,
        }
    }

    #[test]
    fn worlds_double_up_to_2048_ranks_and_the_one_asked_for_is_there() {
        let ranks = |domains: u32| -> Vec<u32> {
            args(1, 1).of(&asked(domains)).unwrap().iter().map(|t| t.ranks).collect()
        };
        assert_eq!(ranks(4), [8, 16, 32, 64, 128, 256, 512, 1024, 2048]);
        assert!(ranks(16).contains(&128));
        let three =
            AskedExchange { levels: TwoLevels { experts: 288, ..asked(3).levels }, ..asked(3) };
        let all = args(1, 1).of(&three).unwrap();
        assert!(all.iter().any(|t| (t.ranks, t.experts) == (24, 288)));
        assert!(all.iter().all(|t| t.experts.is_multiple_of(t.ranks)));
    }

    #[test]
    fn one_domain_puts_nothing_out_and_groups_bound_the_domains_of_a_token() {
        let all = args(8, 4).of(&asked(8)).unwrap();
        assert_eq!(all[0].dispatch.out.rows + all[0].combine.out.rows, 0.0);
        assert!(all.iter().all(|t| t.domains_per_token <= 8.0));
        let of = |args: TrafficArgs| {
            let all = args.of(&asked(8)).unwrap();
            all.iter().find(|t| t.domains == 8).map(|t| t.domains_per_token).unwrap()
        };
        assert!(of(args(8, 4)) <= 4.0 && of(args(1, 1)) > 5.0);
    }

    #[test]
    fn groups_that_do_not_fit_are_refused() {
        let text = |groups, chosen| args(groups, chosen).of(&asked(4)).unwrap_err().to_string();
        assert!(text(3, 1).contains("3 groups of 256 experts"));
        assert!(text(2, 3).contains("--topk-groups 3"));
        assert!(text(64, 1).contains("room for 8 experts"));
        assert!(rate("0").is_err() && rate("-1").is_err() && rate("inf").is_err());
        assert!(rate("nan").is_err() && rate("12.5").is_ok());
    }
}
