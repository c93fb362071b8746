use super::region::{RegionRows, arrays};
use super::{Layout, RecvPlan, RegionLayout, RegionSpec, RowFormat, SendPlan, Shape, Span};
use crate::Result;

/// Records in the control area start on a multiple of this, so that no two peers write one line.
const RECORD_ALIGN: u64 = 64;

/// Bytes of a control record's header.
pub const RECORD_HEADER: u64 = 64;

/// Room for the text of a refusal, in bytes; a longer text is cut.
pub const RECORD_TEXT: u64 = 192;

/// The layout of the control area of one operation slot: the same on every rank, O(R + E) bytes.
///
/// Peers write one record each: every rank an entry, owners a grant. A record is one put: a header
/// of [`RECORD_HEADER`] bytes, then u32 `[El]` (counts, or first rows), or the text of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlLayout {
    /// `[R]` records, by the rank that enters the operation.
    pub entries: Span,
    /// `[R]` records, by the owner that grants the places.
    pub grants: Span,
    /// Bytes from one record to the next, in both.
    pub pitch: u64,
    /// Bytes of the control area of one slot.
    pub bytes: u64,
}

impl ControlLayout {
    /// The layout for `shape`.
    pub fn new(shape: &Shape) -> Self {
        Self::of(shape.ranks, shape.local_experts())
    }

    /// The layout of `writers` records of each sort, with at most `counts` numbers each.
    pub fn of(writers: u32, counts: u32) -> Self {
        let (writers, counts) = (u64::from(writers), u64::from(counts));
        let pitch = (RECORD_HEADER + RECORD_TEXT.max(4 * counts)).next_multiple_of(RECORD_ALIGN);
        // Below 2^32 * 2^35, so nothing here overflows.
        let entries = Span { offset: 0, bytes: writers * pitch };
        let offset = entries.bytes.next_multiple_of(super::REGION_ALIGN);
        let grants = Span { offset, bytes: writers * pitch };
        let bytes = grants.end().next_multiple_of(super::REGION_ALIGN);
        Self { entries, grants, pitch, bytes }
    }
}

/// One line of the memory report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferSize {
    /// The name of the buffer, for example `"flat region: x"`.
    pub name: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// The formula of the size, in the symbols of the project.
    pub formula: String,
}

/// The most memory that one dispatch of `shape` can need on one rank, buffer by buffer.
///
/// Lists the arena region of each layout, array by array and in total, then the control area for
/// `in_flight` operations and the routing plans. `max_rows`: P, a cap on flat and expert-major rows. A communicator
/// holds one region per dispatch whose result the caller still holds; regions that are not worst-case are smaller.
///
/// # Errors
/// The errors of [`RegionLayout::worst`], for the first layout that does not fit.
pub fn buffers(
    shape: &Shape,
    row: RowFormat,
    alignment: u32,
    in_flight: u32,
    max_rows: Option<u64>,
) -> Result<Vec<BufferSize>> {
    let mut report = Vec::new();
    let expert_major = Layout::ExpertMajor { alignment, zero_padding: false };
    let rank_major = Layout::RankMajor { zero_padding: false };
    for layout in [Layout::Flat, expert_major, Layout::Packed, rank_major] {
        add_region(&mut report, &RegionSpec { max_rows, ..RegionSpec::new(*shape, layout, row) })?;
    }
    let control = ControlLayout::new(shape);
    report.push(BufferSize {
        name: "control area".to_owned(),
        bytes: u64::from(in_flight) * control.bytes,
        formula: format!(
            "{in_flight} in flight * R * ({0} bytes of entry + {0} bytes of grant)",
            control.pitch
        ),
    });
    report.push(BufferSize {
        name: "send plan".to_owned(),
        bytes: SendPlan::bytes_for(shape),
        formula: "12 * R + 4 * E + 4 * M + 12 * M * min(K, R) + 8".to_owned(),
    });
    report.push(BufferSize {
        name: "receive plan".to_owned(),
        bytes: RecvPlan::bytes_for(shape),
        formula: "4 * R + 4 * E + 12 * El + 8".to_owned(),
    });
    Ok(report)
}

fn add_region(report: &mut Vec<BufferSize>, spec: &RegionSpec) -> Result<()> {
    let layout = spec.layout.name();
    let rows = RegionRows::worst(spec)?;
    for array in arrays(spec, rows)?.into_iter().filter(|array| array.bytes > 0) {
        report.push(BufferSize {
            name: format!("{layout} region: {}", array.name),
            bytes: array.bytes,
            formula: format!("({}) * {} bytes", array.formula, array.element),
        });
    }
    report.push(BufferSize {
        name: format!("{layout} region: all"),
        bytes: RegionLayout::new(spec, rows)?.bytes,
        formula: format!("the sum of the above, each rounded up to {} bytes", super::REGION_ALIGN),
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { ranks: 4, experts: 12, topk: 2, hidden: 64, max_tokens: 5 };

    fn report() -> Vec<BufferSize> {
        let row = RowFormat { x_bytes: 128, scale_bytes: 0, weights: true };
        buffers(&SHAPE, row, 8, 2, None).unwrap()
    }

    fn line(name: &str) -> BufferSize {
        report().into_iter().find(|line| line.name == name).unwrap()
    }

    #[test]
    fn the_report_lists_sizes_with_their_formulas() {
        let x = line("expert-major region: x");
        assert_eq!(x.bytes, 64 * 128);
        assert_eq!(x.formula, "(align_up(R*M * min(K, El) + (A-1) * El, A)) * 128 bytes");
        assert_eq!(line("flat region: ids").bytes, 20 * 2 * 4);
        // A header of 64 bytes and a text of 192, which is more than 3 experts * 4 bytes; twice.
        assert_eq!(line("control area").bytes, 2 * 4 * (256 + 256));
        assert_eq!(line("send plan").bytes, 12 * 4 + 4 * 12 + 4 * 5 + 12 * 5 * 2 + 8);
        assert_eq!(line("receive plan").bytes, 4 * 4 + 4 * 12 + 12 * 3 + 8);
        assert!(report().iter().all(|line| line.bytes > 0 && !line.name.contains("scales")));
    }

    #[test]
    fn a_cap_bounds_the_rows_of_a_region_whatever_the_worst_case_is() {
        let row = RowFormat { x_bytes: 128, scale_bytes: 0, weights: true };
        let capped = buffers(&SHAPE, row, 8, 2, Some(16)).unwrap();
        let line = |name: &str| capped.iter().find(|line| line.name == name).unwrap();
        let x = line("expert-major region: x");
        assert_eq!(x.bytes, 16 * 128);
        assert_eq!(x.formula, "(min(P, align_up(R*M * min(K, El) + (A-1) * El, A))) * 128 bytes");
        // One row per token is not capped where an expert has its own.
        assert_eq!(line("expert-major region: slots").formula, "(R*M * K) * 4 bytes");
        assert_eq!(line("flat region: ids").bytes, 16 * 2 * 4);
        assert_eq!(line("flat region: dropped").bytes, 4 * 4);
        assert_eq!(line("packed region: x").bytes, 60 * 128);
    }

    #[test]
    fn the_total_of_a_region_covers_its_components() {
        for layout in ["flat", "expert-major", "packed", "rank-major"] {
            let prefix = format!("{layout} region: ");
            let parts: Vec<_> =
                report().into_iter().filter(|line| line.name.starts_with(&prefix)).collect();
            let (total, parts) = parts.split_last().unwrap();
            let sum: u64 = parts.iter().map(|part| part.bytes.next_multiple_of(128)).sum();
            assert_eq!(total.bytes, sum);
        }
    }

    #[test]
    fn control_records_do_not_overlap() {
        let control = ControlLayout::new(&Shape { experts: 4 * 100, ..SHAPE });
        // A header of 64 bytes and 100 counts, rounded up to 64.
        assert_eq!(control.pitch, 512);
        assert_eq!(control.entries.bytes, 4 * control.pitch);
        assert!(control.grants.offset >= control.entries.end());
        assert!(control.bytes >= control.grants.end());
    }
}
