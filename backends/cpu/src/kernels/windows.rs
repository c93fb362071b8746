use tokenyard_core::abi;
use tokenyard_core::moe::{
    ControlLayout, Layout, REGION_ALIGN, RegionLayout, RegionRows, RegionSpec, RowFormat, Shape,
};
use tokenyard_core::transport::Capabilities;
use tokenyard_core::{Error, ErrorKind, Result};

use super::CpuConfig;

/// Window of records, staging and landing places.
pub(super) const CONTROL: u16 = 0;
/// Window of outputs.
pub(super) const ARENA: u16 = 1;

/// Larger puts are cut into pieces.
pub(super) const LARGEST_PUT: u64 = 1 << 30;
/// Most bytes that an arena takes unless the config says otherwise.
const ARENA_LIMIT: u64 = 16 << 30;

/// Sizes and offsets of both windows; equal on all ranks, because only the shape, the config and
/// the transport's kind decide.
///
/// Control window, per operation slot: records that arrive, records that leave, rows that wait to
/// be put (only for transports without load and store), landing places of the packed layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSizes {
    /// Layout of the records of one slot.
    pub records: ControlLayout,
    /// Bytes for rows that wait to be put, per slot.
    pub stage_bytes: u64,
    /// Bytes of one source's landing places.
    pub landing_pitch: u64,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Bytes of the control window.
    pub control_bytes: u64,
    /// Bytes of the arena window.
    pub arena_bytes: u64,
}

/// The widest row that any call may bring: fp32 with as many scale bytes as channels.
fn widest_row(shape: &Shape) -> RowFormat {
    RowFormat { x_bytes: 4 * shape.hidden, scale_bytes: shape.hidden.max(4), weights: true }
}

impl WindowSizes {
    /// The sizes for a shape.
    ///
    /// # Errors
    /// Rows that one put cannot carry, or sizes beyond 64 bits.
    pub fn new(
        shape: &Shape,
        in_flight: u32,
        limits: &Capabilities,
        config: &CpuConfig,
    ) -> Result<Self> {
        let records = ControlLayout::new(shape);
        let row = widest_row(shape);
        let smallest_put = u64::from(row.x_bytes).max(records.pitch);
        if limits.largest_put < smallest_put {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "size windows",
                format!(
                    "a row or record takes {smallest_put} bytes; the transport puts at most {}",
                    limits.largest_put
                ),
            )
            .with_fix("choose a smaller hidden size or another transport"));
        }
        let stage_bytes =
            if limits.flags & abi::TY_CAP_LOAD_STORE != 0 { 0 } else { stage_bytes(shape, row) };
        let landing = RegionSpec { shape: *shape, layout: Layout::Flat, row };
        let most = u64::from(shape.max_tokens);
        let landing_pitch =
            RegionLayout::new(&landing, RegionRows { tokens: most, experts: 0 })?.bytes;
        let slot_bytes = 2 * records.bytes + stage_bytes + landing_pitch * u64::from(shape.ranks);
        Ok(Self {
            records,
            stage_bytes,
            landing_pitch,
            slot_bytes,
            control_bytes: slot_bytes * u64::from(in_flight),
            arena_bytes: arena_bytes(shape, row, config)?,
        })
    }

    /// Where the records from peers of a slot start.
    pub(super) fn records_in(&self, slot: usize) -> u64 {
        self.slot_bytes * slot as u64
    }

    /// Where the records to peers of a slot start.
    pub(super) fn records_out(&self, slot: usize) -> u64 {
        self.records_in(slot) + self.records.bytes
    }

    /// Where the rows of a slot wait to be put.
    pub(super) fn stage(&self, slot: usize) -> u64 {
        self.records_out(slot) + self.records.bytes
    }

    /// Where the rows of `source` land in the packed layout.
    pub(super) fn landing(&self, slot: usize, source: u32) -> u64 {
        self.stage(slot) + self.stage_bytes + self.landing_pitch * u64::from(source)
    }
}

/// M * min(K, R) rows with all their side arrays, each array aligned.
fn stage_bytes(shape: &Shape, row: RowFormat) -> u64 {
    let rows = u64::from(shape.max_tokens) * u64::from(shape.max_fanout());
    let topk = u64::from(shape.topk);
    let widths = [row.x_bytes.into(), row.scale_bytes.into(), 4 * topk, 4 * topk, 4];
    widths.iter().map(|w: &u64| (rows * w).next_multiple_of(REGION_ALIGN)).sum()
}

fn arena_bytes(shape: &Shape, row: RowFormat, config: &CpuConfig) -> Result<u64> {
    if let Some(mib) = config.arena_mib {
        return Ok(mib << 20);
    }
    let worst = |layout| {
        RegionLayout::worst(&RegionSpec { shape: *shape, layout, row }).map(|region| region.bytes)
    };
    let flat = worst(Layout::Flat)?;
    // Shapes whose other layouts have more rows than an index can name still work flat.
    let expert_major =
        worst(Layout::ExpertMajor { alignment: 128, zero_padding: false }).unwrap_or(0);
    let packed = worst(Layout::Packed).unwrap_or(0);
    let two = 2 * flat.max(expert_major).max(packed);
    Ok(two.min(ARENA_LIMIT).max(4 * flat))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenyard_core::transport::NO_CAPABILITIES;

    const SHAPE: Shape = Shape { ranks: 4, experts: 8, topk: 2, hidden: 64, max_tokens: 16 };

    #[test]
    fn areas_of_a_slot_follow_each_other_without_overlap() {
        let limits = Capabilities { largest_put: 1 << 20, ..NO_CAPABILITIES };
        let sizes = WindowSizes::new(&SHAPE, 2, &limits, &CpuConfig::default()).expect("fits");
        assert!(sizes.stage_bytes > 0);
        for slot in 0..2 {
            assert!(sizes.records_in(slot) + sizes.records.bytes <= sizes.records_out(slot));
            assert!(sizes.records_out(slot) + sizes.records.bytes <= sizes.stage(slot));
            assert!(sizes.stage(slot) + sizes.stage_bytes <= sizes.landing(slot, 0));
            let end = sizes.landing(slot, 3) + sizes.landing_pitch;
            assert!(end <= sizes.records_in(slot + 1) && end <= sizes.control_bytes);
        }
    }

    #[test]
    fn a_transport_that_cannot_carry_a_row_is_refused_with_both_sizes() {
        let limits = Capabilities { largest_put: 100, ..NO_CAPABILITIES };
        let error = WindowSizes::new(&SHAPE, 2, &limits, &CpuConfig::default()).expect_err("small");
        assert!(error.to_string().contains("256 bytes; the transport puts at most 100"), "{error}");
    }
}
