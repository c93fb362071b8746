//! The rank-major layout: landed rows are copied to the block of their source.

use std::ops::Range;

use tokenyard_core::Result;
use tokenyard_core::moe::{RegionLayout, Span};

use crate::engine::places::Places;
use crate::engine::record::bad_record;
use crate::moe::dispatch::output::write_counts;
use crate::moe::operation::{DispatchOp, Output};
use crate::moe::runner::Runner;

/// The rows of one source on their way to its block of M rows.
struct SourceBlock<'a> {
    places: &'a Places,
    op: &'a DispatchOp,
    output: &'a Output,
    landing: &'a RegionLayout,
    /// Where the rows landed.
    base: u64,
    /// The first row of the block.
    first: usize,
    topk: usize,
}

/// One array of the rows.
struct Part {
    landed: Span,
    out: Span,
    /// Bytes of a row.
    width: usize,
    /// Whether it is -1, where there is no token.
    is_mark: bool,
}

/// Copies the rows of every source to its block.
pub(crate) fn place_rows(
    runner: &mut Runner,
    slot: usize,
    op: &DispatchOp,
    output: &Output,
) -> Result<()> {
    let landing = runner.landing_layout(&op.format)?;
    let shape = runner.exchange.regions;
    let (state, local) = (&runner.routing.handles[op.handle], shape.local_experts() as usize);
    let (room, zeroes) = (state.max_tokens as usize, state.arrangement.layout.zero_padding());
    for source in 0..shape.ranks {
        let came = runner.routing.gathered.entries[source as usize].rows as usize;
        // A replay has places for the rows of its dispatch, of which none come where the source was lost since then.
        let rows = match op.signature.is_fresh() {
            true => came,
            false => runner.routing.handles[op.handle].recv.rows_from(source) as usize,
        };
        let block = SourceBlock {
            places: &runner.places,
            op,
            output,
            landing: &landing,
            base: runner.places.slots.landing(slot, source),
            first: source as usize * room,
            topk: shape.topk as usize,
        };
        block.copy(came);
        let counts = &mut runner.routing.gathered.counts[source as usize * local..][..local];
        block.count(came, source, counts)?;
        block.clear(came..rows, true);
        block.clear(rows..room, zeroes);
    }
    if op.signature.is_fresh() {
        remember_rows(runner, op, room)?;
    }
    write_counts(&runner.routing, &runner.places, op, output);
    Ok(())
}

/// Stores in the handle how many rows each source has, and where they lie.
fn remember_rows(runner: &mut Runner, op: &DispatchOp, room: usize) -> Result<()> {
    let gathered = &runner.routing.gathered;
    let state = &mut runner.routing.handles[op.handle];
    state.recv.build(1, &gathered.rows, &gathered.counts)?;
    state.tokens = state.recv.num_rows().into();
    state.rows = state.recv.num_expert_rows().into();
    state.slots.clear();
    for (source, rows) in gathered.rows.iter().enumerate() {
        let first = source * room;
        state.slots.extend((first..first + *rows as usize).map(|row| row as i32));
    }
    Ok(())
}

impl SourceBlock<'_> {
    fn landed(&self, part: &Part) -> *const u8 {
        self.places.control.at(self.base + part.landed.offset).cast_const()
    }

    fn out(&self, part: &Part, row: usize) -> *mut u8 {
        let array = self.places.array(self.output, part.out);
        array.wrapping_add((self.first + row) * part.width)
    }

    fn ids(&self) -> Part {
        let (landed, out) = (self.landing.ids, self.output.layout.ids);
        Part { landed, out, width: 4 * self.topk, is_mark: true }
    }

    /// The arrays that come with a row. Those that the dispatch lacks have rows of no bytes.
    fn parts(&self) -> [Part; 5] {
        let (landing, layout, row) = (self.landing, &self.output.layout, self.op.format.row);
        let part = |landed, out, width| Part { landed, out, width, is_mark: false };
        let weights = if row.weights { 4 * self.topk } else { 0 };
        [
            part(landing.x, layout.x, row.x_bytes as usize),
            part(landing.scales, layout.scales, row.scale_bytes as usize),
            part(landing.weights, layout.weights, weights),
            self.ids(),
            Part { is_mark: true, ..part(landing.source, layout.source, 4) },
        ]
    }

    /// Copies the first rows.
    fn copy(&self, rows: usize) {
        for part in self.parts() {
            // SAFETY: at most M rows of each array, complete because their signal was seen, go to the M rows of
            // the source's block in this rank's region.
            unsafe {
                let to = self.out(&part, 0);
                std::ptr::copy_nonoverlapping(self.landed(&part), to, rows * part.width);
            }
        }
    }

    /// Counts the first rows of each local expert.
    fn count(&self, rows: usize, source: u32, counts: &mut [u32]) -> Result<()> {
        counts.fill(0);
        let ids = self.out(&self.ids(), 0).cast::<i32>();
        for place in 0..rows * self.topk {
            // SAFETY: ids that were copied to this rank's region, where no source can change them.
            let id = unsafe { ids.add(place).read() };
            let Ok(expert) = usize::try_from(id) else { continue };
            match counts.get_mut(expert) {
                Some(count) => *count += 1,
                None => return Err(bad_record(source, format!("local expert {id}"))),
            }
        }
        Ok(())
    }

    /// Marks rows as those of no token; with `zeroes` it clears the rest of them.
    fn clear(&self, rows: Range<usize>, zeroes: bool) {
        for part in self.parts().iter().filter(|part| part.is_mark || zeroes) {
            let byte = if part.is_mark { 0xff } else { 0 };
            // SAFETY: rows of the source's block in this rank's region.
            unsafe { self.out(part, rows.start).write_bytes(byte, rows.len() * part.width) };
        }
    }
}
