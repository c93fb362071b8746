/// A cap on the rows of a rank's output: P, and what happens where more rows come.
///
/// Rows keep the places that they have without a cap. So in the expert-major layout an expert starts behind the aligned
/// rows of those before it, whether or not rows of these are dropped. The rows from P on are too many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowCap {
    /// P: the most rows of x, padding included. At least 1. Ranks may have different ones.
    pub rows: u64,
    /// The fate of the rows from P on.
    pub overflow: Overflow,
}

/// The fate of rows that are too many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Overflow {
    /// The dispatch fails on all ranks, before a row moves.
    #[default]
    Error,
    /// They are left out. Outputs name how many of each expert, and combine leaves them out of its sums.
    Drop,
}

impl RowCap {
    /// A cap that drops the rows from `rows` on.
    pub const fn dropping(rows: u64) -> Self {
        Self { rows, overflow: Overflow::Drop }
    }

    /// True if rows from P on are left out.
    pub fn drops(self) -> bool {
        self.overflow == Overflow::Drop
    }
}
