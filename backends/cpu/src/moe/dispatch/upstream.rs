//! The rows of a dispatch: those of the caller; or, in groups, those that came over the rail.

use tokenyard_core::Result;
use tokenyard_core::call::{DispatchCall, WireFormat};

use crate::moe::launcher::Launcher;
use crate::moe::operation::DispatchOp;
use crate::moe::rows::moves::Move;
use crate::moe::rows::transfer::{move_to_landing, move_to_regions};
use crate::moe::rows::writer::RowSource;
use crate::moe::runner::Runner;

/// The local experts of the rows that landed from a source: `[rows, K]`.
pub(crate) fn landed_ids<'a>(
    runner: &Runner,
    slot: usize,
    format: &WireFormat,
    source: u32,
) -> Result<&'a [i32]> {
    let layout = runner.landing_layout(format)?;
    let rows = runner.routing.gathered.rows[source as usize] as usize;
    let at = runner.places.slots.landing(slot, source) + layout.ids.offset;
    let count = rows * runner.exchange.shape.topk as usize;
    // SAFETY: there is room for M rows of K ids; they are complete, and stay as they are until
    // this rank has left the operation.
    Ok(unsafe { std::slice::from_raw_parts(runner.places.control.at(at).cast(), count) })
}

/// The rows that came over the rail in an operation, by group, which is the domain of their source.
pub(crate) struct Upstream<'a> {
    pub(crate) runner: &'a Runner,
    pub(crate) slot: usize,
    pub(crate) format: WireFormat,
}

impl Upstream<'_> {
    /// Whether nothing came of a group, because its source is lost.
    pub(crate) fn is_gone(&self, group: u32) -> bool {
        self.runner.routing.gathered.entries[group as usize].gone
    }

    pub(crate) fn rows(&self, group: u32) -> u32 {
        self.runner.routing.gathered.rows[group as usize]
    }

    /// `[rows, K]` experts of this domain, counted from its first, or -1, as their source wrote them.
    pub(crate) fn ids(&self, group: u32) -> Result<&[i32]> {
        landed_ids(self.runner, self.slot, &self.format, group)
    }

    /// The rows, where they landed.
    pub(crate) fn source(&self, group: u32) -> Result<RowSource> {
        let places = &self.runner.places;
        let layout = self.runner.landing_layout(&self.format)?;
        let base = places.slots.landing(self.slot, group);
        let at = |offset: u64| places.control.at(base + offset).cast_const();
        Ok(RowSource {
            x: at(layout.x.offset),
            x_pitch: self.format.row.x_bytes as usize,
            scales: at(layout.scales.offset),
            scale_pitch: [self.format.row.scale_bytes as isize, 4],
            weights: at(layout.weights.offset).cast(),
            sources: at(layout.source.offset).cast(),
        })
    }
}

/// The rows of a dispatch: those of the call; or, by group, those that came over the rail.
pub(crate) struct Rows<'a> {
    pub(crate) call: &'a DispatchCall<'a>,
    pub(crate) upstream: Option<&'a Upstream<'a>>,
}

impl Rows<'_> {
    /// # Safety
    /// The call's tensors are valid until the operation is received.
    unsafe fn of(&self, launcher: &mut Launcher, group: u32) -> Result<RowSource> {
        match self.upstream {
            // SAFETY: by this function's contract.
            None => unsafe { launcher.row_source(self.call, &self.call.format) },
            Some(upstream) => upstream.source(group),
        }
    }

    /// Moves the rows of each group, except for groups whose source is lost.
    ///
    /// # Safety
    /// As [`of`](Self::of).
    pub(crate) unsafe fn move_all(
        &self,
        runner: &mut Runner,
        slot: usize,
        op: &DispatchOp,
    ) -> Result<()> {
        for group in runner.exchange.member.domains.all() {
            if runner.routing.is_source_gone(group) {
                continue;
            }
            let m = Move { group, ..op.carry(slot) };
            // SAFETY: by this function's contract; landing places stay as they are until this rank has left
            // the operation on the rail.
            unsafe {
                let source = self.of(&mut runner.launcher, group)?;
                match op.lands {
                    true => move_to_landing(runner, &m, &source)?,
                    false => move_to_regions(runner, &m, &source)?,
                }
            }
        }
        Ok(())
    }
}
