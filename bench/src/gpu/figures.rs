//! Turns the figures of ranks into the lines of a report. All functions are pure.

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::bytes::{PairBytes, Rule, Traffic, gb_s, us_of};
use super::case::Case;
use super::ceiling::{self, Copy};
use super::exchange::{GpuExchangeTask, GpuSamples, Spent};
use super::two_levels::{LevelContext, LevelFigures};
use crate::spread::{Spread, median};

/// The most multiprocessors with which an operation must meet the rule.
pub const MOST_SMS: u32 = 16;

/// Copies between all GPUs, for one way of copying and one SM count.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CopyRow {
    /// The way of copying.
    pub copy: Copy,
    /// Multiprocessors; 0 for copy engines.
    pub sms: u32,
    /// The median time of a launch on the slowest rank, in microseconds.
    pub us: f64,
    /// Bytes that left each rank for others in that time.
    pub gb_s: f64,
}

/// The rates of the link.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Bytes of each row that was copied.
    pub row_bytes: u32,
    /// Bytes that left each rank in a launch.
    pub bytes: u64,
    /// One for each way and SM count.
    pub copies: Vec<CopyRow>,
    /// The highest rate that multiprocessors reached, in either direction.
    pub ceiling_gb_s: f64,
    /// The time of a barrier of all ranks, on the slowest rank.
    pub barrier_us: f64,
    /// The number of counts that each rank sends to every other.
    pub counts: u32,
    /// The time of an exchange of `counts` counts.
    pub counts_us: f64,
    /// The time of an empty kernel, launched back to back.
    pub launch_us: f64,
}

/// The times of the phases of an operation, in microseconds: medians of the slowest rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Breakdown {
    /// From the end of the operation before to the start of its kernel; copies of rows too.
    pub launch: f64,
    /// Counting, and a cast.
    pub count: f64,
    /// Until the counts of all ranks were there, on the rank that waited least, which is the last
    /// one to start.
    pub exchange: f64,
    /// Until rows had left, or sums were made.
    pub rows: f64,
    /// Until the rows of all ranks had arrived, or all had read.
    pub drain: f64,
    /// How much longer the rank with the longest wait for counts waited than the one with the
    /// shortest: the skew of the ranks.
    pub skew: f64,
}

/// One operation with one SM count.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuRow {
    /// The operation.
    pub case: Case,
    /// The experts that tokens selected.
    pub routing: String,
    /// Multiprocessors.
    pub sms: u32,
    /// Routed input to usable rows: the slowest rank's median.
    pub us: f64,
    /// The fastest operation of each rank; of these the slowest.
    pub min_us: f64,
    /// 99 of 100 operations take no longer, on any rank.
    pub p99_us: f64,
    /// The times of its phases; none where kernels do not record them.
    pub breakdown: Option<Breakdown>,
    /// Bytes through the busiest port of any rank, in its busier direction.
    pub link_bytes: u64,
    /// GB per second through the busiest port of any rank, in its busier direction.
    pub link_gb_s: f64,
    /// The fraction of the ceiling.
    pub ratio: f64,
    /// Rows and scales that a rank receives, its own included, per second, as other systems count.
    pub counted_gb_s: f64,
    /// The time of `link_bytes` at the ceiling.
    pub floor_us: f64,
    /// The longest time by the [`Rule`].
    pub rule_us: f64,
    /// Whether it takes no longer than `rule_us`.
    pub holds: bool,
    /// Operations measured.
    pub samples: usize,
    /// Where there are two levels: `link_bytes` and the floor are those of the slower one, by its rate.
    #[serde(default)]
    pub levels: Option<LevelFigures>,
}

/// The lines of the link, from the figures of all ranks.
pub(super) fn link(all: &[&ceiling::CeilingFigures]) -> Result<Link> {
    let first = all.first().context("found no rank's figures of the link")?;
    let mut copies = Vec::new();
    for (index, of_first) in first.launches.iter().enumerate() {
        let mut by_rank = Vec::new();
        for figures in all {
            let launches = figures.launches.get(index);
            let same = launches.filter(|l| (l.copy, l.sms) == (of_first.copy, of_first.sms));
            by_rank.push(same.context("ranks measured different copies")?.us.as_slice());
        }
        let us = median(slowest(&by_rank)).context("found no launch of a copy")?;
        let (copy, sms) = (of_first.copy, of_first.sms);
        copies.push(CopyRow { copy, sms, us, gb_s: gb_s(first.bytes as f64, us) });
    }
    let by_sms = copies.iter().filter(|row| row.sms > 0).map(|row| row.gb_s);
    let most =
        |of: fn(&ceiling::CeilingFigures) -> f64| all.iter().map(|f| of(f)).fold(0.0, f64::max);
    Ok(Link {
        row_bytes: ceiling::ROW_BYTES,
        bytes: first.bytes,
        ceiling_gb_s: by_sms.fold(0.0, f64::max),
        copies,
        barrier_us: most(|f| f.barrier_us),
        counts: ceiling::COUNTS,
        counts_us: most(|f| f.counts_us),
        launch_us: most(|f| f.launch_us),
    })
}

/// The lines of operations, from the samples of all ranks.
pub(super) fn rows(
    task: &GpuExchangeTask,
    all: &[&[GpuSamples]],
    context: &LevelContext,
) -> Result<Vec<GpuRow>> {
    let count = all.first().map_or(0, |samples| samples.len());
    ensure!(
        all.iter().all(|samples| samples.len() == count),
        "ranks measured different operations"
    );
    (0..count)
        .map(|index| {
            let of_all: Vec<&GpuSamples> = all.iter().map(|samples| &samples[index]).collect();
            row(task, &of_all, context)
        })
        .collect()
}

fn row(task: &GpuExchangeTask, all: &[&GpuSamples], context: &LevelContext) -> Result<GpuRow> {
    let (case, sms) = (all[0].case, all[0].sms);
    ensure!(
        all.iter().all(|samples| (samples.case, samples.sms) == (case, sms)),
        "ranks measured different operations at {case}"
    );
    let spreads = all.iter().filter_map(|samples| Spread::of(samples.us.iter().copied()));
    let spread = spreads.reduce(Spread::slowest).context("found no operation")?;
    let us = spread.median;
    let sends: Vec<Vec<u64>> = all.iter().map(|samples| samples.sends.clone()).collect();
    let traffic = Traffic::new(&sends);
    let pair = PairBytes::new(case.phase, case.rows, &task.fixed);
    let levels = context.figures(&case, all, us);
    let (floor_us, link_bytes, ceiling) = match &levels {
        Some(levels) => levels.slower(),
        None => {
            let (bytes, ceiling) = (traffic.busiest * pair.all(), context.measured_gb_s);
            (us_of(bytes as f64, ceiling), bytes, ceiling)
        }
    };
    let rule_us = Rule::of(levels.is_some()).us(floor_us);
    let link_gb_s = gb_s(link_bytes as f64, us);
    Ok(GpuRow {
        case,
        routing: task.routing.to_string(),
        sms,
        us,
        min_us: spread.min,
        p99_us: spread.p99,
        breakdown: breakdown(&all.iter().map(|s| s.spent.as_slice()).collect::<Vec<_>>()),
        link_bytes,
        link_gb_s,
        // Without a row there may be no ceiling, and reports hold numbers alone.
        ratio: if ceiling > 0.0 { link_gb_s / ceiling } else { 0.0 },
        counted_gb_s: gb_s(traffic.received * pair.counted() as f64, us),
        floor_us,
        rule_us,
        holds: us <= rule_us && !levels.as_ref().is_some_and(|levels| levels.is_void),
        samples: all[0].us.len(),
        levels,
    })
}

fn breakdown(by_rank: &[&[Spent]]) -> Option<Breakdown> {
    let part = |of: fn(&Spent) -> f64| {
        by_rank.iter().filter_map(|all| median(all.iter().map(of))).max_by(f64::total_cmp)
    };
    let waits: Vec<Vec<f64>> =
        by_rank.iter().map(|all| all.iter().map(|spent| spent.exchange).collect()).collect();
    let waits: Vec<&[f64]> = waits.iter().map(Vec::as_slice).collect();
    let (longest, shortest) = (slowest(&waits), fastest(&waits));
    let skews: Vec<f64> = longest.iter().zip(&shortest).map(|(most, least)| most - least).collect();
    Some(Breakdown {
        launch: part(|spent| spent.launch)?,
        count: part(|spent| spent.count)?,
        exchange: median(shortest)?,
        rows: part(|spent| spent.rows)?,
        drain: part(|spent| spent.drain)?,
        skew: median(skews)?,
    })
}

/// Figures that are void, and operations that meet the rule with none of their SM counts up to [`MOST_SMS`].
pub(super) fn missed(rows: &[GpuRow]) -> Vec<String> {
    let void = |row: &GpuRow| {
        let why = row.levels.as_ref()?.void(row.us)?;
        Some(format!("{}, {} tokens, {} SMs: {why}", row.case, row.case.tokens, row.sms))
    };
    let mut missed: Vec<String> = rows.iter().filter_map(void).collect();
    let mut cases: Vec<Case> = Vec::new();
    for row in rows {
        if cases.contains(&row.case) {
            continue;
        }
        cases.push(row.case);
        let is_valid = |row: &&GpuRow| !row.levels.as_ref().is_some_and(|levels| levels.is_void);
        let of_case =
            || rows.iter().filter(is_valid).filter(|r| r.case == row.case && r.sms <= MOST_SMS);
        let best = of_case().min_by(|a, b| a.us.total_cmp(&b.us));
        if let Some(best) = best.filter(|_| !of_case().any(|r| r.holds)) {
            missed.push(format!(
                "{}, {} tokens: found {:.1} us with {} SMs; required at most {:.1} with {MOST_SMS} or \
                 fewer ({}; floor {:.1})",
                row.case,
                row.case.tokens,
                best.us,
                best.sms,
                best.rule_us,
                Rule::of(best.levels.is_some()),
                best.floor_us
            ));
        }
    }
    missed
}

/// For each measurement, the highest value of any rank.
fn slowest(by_rank: &[&[f64]]) -> Vec<f64> {
    across(by_rank, f64::max)
}

fn fastest(by_rank: &[&[f64]]) -> Vec<f64> {
    across(by_rank, f64::min)
}

fn across(by_rank: &[&[f64]], choose: fn(f64, f64) -> f64) -> Vec<f64> {
    let count = by_rank.iter().map(|values| values.len()).min().unwrap_or(0);
    let at = |index: usize| by_rank.iter().map(|values| values[index]).reduce(choose);
    (0..count).filter_map(at).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::case::{Calls, Fixed, Layout, Manner, Phase, Routing, Rows};
    use super::super::ceiling::Launches;
    use super::super::nic::Lateness;
    use super::*;

    /// A case of a test.
    pub(in super::super) fn case(rows: Rows) -> Case {
        Case {
            phase: Phase::Dispatch,
            rows,
            layout: Layout::Flat,
            manner: Manner::Plain,
            calls: Calls::Waiting,
            tokens: 4096,
        }
    }

    /// A dispatch that took a time with an SM count.
    pub(in super::super) fn row(rows: Rows, sms: u32, us: f64) -> GpuRow {
        GpuRow {
            case: case(rows),
            routing: "uniform".to_owned(),
            sms,
            us,
            min_us: us,
            p99_us: us,
            breakdown: None,
            link_bytes: 100_000_000,
            link_gb_s: 1e5 / us,
            ratio: 1e5 / us / 340.0,
            counted_gb_s: 1.2e5 / us,
            floor_us: 294.1,
            rule_us: 328.8,
            holds: us <= 328.8,
            samples: 50,
            levels: None,
        }
    }

    /// Figures of two levels, which may be void.
    pub(in super::super) fn levels_of(is_void: bool) -> LevelFigures {
        LevelFigures {
            domains: 2,
            out_bytes: 12_000_000,
            inside_bytes: 80_000_000,
            out_gb_s: 46.0,
            inside_gb_s: 365.0,
            out_us: 260.9,
            inside_us: 219.2,
            ratio: 1.15,
            formula_sms: Some(12),
            late: Some(Lateness { signals: 9, mean_us: 1234.5, most_us: 12_345.6 }),
            is_void,
        }
    }

    /// One level, whose link has this rate.
    fn one_level(measured_gb_s: f64) -> LevelContext {
        let (setup, given) = Default::default();
        LevelContext { setup, given, fixed: task().fixed, measured_gb_s }
    }

    fn task() -> GpuExchangeTask {
        GpuExchangeTask {
            phase: Phase::Dispatch,
            fixed: Fixed { hidden: 7168, topk: 8, experts: 256 },
            tokens: vec![4096],
            rows: vec![Rows::Bf16],
            layouts: vec![Layout::Flat],
            routing: Routing::Uniform,
            manner: Manner::Plain,
            calls: Calls::Waiting,
            sms: vec![16],
            samples: 3,
        }
    }

    fn samples(us: [f64; 3], exchange: [f64; 2]) -> GpuSamples {
        let spent = |exchange| Spent { launch: 3.0, count: 5.0, exchange, rows: 100.0, drain: 2.0 };
        GpuSamples {
            case: case(Rows::Bf16),
            sms: 16,
            sends: vec![4000, 4000],
            us: us.to_vec(),
            spent: exchange.map(spent).to_vec(),
            levels: None,
        }
    }

    /// Figures of a link whose copies reach 340 GB/s at 16 SMs and less with fewer.
    pub(in super::super) fn link_of(ranks: usize) -> Link {
        let launches = |copy, sms, us| Launches { copy, sms, us: vec![us, us + 1.0, us] };
        let figures = ceiling::CeilingFigures {
            bytes: 340_000_000,
            launches: vec![
                launches(Copy::PushEngines, 0, 900.0),
                launches(Copy::PushBulk, 8, 1100.0),
                launches(Copy::PushBulk, 16, 1000.0),
                launches(Copy::PullBulk, 16, 1020.0),
            ],
            barrier_us: 1.5,
            counts_us: 2.6,
            launch_us: 3.4,
        };
        link(&vec![&figures; ranks]).unwrap()
    }

    #[test]
    fn the_ceiling_is_the_best_of_multiprocessors_and_not_of_copy_engines() {
        let link = link_of(2);
        assert!((link.ceiling_gb_s - 340.0).abs() < 1e-9, "{link:?}");
        assert!(link.copies[0].gb_s > link.ceiling_gb_s);
        assert_eq!((link.barrier_us, link.counts_us, link.launch_us), (1.5, 2.6, 3.4));
    }

    #[test]
    fn of_copies_the_slowest_rank_of_each_launch_counts() {
        let figures = |us: [f64; 3]| ceiling::CeilingFigures {
            bytes: 1_000_000,
            launches: vec![Launches { copy: Copy::PushBulk, sms: 4, us: us.to_vec() }],
            barrier_us: us[0],
            counts_us: 1.0,
            launch_us: 1.0,
        };
        let (a, b) = (figures([10.0, 20.0, 10.0]), figures([12.0, 11.0, 14.0]));
        let link = link(&[&a, &b]).unwrap();
        assert_eq!((link.copies[0].us, link.barrier_us), (14.0, 12.0));
        assert!(super::link(&[]).is_err());
    }

    #[test]
    fn the_slowest_median_counts_and_is_held_against_floor_and_rule() {
        let all = [samples([195.0, 190.0, 900.0], [2.0, 9.0]), samples([180.0; 3], [6.0, 3.0])];
        let all: Vec<&[GpuSamples]> = all.iter().map(std::slice::from_ref).collect();
        let row = &rows(&task(), &all, &one_level(340.0)).unwrap()[0];
        assert_eq!((row.us, row.samples), (195.0, 3));
        // Both values are of the first rank, the slower one.
        assert_eq!((row.min_us, row.p99_us), (190.0, 900.0));
        assert_eq!(row.link_bytes, 4000 * 14_404);
        assert!((row.floor_us - 4000.0 * 14_404.0 / 340e3).abs() < 1e-6);
        assert!((row.ratio - row.floor_us / row.us).abs() < 1e-12);
        // 8,000 rows received per rank, own ones included.
        assert!((row.counted_gb_s - 8000.0 * 14_336.0 / 195e3).abs() < 1e-9);
        assert!(row.holds && row.rule_us > 197.0, "{row:?}");
        let spent = row.breakdown.unwrap();
        // The last rank to start waits least; the other one waits longer by 4 and by 6.
        assert_eq!((spent.exchange, spent.skew), (2.5, 5.0));
        assert_eq!((spent.launch, spent.count, spent.rows, spent.drain), (3.0, 5.0, 100.0, 2.0));
    }

    #[test]
    fn without_a_ceiling_there_is_no_floor_and_no_infinite_ratio() {
        let one = samples([300.0; 3], [1.0; 2]);
        let all = [std::slice::from_ref(&one), std::slice::from_ref(&one)];
        let row = &rows(&task(), &all, &one_level(0.0)).unwrap()[0];
        assert_eq!((row.floor_us, row.ratio), (0.0, 0.0));
    }

    #[test]
    fn a_case_is_missed_if_no_count_up_to_16_keeps_the_rule() {
        let all = [samples([300.0; 3], [1.0; 2]), samples([300.0; 3], [1.0; 2])];
        let all: Vec<&[GpuSamples]> = all.iter().map(std::slice::from_ref).collect();
        let slow = rows(&task(), &all, &one_level(340.0)).unwrap();
        let fast = GpuRow { sms: 8, us: 150.0, holds: true, ..slow[0].clone() };
        let wide = GpuRow { sms: 24, ..fast.clone() };
        assert!(missed(&[slow[0].clone(), fast]).is_empty());
        let missed = missed(&[slow[0].clone(), wide]);
        assert_eq!(missed.len(), 1, "{missed:?}");
        assert!(missed[0].contains("4096 tokens: found 300.0 us with 16 SMs"), "{missed:?}");
    }

    #[test]
    fn a_void_figure_is_missed_by_name_and_meets_no_rule() {
        let valid = GpuRow { levels: Some(levels_of(false)), ..row(Rows::Fp8, 16, 300.0) };
        assert!(missed(std::slice::from_ref(&valid)).is_empty());
        let void = GpuRow { levels: Some(levels_of(true)), ..row(Rows::Fp8, 8, 310.0) };
        let missed = missed(&[valid, void]);
        assert_eq!(missed.len(), 1, "{missed:?}");
        assert!(missed[0].contains("4096 tokens, 8 SMs: void, because"), "{missed:?}");
    }

    #[test]
    fn ranks_that_measured_different_things_are_refused() {
        let one = samples([1.0; 3], [1.0; 2]);
        let other = GpuSamples { sms: 8, ..one.clone() };
        let all = [std::slice::from_ref(&one), std::slice::from_ref(&other)];
        assert!(rows(&task(), &all, &one_level(340.0)).is_err());
        assert!(rows(&task(), &[std::slice::from_ref(&one), &[]], &one_level(340.0)).is_err());
    }

    #[test]
    fn kernels_that_tell_nothing_have_no_breakdown() {
        assert_eq!(breakdown(&[&[], &[]]), None);
    }
}
