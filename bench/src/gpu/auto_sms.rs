//! The number of multiprocessors that `sms = "auto"` takes, beside the best one that was measured.

use serde::{Deserialize, Serialize};
use tokenyard_gpu::{FlatOp, FlatWork};

use super::bytes::PairBytes;
use super::case::{Calls, Case, Fixed, Layout, Manner, Phase, Rows};
use super::figures::GpuRow;

/// The SM counts among which the best one is looked for.
const COUNTS: std::ops::RangeInclusive<u32> = 4..=32;
/// The longest time with the choice, as a part of the best one.
const MOST_RATIO: f64 = 1.03;

/// One operation: the choice of the formula, and the best SM count of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AutoSms {
    /// The operation.
    pub case: Case,
    /// The experts that tokens selected.
    pub routing: String,
    /// The choice of `sms = "auto"`.
    pub auto_sms: u32,
    /// The time with it, in microseconds; none if it was not among the SM counts of the run.
    pub auto_us: Option<f64>,
    /// The SM count of 4 to 32 that took the least time.
    pub best_sms: u32,
    /// The time with it, in microseconds.
    pub best_us: f64,
    /// `auto_us` as a part of `best_us`.
    pub ratio: Option<f64>,
    /// Whether `ratio` is at most 1.03.
    pub holds: Option<bool>,
}

/// The work that the formula is about; none for operations that it does not decide.
fn work(case: &Case, fixed: &Fixed, ranks: u32) -> Option<FlatWork> {
    let plain =
        case.layout == Layout::Flat && case.manner != Manner::Outside && case.calls != Calls::Sends;
    let op = match (case.phase, case.rows) {
        (Phase::Dispatch, Rows::Fp8 | Rows::Bf16) if plain => FlatOp::Dispatch,
        (Phase::Combine, _) if plain => FlatOp::Combine,
        _ => return None,
    };
    let pair = PairBytes::new(case.phase, case.rows, fixed);
    Some(FlatWork {
        op,
        ranks,
        topk: fixed.topk,
        tokens: case.tokens,
        row_bytes: pair.row,
        beside_bytes: pair.scales + pair.beside,
    })
}

/// One line for each operation over one level that the formula decides.
pub(super) fn lines(rows: &[GpuRow], fixed: &Fixed, ranks: u32) -> Vec<AutoSms> {
    each(rows, |row, same| {
        let one_level = row.levels.is_none();
        let work = work(&row.case, fixed, ranks).filter(|_| one_level)?;
        line(work.sms(), same)
    })
}

/// One line for each operation over two levels that their formula decides. Figures that are void do not count.
pub(super) fn level_lines(rows: &[GpuRow]) -> Vec<AutoSms> {
    each(rows, |row, same| {
        let is_valid = |row: &&GpuRow| row.levels.as_ref().is_some_and(|levels| !levels.is_void);
        let valid: Vec<&GpuRow> = same.iter().copied().filter(is_valid).collect();
        line(row.levels.as_ref()?.formula_sms?, &valid)
    })
}

/// A line of each operation and routing, from its rows.
fn each(rows: &[GpuRow], line: impl Fn(&GpuRow, &[&GpuRow]) -> Option<AutoSms>) -> Vec<AutoSms> {
    let of = |row: &GpuRow| (row.case, row.routing.clone());
    let mut seen = Vec::new();
    let mut lines = Vec::new();
    for row in rows {
        let (case, routing) = of(row);
        if seen.contains(&(case, routing.clone())) {
            continue;
        }
        seen.push((case, routing.clone()));
        let same: Vec<&GpuRow> = rows.iter().filter(|other| of(other) == of(row)).collect();
        lines.extend(line(row, &same));
    }
    lines
}

/// The line of one operation, from its times with several SM counts.
fn line(auto_sms: u32, rows: &[&GpuRow]) -> Option<AutoSms> {
    let counted = rows.iter().filter(|row| COUNTS.contains(&row.sms));
    let best = counted.min_by(|a, b| a.us.total_cmp(&b.us))?;
    let auto_us = rows.iter().find(|row| row.sms == auto_sms).map(|row| row.us);
    let ratio = auto_us.map(|us| us / best.us);
    Some(AutoSms {
        case: best.case,
        routing: best.routing.clone(),
        auto_sms,
        auto_us,
        best_sms: best.sms,
        best_us: best.us,
        ratio,
        holds: ratio.map(|ratio| ratio <= MOST_RATIO),
    })
}

#[cfg(test)]
mod tests {
    use super::super::figures::tests::{case, levels_of, row};
    use super::*;

    const FIXED: Fixed = Fixed { hidden: 7168, topk: 8, experts: 256 };

    fn rows(of: Case, times: &[(u32, f64)]) -> Vec<GpuRow> {
        times.iter().map(|(sms, us)| GpuRow { case: of, ..row(of.rows, *sms, *us) }).collect()
    }

    #[test]
    fn the_choice_is_held_against_the_best_of_4_to_32_multiprocessors() {
        // Two ranks: 16 are chosen. 64 do not count.
        let times = [(8, 191.0), (16, 110.0), (24, 108.0), (64, 90.0)];
        let found = lines(&rows(case(Rows::Fp8), &times), &FIXED, 2);
        let [line] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!((line.auto_sms, line.auto_us), (16, Some(110.0)));
        assert_eq!((line.best_sms, line.best_us, line.holds), (24, 108.0, Some(true)));
        assert!((line.ratio.unwrap() - 110.0 / 108.0).abs() < 1e-12);
        let slow = rows(case(Rows::Fp8), &[(16, 112.0), (24, 108.0)]);
        assert_eq!(lines(&slow, &FIXED, 2)[0].holds, Some(false));
    }

    #[test]
    fn a_choice_that_was_not_measured_has_no_ratio() {
        let found = lines(&rows(case(Rows::Fp8), &[(8, 191.0), (24, 108.0)]), &FIXED, 2);
        assert_eq!((found[0].auto_sms, found[0].best_sms), (16, 24));
        assert_eq!((found[0].auto_us, found[0].ratio, found[0].holds), (None, None, None));
        assert!(lines(&rows(case(Rows::Fp8), &[(64, 90.0)]), &FIXED, 2).is_empty());
    }

    #[test]
    fn two_levels_have_a_formula_of_their_own_and_void_figures_are_not_the_best() {
        let of = |sms, us, is_void| {
            let levels = Some(levels_of(is_void));
            GpuRow { levels, ..row(Rows::Fp8, sms, us) }
        };
        let all = [of(8, 250.0, true), of(12, 309.0, false), of(24, 301.0, false)];
        assert!(lines(&all, &FIXED, 2).is_empty());
        let found = level_lines(&all);
        let [line] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!((line.auto_sms, line.auto_us, line.best_sms), (12, Some(309.0), 24));
        assert_eq!(line.holds, Some(true));
        assert!(level_lines(&rows(case(Rows::Fp8), &[(12, 300.0)])).is_empty());
    }

    #[test]
    fn operations_that_the_formula_does_not_decide_have_no_line() {
        let flat = case(Rows::Fp8);
        let others = [
            Case { rows: Rows::Cast, ..flat },
            Case { layout: Layout::Packed, ..flat },
            Case { phase: Phase::Pair, ..flat },
            Case { calls: Calls::Sends, ..flat },
            Case { phase: Phase::Combine, manner: Manner::Outside, ..flat },
        ];
        for other in others {
            assert!(lines(&rows(other, &[(16, 100.0)]), &FIXED, 2).is_empty(), "{other}");
        }
        let both = [flat, Case { phase: Phase::Combine, rows: Rows::Bf16, ..flat }]
            .map(|one| rows(one, &[(8, 130.0), (16, 100.0)]))
            .concat();
        assert_eq!(lines(&both, &FIXED, 2).len(), 2);
    }
}
