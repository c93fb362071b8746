use tokenyard_core::Result;
use tokenyard_core::domains::Domains;
use tokenyard_core::moe::{Layout, RecvPlan, RegionRows, RegionSpec, SendPlan, Shape};

use super::world::World;

/// How received rows are arranged, as a dispatch asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrangement {
    pub(super) layout: Layout,
    pub(super) worst_case: bool,
}

/// Where a source's rows go at one owner, and how large the owner's region is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OwnerBlock {
    /// N and X that the owner's region was laid out for.
    pub(super) tokens: u64,
    pub(super) rows: u64,
    /// First flat row of the source's block.
    pub(super) first: u64,
}

/// The rows that reach this domain from one domain: what its source on this rank's rail sends, or
/// this rank itself. All memory is allocated when the communicator is planned.
#[derive(Debug)]
pub(super) struct Leg {
    /// The peers of this domain that each row goes to. Its tokens are rows of the landing places, or
    /// this rank's own tokens.
    pub(super) send: SendPlan,
    /// `[rows, K]`: experts of this domain, counted from its first, or -1.
    pub(super) topk: Vec<i32>,
    /// `[S]`, by owner.
    pub(super) places: Vec<OwnerBlock>,
    /// `[S * El]`: the source's first row in each expert's block, at the expert's owner.
    pub(super) expert_bases: Vec<u32>,
}

impl Leg {
    fn new(inside: &Shape) -> Self {
        Self {
            send: SendPlan::new(inside),
            topk: Vec::with_capacity(inside.max_tokens as usize * inside.topk as usize),
            places: vec![OwnerBlock::default(); inside.ranks as usize],
            expert_bases: vec![0; inside.experts as usize],
        }
    }

    /// Takes a routing that was validated.
    pub(super) fn route(&mut self, topk_idx: &[i64]) {
        self.send.build(topk_idx);
        keep(&mut self.topk, topk_idx);
    }
}

fn keep(topk: &mut Vec<i32>, topk_idx: &[i64]) {
    topk.clear();
    topk.extend(topk_idx.iter().map(|e| i32::try_from(*e).unwrap_or(-1).max(-1)));
}

/// Where this rank's tokens go among several domains.
#[derive(Debug)]
pub(super) struct Outward {
    /// The domains that each token goes to, the own one included.
    pub(super) send: SendPlan,
    /// `[T, K]`: experts of the world, or -1.
    pub(super) topk: Vec<i32>,
    /// `[R]`: rows that each rank gets of this one's tokens.
    pub(super) rank_rows: Vec<u32>,
    /// Token + 1 of the last token that each rank got; `[R]`.
    last_token: Vec<u32>,
}

impl Outward {
    fn new(world: &Shape, domains: &Domains) -> Self {
        Self {
            send: SendPlan::new(&domains.rail(world)),
            topk: Vec::with_capacity(world.max_tokens as usize * world.topk as usize),
            rank_rows: vec![0; world.ranks as usize],
            last_token: vec![0; world.ranks as usize],
        }
    }

    fn route(&mut self, world: &Shape, topk_idx: &[i64]) {
        self.send.build(topk_idx);
        keep(&mut self.topk, topk_idx);
        self.rank_rows.fill(0);
        self.last_token.fill(0);
        for (row, stamp) in self.topk.chunks_exact(world.topk as usize).zip(1..) {
            for rank in row.iter().filter_map(|e| u32::try_from(*e).ok()).map(|e| world.rank_of(e))
            {
                let last = &mut self.last_token[rank as usize];
                self.rank_rows[rank as usize] += u32::from(*last != stamp);
                *last = stamp;
            }
        }
    }
}

/// The remains of a dispatch: the routing of all rows that this rank sends, for itself and as an
/// forwarder, and the places on both sides. All memory is allocated when the handle's slot is first used.
#[derive(Debug)]
pub(super) struct HandleState {
    /// Number of the dispatch that made the handle: the same on all ranks.
    pub(super) origin: u64,
    /// `[D]`, by the domain that the rows come from.
    pub(super) legs: Vec<Leg>,
    /// The way to other domains, where there are several.
    pub(super) outward: Option<Outward>,
    pub(super) recv: RecvPlan,
    pub(super) arrangement: Arrangement,
    /// True N and number of rows, padding included, on this rank.
    pub(super) tokens: u64,
    pub(super) rows: u64,
    /// M of the dispatch.
    pub(super) max_tokens: u32,
    /// Whether there is a dispatch.
    pub(super) is_made: bool,
    /// `[N, K]`, of the dispatch, for combines: where each expert's copy lies, or -1, and its weight. Empty
    /// of flat rows. They grow with the largest dispatch that the handle had.
    pub(super) slots: Vec<i32>,
    pub(super) weights: Vec<f32>,
    /// Rows that the output tensor has, and combine takes.
    pub(super) output_rows: u64,
}

impl HandleState {
    pub(super) fn new(world: &Shape, domains: &Domains) -> Self {
        let inside = domains.inside(world);
        Self {
            origin: 0,
            legs: (0..domains.count).map(|_| Leg::new(&inside)).collect(),
            outward: (domains.count > 1).then(|| Outward::new(world, domains)),
            recv: RecvPlan::new(world),
            arrangement: Arrangement { layout: Layout::Flat, worst_case: false },
            tokens: 0,
            rows: 0,
            max_tokens: world.max_tokens,
            is_made: false,
            slots: Vec::new(),
            weights: Vec::new(),
            output_rows: 0,
        }
    }

    /// Takes this rank's routing for dispatch number `origin`. The host has validated it. With several
    /// domains `here` has room for the routing within this one.
    pub(super) fn route(
        &mut self,
        origin: u64,
        topk_idx: &[i64],
        world: &World,
        here: Option<&mut Vec<i64>>,
    ) {
        self.origin = origin;
        self.is_made = false;
        let domains = &world.domains;
        let own = &mut self.legs[domains.mine as usize];
        let (Some(outward), Some(here)) = (&mut self.outward, here) else {
            return own.route(topk_idx);
        };
        outward.route(&world.shape, topk_idx);
        let experts = i64::from(world.inside.experts);
        let first = experts * i64::from(domains.mine);
        here.clear();
        here.extend(
            topk_idx.iter().map(
                |e| {
                    if (first..first + experts).contains(e) { e - first } else { -1 }
                },
            ),
        );
        own.route(here);
    }

    /// The shape with M of the dispatch.
    pub(super) fn shape_of(&self, world: &Shape) -> Shape {
        Shape { max_tokens: self.max_tokens, ..*world }
    }

    /// Rows that a region of this rank must hold.
    pub(super) fn region_rows(&self, spec: &RegionSpec) -> Result<RegionRows> {
        // A packed region is always laid out for the worst case: its rows are not counted before.
        if self.arrangement.worst_case || self.arrangement.layout == Layout::Packed {
            RegionRows::worst(spec)
        } else {
            Ok(RegionRows { tokens: self.tokens, experts: self.rows })
        }
    }

    /// Rows of the output tensor: N (flat), X (expert-major), El * R*M (packed).
    pub(super) fn rows_of_output(&self, shape: &Shape, rows: &RegionRows) -> u64 {
        match self.arrangement.layout {
            Layout::Flat => rows.tokens,
            Layout::ExpertMajor { .. } => rows.experts,
            Layout::Packed => {
                u64::from(shape.local_experts())
                    * u64::from(shape.ranks)
                    * u64::from(self.max_tokens)
            }
        }
    }
}

/// Bytes that one handle takes on a rank of a world of `shape.ranks` ranks in `domains` domains, without what it
/// keeps of its outputs: 8 bytes for each received token and k, unless rows are flat.
pub fn handle_bytes(shape: &Shape, domains: u32) -> u64 {
    let size = shape.ranks / domains;
    let inside = Shape { ranks: size, experts: shape.experts / domains, ..*shape };
    let topk = 4 * u64::from(shape.max_tokens) * u64::from(shape.topk);
    let leg = SendPlan::bytes_for(&inside)
        + topk
        + size_of::<OwnerBlock>() as u64 * u64::from(size)
        + 4 * u64::from(inside.experts);
    let rail = Shape { ranks: domains, ..*shape };
    let outward = SendPlan::bytes_for(&rail) + topk + 8 * u64::from(shape.ranks);
    let outward = if domains > 1 { outward } else { 0 };
    u64::from(domains) * leg + outward + RecvPlan::bytes_for(shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes<T>(list: &Vec<T>) -> u64 {
        (list.capacity() * size_of::<T>()) as u64
    }

    #[test]
    fn a_handle_takes_as_much_as_is_announced_before() {
        let shape = Shape { ranks: 6, experts: 24, topk: 3, hidden: 64, max_tokens: 7 };
        for count in [1, 2, 3] {
            let domains = Domains { count, size: 6 / count, mine: 0, index: 0 };
            let handle = HandleState::new(&shape, &domains);
            let legs = handle.legs.iter().map(|leg| {
                leg.send.memory_bytes() as u64
                    + bytes(&leg.topk)
                    + bytes(&leg.places)
                    + bytes(&leg.expert_bases)
            });
            let outward = handle.outward.as_ref().map_or(0, |outward| {
                outward.send.memory_bytes() as u64
                    + bytes(&outward.topk)
                    + bytes(&outward.rank_rows)
                    + bytes(&outward.last_token)
            });
            let found = legs.sum::<u64>() + outward + handle.recv.memory_bytes() as u64;
            assert_eq!(found, handle_bytes(&shape, count), "{count} domains");
        }
    }
}
