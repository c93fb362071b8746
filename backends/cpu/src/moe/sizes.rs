use tokenyard_core::abi;
use tokenyard_core::moe::{
    ControlLayout, Layout, REGION_ALIGN, RegionLayout, RegionRows, RegionSpec, RowFormat, Shape,
    Span,
};
use tokenyard_core::transport::Capabilities;
use tokenyard_core::{Error, ErrorKind, Result};

use crate::engine::areas::SlotLayout;
use crate::moe::config::CpuConfig;

/// Most bytes that an arena takes unless the config says otherwise.
const ARENA_LIMIT: u64 = 16 << 30;

/// Sizes and offsets of both windows; equal on all ranks, because only the shape, the config and
/// the transports' kinds decide.
///
/// The control window has, per operation slot: records that arrive and that leave, rows that wait to be put
/// (only for transports without load and store), and landing places of packed and rank-major rows. With several
/// domains it has the same for the rail, whose rows land there in every layout.
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

/// The widest row that any call may have: fp32 with as many scale bytes as channels, or weights of a combine.
fn widest_row(shape: &Shape) -> RowFormat {
    RowFormat { x_bytes: 4 * shape.widest_row(), scale_bytes: shape.hidden.max(4), weights: true }
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
        let rail_records = if several { ControlLayout::of(domains, 0) } else { NO_RECORDS };
        let pitches = [records.pitch, rail_records.pitch];
        for (limits, pitch) in limits.into_iter().zip(pitches).filter(|(_, pitch)| *pitch > 0) {
            check_put(limits, pitch.max(row.x_bytes.into()))?;
        }
        let stores = limits[0].flags & abi::TY_CAP_LOAD_STORE != 0;
        let stage = |ranks: u32| stage_bytes(&Shape { ranks, ..*shape }, row);
        let stage_bytes = if stores { 0 } else { stage(inside.ranks) };
        // A combine has no rows to stage. It announces from the stage which ranks are left out: a
        // byte per rank.
        let ranks = u64::from(shape.ranks).next_multiple_of(REGION_ALIGN);
        let rail_stage_bytes = if several { stage(domains).max(ranks) } else { 0 };
        let landing = RegionSpec::new(*shape, Layout::Flat, row);
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
        sizes.slot_bytes = if several { sizes.rail().end() } else { sizes.owners().end() };
        let control = sizes.slot_bytes.checked_mul(in_flight.into());
        sizes.control_bytes = control.ok_or_else(too_large)?;
        Ok(sizes)
    }

    /// The areas of the exchange with owners.
    pub(crate) fn owners(&self) -> SlotLayout {
        SlotLayout {
            records: self.records,
            first: 0,
            groups: self.domains,
            sources: self.ranks,
            stage_bytes: self.stage_bytes,
            landing_pitch: self.landing_pitch,
            slot_bytes: self.slot_bytes,
        }
    }

    /// The areas of the exchange on the rail, behind those of the other one.
    pub(crate) fn rail(&self) -> SlotLayout {
        SlotLayout {
            records: self.rail_records,
            first: self.owners().end(),
            groups: 1,
            sources: self.domains,
            stage_bytes: self.rail_stage_bytes,
            landing_pitch: self.landing_pitch,
            slot_bytes: self.slot_bytes,
        }
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
        RegionLayout::worst(&RegionSpec::new(*shape, layout, row)).map(|region| region.bytes)
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
            let (owners, rail) = (sizes.owners(), sizes.rail());
            for slot in 0..2 {
                let mut end = slot as u64 * sizes.slot_bytes;
                for (areas, groups, sources) in [(owners, domains, 4), (rail, 1, domains)] {
                    if areas.records.bytes == 0 {
                        continue;
                    }
                    assert_eq!(areas.records_in(slot), end);
                    assert_eq!(areas.records_out(slot), end + areas.records.bytes);
                    assert_eq!(areas.stage(slot, 0), end + 2 * areas.records.bytes);
                    let staged = areas.stage(slot, 0) + u64::from(groups) * areas.stage_bytes;
                    assert_eq!(areas.landing(slot, 0), staged);
                    end = areas.landing(slot, sources);
                }
                assert_eq!(end, (slot as u64 + 1) * sizes.slot_bytes);
            }
            assert_eq!(sizes.control_bytes, 2 * sizes.slot_bytes);
        }
    }

    #[test]
    fn there_is_room_for_the_weights_of_a_combine_whatever_the_hidden_size() {
        let widest = |hidden| widest_row(&Shape { hidden, topk: 8, ..SHAPE }).x_bytes;
        assert_eq!([4, 8, 12, 64].map(widest), [48, 48, 48, 256]);
    }

    #[test]
    fn a_transport_that_cannot_carry_a_row_is_refused_with_both_sizes() {
        let error = sizes(1, 100).expect_err("small");
        assert!(error.to_string().contains("256 bytes; the transport puts at most 100"), "{error}");
    }
}
