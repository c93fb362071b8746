use super::*;

const SHAPE: Shape = Shape { ranks: 4, experts: 12, topk: 2, hidden: 64, max_tokens: 5 };
const ROW: RowFormat = RowFormat { x_bytes: 128, scale_bytes: 4, weights: true };
const MAJOR: Layout = Layout::ExpertMajor { alignment: 8, zero_padding: false };
const RANK_MAJOR: Layout = Layout::RankMajor { zero_padding: false };

fn spec(layout: Layout) -> RegionSpec {
    RegionSpec::new(SHAPE, layout, ROW)
}

fn sizes(region: &RegionLayout) -> [u64; ARRAYS] {
    spans(region).map(|span| span.bytes)
}

fn spans(r: &RegionLayout) -> [Span; ARRAYS] {
    [
        r.x,
        r.scales,
        r.weights,
        r.ids,
        r.source,
        r.slots,
        r.rank_counts,
        r.expert_counts,
        r.expert_starts,
        r.expert_ends,
        r.rank_ends,
        r.ranges,
        r.landed_scales,
        r.landed_weights,
        r.landed_source,
        r.totals,
        r.lost,
        r.dropped,
    ]
}

#[test]
fn exact_sizes_follow_the_shapes_of_the_arrays() {
    let rows = RegionRows { tokens: 7, experts: 24 };
    let flat = RegionLayout::new(&spec(Layout::Flat), rows).unwrap();
    assert_eq!(
        sizes(&flat),
        [7 * 128, 7 * 4, 7 * 2 * 4, 7 * 2 * 4, 7 * 4, 0, 16, 12, 0, 0, 16, 0, 0, 0, 0, 16, 4, 0]
    );
    let major = RegionLayout::new(&spec(MAJOR), rows).unwrap();
    let landed = [7 * 4, 7 * 2 * 4];
    assert_eq!(
        sizes(&major),
        [
            24 * 128,
            24 * 4,
            24 * 4,
            0,
            28,
            56,
            16,
            12,
            16,
            12,
            16,
            0,
            landed[0],
            landed[1],
            0,
            16,
            4,
            0
        ]
    );
    let packed = RegionLayout::new(&spec(Layout::Packed), rows).unwrap();
    assert_eq!(
        sizes(&packed),
        [
            60 * 128,
            60 * 4,
            60 * 4,
            0,
            60 * 4,
            56,
            16,
            12,
            0,
            0,
            16,
            3 * 4 * 8,
            landed[0],
            landed[1],
            28,
            16,
            4,
            0
        ]
    );
}

#[test]
fn a_rank_major_region_has_room_for_all_tokens_whatever_arrives() {
    for tokens in [0, 7, 20] {
        let rows = RegionRows { tokens, experts: 0 };
        let region = RegionLayout::new(&spec(RANK_MAJOR), rows).unwrap();
        assert_eq!(
            sizes(&region),
            [20 * 128, 20 * 4, 160, 160, 20 * 4, 0, 16, 12, 0, 0, 16, 0, 0, 0, 0, 16, 4, 0]
        );
    }
}

#[test]
fn worst_sizes_follow_the_formulas() {
    assert_eq!(
        RegionRows::worst(&spec(Layout::Flat)).unwrap(),
        RegionRows { tokens: 20, experts: 40 }
    );
    // 20 * min(2, 3) + 7 * 3 = 61, up to 64.
    assert_eq!(RegionRows::worst(&spec(MAJOR)).unwrap(), RegionRows { tokens: 20, experts: 64 });
    assert_eq!(RegionLayout::worst(&spec(Layout::Packed)).unwrap().x.bytes, 60 * 128);
    assert_eq!(RegionLayout::worst(&spec(RANK_MAJOR)).unwrap().x.bytes, 20 * 128);
}

#[test]
fn a_cap_bounds_the_rows_of_x_and_adds_counts_of_dropped_rows() {
    let capped = |layout| RegionSpec { max_rows: Some(9), ..spec(layout) };
    let rows = |layout| RegionRows::worst(&capped(layout)).unwrap();
    assert_eq!(rows(Layout::Flat), RegionRows { tokens: 9, experts: 40 });
    assert_eq!(rows(MAJOR), RegionRows { tokens: 20, experts: 9 });
    let bytes = |layout| {
        let region = RegionLayout::worst(&capped(layout)).unwrap();
        (region.x.bytes, region.dropped.bytes)
    };
    assert_eq!([Layout::Flat, MAJOR].map(bytes), [(9 * 128, 16); 2]);
    assert_eq!(bytes(Layout::Packed), (60 * 128, 0));
    assert_eq!(bytes(RANK_MAJOR), (20 * 128, 0));
    let wide = RegionSpec { max_rows: Some(u64::MAX), ..spec(MAJOR) };
    assert_eq!(RegionRows::worst(&wide).unwrap(), RegionRows::worst(&spec(MAJOR)).unwrap());
}

#[test]
fn arrays_are_aligned_and_do_not_overlap() {
    for layout in [Layout::Flat, MAJOR, Layout::Packed, RANK_MAJOR] {
        for tokens in [0, 1, 19] {
            let rows = RegionRows { tokens, experts: 2 * tokens };
            let region = RegionLayout::new(&spec(layout), rows).unwrap();
            let mut end = 0;
            for span in spans(&region) {
                assert!(span.offset >= end && span.offset % REGION_ALIGN == 0);
                end = span.end();
            }
            assert!(region.bytes >= end && region.bytes < end + REGION_ALIGN);
            assert_eq!(region.bytes % REGION_ALIGN, 0);
        }
    }
}

#[test]
fn absent_components_take_no_bytes() {
    let row = RowFormat { x_bytes: 128, scale_bytes: 0, weights: false };
    let region = RegionLayout::worst(&RegionSpec { row, ..spec(Layout::Flat) }).unwrap();
    assert_eq!((region.scales.bytes, region.weights.bytes), (0, 0));
    assert_eq!(region.x.bytes, 20 * 128);
}

#[test]
fn sizes_beyond_any_index_or_offset_are_refused() {
    let huge = Shape { ranks: 1, experts: 1 << 20, max_tokens: i32::MAX as u32, ..SHAPE };
    for layout in [MAJOR, Layout::Packed] {
        let error = RegionLayout::worst(&RegionSpec { shape: huge, ..spec(layout) })
            .expect_err("too many rows");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.message().contains("rows; expected at most 2147483647"));
    }
    let all = Layout::ExpertMajor { alignment: u32::MAX, zero_padding: false };
    let wide = Shape { experts: u32::MAX, ..huge };
    assert!(RegionLayout::worst(&RegionSpec { shape: wide, ..spec(all) }).is_err());
    let none = Layout::ExpertMajor { alignment: 0, zero_padding: false };
    let error = RegionLayout::worst(&spec(none)).expect_err("no alignment");
    assert_eq!(error.message(), "found alignment = 0; expected at least 1");
}
