//! How a dispatch moves rows, and the pieces that rows move in.

use tokenyard_core::moe::{Quant, REGION_ALIGN, RowFormat};

/// A longer row moves in pieces.
pub(crate) const LONGEST_PIECE: u64 = 16_384;
/// The most bytes of a piece of a row that is cast as it moves, counted before the cast. A warp has two
/// stages of bf16: one fills while the other is cast.
const LONGEST_CAST: u64 = 8192;
/// Channels of a piece of such a row are a multiple of this, so that words of scales belong to one piece:
/// four UE8M0 scales share one.
const CAST_CHANNELS: u64 = 4 * Quant::FP8_UE8M0.group as u64;

/// How warps move rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moving {
    /// By bulk copies, each to one place of a rank. `beside`: another exchange is under way, on a rail or inside.
    Links { beside: bool },
    /// As `Links`, while other warps spread rows that arrive: see `tiles.cuh`. `few`: some of few blocks push.
    Tiles { few: bool },
    /// In any other way.
    Any,
    /// Rows of channels of this many bytes are cast on the way.
    Cast { channel_bytes: u32 },
}

/// A piece of a row, and its stage.
pub(crate) struct Piece {
    pub(crate) bytes: u32,
    pub(crate) count: u32,
    pub(crate) scales: u32,
    pub(crate) pitch: u32,
}

impl Piece {
    pub(crate) fn new(row: &RowFormat, moving: Moving) -> Self {
        let align = |bytes: u32| bytes.next_multiple_of(REGION_ALIGN as u32).max(128);
        let Moving::Cast { channel_bytes } = moving else {
            let (bytes, count) = pieces(row.x_bytes.into());
            return Self { bytes, count, scales: 0, pitch: align(bytes) };
        };
        let row_bytes = u64::from(row.x_bytes);
        let count = (row_bytes * u64::from(channel_bytes)).div_ceil(LONGEST_CAST).max(1);
        let bytes = row_bytes.div_ceil(count).next_multiple_of(CAST_CHANNELS).min(row_bytes) as u32;
        let scales = align(bytes * channel_bytes);
        // Exponents of powers take fewer bytes.
        let pitch = scales + align(Quant::FP8.scale_bytes(bytes).min(row.scale_bytes));
        Self { bytes, count: row.x_bytes.div_ceil(bytes.max(1)).max(1), scales, pitch }
    }
}

/// Bytes of a piece of a row, and the number of pieces.
pub(crate) fn pieces(row_bytes: u64) -> (u32, u32) {
    let pieces = row_bytes.div_ceil(LONGEST_PIECE).max(1);
    let piece = row_bytes.div_ceil(pieces).next_multiple_of(REGION_ALIGN).min(row_bytes);
    (piece as u32, row_bytes.div_ceil(piece.max(1)).max(1) as u32)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Every way in which rows move.
    pub(crate) const MOVING: [Moving; 6] = [
        Moving::Links { beside: false },
        Moving::Links { beside: true },
        Moving::Tiles { few: false },
        Moving::Any,
        Moving::Cast { channel_bytes: 2 },
        Moving::Cast { channel_bytes: 4 },
    ];

    #[test]
    fn words_of_scales_belong_to_one_piece_of_a_row_that_is_cast() {
        for hidden in [16, 80, 512, 2880, 7168, 16_384, 1 << 20] {
            for channel_bytes in [2, 4] {
                let row = RowFormat {
                    x_bytes: hidden,
                    scale_bytes: Quant::FP8.scale_bytes(hidden),
                    weights: true,
                };
                let piece = Piece::new(&row, Moving::Cast { channel_bytes });
                assert!(piece.count == 1 || piece.bytes.is_multiple_of(512), "{hidden}");
                assert!(piece.bytes * channel_bytes <= piece.scales, "{hidden}");
                assert!(
                    piece.scales + Quant::FP8.scale_bytes(piece.bytes) <= piece.pitch,
                    "{hidden}"
                );
            }
        }
    }
}
