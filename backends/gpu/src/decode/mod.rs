//! Dispatch and combine of few tokens, whose rows leave before anything is counted.

pub(crate) mod loaded;
pub(crate) mod masked;
pub(crate) mod sizes;
pub(crate) mod steps;
