use super::Shape;
use crate::{Error, ErrorKind, Result};

const OPERATION: &str = "plan receive";

/// The plan of an owner, from the counts of all sources: the place of every row.
///
/// Flat rows are ordered by source rank, then by source token. Within an expert, rows have the same
/// order. So a source needs no more than its first place: the grant, made of
/// [`row_base`](Self::row_base) and [`expert_bases`](Self::expert_bases).
///
/// All memory is allocated by [`new`](Self::new); it is O(R + E).
#[derive(Debug)]
pub struct RecvPlan {
    shape: Shape,
    /// First flat row of each source, then N; `[R + 1]`.
    row_bases: Vec<u32>,
    /// Rows of each local expert, without padding, and without those that a cap drops; `[El]`.
    expert_counts: Vec<u32>,
    /// First row of each local expert, then X; `[El + 1]`.
    expert_starts: Vec<u32>,
    /// First row of each source in each local expert; `[R, El]`. No cap changes them.
    expert_bases: Vec<u32>,
    /// Rows of each local expert that a cap drops; `[El]`.
    dropped: Vec<u32>,
}

impl RecvPlan {
    /// An empty plan: no rows from any source.
    pub fn new(shape: &Shape) -> Self {
        let (ranks, local) = (shape.ranks as usize, shape.local_experts() as usize);
        Self {
            shape: *shape,
            row_bases: vec![0; ranks + 1],
            expert_counts: vec![0; local],
            expert_starts: vec![0; local + 1],
            expert_bases: vec![0; ranks * local],
            dropped: vec![0; local],
        }
    }

    /// Replaces the plan, in O(R + E) and without allocation.
    ///
    /// - `alignment`: A, to which the rows of each expert are rounded up in the expert-major
    ///   layout; 1 for no padding.
    /// - `rows`: rows from each source; `[R]`.
    /// - `expert_counts`: rows from each source for each local expert; `[R, El]`, row-major.
    ///
    /// The counts come from peers, so they are checked. After an error the plan is not usable
    /// until a build succeeds.
    ///
    /// # Errors
    /// - [`ErrorKind::Protocol`] if the counts of a source contradict each other or the shape.
    /// - [`ErrorKind::InvalidInput`] if a length or the alignment is wrong, or if the rows with padding
    ///   exceed the range of an `i32` row index.
    pub fn build(&mut self, alignment: u32, rows: &[u32], expert_counts: &[u32]) -> Result<()> {
        if rows.len() != self.shape.ranks as usize
            || expert_counts.len() != self.expert_bases.len()
            || alignment == 0
        {
            return Err(self.wrong_arguments(alignment, rows.len(), expert_counts.len()));
        }
        let local = self.expert_counts.len();
        for ((source, &rows), counts) in (0..).zip(rows).zip(expert_counts.chunks_exact(local)) {
            self.check_source(source, rows, counts)?;
        }
        self.dropped.fill(0);
        let mut sum = 0;
        for (base, &rows) in self.row_bases[1..].iter_mut().zip(rows) {
            sum += rows;
            *base = sum;
        }
        self.place_experts(alignment, expert_counts)
    }

    /// A source sends at most M rows, and every row has 1 to min(K, El) experts, all different.
    fn check_source(&self, source: u32, rows: u32, counts: &[u32]) -> Result<()> {
        let selected: u64 = counts.iter().copied().map(u64::from).sum();
        let most_selected =
            u64::from(rows) * u64::from(self.shape.topk.min(self.shape.local_experts()));
        let possible = rows <= self.shape.max_tokens
            && (u64::from(rows)..=most_selected).contains(&selected)
            && counts.iter().all(|&count| count <= rows);
        if possible { Ok(()) } else { Err(self.wrong_counts(source, rows, counts)) }
    }

    fn place_experts(&mut self, alignment: u32, counts: &[u32]) -> Result<()> {
        let local = self.expert_counts.len();
        // First the rows from sources of lower rank; the starts are added when all counts are known.
        self.expert_counts.fill(0);
        for (bases, counts) in
            self.expert_bases.chunks_exact_mut(local).zip(counts.chunks_exact(local))
        {
            for ((base, &count), total) in bases.iter_mut().zip(counts).zip(&mut self.expert_counts)
            {
                *base = *total;
                *total += count;
            }
        }
        let mut start = 0;
        for (next, &count) in self.expert_starts[1..].iter_mut().zip(&self.expert_counts) {
            start += u64::from(count).next_multiple_of(u64::from(alignment));
            if start > i32::MAX as u64 {
                return Err(too_many_rows(start, alignment));
            }
            *next = start as u32;
        }
        for bases in self.expert_bases.chunks_exact_mut(local) {
            for (base, &start) in bases.iter_mut().zip(&self.expert_starts) {
                *base += start;
            }
        }
        Ok(())
    }

    /// Leaves out the expert-major rows from `most` on. Each source finds them by its places, which stay as they are.
    pub fn cap_copies(&mut self, most: u64) {
        let most = u32::try_from(most).unwrap_or(u32::MAX);
        let counts = self.expert_counts.iter_mut().zip(&self.expert_starts);
        for ((count, &start), dropped) in counts.zip(&mut self.dropped) {
            let left = (*count).min(most.saturating_sub(start));
            (*dropped, *count) = (*count - left, left);
        }
        self.expert_starts.iter_mut().for_each(|start| *start = most.min(*start));
    }

    /// Leaves out the flat rows from `most` on. Only their ids say which experts they had: see
    /// [`keep_rows`](Self::keep_rows).
    pub fn cap_tokens(&mut self, most: u64) {
        let most = u32::try_from(most).unwrap_or(u32::MAX);
        self.row_bases.iter_mut().for_each(|base| *base = most.min(*base));
    }

    /// Takes the local experts of the flat rows that a cap has left. All other rows of experts were dropped. Ids that
    /// are no experts count nowhere.
    pub fn keep_rows(&mut self, ids: &[i32]) {
        std::mem::swap(&mut self.dropped, &mut self.expert_counts);
        self.expert_counts.fill(0);
        for id in ids.iter().filter_map(|id| usize::try_from(*id).ok()) {
            let Some(dropped) = self.dropped.get_mut(id).filter(|dropped| **dropped > 0) else {
                continue;
            };
            *dropped -= 1;
            self.expert_counts[id] += 1;
        }
    }

    /// Rows of each local expert that a cap has dropped; `[El]`.
    pub fn dropped(&self) -> &[u32] {
        &self.dropped
    }

    /// N: flat rows received, at most R*M.
    pub fn num_rows(&self) -> u32 {
        self.row_bases[self.row_bases.len() - 1]
    }

    /// X: rows of the expert-major layout, padding included.
    pub fn num_expert_rows(&self) -> u32 {
        self.expert_starts[self.expert_starts.len() - 1]
    }

    /// The first flat row of `source`.
    pub fn row_base(&self, source: u32) -> u32 {
        self.row_bases[source as usize]
    }

    /// The rows that `source` sends.
    pub fn rows_from(&self, source: u32) -> u32 {
        self.row_bases[source as usize + 1] - self.row_bases[source as usize]
    }

    /// Rows of each local expert, without padding; `[El]`.
    pub fn expert_counts(&self) -> &[u32] {
        &self.expert_counts
    }

    /// First row of each local expert in the expert-major layout, a multiple of the alignment;
    /// `[El + 1]`, the last is X.
    pub fn expert_starts(&self) -> &[u32] {
        &self.expert_starts
    }

    /// The first row of `source` within each local expert, as expert-major rows; `[El]`.
    pub fn expert_bases(&self, source: u32) -> &[u32] {
        let local = self.expert_counts.len();
        &self.expert_bases[source as usize * local..][..local]
    }

    /// The first row of `source` within local expert `expert`, as an expert-major row.
    pub fn expert_base(&self, expert: u32, source: u32) -> u32 {
        self.expert_bases(source)[expert as usize]
    }

    /// Bytes that [`new`](Self::new) needs for `shape`.
    pub fn bytes_for(shape: &Shape) -> u64 {
        let [ranks, experts] = [shape.ranks, shape.experts].map(u64::from);
        let local = u64::from(shape.local_experts());
        // Bases per source and, of each source, per expert; counts, starts and dropped rows per local expert.
        4 * (ranks + 1) + 4 * experts + 4 * (3 * local + 1)
    }

    /// Bytes allocated, all of them by [`new`](Self::new).
    pub fn memory_bytes(&self) -> usize {
        let words = self.row_bases.capacity()
            + self.expert_counts.capacity()
            + self.expert_starts.capacity()
            + self.expert_bases.capacity()
            + self.dropped.capacity();
        words * size_of::<u32>()
    }

    #[cold]
    fn wrong_arguments(&self, alignment: u32, rows: usize, counts: usize) -> Error {
        Error::new(
            ErrorKind::InvalidInput,
            OPERATION,
            format!(
                "found alignment = {alignment}, {rows} row counts, {counts} expert counts; \
                 expected alignment of at least 1, {} row counts, {} expert counts",
                self.shape.ranks,
                self.expert_bases.len()
            ),
        )
    }

    #[cold]
    fn wrong_counts(&self, source: u32, rows: u32, counts: &[u32]) -> Error {
        let selected: u64 = counts.iter().copied().map(u64::from).sum();
        let largest = counts.iter().copied().max().unwrap_or(0);
        Error::new(
            ErrorKind::Protocol,
            OPERATION,
            format!(
                "found {rows} rows with {selected} selections, up to {largest} per expert; \
                 expected at most {} rows, 1 to {} selections per row, at most one per row and \
                 expert",
                self.shape.max_tokens,
                self.shape.topk.min(self.shape.local_experts())
            ),
        )
        .with_context("source rank", source)
        .with_fix("check that every rank runs the same version with the same shape")
    }
}

#[cold]
fn too_many_rows(rows: u64, alignment: u32) -> Error {
    Error::new(
        ErrorKind::InvalidInput,
        OPERATION,
        format!("found at least {rows} expert-major rows; expected at most {}", i32::MAX),
    )
    .with_context("alignment", alignment)
    .with_fix("lower max_tokens or the expert alignment")
}
