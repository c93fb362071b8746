//! Variants of rank-major kernels that are compared with each other: measured on GPUs, one of each is left.

use std::sync::OnceLock;

/// The environment variable that names those in use, apart by commas, as the fields of [`Variants`]. Without it the
/// default counts; `none` names no variant.
const VARIABLE: &str = "TOKENYARD_TEST_RANK_MAJOR";
const DEFAULT: &str = "combine,ballots,few,carveout";

/// The variants in use in a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Variants {
    /// Combines of rows of 16-bit numbers have a kernel of their own.
    pub(crate) combine: bool,
    /// Its blocks have 512 threads, also where a row needs fewer.
    pub(crate) wide: bool,
    /// Dispatches make sets of ranks by ballots, and one block posts heads and counts, and reports the outcome.
    pub(crate) ballots: bool,
    /// With `ballots`: a block has 256 threads, with more of a row each, so that two blocks fit a multiprocessor.
    pub(crate) few: bool,
    /// Both kernels ask for the same division of a multiprocessor's memory: where they differ, a block of the one does
    /// not start beside one of the other.
    pub(crate) carveout: bool,
}

impl Variants {
    /// Of this process.
    pub(crate) fn get() -> Self {
        static FOUND: OnceLock<Variants> = OnceLock::new();
        *FOUND.get_or_init(|| {
            Self::of(&std::env::var(VARIABLE).unwrap_or_else(|_| DEFAULT.to_owned()))
        })
    }

    fn of(named: &str) -> Self {
        let has = |name: &str| named.split(',').any(|one| one.trim() == name);
        Self {
            combine: has("combine"),
            wide: has("wide"),
            ballots: has("ballots"),
            few: has("few"),
            carveout: has("carveout"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_the_variants_in_use() {
        assert_eq!(Variants::of("none"), Variants::default());
        let found = Variants::of("combine, few");
        assert_eq!(found, Variants { combine: true, few: true, ..Variants::default() });
        let usual =
            Variants { combine: true, ballots: true, few: true, carveout: true, wide: false };
        assert_eq!(Variants::of(DEFAULT), usual);
    }
}
