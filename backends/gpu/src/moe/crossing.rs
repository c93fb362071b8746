//! Rows that cross between domains in runs, so that the exchange inside a domain runs beside the one on the rail: see
//! `runs.cuh`.

use std::sync::Arc;

use tokenyard_core::Result;

use crate::driver::{Buffer, Context};
use crate::moe::args::Crossing;
use crate::moe::exchange::Exchange;

/// Rows of a run: a put of 119 KB of FP8 rows of 7168 channels. Longer ones end later, shorter ones cost more requests.
const RUN_ROWS: u32 = 16;
/// Few tokens cross in as many runs at least, so that the first are forwarded early.
const LEAST_RUNS: u32 = 32;
/// The share of a transport's signals that an exchange with runs may take: others of the session have some, too.
const SIGNAL_SHARE: u32 = 4;
/// All lanes of any warp.
const MOST_LANES: u32 = 64;

/// The runs of one rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RunSizes {
    /// A run has `1 << shift` rows.
    pub(crate) shift: u32,
    /// Runs of a source.
    pub(crate) most: u32,
    ranks: u32,
    slots: u32,
}

impl RunSizes {
    /// The runs of an exchange, unless its rows do not cross in any.
    pub(crate) fn new(exchange: &Exchange) -> Option<Self> {
        let (ranks, slots, tokens) =
            (exchange.shape.ranks, exchange.slots(), exchange.shape.max_tokens);
        let of = |shift: u32| Self { shift, most: tokens.div_ceil(1 << shift), ranks, slots };
        let wanted = RUN_ROWS.min(tokens / LEAST_RUNS).max(1).ilog2();
        let most = (exchange.path.most_signals / SIGNAL_SHARE).saturating_sub(3 * ranks * slots);
        let fits = |runs: &Self| runs.signals() <= most;
        exchange.has_runs().then(|| (wanted..31).map(of).find(fits).unwrap_or(of(31)))
    }

    /// One for each slot, run and rank.
    pub(crate) fn signals(&self) -> u32 {
        self.slots.saturating_mul(self.ranks).saturating_mul(self.most)
    }
}

/// The memory of the device for the runs of a rail.
#[derive(Debug)]
pub(crate) struct Runs {
    sizes: RunSizes,
    totals: Buffer,
    staged: Buffer,
    here: Buffer,
    described: Buffer,
    /// One for each operation that may be open: an exchange inside counts sums before the rail has put those of the
    /// operation before.
    summed: Vec<Buffer>,
    /// The first of their signals.
    signal: u32,
    /// This domain.
    mine: u32,
    /// Lanes of a warp that look at words at once.
    lanes: u32,
}

impl Runs {
    /// `signal`: the first of their signals. Memory is zero at first.
    pub(crate) fn new(
        context: &Arc<Context>,
        sizes: RunSizes,
        signal: u32,
        exchange: &Exchange,
    ) -> Result<Self> {
        let of_all = 8 * u64::from(sizes.ranks) * u64::from(sizes.most);
        let open = exchange.in_flight.max(2);
        Ok(Self {
            sizes,
            totals: Buffer::new(context, of_all * u64::from(sizes.slots))?,
            staged: Buffer::new(context, of_all)?,
            here: Buffer::new(context, of_all)?,
            described: Buffer::new(context, 8 * u64::from(sizes.ranks))?,
            summed: (0..open).map(|_| Buffer::new(context, of_all + 8)).collect::<Result<_>>()?,
            signal,
            mine: exchange.rank,
            lanes: match exchange.path.has_ring() {
                // The host's memory answers a million looks a second, however many threads ask.
                true => exchange.shape.ranks,
                false => MOST_LANES,
            },
        })
    }

    /// For the exchange on the rail.
    pub(crate) fn on_the_rail(&self) -> Crossing {
        Crossing {
            totals: self.totals.address(),
            staged: self.staged.address(),
            here: self.here.address(),
            described: self.described.address(),
            summed: 0,
            signal: self.signal,
            most: self.sizes.most,
            shift: self.sizes.shift,
            mine: self.mine,
            lanes: self.lanes,
            scales: 0,
        }
    }

    /// For the dispatch inside, which only reads. `casts`: rows are cast on the rail, so their scales come with them.
    pub(crate) fn inside(&self, casts: bool) -> Crossing {
        let scales = casts.into();
        Crossing { totals: 0, staged: 0, signal: 0, scales, ..self.on_the_rail() }
    }

    /// For both exchanges of a combine.
    pub(crate) fn of_sums(&self, operation: u64) -> Crossing {
        let slot = (operation % self.summed.len() as u64) as usize;
        Crossing { summed: self.summed[slot].address(), ..self.on_the_rail() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::path::Path;
    use crate::engine::path::tests::ring;
    use crate::moe::exchange::tests::SHAPE;

    fn rail(domains: u32, max_tokens: u32, path: Path) -> Exchange {
        let [_, mut between] = Exchange::levels(&SHAPE, [Path::STORE, path]);
        between.shape.ranks = domains;
        between.shape.max_tokens = max_tokens;
        between
    }

    #[test]
    fn runs_cover_all_tokens_with_few_signals() {
        for (domains, max_tokens) in
            [(2, 1), (2, 128), (2, 4096), (8, 8192), (64, 8192), (256, 4096)]
        {
            for most_signals in [4096, 65_536] {
                let path = Path { most_signals, ..ring(1024) };
                let sizes = RunSizes::new(&rail(domains, max_tokens, path)).unwrap();
                assert!(sizes.most << sizes.shift >= max_tokens, "{sizes:?}");
                assert!(sizes.signals() <= most_signals / 4, "{sizes:?}");
            }
        }
        let of = |max_tokens| RunSizes::new(&rail(2, max_tokens, ring(1024))).unwrap();
        assert_eq!([of(4096).shift, of(128).shift, of(1).shift], [4, 2, 0]);
    }

    #[test]
    fn rows_that_are_stored_between_domains_have_no_runs() {
        assert_eq!(RunSizes::new(&rail(2, 64, Path::STORE)), None);
    }
}
