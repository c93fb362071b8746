//! Rows that a rank moves in an operation, from the routing or on average.

use super::{Gate, TwoLevels};

/// Rows of one rank (d, s) in a dispatch. A combine moves the same rows the other way.
#[derive(Clone, Debug, PartialEq)]
pub struct RankRows {
    /// T.
    pub tokens: f64,
    /// d, the rank's domain.
    pub domain: u32,
    /// s, its index there.
    pub index: u32,
    /// `[D]`: this rank's tokens with experts in each domain. Those of the other domains cross the rail.
    pub to_domains: Vec<f64>,
    /// `[D]`: rows of the source with index s in each domain that have experts in this one. Those of the
    /// other domains come over the rail.
    pub from_domains: Vec<f64>,
    /// `[D, S]`: how many of `from_domains` this rank moves to each peer of its domain, itself included.
    pub to_peers: Vec<f64>,
    /// `[R]`: rows of this rank's output, by source. Peer s' moves those of the sources with index s'.
    pub from_sources: Vec<f64>,
}

/// How many tokens select experts in each of `parts` equal parts of all experts.
fn reached(routing: &[i64], levels: &TwoLevels, parts: u32) -> Vec<f64> {
    let part = levels.experts / parts;
    let mut counts = vec![0.0; parts as usize];
    for token in routing.chunks(levels.topk as usize) {
        let part_of = |expert: &i64| Some(u32::try_from(*expert).ok()? / part);
        let mut touched: Vec<u32> = token.iter().filter_map(part_of).collect();
        touched.sort_unstable();
        touched.dedup();
        touched.iter().for_each(|part| counts[*part as usize] += 1.0);
    }
    counts
}

impl RankRows {
    /// The rows of each rank for the routing of all ranks, `[T, K]` each.
    ///
    /// # Panics
    /// There is no routing for some rank, or an expert that does not exist.
    pub fn exact(levels: &TwoLevels, routings: &[Vec<i64>]) -> Vec<Self> {
        let TwoLevels { domains, domain_ranks: size, .. } = *levels;
        let by_domain: Vec<_> = routings.iter().map(|r| reached(r, levels, domains)).collect();
        let by_rank: Vec<_> = routings.iter().map(|r| reached(r, levels, levels.ranks())).collect();
        let tokens: Vec<_> =
            routings.iter().map(|r| (r.len() / levels.topk as usize) as f64).collect();
        Self::of_counts([domains, size], &tokens, &by_domain, &by_rank)
    }

    /// The rows of each rank of `[D, S]`: from its tokens, and how many of them have experts in each domain and on
    /// each rank.
    ///
    /// # Panics
    /// A list is shorter than there are ranks.
    pub fn of_counts(
        [domains, size]: [u32; 2],
        tokens: &[f64],
        by_domain: &[Vec<f64>],
        by_rank: &[Vec<f64>],
    ) -> Vec<Self> {
        let rows_of = |rank: u32| {
            let (domain, index) = (rank / size, rank % size);
            let rail = (0..domains).map(|d| (d * size + index) as usize);
            let here = (domain * size) as usize..((domain + 1) * size) as usize;
            Self {
                tokens: tokens[rank as usize],
                domain,
                index,
                to_domains: by_domain[rank as usize].clone(),
                from_domains: rail.clone().map(|q| by_domain[q][domain as usize]).collect(),
                to_peers: rail.flat_map(|q| by_rank[q][here.clone()].to_vec()).collect(),
                from_sources: by_rank.iter().map(|rows| rows[rank as usize]).collect(),
            }
        };
        (0..domains * size).map(rows_of).collect()
    }

    /// The rows of any rank on average, where each has `tokens` tokens. None where the gate does not fit
    /// the levels.
    pub fn expected(levels: &TwoLevels, gate: &Gate, tokens: f64) -> Option<Self> {
        let TwoLevels { domains, experts, topk, .. } = *levels;
        let ranks = levels.ranks();
        let per_part = |parts: u32| {
            Some(tokens * gate.parts_reached(experts, topk, parts)? / f64::from(parts))
        };
        let (domain, rank) = (per_part(domains)?, per_part(ranks)?);
        Some(Self {
            tokens,
            domain: 0,
            index: 0,
            to_domains: vec![domain; domains as usize],
            from_domains: vec![domain; domains as usize],
            to_peers: vec![rank; ranks as usize],
            from_sources: vec![rank; ranks as usize],
        })
    }

    /// The domains of others, of one of the lists by domain.
    pub(super) fn others<'a>(&self, by_domain: &'a [f64]) -> impl Iterator<Item = f64> + use<'a> {
        let mine = self.domain as usize;
        let others = by_domain.iter().enumerate().filter(move |(domain, _)| *domain != mine);
        others.map(|(_, rows)| *rows)
    }

    /// Rows that this rank puts on its rail.
    pub fn crossing(&self) -> f64 {
        self.others(&self.to_domains).sum()
    }

    /// The most rows of either direction: to or from other domains, and to or from other ranks of the domain.
    pub fn busiest(&self) -> [f64; 2] {
        let came: f64 = self.others(&self.from_domains).sum();
        let got: f64 = self.split(&self.from_sources)[0].iter().copied().sum();
        [self.crossing().max(came), self.moved_inside().max(got)]
    }

    /// Rows that this rank's SMs write in a dispatch, and load in a combine.
    pub fn by_sms(&self) -> [f64; 2] {
        let inside = self.to_peers.iter().sum::<f64>();
        [self.crossing() + inside, inside + self.to_domains.iter().sum::<f64>()]
    }

    /// One of the lists by place, without and with this rank alone.
    pub(super) fn split<'a>(&self, by_place: &'a [f64]) -> [Vec<&'a f64>; 2] {
        let (me, size) = (self.index as usize, by_place.len() / self.to_domains.len());
        let is_mine = |place: usize| place % size == me;
        let of = |mine: bool| {
            let places = by_place.iter().enumerate().filter(|(place, _)| is_mine(*place) == mine);
            places.map(|(_, rows)| rows).collect()
        };
        [of(false), of(true)]
    }

    /// Rows that this rank moves to other ranks of its domain.
    pub fn moved_inside(&self) -> f64 {
        self.split(&self.to_peers)[0].iter().copied().sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::UNIFORM;
    use super::*;
    use crate::workload::Random;

    /// Any world of up to 4 domains of 4 ranks, with a routing in which some entries select nothing.
    fn worlds() -> impl Strategy<Value = (TwoLevels, Vec<Vec<i64>>)> {
        (1_u32..5, 1_u32..5, 1_u32..4, 1_u32..6, any::<u64>()).prop_map(|(d, s, el, k, seed)| {
            let experts = d * s * el;
            let topk = k.min(experts);
            let levels = TwoLevels { domains: d, domain_ranks: s, experts, topk };
            let mut random = Random::new(seed);
            let mut routing = || {
                let tokens = random.below(9);
                let mut all = Vec::new();
                for _ in 0..tokens {
                    let mut ids: Vec<i64> = (0..i64::from(experts)).collect();
                    for at in 0..topk as usize {
                        let other = at + random.below((ids.len() - at) as u64) as usize;
                        ids.swap(at, other);
                        let is_selected = random.below(5) > 0;
                        all.push(if is_selected { ids[at] } else { -1 });
                    }
                }
                all
            };
            (levels, (0..levels.ranks()).map(|_| routing()).collect())
        })
    }

    fn sum(rows: &[RankRows], of: impl Fn(&RankRows) -> f64) -> f64 {
        rows.iter().map(of).sum()
    }

    proptest! {
        #[test]
        fn a_row_crosses_once_for_each_other_domain_of_its_experts(world in worlds()) {
            let (levels, routings) = world;
            let rows = RankRows::exact(&levels, &routings);
            for (rank, routing) in (0..).zip(&routings) {
                let mut crossings = 0;
                for token in routing.chunks(levels.topk as usize) {
                    for domain in (0..levels.domains).filter(|d| *d != rank / levels.domain_ranks) {
                        let size = i64::from(levels.experts / levels.domains);
                        let is_there = |e: &i64| *e >= 0 && e / size == i64::from(domain);
                        crossings += u32::from(token.iter().any(is_there));
                    }
                }
                prop_assert_eq!(rows[rank as usize].crossing(), f64::from(crossings));
            }
            let came = sum(&rows, |r| r.others(&r.from_domains).sum());
            prop_assert_eq!(sum(&rows, RankRows::crossing), came);
        }

        #[test]
        fn every_pair_of_a_token_and_a_rank_is_moved_inside_once(world in worlds()) {
            let (levels, routings) = world;
            let rows = RankRows::exact(&levels, &routings);
            let pairs: f64 = routings.iter().map(|r| reached(r, &levels, levels.ranks()).iter().sum::<f64>()).sum();
            prop_assert_eq!(sum(&rows, |r| r.to_peers.iter().sum()), pairs);
            prop_assert_eq!(sum(&rows, |r| r.from_sources.iter().sum()), pairs);
            // Peers get from a rank all that it moves to them.
            let got = sum(&rows, |r| r.split(&r.from_sources)[0].iter().copied().sum());
            prop_assert_eq!(sum(&rows, RankRows::moved_inside), got);
        }

        #[test]
        fn one_level_moves_nothing_on_the_other(world in worlds()) {
            let (levels, routings) = world;
            for rows in RankRows::exact(&levels, &routings) {
                prop_assert!(levels.domains > 1 || rows.crossing() == 0.0);
                prop_assert!(levels.domain_ranks > 1 || rows.moved_inside() == 0.0);
            }
        }
    }

    #[test]
    fn the_expectation_is_the_mean_of_many_tokens() {
        let levels = TwoLevels { domains: 4, domain_ranks: 2, experts: 32, topk: 4 };
        let sizes = crate::Sizes { tokens: 4000, hidden: 16, topk: 4, experts: 32 };
        let routings: Vec<_> = (0..8).map(|r| crate::workload::routing(&sizes, r)).collect();
        let exact = RankRows::exact(&levels, &routings);
        let expected = RankRows::expected(&levels, &UNIFORM, 4000.0).unwrap();
        for (found, expected) in [
            (sum(&exact, RankRows::crossing) / 8.0, expected.crossing()),
            (sum(&exact, RankRows::moved_inside) / 8.0, expected.moved_inside()),
        ] {
            // 32,000 tokens: the mean of a bounded number of rows is known to about 0.5 %.
            assert!((found / expected - 1.0).abs() < 0.01, "{found} of {expected}");
        }
    }
}
