//! Variants of rank-major kernels that are compared with each other: measured on GPUs, one of each is left.

use std::sync::OnceLock;

/// The environment variable that names those in use, apart by commas: `combine`, `wide`. None: the default; `none`:
/// no variant.
const VARIABLE: &str = "TOKENYARD_TEST_RANK_MAJOR";
const DEFAULT: &str = "combine";

/// What is in use in this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Variants {
    /// Combines of rows of 16-bit numbers have a kernel of their own.
    pub(crate) combine: bool,
    /// Its blocks have 512 threads, also where a row needs fewer.
    pub(crate) wide: bool,
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
        Self { combine: has("combine"), wide: has("wide") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_the_variants_in_use() {
        assert_eq!(Variants::of("none"), Variants::default());
        assert_eq!(Variants::of("combine, wide"), Variants { combine: true, wide: true });
    }
}
