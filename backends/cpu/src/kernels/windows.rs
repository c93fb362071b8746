use tokenyard_core::abi;
use tokenyard_core::moe::{
    ControlLayout, Layout, REGION_ALIGN, RegionLayout, RegionRows, RegionSpec, RowFormat, Shape,
    Span,
};
use tokenyard_core::transport::Capabilities;
use tokenyard_core::{Error, ErrorKind, Result};

use super::config::CpuConfig;

/// Window of records, staging and landing places.
pub(super) const CONTROL: u16 = 0;
/// Window of outputs.
pub(super) const ARENA: u16 = 1;

/// Larger puts are cut into pieces.
pub(super) const LARGEST_PUT: u64 = 1 << 30;
/// Most bytes that an arena takes unless the config says otherwise.
const ARENA_LIMIT: u64 = 16 << 30;

/// Sizes and offsets of both windows; equal on all ranks, because only the shape, the config and
/// the transports' kinds decide.
///
/// Control window, per operation slot: records that arrive and that leave, rows that wait to be put
/// in the domain (only for transports without load and store), landing places of the packed layout;
/// and, with several domains, the same for the rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSizes {
    /// Layout of the records of one slot.
    pub records: ControlLayout,
    /// Layout of the rail's records of one slot; of no bytes where there is one domain.
    pub rail_records: ControlLayout,
    /// Bytes for rows that wait to be put to peers of the domain, per slot and source domain.
    pub stage_bytes: u64,
    /// Bytes for rows that wait to be put over the rail, per slot.
    pub rail_stage_bytes: u64,
    /// Bytes of one source's landing places.
    pub landing_pitch: u64,
    ranks: u32,
    domains: u32,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Bytes of the control window.
    pub control_bytes: u64,
    /// Bytes of the arena window.
    pub arena_bytes: u64,
}

/// How many operations and domains there are room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spread {
    /// Operations that may be sent and not yet received.
    pub in_flight: u32,
    /// D.
    pub domains: u32,
}

/// The widest row that any call may have: fp32 with as many scale bytes as channels.
fn widest_row(shape: &Shape) -> RowFormat {
    RowFormat { x_bytes: 4 * shape.hidden, scale_bytes: shape.hidden.max(4), weights: true }
}

const NO_RECORDS: ControlLayout = ControlLayout {
    entries: Span { offset: 0, bytes: 0 },
    grants: Span { offset: 0, bytes: 0 },
    pitch: 0,
    bytes: 0,
};

impl WindowSizes {
    /// The sizes for a shape. `limits` are those of the domain's transport and, with several
    /// domains, of the rail's.
    ///
    /// # Errors
    /// Rows that one put cannot carry, or sizes beyond 64 bits.
    pub fn new(
        shape: &Shape,
        spread: Spread,
        limits: [&Capabilities; 2],
        config: &CpuConfig,
    ) -> Result<Self> {
        let Spread { in_flight, domains } = spread;
        let several = domains > 1;
        let row = widest_row(shape);
        let inside = Shape { ranks: shape.ranks / domains, ..*shape };
        let records = ControlLayout::new(shape);
        let rail_records = if several {
            // Rows per rank and per expert of the domain.
            ControlLayout::of(domains, inside.ranks + shape.experts / domains)
        } else {
            NO_RECORDS
        };
        let pitches = [records.pitch, rail_records.pitch];
        for (limits, pitch) in limits.into_iter().zip(pitches).filter(|(_, pitch)| *pitch > 0) {
            check_put(limits, pitch.max(row.x_bytes.into()))?;
        }
        let stores = limits[0].flags & abi::TY_CAP_LOAD_STORE != 0;
        let stage = |ranks: u32| stage_bytes(&Shape { ranks, ..*shape }, row);
        let stage_bytes = if stores { 0 } else { stage(inside.ranks) };
        let rail_stage_bytes = if several { stage(domains) } else { 0 };
        let landing = RegionSpec { shape: *shape, layout: Layout::Flat, row };
        let most = u64::from(shape.max_tokens);
        let landing_pitch =
            RegionLayout::new(&landing, RegionRows { tokens: most, experts: 0 })?.bytes;
        let mut sizes = Self {
            records,
            rail_records,
            stage_bytes,
            rail_stage_bytes,
            landing_pitch,
            ranks: shape.ranks,
            domains,
            slot_bytes: 0,
            control_bytes: 0,
            arena_bytes: arena_bytes(shape, several, config)?,
        };
        // At most four areas of R*M rows, each less than 2^62 bytes by the limits of a shape.
        sizes.slot_bytes = sizes.rail_landing(0, if several { domains } else { 0 });
        let control = sizes.slot_bytes.checked_mul(in_flight.into());
        sizes.control_bytes = control.ok_or_else(too_large)?;
        Ok(sizes)
    }

    /// Where the records from peers of a slot start.
    pub(super) fn records_in(&self, slot: usize) -> u64 {
        self.slot_bytes * slot as u64
    }

    /// Where the records to peers of a slot start.
    pub(super) fn records_out(&self, slot: usize) -> u64 {
        self.records_in(slot) + self.records.bytes
    }

    /// Where the rows of a slot that came from `domain` wait to be put.
    pub(super) fn stage(&self, slot: usize, domain: u32) -> u64 {
        self.records_out(slot) + self.records.bytes + self.stage_bytes * u64::from(domain)
    }

    /// Where the rows of `source` land in the packed layout.
    pub(super) fn landing(&self, slot: usize, source: u32) -> u64 {
        self.stage(slot, self.domains) + self.landing_pitch * u64::from(source)
    }

    /// Where the records from the rail start.
    pub(super) fn rail_records_in(&self, slot: usize) -> u64 {
        self.landing(slot, self.ranks)
    }

    /// Where the records to the rail start.
    pub(super) fn rail_records_out(&self, slot: usize) -> u64 {
        self.rail_records_in(slot) + self.rail_records.bytes
    }

    /// Where rows wait to be put over the rail.
    pub(super) fn rail_stage(&self, slot: usize) -> u64 {
        self.rail_records_out(slot) + self.rail_records.bytes
    }

    /// Where the rows of the rail's rank in `domain` land.
    pub(super) fn rail_landing(&self, slot: usize, domain: u32) -> u64 {
        self.rail_stage(slot) + self.rail_stage_bytes + self.landing_pitch * u64::from(domain)
    }
}

fn check_put(limits: &Capabilities, smallest: u64) -> Result<()> {
    if limits.largest_put >= smallest {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        "size windows",
        format!(
            "a row or record takes {smallest} bytes; the transport puts at most {}",
            limits.largest_put
        ),
    )
    .with_fix("choose a smaller hidden size or another transport"))
}

/// M * min(K, ranks) rows with all their side arrays, each array aligned.
fn stage_bytes(shape: &Shape, row: RowFormat) -> u64 {
    let rows = u64::from(shape.max_tokens) * u64::from(shape.max_fanout());
    let topk = u64::from(shape.topk);
    let widths = [row.x_bytes.into(), row.scale_bytes.into(), 4 * topk, 4 * topk, 4];
    widths.iter().map(|w: &u64| (rows * w).next_multiple_of(REGION_ALIGN)).sum()
}

fn arena_bytes(shape: &Shape, several: bool, config: &CpuConfig) -> Result<u64> {
    let row = widest_row(shape);
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
    let two = flat.max(expert_major).max(packed).saturating_mul(2);
    // With several domains a combine also holds rows on their way between them.
    let flats = if several { 6 } else { 4 };
    Ok(two.min(ARENA_LIMIT).max(flat.checked_mul(flats).ok_or_else(too_large)?))
}

fn too_large() -> Error {
    Error::new(
        ErrorKind::InvalidInput,
        "size windows",
        "the windows' bytes do not fit into 64 bits",
    )
    .with_fix("choose a smaller hidden size, fewer tokens, or fewer operations in flight")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenyard_core::transport::NO_CAPABILITIES;

    const SHAPE: Shape = Shape { ranks: 4, experts: 8, topk: 2, hidden: 64, max_tokens: 16 };

    fn sizes(domains: u32, put: u64) -> Result<WindowSizes> {
        let limits = Capabilities { largest_put: put, ..NO_CAPABILITIES };
        let spread = Spread { in_flight: 2, domains };
        WindowSizes::new(&SHAPE, spread, [&limits, &limits], &CpuConfig::default())
    }

    #[test]
    fn areas_of_a_slot_follow_each_other_without_overlap() {
        for domains in [1, 2] {
            let sizes = sizes(domains, 1 << 20).expect("fits");
            assert!(sizes.stage_bytes > 0);
            assert_eq!(sizes.rail_stage_bytes > 0, domains > 1);
            for slot in 0..2 {
                let ends = [
                    sizes.records_in(slot),
                    sizes.records_out(slot) - sizes.records.bytes,
                    sizes.stage(slot, 0) - sizes.records.bytes,
                    sizes.landing(slot, 0) - u64::from(domains) * sizes.stage_bytes,
                    sizes.rail_records_in(slot) - 4 * sizes.landing_pitch,
                    sizes.rail_records_out(slot) - sizes.rail_records.bytes,
                    sizes.rail_stage(slot) - sizes.rail_records.bytes,
                    sizes.rail_landing(slot, 0) - sizes.rail_stage_bytes,
                ];
                let starts = [
                    sizes.records_in(slot),
                    sizes.records_in(slot),
                    sizes.records_out(slot),
                    sizes.stage(slot, 0),
                    sizes.landing(slot, 0),
                    sizes.rail_records_in(slot),
                    sizes.rail_records_out(slot),
                    sizes.rail_stage(slot),
                ];
                assert_eq!(ends, starts);
                let rails = if domains > 1 { domains } else { 0 };
                assert_eq!(sizes.rail_landing(slot, rails), sizes.records_in(slot + 1));
            }
            assert_eq!(sizes.control_bytes, sizes.records_in(2));
        }
    }

    #[test]
    fn a_transport_that_cannot_carry_a_row_is_refused_with_both_sizes() {
        let error = sizes(1, 100).expect_err("small");
        assert!(error.to_string().contains("256 bytes; the transport puts at most 100"), "{error}");
    }
}
