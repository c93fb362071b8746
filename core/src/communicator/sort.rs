//! The kinds of operations of a communicator. Reports name them.

/// The kind of an operation: its index in [`NAMES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    Dispatch = 0,
    Replay = 1,
    Combine = 2,
}

/// The names of the kinds, as reports have them.
pub(super) const NAMES: &[&str] = &["dispatch", "replay", "combine"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_its_name() {
        for (kind, name) in
            [(Sort::Dispatch, "dispatch"), (Sort::Replay, "replay"), (Sort::Combine, "combine")]
        {
            assert_eq!(NAMES.get(kind as usize), Some(&name));
        }
        assert_eq!(NAMES.len(), 3);
    }
}
