//! The worker pool of an exchange, and the working memory of its loops over rows.

use std::sync::Arc;

use tokenyard_core::moe::Quant;

use crate::engine::launch::PIECE_BYTES;
use crate::moe::exchange::Exchange;
use crate::moe::rows::moves::Spot;
use crate::moe::rows::writer::Target;
use crate::pool::Pool;

/// Working memory of a dispatch; allocated once.
#[derive(Debug)]
pub(crate) struct RowScratch {
    /// Rows cast to FP8, `[M, H]`, and their scales.
    pub(crate) cast_rows: Vec<u8>,
    pub(crate) cast_scales: Vec<u8>,
    /// `[M, K]`: expert-major row of each copy at its owner.
    pub(crate) slot_of: Vec<u32>,
    /// `[S * El]`: next row in each expert's block.
    pub(crate) next: Vec<u32>,
    /// By peer.
    pub(crate) spots: Vec<Spot>,
    pub(crate) targets: Vec<Target>,
}

impl RowScratch {
    fn new(exchange: &Exchange) -> Self {
        let Exchange { shape, .. } = exchange;
        let tokens = shape.max_tokens as usize;
        Self {
            cast_rows: vec![0; tokens * shape.hidden as usize],
            cast_scales: vec![0; tokens * Quant::FP8.scale_bytes(shape.hidden) as usize],
            slot_of: vec![0; tokens * shape.topk as usize],
            next: vec![0; shape.experts as usize],
            spots: vec![Spot::default(); shape.ranks as usize],
            targets: vec![Target::default(); shape.ranks as usize],
        }
    }
}

/// The pool that runs the loops over rows, and their working memory.
#[derive(Debug)]
pub(crate) struct Launcher {
    pub(crate) exchange: Exchange,
    pub(crate) scratch: RowScratch,
    pub(crate) pool: Arc<Pool>,
}

impl Launcher {
    pub(crate) fn new(exchange: Exchange, pool: Arc<Pool>) -> Self {
        Self { exchange, scratch: RowScratch::new(&exchange), pool }
    }

    /// Rows of a piece, where a row has so many bytes.
    pub(crate) fn piece_rows(&self, width: u64) -> usize {
        (PIECE_BYTES / width.max(1)).max(1) as usize * self.pool.threads()
    }
}
