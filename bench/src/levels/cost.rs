//! Bytes and commands of an operation, by the protocol of `docs/protocol.md`.

use tokenyard_core::moe::{Layout, RECORD_HEADER, RowFormat};

use super::{RankRows, TwoLevels};

/// The largest step of a signal.
const LARGEST_ADD: f64 = 65_535.0;

/// The facts that decide the cost of an exchange, beside its rows.
#[derive(Clone, Copy, Debug)]
pub struct CostModel {
    /// The ranks.
    pub levels: TwoLevels,
    /// How rows arrive.
    pub layout: Layout,
    /// A row of the dispatch.
    pub row: RowFormat,
    /// A row of the combine; it has no scales.
    pub back: RowFormat,
    /// Whether ranks of a domain store into each other's memory. Otherwise they put, as between
    /// domains.
    pub stores: bool,
    /// Bytes of rows that one put carries at most.
    pub piece_bytes: u64,
}

/// The commands and bytes of one rank over one level in one operation. In a combine over loads and stores, rows are
/// loaded by the rank that sums them: they count here for the rank that has them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LevelCost {
    /// Rows, own ones left out.
    pub rows: f64,
    /// Bytes of the rows and their metadata.
    pub row_bytes: f64,
    /// Bytes of entries and grants.
    pub record_bytes: f64,
    /// Commands that put rows or records.
    pub puts: f64,
    /// Commands that only raise a signal.
    pub signals: f64,
}

/// One operation of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OperationCost {
    /// The cost between domains.
    pub out: LevelCost,
    /// The cost inside the domain.
    pub inside: LevelCost,
    /// Bytes that the rank's SMs write in a dispatch, or load in a combine.
    pub sm_bytes: f64,
}

impl LevelCost {
    /// All bytes.
    pub fn bytes(&self) -> f64 {
        self.row_bytes + self.record_bytes
    }

    /// All commands.
    pub fn commands(&self) -> f64 {
        self.puts + self.signals
    }

    fn records(count: f64, bytes: f64) -> Self {
        Self { record_bytes: count * bytes, puts: count, ..Self::default() }
    }
}

/// Steps in which a total is reached; a mean that is no whole number is rounded up.
fn steps(total: f64, most: f64) -> f64 {
    (total / most).ceil()
}

impl CostModel {
    /// Bytes of a row and its metadata on either level: K ids, K weights, scales, source.
    pub fn row_bytes(&self) -> f64 {
        let ids = 4 * u64::from(self.levels.topk);
        let weights = if self.row.weights { ids } else { 0 };
        (u64::from(self.row.x_bytes) + u64::from(self.row.scale_bytes) + ids + weights + 4) as f64
    }

    /// Bytes of a row of the combine: its elements, and K weights where they travel back.
    pub fn back_bytes(&self) -> f64 {
        let weights = if self.back.weights { 4 * self.levels.topk } else { 0 };
        f64::from(self.back.x_bytes) + f64::from(weights)
    }

    /// Arrays of a row: elements, ids, source, and those that not every row has.
    fn arrays(&self) -> f64 {
        3.0 + f64::from(u8::from(self.row.scale_bytes > 0) + u8::from(self.row.weights))
    }

    /// Puts of the elements of so many rows that lie together at the receiver.
    fn pieces(&self, rows: f64, x_bytes: u32) -> f64 {
        let most = (self.piece_bytes / u64::from(x_bytes.max(1))).max(1) as f64;
        steps(rows, most.min(LARGEST_ADD))
    }

    /// Puts of so many dispatched rows to one peer.
    fn puts(&self, rows: f64, is_inside: bool) -> f64 {
        // Expert-major rows of one source do not lie together at the receiver.
        let are_apart = is_inside && matches!(self.layout, Layout::ExpertMajor { .. });
        let x = if are_apart { rows.ceil() } else { self.pieces(rows, self.row.x_bytes) };
        x + (self.arrays() - 1.0) * steps(rows, LARGEST_ADD)
    }

    /// Ranks of a rail: none where there is one domain.
    fn rail_ranks(&self) -> f64 {
        if self.levels.domains > 1 { f64::from(self.levels.domains) } else { 0.0 }
    }

    /// A dispatch with its own routing.
    pub fn dispatch(&self, rows: &RankRows) -> OperationCost {
        let (rail, size) = (self.rail_ranks(), self.levels.domain_ranks);
        let (ranks, header) = (f64::from(self.levels.ranks()), RECORD_HEADER as f64);
        let local = f64::from(self.levels.local_experts());
        // Where places are fixed nothing is counted: there are no grants.
        let inside_records = if self.layout.has_fixed_places() {
            LevelCost::records(ranks, header)
        } else {
            LevelCost::records(2.0 * ranks, header + 4.0 * local)
        };
        // An entry, and whether the domains go on.
        let out_records = LevelCost::records(2.0 * rail, header);
        let signals_of = |n: f64| steps(self.arrays() * n, LARGEST_ADD);
        // Rows that stay in the domain are announced like the others.
        let stay = if rail > 0.0 { rows.to_domains[rows.domain as usize] } else { 0.0 };
        let out = LevelCost {
            rows: rows.crossing(),
            row_bytes: rows.crossing() * self.row_bytes(),
            puts: out_records.puts
                + rows.others(&rows.to_domains).map(|n| self.puts(n, false)).sum::<f64>(),
            signals: rail + signals_of(stay),
            ..out_records
        };
        let [to_others, own] = rows.split(&rows.to_peers);
        let all_of = |list: &[&f64]| list.iter().map(|n| signals_of(**n)).sum::<f64>();
        let (puts, signals) = if self.stores {
            (0.0, all_of(&to_others))
        } else {
            (to_others.iter().map(|n| self.puts(**n, true)).sum(), 0.0)
        };
        let inside = LevelCost {
            rows: rows.moved_inside(),
            row_bytes: rows.moved_inside() * self.row_bytes(),
            puts: inside_records.puts + puts,
            signals: f64::from(size) + signals + all_of(&own),
            ..inside_records
        };
        OperationCost { out, inside, sm_bytes: rows.by_sms()[0] * self.row_bytes() }
    }

    /// A combine of rows that lie in the arena.
    pub fn combine(&self, rows: &RankRows) -> OperationCost {
        let (rail, size) = (self.rail_ranks(), self.levels.domain_ranks);
        let (ranks, header) = (f64::from(self.levels.ranks()), RECORD_HEADER as f64);
        let weights = f64::from(u8::from(self.back.weights));
        let puts = |n: f64| (1.0 + weights) * steps(n, LARGEST_ADD);
        let came: f64 = rows.others(&rows.from_domains).sum();
        // Whether the domains go on, and an entry.
        let entries = LevelCost::records(2.0 * rail, header);
        let out = LevelCost {
            rows: came,
            row_bytes: came * self.back_bytes(),
            puts: entries.puts + rows.others(&rows.from_domains).map(puts).sum::<f64>(),
            signals: rail,
            ..entries
        };
        // Flat rows lie there; others are summed per token first, or rank-major ones copied, and put as they are made.
        let puts_inside = |n: f64| match self.layout {
            Layout::Flat => puts(n),
            _ => self.pieces(n, self.back.x_bytes) + weights * steps(n, LARGEST_ADD),
        };
        let [from_others, _] = rows.split(&rows.from_sources);
        let back: f64 = from_others.iter().copied().sum();
        let entries = LevelCost::records(ranks, header);
        let of_rows =
            if self.stores { 0.0 } else { from_others.iter().map(|n| puts_inside(**n)).sum() };
        let inside = LevelCost {
            rows: back,
            row_bytes: back * self.back_bytes(),
            puts: entries.puts + of_rows,
            signals: f64::from(size),
            ..entries
        };
        // The forwarder loads the partials of its domain, the source one row per domain.
        OperationCost { out, inside, sm_bytes: rows.by_sms()[1] * self.back_bytes() }
    }
}
