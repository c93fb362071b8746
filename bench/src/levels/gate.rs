//! How tokens choose experts, as a distribution.

/// A gate that chooses `chosen` of `groups` equal groups of consecutive experts, and then K experts of
/// those groups. Each choice is uniform. One group: every set of K experts is equally likely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gate {
    /// Groups of experts.
    pub groups: u32,
    /// Groups that a token may use.
    pub chosen: u32,
}

/// Every set of K experts is equally likely.
pub const UNIFORM: Gate = Gate { groups: 1, chosen: 1 };

impl Gate {
    /// The expected number of `parts` (equal parts of the experts, in order) in which a token has an
    /// expert. There is none where parts and groups do not lie in each other, or where the chosen groups
    /// have fewer than K experts.
    pub fn parts_reached(&self, experts: u32, topk: u32, parts: u32) -> Option<f64> {
        let Self { groups, chosen } = *self;
        let divides = |n: u32, of: u32| n > 0 && of.is_multiple_of(n);
        let is_sound = divides(parts, experts)
            && divides(groups, experts)
            && (1..=groups).contains(&chosen)
            && (divides(groups, parts) || divides(parts, groups));
        let group = experts.checked_div(groups)?;
        let pool = u64::from(chosen) * u64::from(group);
        if !is_sound || u64::from(topk) > pool {
            return None;
        }
        let part = u64::from(experts / parts);
        let reached = if parts >= groups {
            let is_chosen = f64::from(chosen) / f64::from(groups);
            is_chosen * (1.0 - all_elsewhere(pool, part, topk))
        } else {
            let groups_here = groups / parts;
            let chosen_here = |count: u32| {
                let experts_here = u64::from(count) * u64::from(group);
                drawn(groups, groups_here, chosen, count)
                    * (1.0 - all_elsewhere(pool, experts_here, topk))
            };
            (0..=chosen.min(groups_here)).map(chosen_here).sum()
        };
        Some(reached * f64::from(parts))
    }
}

/// The probability that none of `draws` distinct ones of `pool` is among `marked` of them.
fn all_elsewhere(pool: u64, marked: u64, draws: u32) -> f64 {
    let left = pool.saturating_sub(marked);
    let draw = |i: u64| left.saturating_sub(i) as f64 / (pool - i) as f64;
    (0..u64::from(draws)).map(draw).product()
}

/// The probability that `draws` distinct ones of `pool` have exactly `count` of the `marked`.
fn drawn(pool: u32, marked: u32, draws: u32, count: u32) -> f64 {
    let Some(others) = draws.checked_sub(count) else { return 0.0 };
    (ln_choose(marked, count) + ln_choose(pool - marked, others) - ln_choose(pool, draws)).exp()
}

/// The logarithm of the number of ways to choose `k` of `n`.
fn ln_choose(n: u32, k: u32) -> f64 {
    if k > n {
        return f64::NEG_INFINITY;
    }
    (0..k).map(|i| (f64::from(n - i) / f64::from(k - i)).ln()).sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_numbers_of_two_known_cases_come_out() {
        // One of 2 experts per token: half of the tokens reach each part.
        assert_eq!(UNIFORM.parts_reached(2, 1, 2), Some(1.0));
        // 2 of 4 experts in 2 parts: a pair lies in one part in 2 of 6 cases.
        let reached = UNIFORM.parts_reached(4, 2, 2).unwrap();
        assert!((reached - 5.0 / 3.0).abs() < 1e-12, "{reached}");
    }

    #[test]
    fn what_does_not_fit_has_no_expectation() {
        let three = Gate { groups: 3, chosen: 1 };
        assert_eq!(three.parts_reached(12, 1, 2), None);
        assert_eq!(three.parts_reached(12, 5, 3), None);
        assert_eq!(Gate { groups: 0, chosen: 0 }.parts_reached(12, 1, 3), None);
        assert_eq!(UNIFORM.parts_reached(12, 1, 0), None);
        assert_eq!(UNIFORM.parts_reached(12, 1, 5), None);
    }

    proptest! {
        /// The expected value is a sum over all sets of groups and experts.
        #[test]
        fn the_expectation_is_that_of_all_choices(
            sizes in (0_u32..3, 0_u32..3, 1_u32..3), chosen in 1_u32..4, topk in 1_u32..5,
        ) {
            let (groups, parts) = (1 << sizes.0, 1 << sizes.1);
            let experts = groups.max(parts) * sizes.2;
            let chosen = chosen.min(groups);
            let gate = Gate { groups, chosen };
            let sets = |n: u32, k: u32| (0..1_u32 << n).filter(move |set| set.count_ones() == k);
            let (mut sum, mut of_groups) = (0.0, 0.0);
            for some in sets(groups, chosen) {
                let allowed = |e: &u32| some >> (e / (experts / groups)) & 1 == 1;
                let pool: Vec<u32> = (0..experts).filter(allowed).collect();
                let (mut reached, mut count) = (0, 0);
                for set in sets(pool.len() as u32, topk) {
                    let picked = pool.iter().enumerate().filter(|(i, _)| set >> i & 1 == 1);
                    let touched = picked.fold(0_u32, |all, (_, e)| all | 1 << (e / (experts / parts)));
                    reached += touched.count_ones();
                    count += 1;
                }
                sum += f64::from(reached) / f64::from(count.max(1));
                of_groups += 1.0;
            }
            match gate.parts_reached(experts, topk, parts) {
                Some(found) => prop_assert!((found - sum / of_groups).abs() < 1e-9),
                None => prop_assert!(topk > chosen * (experts / groups)),
            }
        }

        #[test]
        fn more_parts_are_never_reached_by_fewer_rows(
            experts in 0_u32..8, topk in 1_u32..9, parts in 0_u32..8,
        ) {
            let reached = |parts: u32| UNIFORM.parts_reached(1 << experts, topk, 1 << parts);
            if let (Some(few), Some(many)) = (reached(parts), reached(parts + 1)) {
                prop_assert!(many + 1e-9 >= few && few <= f64::from(topk) + 1e-9);
            }
        }
    }
}
