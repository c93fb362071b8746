//! Windows, records, and how a launch uses shared memory.

use tokenyard_core::moe::{Layout, REGION_ALIGN, RegionLayout, RegionSpec, RowFormat, Shape};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::config::{GpuConfig, MOST_ARENA};
use crate::decode::sizes::DecodeSizes;
use crate::engine::args::{HEAD, TEXT_WORDS};
use crate::engine::path::{Path, Transfer};
use crate::moe::combine_tiling::CombineTiling;
use crate::moe::crossing::RunSizes;
use crate::moe::exchange::{Exchange, Scope};
use crate::moe::limits::{BlockLimits, metadata_bytes};
use crate::moe::moving::{Moving, Piece, pieces};
use crate::moe::push::most_units;

/// Window of entry records.
pub(crate) const CONTROL: usize = 0;
/// Window of rows.
pub(crate) const ARENA: usize = 1;

const MOST_STAGES: u32 = 4;

/// Warps of a block that move rows. These are 14 of 16: bulk copies of one or two stages each fill the shared
/// memory of a multiprocessor, and many shallow queues beat few deep ones. The last warps move row metadata first.
/// Rows that only cross a link have half as many movers: more warps crowd the link, and bf16 rows took 1.5 %
/// longer. Beside warps that spread rows a copy takes longer, and up to 12 movers with two stages each win, or with one
/// where few blocks push. On two H200, 4096 tokens, top-8, 7, 8, 10, 12 and 14 movers of 132 blocks took 145, 143,
/// 138, 139 and 140 µs for FP8, and 213, 220, 222, 224 and 230 µs for BF16; of 32 blocks 260, 235, 202, 188 and 201 µs,
/// and 326, 320, 314, 310 and 309 µs. Few blocks have each level where both are under way, so more warps move rows.
fn most_movers(block: BlockLimits, moving: Moving, room: u32) -> u32 {
    let of_links = block.warps() / 2 - 1;
    match moving {
        Moving::Links { beside: false } => of_links,
        Moving::Links { beside: true } => block.warps() * 3 / 4,
        Moving::Tiles { few } => {
            let served = if few { room } else { room / 2 };
            served.min(block.warps() * 3 / 4).max(of_links)
        }
        _ => block.warps() - block.metadata_warps() / 2,
    }
}
/// Rows of a tile, which expert-major rows are spread by: see `tiles.cuh`. With 64, the last rows were spread
/// 10 to 25 µs later. A source never has more than `MOST_TILES`.
const TILE_ROWS: u32 = 16;
const MOST_TILES: u32 = 1024;
/// The most shared memory that kernels declare.
pub(crate) const DECLARED: u32 = 2048;
/// Shared memory that is not for stages: the declared memory, and the driver's own.
pub(crate) const KEPT: u32 = DECLARED + 1024;
/// Most bytes of an arena for two outputs of any layout, unless the config sets its size.
const ARENA_LIMIT: u64 = 16 << 30;
/// The limit for an arena in host memory, which all ranks of a machine share, and which is pinned at once.
const HOST_ARENA_LIMIT: u64 = 4 << 30;

/// Sizes and offsets of both windows; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// 64-bit words of one record.
    pub(crate) entry_words: u32,
    /// Operations whose records have places of their own.
    pub(crate) slots: u32,
    ranks: u32,
    /// Rows of a tile.
    pub(crate) tile_rows: u32,
    /// Tiles of the rows that one rank has for another, at most.
    tiles: u32,
    /// Units of these rows that a combine pushes, at most.
    pub(crate) units: u32,
    pub(crate) arena_bytes: u64,
    /// The inbox of low-latency rows, behind everything else in the control window.
    pub(crate) decode: Option<DecodeSizes>,
    /// The longest put, where kernels put; else they load and store.
    pub(crate) path: Path,
    /// Between domains, where kernels put.
    pub(crate) runs: Option<RunSizes>,
}

impl Sizes {
    pub(crate) fn new(exchange: &Exchange, config: &GpuConfig) -> Result<Self> {
        let Exchange { shape, groups, in_flight, path, .. } = *exchange;
        let words = HEAD + (shape.ranks + shape.experts) * groups + TEXT_WORDS;
        // fp32 with as many scale bytes as channels: the widest row of any call.
        let row = RowFormat {
            x_bytes: 4 * shape.hidden,
            scale_bytes: shape.hidden.max(4),
            weights: true,
        };
        let worst = |layout| {
            let spec = RegionSpec::new(exchange.regions, layout, row);
            RegionLayout::worst(&spec).map(|r| r.bytes)
        };
        let staged = if path.puts() { staged_bytes(&shape, &row, shape.max_tokens) } else { 0 };
        let arena_bytes = match config.arena_mib {
            // Rows that move between domains, there and back: no output lies there.
            _ if exchange.scope == Scope::InterDomain => {
                let each = worst(Layout::Flat)? + staged;
                u64::from(in_flight.max(2) + 1) * each
            }
            Some(mib) => mib << 20,
            None => {
                let flat = worst(Layout::Flat)?;
                if flat > MOST_ARENA {
                    return Err(too_large(flat));
                }
                // A shape whose other layouts have too many rows for an index still works flat.
                let major = Layout::ExpertMajor { alignment: 128, zero_padding: false };
                let others = [major, Layout::Packed].map(|layout| worst(layout).unwrap_or(0));
                let two = 2 * others.into_iter().fold(flat, u64::max);
                let limit = if path.in_host_memory() { HOST_ARENA_LIMIT } else { ARENA_LIMIT };
                let moving = u64::from(in_flight) * staged;
                (two.min(limit).max(4 * flat) + moving).min(MOST_ARENA)
            }
        };
        if arena_bytes > MOST_ARENA {
            return Err(too_large(arena_bytes));
        }
        let tile_rows = shape.max_tokens.div_ceil(MOST_TILES).next_multiple_of(TILE_ROWS);
        let mut sizes = Self {
            decode: None,
            tile_rows,
            tiles: shape.max_tokens.div_ceil(tile_rows),
            units: most_units(shape.max_tokens),
            entry_words: words.next_multiple_of(16),
            slots: exchange.slots(),
            ranks: shape.ranks,
            arena_bytes,
            path,
            runs: RunSizes::new(exchange),
        };
        if exchange.decodes {
            sizes.decode = Some(DecodeSizes::new(exchange, sizes.control_bytes()));
        }
        Ok(sizes)
    }

    /// The start of the records of a slot in the control window.
    pub(crate) fn entries(&self, slot: u32) -> u64 {
        8 * u64::from(slot) * u64::from(self.ranks) * u64::from(self.entry_words)
    }

    /// The start of the counts of tiles in the control window: behind the records. Kernels that put
    /// have none.
    pub(crate) fn tiles(&self) -> u64 {
        self.entries(self.slots)
    }

    /// The start of the words of pushed units in the control window: behind the counts of tiles.
    pub(crate) fn flags(&self) -> u64 {
        self.tiles() + 8 * u64::from(self.ranks) * u64::from(self.tiles)
    }

    /// Received records, then, where kernels put, as many staged records; else the counts of tiles
    /// and the words of units; then the inbox.
    pub(crate) fn control_bytes(&self) -> u64 {
        match self.path.transfer {
            _ if self.decode.is_some() => self.decode.map_or(0, |decode| decode.end),
            Transfer::Put => 2 * self.entries(self.slots),
            Transfer::Store => self.flags() + 8 * u64::from(self.ranks) * u64::from(self.units),
        }
    }

    /// For each slot: the arrival of rows and the end of reading, each raised by one rank; where
    /// kernels put, the arrival of records too.
    pub(crate) fn signals(&self) -> u32 {
        self.run_signal() + self.runs.map_or(0, |runs| runs.signals())
    }

    /// The first signal of a run: behind all others.
    pub(crate) fn run_signal(&self) -> u32 {
        let kinds = if self.path.puts() { 3 } else { 2 };
        kinds * self.ranks * self.slots
    }
}

/// The most rows that this rank's tokens make: one per token and rank that it selects.
fn most_rows(shape: &Shape, tokens: u32) -> u64 {
    u64::from(tokens) * u64::from(shape.topk.min(shape.ranks))
}

/// Bytes that a dispatch of this many tokens stages, where kernels put: `Staged` of the kernels, for
/// all ranks.
pub(crate) fn staged_bytes(shape: &Shape, row: &RowFormat, tokens: u32) -> u64 {
    let by_k = 4 * u64::from(shape.topk);
    let weights = if row.weights { by_k } else { 0 };
    let each = u64::from(row.x_bytes) + u64::from(row.scale_bytes) + weights + by_k + 4;
    let arrays = 5 * u64::from(shape.ranks);
    most_rows(shape, tokens) * each + arrays * REGION_ALIGN
}

/// Bytes of the returned rows of a combine where they land, if kernels put them: rows, weights.
pub(crate) fn landing_bytes(shape: &Shape, widths: [u64; 2], tokens: u32) -> [u64; 2] {
    widths.map(|width| (most_rows(shape, tokens) * width).next_multiple_of(REGION_ALIGN))
}

/// How a dispatch moves rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DispatchTiling {
    pub(crate) piece_bytes: u32,
    pub(crate) pieces: u32,
    pub(crate) stages: u32,
    pub(crate) movers: u32,
    /// Shared memory of a dispatch before the stages: see `DispatchTables`.
    pub(crate) table_bytes: u32,
    /// Tokens whose ids, weights and scales are gathered at once: see `MetadataRoom`.
    pub(crate) metadata_tokens: u32,
    /// Shared memory of one gathering.
    pub(crate) metadata_bytes: u32,
    /// Whether scales are gathered: wide scales are not.
    pub(crate) metadata_scales: bool,
    pub(crate) metadata_at: u32,
    /// Tokens that a warp counts at once.
    pub(crate) tally_tokens: u32,
    /// The notes of the stages: see `Stages` of the kernels.
    pub(crate) notes_at: u32,
    pub(crate) shared: u32,
    /// Shared memory of a stage.
    pub(crate) pitch: u32,
    /// Where in a stage the scales of a piece lie that is cast.
    pub(crate) stage_scales: u32,
}

/// Wider scales move from memory to memory.
const WIDEST_SCALES: u32 = 1024;

/// Tokens that a warp counts at once where a block has memory for their selections: one bit each of
/// a word. Fewer take longer: counts are summed up more often.
const MOST_TALLY_TOKENS: u32 = 32;

/// Shared memory of a dispatch that does not depend on its rows.
struct Tables {
    /// See `DispatchTables`.
    table_bytes: u32,
    /// While it counts, each warp has two numbers per rank and expert, and the experts that
    /// `tally_tokens` tokens select, in the memory that stages and gatherings use later.
    counts: u32,
    tally_tokens: u32,
}

impl Tables {
    fn new(Exchange { shape, groups, .. }: &Exchange, block: BlockLimits) -> Self {
        let ranks = shape.ranks;
        // So many experts never fit and are refused, but their bytes can still be computed.
        let experts = shape.experts.min(1 << 20);
        let of_rank = 6 * 8 + 4 * (groups + 3) + 4 * (HEAD + ranks * groups);
        let table_bytes = (ranks * of_rank + 4 * (groups + 1) * experts).next_multiple_of(128);
        let counts = |tokens| block.warps() * (2 * (ranks + experts) + tokens * shape.topk) * 4;
        let room = block.shared.saturating_sub(KEPT + table_bytes);
        let mut tally_tokens = MOST_TALLY_TOKENS;
        while tally_tokens > 1 && counts(tally_tokens) > room {
            tally_tokens /= 2;
        }
        Self { table_bytes, counts: counts(tally_tokens), tally_tokens }
    }
}

/// How warps gather row metadata in shared memory.
struct Gathering {
    /// Tokens of a gathering, and its bytes.
    tokens: u32,
    bytes: u32,
    warps: u32,
    /// It comes before rows, in the same memory.
    before_rows: bool,
}

impl Gathering {
    /// `each`: bytes of a token.
    fn new(exchange: &Exchange, block: BlockLimits, table_bytes: u32, each: u32) -> Self {
        let before_rows = exchange.has_runs();
        let (warps, room) = match before_rows {
            true => {
                let free = block.shared.saturating_sub(KEPT + table_bytes);
                let all = free / block.warps() / 128 * 128;
                (block.warps(), block.metadata_room().min(all.saturating_sub(metadata_bytes(0))))
            }
            false => (block.metadata_warps(), block.metadata_room()),
        };
        let mut tokens = 32;
        while tokens > 1 && tokens * each > room {
            tokens /= 2;
        }
        Self { tokens, bytes: metadata_bytes(tokens * each), warps, before_rows }
    }

    fn all(&self) -> u32 {
        self.warps * self.bytes
    }

    /// Bytes that rows leave free.
    fn beside_rows(&self) -> u32 {
        if self.before_rows { 0 } else { self.all() }
    }
}

impl DispatchTiling {
    /// The tiling for rows on a device.
    pub(crate) fn new(
        exchange: &Exchange,
        row: &RowFormat,
        block: BlockLimits,
        moving: Moving,
    ) -> Self {
        let shape = &exchange.shape;
        let topk = shape.topk;
        let Tables { table_bytes, counts, tally_tokens } = Tables::new(exchange, block);
        // Scales of rows that are cast travel with the rows.
        let casts = matches!(moving, Moving::Cast { .. });
        let metadata_scales = row.scale_bytes <= WIDEST_SCALES && !casts;
        let each = 8 * topk + if metadata_scales { row.scale_bytes } else { 0 };
        let gathering = Gathering::new(exchange, block, table_bytes, each);
        let Piece { bytes: piece_bytes, count: pieces, scales: stage_scales, pitch } =
            Piece::new(row, moving);
        let note = 4 * (2 + if casts { 2 } else { 1 } * topk);
        let beside = gathering.beside_rows();
        let room = block.shared.saturating_sub(KEPT + table_bytes + beside) / (pitch + note);
        // The last two warps of a block serve runs.
        let most = if exchange.has_runs() { block.warps() - 2 } else { block.warps() };
        let movers = most_movers(block, moving, room).min(room).min(most).max(1);
        let stages = (room / movers).clamp(1, MOST_STAGES);
        let stages_bytes = movers * stages * pitch;
        let notes_at = table_bytes + stages_bytes + beside;
        let used = (stages_bytes + beside + movers * stages * note).max(gathering.all());
        Self {
            piece_bytes,
            pieces,
            stages,
            movers,
            table_bytes,
            metadata_tokens: gathering.tokens,
            metadata_bytes: gathering.bytes,
            metadata_scales,
            metadata_at: table_bytes + if beside > 0 { stages_bytes } else { 0 },
            tally_tokens,
            notes_at,
            shared: table_bytes + counts.max(used),
            pitch,
            stage_scales,
        }
    }
}

/// Whether a block has memory for the tables of a shape, and for a piece of its widest row. Equal on
/// equal devices: an operation must not fail on this.
pub(crate) fn check_shared(exchange: &Exchange, block: BlockLimits) -> Result<()> {
    let shape = &exchange.shape;
    let widest = 4 * u64::from(shape.hidden);
    let Tables { table_bytes, counts, .. } = Tables::new(exchange, block);
    // One stage, because fewer warps may move rows. Gatherings before rows need less: they may be of one token each.
    let stage = pieces(widest).0.next_multiple_of(REGION_ALIGN as u32).max(128);
    let gatherings = block.metadata_warps() * metadata_bytes(block.metadata_room());
    let dispatch_tiling = table_bytes + counts.max(stage + gatherings + 4 * (2 + shape.topk));
    let combine_tiling = CombineTiling::new(exchange, widest, block).shared;
    let needed = dispatch_tiling.max(combine_tiling).saturating_add(KEPT);
    if needed <= block.shared {
        return Ok(());
    }
    let of = |what, fix| {
        let message = format!(
            "{} ranks{what}, {} experts and top-{} need {needed} bytes of shared memory in a block; the \
             device has {}",
            shape.ranks, shape.experts, shape.topk, block.shared
        );
        Err(Error::new(ErrorKind::Unsupported, "plan needs", message).with_fix(fix))
    };
    match exchange.groups {
        1 => of(String::new(), "use fewer experts, or a device with more shared memory"),
        groups => of(
            format!(" of each of {groups} domains"),
            "use fewer domains or experts, or a device with more shared memory",
        ),
    }
}

#[cold]
fn too_large(flat: u64) -> Error {
    let message = format!(
        "one flat output may take {flat} bytes; an arena has at most {MOST_ARENA}, in which combine \
         can name places"
    );
    Error::new(ErrorKind::Unsupported, "plan needs", message)
        .with_fix("lower max_tokens; or set `arena_mib` of the kernel set for what really arrives")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::engine::path::tests::ring;
    use crate::moe::moving::tests::MOVING;
    use tokenyard_core::domains::TeamRanks;

    pub(crate) fn whole(shape: Shape, in_flight: u32, path: Path) -> Exchange {
        Exchange {
            scope: Scope::Flat,
            level: 0,
            shape,
            regions: shape,
            groups: 1,
            team: TeamRanks { first: 0, step: 1 },
            rank: 0,
            path,
            in_flight,
            decodes: false,
            awaits_rows: false,
        }
    }

    pub(crate) const HOPPER: BlockLimits = BlockLimits { shared: 232_448, wave: 32 };

    #[test]
    fn pieces_cover_a_row_and_fit_shared_memory() {
        for (ranks, experts) in [(1, 4), (2, 512), (8, 256), (72, 288)] {
            let shape = Shape { ranks, experts, topk: 2, hidden: 64, max_tokens: 8 };
            for (row_bytes, moving) in [16, 48, 2880 * 2, 7168, 14_336, 16_400, 28_672, 1 << 20]
                .into_iter()
                .flat_map(|bytes| MOVING.map(|moving| (bytes, moving)))
            {
                let row = RowFormat { x_bytes: row_bytes as u32, scale_bytes: 224, weights: true };
                let exchange = whole(shape, 2, Path::STORE);
                let dispatch_tiling = DispatchTiling::new(&exchange, &row, HOPPER, moving);
                let covered =
                    u64::from(dispatch_tiling.pieces) * u64::from(dispatch_tiling.piece_bytes);
                assert!(
                    (row_bytes..row_bytes + u64::from(dispatch_tiling.piece_bytes))
                        .contains(&covered)
                );
                assert!(
                    dispatch_tiling.piece_bytes.is_multiple_of(16)
                        && dispatch_tiling.movers * dispatch_tiling.stages <= 64
                );
                assert!(dispatch_tiling.shared + KEPT <= HOPPER.shared, "{dispatch_tiling:?}");
            }
        }
    }

    #[test]
    fn an_arena_is_never_larger_than_what_combine_can_name() {
        let config = GpuConfig::default();
        let shape = Shape { ranks: 8, experts: 256, topk: 8, hidden: 7168, max_tokens: 4096 };
        let arena = |max_tokens| {
            let shape = Shape { max_tokens, ..shape };
            Sizes::new(&whole(shape, 1, Path::STORE), &config).map(|sizes| sizes.arena_bytes)
        };
        assert_eq!(arena(4096).unwrap(), ARENA_LIMIT);
        assert_eq!(arena(65_536).unwrap(), MOST_ARENA);
        let error = arena(1 << 20).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("an arena has at most 68719476736"), "{error}");
    }

    #[test]
    fn where_kernels_put_there_is_room_for_staged_records_rows_and_signals_of_records() {
        let shape = Shape { ranks: 2, experts: 8, topk: 4, hidden: 64, max_tokens: 16 };
        let sizes = |put| Sizes::new(&whole(shape, 2, put), &GpuConfig::default()).unwrap();
        let (stores, puts) = (sizes(Path::STORE), sizes(ring(1024)));
        let records = puts.entries(puts.slots);
        assert_eq!(puts.control_bytes(), 2 * records);
        // A tile and eight units from each rank.
        assert_eq!([stores.tiles(), stores.flags()], [records, records + 2 * 8]);
        assert_eq!(stores.control_bytes(), records + 2 * 8 + 2 * 8 * 8);
        assert_eq!([stores.signals(), puts.signals()], [8, 12]);
        let row = RowFormat { x_bytes: 128, scale_bytes: 4, weights: true };
        // One row per token and rank: 2 ranks, though a token selects 4 experts.
        assert_eq!(staged_bytes(&shape, &row, 3), 6 * (128 + 4 + 16 + 16 + 4) + 10 * 128);
        assert!(puts.arena_bytes > stores.arena_bytes);
        assert_eq!(landing_bytes(&shape, [128, 16], 3), [768, 128]);
    }

    #[test]
    fn tiles_grow_where_there_would_be_too_many() {
        let tiles = |max_tokens| {
            let shape = Shape { ranks: 8, experts: 256, topk: 8, hidden: 7168, max_tokens };
            let config = GpuConfig { arena_mib: Some(1024), ..GpuConfig::default() };
            Sizes::new(&whole(shape, 1, Path::STORE), &config)
                .map(|s| (s.tile_rows, s.tiles))
                .unwrap()
        };
        assert_eq!(tiles(1), (16, 1));
        assert_eq!(tiles(4096), (16, 256));
        assert_eq!(tiles(1 << 20), (1024, 1024));
    }

    #[test]
    fn shapes_that_no_block_has_room_for_are_refused_before_the_first_operation() {
        let shape = |experts, topk| Shape { ranks: 8, experts, topk, hidden: 7168, max_tokens: 64 };
        const AMPERE: BlockLimits = BlockLimits { shared: 166_912, wave: 32 };
        const SMALL: BlockLimits = BlockLimits { shared: 101_376, wave: 32 };
        for (experts, topk, shared, fits) in [
            (512, 8, HOPPER, true),
            (512, 32, HOPPER, true),
            (512, 32, AMPERE, true),
            (1536, 8, HOPPER, true),
            (2048, 8, HOPPER, false),
            (512, 8, SMALL, true),
            (256, 16, SMALL, true),
            (1024, 8, SMALL, false),
        ] {
            let found = check_shared(&whole(shape(experts, topk), 2, Path::STORE), shared);
            assert_eq!(found.is_ok(), fits, "{experts} experts, top-{topk}: {found:?}");
        }
        let error = check_shared(&whole(shape(2048, 8), 2, Path::STORE), HOPPER).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("2048 experts and top-8 need") && text.contains("232448"), "{text}");
        // The received counts of each domain's rows.
        let inside = Exchange { groups: 72, ..whole(shape(64, 8), 2, Path::STORE) };
        assert!(check_shared(&inside, HOPPER).is_ok());
        let inside = Exchange { shape: Shape { ranks: 32, ..inside.shape }, ..inside };
        let error = check_shared(&inside, HOPPER).unwrap_err();
        assert!(
            error.to_string().contains("32 ranks of each of 72 domains, 64 experts"),
            "{error}"
        );
        assert!(error.fix().is_some_and(|fix| fix.contains("fewer domains")), "{error}");
    }

    #[test]
    fn a_row_of_7168_channels_has_fourteen_stages_in_as_many_warps_or_fewer() {
        let shape = Shape { ranks: 8, experts: 256, topk: 8, hidden: 7168, max_tokens: 4096 };
        let row = RowFormat { x_bytes: 14_336, scale_bytes: 0, weights: true };
        let exchange = whole(shape, 2, Path::STORE);
        let dispatch_tiling = |row, moving| {
            let dispatch_tiling = DispatchTiling::new(&exchange, row, HOPPER, moving);
            (dispatch_tiling.pieces, dispatch_tiling.movers, dispatch_tiling.stages)
        };
        assert_eq!(
            [
                Moving::Any,
                Moving::Links { beside: false },
                Moving::Tiles { few: false },
                Moving::Tiles { few: true }
            ]
            .map(|moving| dispatch_tiling(&row, moving)),
            [(1, 14, 1), (1, 7, 2), (1, 7, 2), (1, 12, 1)]
        );
        let row = RowFormat { x_bytes: 7168, scale_bytes: 224, weights: true };
        assert_eq!(
            MOVING.map(|moving| dispatch_tiling(&row, moving)),
            [(1, 7, 3), (1, 12, 2), (1, 12, 2), (1, 14, 1), (2, 14, 2), (4, 14, 1)]
        );
    }

    #[test]
    fn of_several_domains_records_count_every_group_and_the_rail_has_room_for_rows_on_their_way() {
        use crate::moe::exchange::tests::SHAPE;
        // 3 domains of 2 ranks and 8 experts.
        let [inside, between] = Exchange::levels(&SHAPE, [Path::STORE, ring(1024)]);
        let config = GpuConfig { arena_mib: Some(7), ..GpuConfig::default() };
        let [inner, outer] = [&inside, &between].map(|e| Sizes::new(e, &config).unwrap());
        let words = |counts: u32| (HEAD + counts + TEXT_WORDS).next_multiple_of(16);
        assert_eq!(inner.entry_words, words((2 + 8) * 3));
        assert_eq!(outer.entry_words, words(3 + 24));
        // Eight runs of one row.
        assert_eq!([inner.signals(), outer.signals()], [2 * 2 * 2, (3 + 8) * 3 * 4]);
        assert_eq!(inner.arena_bytes, 7 << 20);
        // Three times: 24 rows that arrive, and 16 that this rank stages, two domains per token.
        let row = u64::from(4 * SHAPE.hidden + SHAPE.hidden + 8 * SHAPE.topk + 4);
        assert!((3 * 40 * row..3 * 40 * row + 3 * 32 * 128).contains(&outer.arena_bytes));
    }
}
