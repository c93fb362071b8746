//! Divisors of kernels. A kernel multiplies instead of dividing: see `quotient` in `moe_args.cuh`.

/// 2^32 / `by`, rounded up; 0 for 1, which has no such number of 32 bits.
pub(crate) fn factor(by: u32) -> u32 {
    (u32::MAX / by.max(1)).wrapping_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As kernels compute it.
    fn quotient(n: u32, by: u32, factor: u32) -> u32 {
        if factor == 0 {
            return n;
        }
        let found = ((u64::from(n) * u64::from(factor)) >> 32) as u32;
        found - u32::from((n.wrapping_sub(found.wrapping_mul(by))).cast_signed() < 0)
    }

    #[test]
    fn a_product_gives_the_quotient_of_all_numbers() {
        let divisors =
            (1..3000).chain((12..20).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) + 1]));
        for by in divisors {
            // Around multiples a quotient that is one too many or too few shows.
            let most = u32::MAX / by;
            for times in
                [0, 1, 2, 3, 1023, most / 3, most / 2, most - 1].map(|times| times.min(most))
            {
                for n in [times * by, (times * by).saturating_sub(1), times * by + (by - 1)] {
                    assert_eq!(quotient(n, by, factor(by)), n / by, "{n} / {by}");
                }
            }
        }
    }
}
