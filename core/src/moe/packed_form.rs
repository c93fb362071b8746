//! The forms of arrays in the packed layout.

use crate::abi;

/// How the scales of received packed rows lie in memory. Ranks need not agree on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScaleLayout {
    /// `[El, R*M, S]`: the scales of a row lie together.
    #[default]
    RowMajor,
    /// `[El, S, R*M]`: a column of the scales of an expert's rows lies together, as matrix products of FP8 read them.
    ColumnMajor,
}

impl ScaleLayout {
    /// Elements from one row of an expert's block to the next, and from one column to the next. The block has `rows`
    /// rows of `columns` scales.
    pub const fn strides(self, rows: u64, columns: u64) -> [u64; 2] {
        match self {
            Self::RowMajor => [columns, 1],
            Self::ColumnMajor => [1, rows],
        }
    }

    /// The places of the scales of row `row` of all blocks, in elements.
    pub fn places(self, row: u64, rows: u64, columns: u64) -> impl Iterator<Item = u64> {
        let [by_row, by_column] = self.strides(rows, columns);
        let first = row / rows * rows * columns + row % rows * by_row;
        (0..columns).map(move |column| first + column * by_column)
    }

    pub(crate) fn of_flags(flags: u32) -> Self {
        match flags & abi::TY_DISPATCH_COLUMN_SCALES {
            0 => Self::RowMajor,
            _ => Self::ColumnMajor,
        }
    }

    pub(crate) fn flag(self) -> u32 {
        match self {
            Self::RowMajor => 0,
            Self::ColumnMajor => abi::TY_DISPATCH_COLUMN_SCALES,
        }
    }
}

/// The numbers in `source` of received packed rows. Ranks need not agree on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SourceIndex {
    /// Source rank * M + source token.
    #[default]
    RankAndToken,
    /// The source token alone; `ranges` has the rank.
    Token,
}

impl SourceIndex {
    /// The factor of the source rank, where M is `max_tokens`.
    pub const fn step(self, max_tokens: u32) -> u32 {
        match self {
            Self::RankAndToken => max_tokens,
            Self::Token => 0,
        }
    }

    pub(crate) fn of_flags(flags: u32) -> Self {
        match flags & abi::TY_DISPATCH_SOURCE_TOKENS {
            0 => Self::RankAndToken,
            _ => Self::Token,
        }
    }

    pub(crate) fn flag(self) -> u32 {
        match self {
            Self::RankAndToken => 0,
            Self::Token => abi::TY_DISPATCH_SOURCE_TOKENS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_place_of_a_block_has_one_scale_in_either_layout() {
        for layout in [ScaleLayout::RowMajor, ScaleLayout::ColumnMajor] {
            let mut all: Vec<u64> = (0..3 * 5).flat_map(|row| layout.places(row, 5, 4)).collect();
            all.sort_unstable();
            assert_eq!(all, (0..3 * 5 * 4).collect::<Vec<_>>(), "{layout:?}");
        }
    }

    #[test]
    fn scales_of_a_row_lie_together_or_a_column_apart() {
        let of = |layout: ScaleLayout| layout.places(7, 5, 4).collect::<Vec<_>>();
        assert_eq!(of(ScaleLayout::RowMajor), [28, 29, 30, 31]);
        assert_eq!(of(ScaleLayout::ColumnMajor), [22, 27, 32, 37]);
    }
}
