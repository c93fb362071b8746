//! Writing one row with its side arrays.

use tokenyard_core::call::WireFormat;
use tokenyard_core::moe::Shape;

use crate::moe::rows::DROPPED;

/// Where the rows come from.
#[derive(Clone, Copy)]
pub(crate) struct RowSource {
    pub(crate) x: *const u8,
    pub(crate) x_pitch: usize,
    pub(crate) scales: *const u8,
    /// Bytes from row to row and from column to column.
    pub(crate) scale_pitch: [isize; 2],
    pub(crate) weights: *const f32,
    /// The sources of the rows; null for those of this rank, which are numbered.
    pub(crate) sources: *const i32,
}

/// The addresses that rows go to, one for each array: at the peer, or in the stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) x: *mut u8,
    pub(crate) scales: *mut u8,
    pub(crate) ids: *mut u8,
    pub(crate) weights: *mut u8,
    pub(crate) source: *mut u8,
    /// In the stage, rows lie one after the other whatever their final place.
    pub(crate) staged: bool,
}

impl Default for Target {
    fn default() -> Self {
        let none = std::ptr::null_mut();
        Self { x: none, scales: none, ids: none, weights: none, source: none, staged: false }
    }
}

/// The expert-major row to which a token crosses: that of the first k whose expert lives on `rank` and does not drop
/// it.
/// `slots`: the row of each k.
pub(crate) fn first_copy(shape: &Shape, topk: &[i32], slots: &[u32], rank: u32) -> Option<u32> {
    let is_local = |e: &i32| u32::try_from(*e).is_ok_and(|e| shape.rank_of(e) == rank);
    let copies = topk.iter().zip(slots).filter(|(e, slot)| is_local(e) && **slot != DROPPED);
    copies.map(|(_, slot)| *slot).next()
}

/// Writes one row and its side arrays.
pub(crate) struct RowWriter<'a> {
    pub(crate) shape: Shape,
    /// The source of this rank's first row: its rank * M.
    pub(crate) first_source: u32,
    pub(crate) source: RowSource,
    pub(crate) format: WireFormat,
    pub(crate) topk: &'a [i32],
    /// Expert-major: rows of all copies; [`DROPPED`] where there is none.
    pub(crate) slot_of: Option<&'a [u32]>,
}

impl RowWriter<'_> {
    /// # Safety
    /// `target` has room for row `index`, and no other thread writes that row; the source is valid.
    pub(crate) unsafe fn write(&self, target: &Target, peer: u32, index: usize, token: usize) {
        let topk = self.shape.topk as usize;
        let experts = &self.topk[token * topk..(token + 1) * topk];
        let slots = self.slot_of.map(|all| &all[token * topk..(token + 1) * topk]);
        let x_row = match slots {
            Some(slots) if !target.staged => {
                first_copy(&self.shape, experts, slots, peer).map(|row| row as usize)
            }
            _ => Some(index),
        };
        let row = self.format.row;
        let x_bytes = row.x_bytes as usize;
        // SAFETY: by this function's contract; tensors are `[T, ..]` as the host validated.
        unsafe {
            if let Some(row) = x_row {
                let from = self.source.x.add(token * self.source.x_pitch);
                std::ptr::copy_nonoverlapping(from, target.x.add(row * x_bytes), x_bytes);
            }
            self.write_scales(target.scales.add(index * row.scale_bytes as usize), token);
            let ids = target.ids.add(index * 4 * topk).cast::<i32>();
            let weights = target.weights.add(index * 4 * topk).cast::<f32>();
            for (k, expert) in experts.iter().enumerate() {
                let local = u32::try_from(*expert)
                    .ok()
                    .filter(|e| self.shape.rank_of(*e) == peer)
                    .map(|e| e - peer * self.shape.local_experts());
                let id = match slots {
                    Some(slots) => local.map(|_| slots[k]),
                    None => local,
                };
                ids.add(k).write(id.map_or(-1, |id| id as i32));
                if row.weights {
                    let weight = self.source.weights.add(token * topk + k).read();
                    weights.add(k).write(if local.is_some() { weight } else { 0.0 });
                }
            }
            let source = if self.source.sources.is_null() {
                (self.first_source + token as u32) as i32
            } else {
                self.source.sources.add(token).read()
            };
            target.source.add(index * 4).cast::<i32>().write(source);
        }
    }

    /// # Safety
    /// As [`write`](Self::write).
    unsafe fn write_scales(&self, target: *mut u8, token: usize) {
        let [row_pitch, col_pitch] = self.source.scale_pitch;
        for col in 0..self.format.scale_cols as usize {
            // SAFETY: `[T, S]` with these strides, as the host validated.
            unsafe {
                let from = self
                    .source
                    .scales
                    .offset(token as isize * row_pitch + col as isize * col_pitch);
                std::ptr::copy_nonoverlapping(from, target.add(4 * col), 4);
            }
        }
    }
}
