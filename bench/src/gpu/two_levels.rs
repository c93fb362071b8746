//! Operations over two levels: the bytes and the floor of each, and figures that a stand-in makes void.
//!
//! Rates come from the config and from options, rows from the routing of all ranks. All functions are pure.

use serde::{Deserialize, Serialize};
use tokenyard_gpu::twin;

use super::bytes::{PairBytes, us_of};
use super::case::{Case, Fixed, Phase};
use super::exchange::GpuSamples;
use super::nic::Lateness;
use super::setup::{GivenRates, Setup};
use crate::levels::{RankRows, sms_of};

/// A figure is void where signals of a stand-in were later than this part of it, in the mean.
const MOST_LATE: f64 = 0.05;

/// Facts of one operation of one rank, where there are two levels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LevelSamples {
    /// T.
    pub tokens: u32,
    /// This rank's tokens with experts in each domain.
    pub to_domains: Vec<u64>,
    /// How late the stand-in between domains raised this rank's signals; none of a NIC.
    pub late: Option<Lateness>,
}

/// Bytes and floors of an operation over two levels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LevelFigures {
    /// D.
    pub domains: u32,
    /// Bytes between domains of the busiest rank, in its busier direction.
    pub out_bytes: u64,
    /// The same inside domains, to or from other ranks.
    pub inside_bytes: u64,
    /// GB/s that are assumed between domains.
    pub out_gb_s: f64,
    /// GB/s inside.
    pub inside_gb_s: f64,
    /// The floor between domains: the bytes at that rate, in microseconds.
    pub out_us: f64,
    /// The floor inside.
    pub inside_us: f64,
    /// The time as a part of the larger floor: 1 is the best possible; 0 where no byte leaves a rank.
    pub ratio: f64,
    /// The number of SMs by the formula, fitted on H200. None of a pair, nor where each rank is a domain.
    pub formula_sms: Option<u32>,
    /// How late the stand-in between domains was: of the rank with the latest mean. None of a NIC, and where a rank
    /// does not know it.
    pub late: Option<Lateness>,
    /// Whether the stand-in was so late that the figure is void, or may have been.
    pub is_void: bool,
}

impl LevelFigures {
    /// The larger floor in microseconds, and the bytes and the rate of its level.
    pub fn slower(&self) -> (f64, u64, f64) {
        if self.out_us >= self.inside_us {
            (self.out_us, self.out_bytes, self.out_gb_s)
        } else {
            (self.inside_us, self.inside_bytes, self.inside_gb_s)
        }
    }

    /// Why the figure is void, if it is.
    pub fn void(&self, us: f64) -> Option<String> {
        if !self.is_void {
            return None;
        }
        let Some(late) = self.late else {
            let text = "void, because the lateness of the stand-in for a NIC is unknown; expected one of each rank. \
                        Fix: build the program and `paced` of the same version";
            return Some(text.to_owned());
        };
        Some(format!(
            "void, because the stand-in for a NIC was late by {:.1} us in the mean ({:.1} at most since the start) of \
             {us:.1} us; expected at most {:.0} %. Fix: give it more blocks, or a lower rate",
            late.mean_us,
            late.most_us,
            1e2 * MOST_LATE
        ))
    }
}

/// The rows of each rank that works. A GPU of a twin has the load of one rank of a whole world: what it sends is its
/// own, and what it gets is what its channels bring.
fn rows(setup: &Setup, samples: &[&GpuSamples]) -> Option<Vec<RankRows>> {
    let levels: Vec<&LevelSamples> =
        samples.iter().map(|s| s.levels.as_ref()).collect::<Option<_>>()?;
    let domains = levels.first()?.to_domains.len() as u32;
    let size = samples.first()?.sends.len() as u32 / domains;
    let floats = |counts: &[u64]| counts.iter().map(|n| *n as f64).collect::<Vec<f64>>();
    let tokens: Vec<f64> = levels.iter().map(|level| f64::from(level.tokens)).collect();
    let by_domain: Vec<_> = levels.iter().map(|level| floats(&level.to_domains)).collect();
    let by_rank: Vec<_> = samples.iter().map(|s| floats(&s.sends)).collect();
    let Some(gpus) = setup.twin else {
        return Some(RankRows::of_counts([domains, size], &tokens, &by_domain, &by_rank));
    };
    let of_gpu = |me: u32| {
        let from = |place: u32| {
            let (sender, at) = twin::sender(gpus, size, me, place);
            by_rank[sender as usize][at as usize]
        };
        RankRows {
            tokens: tokens[me as usize],
            domain: 0,
            index: me,
            to_domains: by_domain[me as usize].clone(),
            from_domains: by_domain[me as usize].clone(),
            to_peers: by_rank[me as usize].clone(),
            from_sources: (0..domains * size).map(from).collect(),
        }
    };
    Some((0..gpus).map(of_gpu).collect())
}

/// Everything that turns samples into figures of two levels.
#[derive(Clone, Debug)]
pub(super) struct LevelContext {
    pub(super) setup: Setup,
    pub(super) given: GivenRates,
    pub(super) fixed: Fixed,
    /// The rate of the link inside that was measured, in GB/s; 0 where it was not.
    pub(super) measured_gb_s: f64,
}

impl LevelContext {
    /// The figures of an operation that took `us`; none over one level.
    pub(super) fn figures(
        &self,
        case: &Case,
        samples: &[&GpuSamples],
        us: f64,
    ) -> Option<LevelFigures> {
        let rows = rows(&self.setup, samples)?;
        let domains = samples.first()?.levels.as_ref()?.to_domains.len();
        let bytes = PairBytes::new(case.phase, case.rows, &self.fixed).all() as f64;
        let most = |of: &dyn Fn(&RankRows) -> f64| rows.iter().map(of).fold(0.0, f64::max);
        let [out, inside] = [0, 1].map(|level| bytes * most(&|rows| rows.busiest()[level]));
        let [out_gb_s, inside_gb_s] = self.setup.rates(self.given, self.measured_gb_s);
        let floors = [us_of(out, out_gb_s), us_of(inside, inside_gb_s)];
        let larger = floors[0].max(floors[1]);
        let by_sms = |side: usize| bytes * most(&|rows| rows.by_sms()[side]);
        let goes_direct = samples.first()?.sends.len() == domains;
        let formula_sms = match case.phase {
            _ if goes_direct => None,
            Phase::Dispatch => Some(sms_of(by_sms(0), floors)),
            Phase::Combine => Some(sms_of(by_sms(1), floors)),
            Phase::Pair => None,
        };
        let late: Option<Vec<Lateness>> = samples.iter().map(|s| s.levels.as_ref()?.late).collect();
        let late =
            late.unwrap_or_default().into_iter().max_by(|a, b| a.mean_us.total_cmp(&b.mean_us));
        Some(LevelFigures {
            domains: domains as u32,
            out_bytes: out as u64,
            inside_bytes: inside as u64,
            out_gb_s,
            inside_gb_s,
            out_us: floors[0],
            inside_us: floors[1],
            ratio: if larger > 0.0 { us / larger } else { 0.0 },
            formula_sms,
            late,
            // Lateness that is unknown may be any.
            is_void: late.map_or(self.setup.is_paced, |late| late.mean_us > MOST_LATE * us),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::case::{Routing, Rows};
    use super::super::figures::tests::case;
    use super::super::workload::Routed;
    use super::*;
    use crate::levels::{TwoLevels, UNIFORM};

    const FIXED: Fixed = Fixed { hidden: 7168, topk: 8, experts: 256 };

    /// The samples of so many ranks of `domains` of `size`, with uniform routing.
    fn samples(working: u32, [domains, size]: [u32; 2], late_us: f64) -> Vec<GpuSamples> {
        let of = |rank: u32| {
            let routed = Routed::generated(FIXED, &Routing::Uniform, rank, 4096);
            let late = Lateness { signals: 9, mean_us: late_us, most_us: 2.0 * late_us };
            GpuSamples {
                case: case(Rows::Fp8),
                sms: 12,
                sends: routed.sends(domains * size),
                us: vec![700.0; 3],
                spent: Vec::new(),
                levels: Some(LevelSamples {
                    tokens: 4096,
                    to_domains: routed.sends(domains),
                    late: Some(late),
                }),
            }
        };
        (0..working).map(of).collect()
    }

    fn context(setup: Setup) -> LevelContext {
        let given = GivenRates { inside: Some(365.0), out: Some(46.0) };
        LevelContext { setup, given, fixed: FIXED, measured_gb_s: 365.0 }
    }

    fn figures(setup: Setup, samples: &[GpuSamples], phase: Phase) -> LevelFigures {
        let all: Vec<&GpuSamples> = samples.iter().collect();
        context(setup).figures(&Case { phase, ..case(Rows::Fp8) }, &all, 700.0).unwrap()
    }

    #[test]
    fn floors_are_the_bytes_of_the_busiest_rank_at_the_rates_of_both_links() {
        for (setup, working) in
            [(Setup::default(), 16), (Setup { twin: Some(2), ..Setup::default() }, 2)]
        {
            let found = figures(setup, &samples(working, [2, 8], 1.0), Phase::Dispatch);
            let levels = TwoLevels { domains: 2, domain_ranks: 8, experts: 256, topk: 8 };
            let mean = RankRows::expected(&levels, &UNIFORM, 4096.0).unwrap().busiest();
            // Of 16 ranks the busiest one has more rows than the mean.
            for (found, mean) in [found.out_bytes, found.inside_bytes].into_iter().zip(mean) {
                let ratio = found as f64 / (7460.0 * mean);
                assert!((0.98..1.04).contains(&ratio), "{working} ranks: {ratio}");
            }
            assert!((found.out_us - found.out_bytes as f64 / 46e3).abs() < 1e-9);
            assert!((found.inside_us - found.inside_bytes as f64 / 365e3).abs() < 1e-9);
            assert_eq!(found.slower(), (found.out_us, found.out_bytes, 46.0));
            assert!((found.ratio - 700.0 / found.out_us).abs() < 1e-12);
            assert_eq!((found.domains, found.formula_sms), (2, Some(12)));
        }
    }

    #[test]
    fn a_combine_returns_the_rows_of_its_dispatch_and_a_pair_has_no_number_of_sms() {
        let all = samples(16, [2, 8], 1.0);
        let there = figures(Setup::default(), &all, Phase::Dispatch);
        let back = figures(Setup::default(), &all, Phase::Combine);
        assert_eq!(there.out_bytes / 7460, back.out_bytes / 14_336);
        let both = figures(Setup::default(), &all, Phase::Pair);
        assert_eq!(both.out_bytes, there.out_bytes + back.out_bytes);
        assert_eq!(both.formula_sms, None);
    }

    #[test]
    fn a_figure_is_void_where_the_stand_in_was_late_by_more_than_a_twentieth() {
        let of =
            |late_us| figures(Setup::default(), &samples(16, [2, 8], late_us), Phase::Dispatch);
        assert!(!of(35.0).is_void && of(35.0).void(700.0).is_none());
        let void = of(36.0);
        assert!(void.is_void);
        let text = void.void(700.0).unwrap();
        assert!(
            text.contains("late by 36.0 us in the mean (72.0 at most since the start)"),
            "{text}"
        );
    }

    #[test]
    fn a_figure_over_paced_is_void_where_a_rank_does_not_know_how_late_it_was() {
        let mut all = samples(16, [2, 8], 1.0);
        all[3].levels.as_mut().unwrap().late = None;
        let nic = figures(Setup::default(), &all, Phase::Dispatch);
        assert_eq!((nic.is_void, nic.late), (false, None));
        let setup = Setup { is_paced: true, ..Setup::default() };
        let text = figures(setup, &all, Phase::Dispatch).void(700.0).unwrap();
        assert!(text.contains("lateness of the stand-in for a NIC is unknown"), "{text}");
    }

    #[test]
    fn where_each_rank_is_a_domain_nothing_moves_inside_and_no_formula_counts() {
        let found = figures(Setup::default(), &samples(4, [4, 1], 36.0), Phase::Dispatch);
        assert_eq!((found.domains, found.inside_bytes, found.formula_sms), (4, 0, None));
        assert!(found.out_us > 0.0 && found.is_void);
    }

    #[test]
    fn operations_without_a_row_have_figures_that_a_report_can_hold() {
        let mut all = samples(4, [2, 2], 1.0);
        for one in &mut all {
            one.sends = vec![0; 4];
            one.levels.as_mut().unwrap().to_domains = vec![0; 2];
        }
        let found = figures(Setup::default(), &all, Phase::Dispatch);
        assert_eq!(found.ratio, 0.0);
        let text = serde_json::to_string(&found).unwrap();
        assert_eq!(serde_json::from_str::<LevelFigures>(&text).unwrap(), found);
    }

    #[test]
    fn one_level_has_no_figures_of_two() {
        let mut all = samples(2, [1, 2], 0.0);
        all[1].levels = None;
        let all: Vec<&GpuSamples> = all.iter().collect();
        assert_eq!(context(Setup::default()).figures(&case(Rows::Fp8), &all, 1.0), None);
    }

    #[test]
    fn a_rate_that_is_not_known_gives_no_floor() {
        let all = samples(2, [2, 8], 1.0);
        let all: Vec<&GpuSamples> = all.iter().collect();
        let setup = Setup { twin: Some(2), ..Setup::default() };
        let context = LevelContext { given: GivenRates::default(), ..context(setup) };
        let found = context.figures(&case(Rows::Fp8), &all, 700.0).unwrap();
        assert_eq!((found.out_us, found.slower().0), (0.0, found.inside_us));
    }
}
