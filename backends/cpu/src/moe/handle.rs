use tokenyard_core::call::DispatchCall;
use tokenyard_core::moe::{Layout, RecvPlan, RegionRows, RegionSpec, RowCap, SendPlan, Shape};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::moe::exchange::Exchange;

/// The arrangement of received rows that a dispatch requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrangement {
    pub(crate) layout: Layout,
    pub(crate) worst_case: bool,
    pub(crate) cap: Option<RowCap>,
}

impl Arrangement {
    pub(crate) fn of(call: &DispatchCall<'_>) -> Self {
        Self { layout: call.layout, worst_case: call.worst_case, cap: call.cap }
    }
}

/// The places of a source's rows at one owner, and the size of the owner's region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OwnerBlock {
    /// N and X that the owner's region was laid out for.
    pub(crate) tokens: u64,
    pub(crate) rows: u64,
    /// First flat row of the source's block.
    pub(crate) first: u64,
    /// The owner drops the rows that its region has no room for.
    pub(crate) drops: bool,
}

/// The rows of one group that this rank sends: its own tokens; or, over a rail, those that came from one domain.
/// All memory is allocated when the handle's slot is first used.
#[derive(Debug)]
pub(crate) struct Leg {
    /// The peers that each row goes to.
    pub(crate) send: SendPlan,
    /// `[rows, K]`: experts of the team, counted from its first, or -1.
    pub(crate) topk: Vec<i32>,
    /// `[S]`, by owner.
    pub(crate) places: Vec<OwnerBlock>,
    /// `[S]`: rows that each owner gets. Fewer than those of the plan where it drops flat rows: then the first ones.
    pub(crate) taken: Vec<u32>,
    /// `[S * El]`: the source's first row in each expert's block, at the expert's owner.
    pub(crate) expert_bases: Vec<u32>,
}

impl Leg {
    fn new(shape: &Shape) -> Self {
        Self {
            send: SendPlan::new(shape),
            topk: Vec::with_capacity(shape.max_tokens as usize * shape.topk as usize),
            places: vec![OwnerBlock::default(); shape.ranks as usize],
            taken: vec![0; shape.ranks as usize],
            expert_bases: vec![0; shape.experts as usize],
        }
    }

    /// Takes a routing that was validated.
    pub(crate) fn route(&mut self, topk_idx: &[i64]) {
        self.send.build(topk_idx);
        self.taken.copy_from_slice(self.send.rank_counts());
        keep(&mut self.topk, topk_idx);
    }

    /// Takes the places that an owner grants. They are checked when rows are sent there.
    pub(crate) fn accept(&mut self, peer: u32, granted: OwnerBlock, layout: Layout) {
        let sent = self.send.rank_counts()[peer as usize];
        let room = u32::try_from(granted.tokens.saturating_sub(granted.first)).unwrap_or(u32::MAX);
        let drops = granted.drops && layout == Layout::Flat;
        self.taken[peer as usize] = if drops { sent.min(room) } else { sent };
        self.places[peer as usize] = granted;
    }
}

fn keep(topk: &mut Vec<i32>, topk_idx: &[i64]) {
    topk.clear();
    topk.extend(topk_idx.iter().map(|e| i32::try_from(*e).unwrap_or(-1).max(-1)));
}

/// The remains of a dispatch: the routing of all rows that this rank sends, and the places on both sides. All
/// memory is allocated when the handle's slot is first used.
#[derive(Debug)]
pub(crate) struct HandleState {
    /// Number of the dispatch that made the handle: the same on all ranks.
    pub(crate) origin: u64,
    /// By group.
    pub(crate) legs: Vec<Leg>,
    pub(crate) recv: RecvPlan,
    pub(crate) arrangement: Arrangement,
    /// True N and number of rows, padding included, on this rank.
    pub(crate) tokens: u64,
    pub(crate) rows: u64,
    /// Whether a cap has dropped rows on this rank.
    pub(crate) drops: bool,
    /// M of the dispatch.
    pub(crate) max_tokens: u32,
    /// Whether there is a dispatch.
    pub(crate) is_made: bool,
    /// `[N, K]`, of the dispatch, for combines: where each expert's copy lies, or -1, and its weight. Of rank-major
    /// rows `[N]` alone: where each lies. Not used of flat rows. They grow with the largest dispatch that the handle
    /// had.
    pub(crate) slots: Vec<i32>,
    pub(crate) weights: Vec<f32>,
    /// Rows that the output tensor has, and combine takes.
    pub(crate) output_rows: u64,
}

impl HandleState {
    pub(crate) fn new(exchange: &Exchange) -> Self {
        let Exchange { member, shape, regions } = exchange;
        Self {
            origin: 0,
            legs: (0..member.domains.count).map(|_| Leg::new(shape)).collect(),
            recv: RecvPlan::new(regions),
            arrangement: Arrangement { layout: Layout::Flat, worst_case: false, cap: None },
            tokens: 0,
            rows: 0,
            drops: false,
            max_tokens: shape.max_tokens,
            is_made: false,
            slots: Vec::new(),
            weights: Vec::new(),
            output_rows: 0,
        }
    }

    /// Begins to hold the routing of dispatch number `origin`.
    pub(crate) fn begin(&mut self, origin: u64, arrangement: Arrangement, max_tokens: u32) {
        (self.origin, self.is_made) = (origin, false);
        (self.arrangement, self.max_tokens) = (arrangement, max_tokens);
    }

    /// The shape with M of the dispatch.
    pub(crate) fn shape_of(&self, world: &Shape) -> Shape {
        Shape { max_tokens: self.max_tokens, ..*world }
    }

    /// Rows that a region of this rank must hold.
    pub(crate) fn region_rows(&self, spec: &RegionSpec) -> Result<RegionRows> {
        // Rows that are not counted before have room for the worst case.
        if self.arrangement.worst_case || self.arrangement.layout.has_fixed_places() {
            RegionRows::worst(spec)
        } else {
            Ok(RegionRows { tokens: self.tokens, experts: self.rows })
        }
    }

    /// Takes the counts of the receive plan. Where more rows come than the cap takes, the rest is left out, or this is
    /// an error.
    pub(crate) fn take_counts(&mut self) -> Result<()> {
        let by_token = self.arrangement.layout.has_a_row_per_token();
        let needed = if by_token { self.recv.num_rows() } else { self.recv.num_expert_rows() };
        self.drops = self.arrangement.cap.is_some_and(|cap| u64::from(needed) > cap.rows);
        match self.arrangement.cap {
            Some(cap) if self.drops && !cap.drops() => {
                return Err(too_many_rows(needed, cap));
            }
            Some(cap) if by_token => self.recv.cap_tokens(cap.rows),
            Some(cap) => self.recv.cap_copies(cap.rows),
            None => {}
        }
        self.tokens = self.recv.num_rows().into();
        self.rows = self.recv.num_expert_rows().into();
        Ok(())
    }

    /// Rows of the output tensor: N (flat), X (expert-major), El * R*M (packed), R*M (rank-major).
    pub(crate) fn rows_of_output(&self, shape: &Shape, rows: &RegionRows) -> u64 {
        let most_tokens = u64::from(shape.ranks) * u64::from(self.max_tokens);
        match self.arrangement.layout {
            Layout::Flat => rows.tokens,
            Layout::ExpertMajor { .. } => rows.experts,
            Layout::Packed => u64::from(shape.local_experts()) * most_tokens,
            Layout::RankMajor { .. } => most_tokens,
        }
    }
}

/// It fits into a record, so that all ranks read it whole.
#[cold]
fn too_many_rows(needed: u32, cap: RowCap) -> Error {
    let text =
        format!("max_rows: {needed} rows come, padding included; expected at most {}", cap.rows);
    Error::new(ErrorKind::Full, "dispatch", text)
        .with_fix("raise max_rows, or drop the rows beyond it (overflow)")
}

/// Bytes that one handle takes on a rank of a world of `shape.ranks` ranks in `domains` domains, without what it
/// keeps of its outputs: 8 bytes for each received token and k, 4 for each token of rank-major rows, none of flat ones.
pub fn handle_bytes(shape: &Shape, domains: u32) -> u64 {
    let leg = |team: &Shape| {
        SendPlan::bytes_for(team)
            + 4 * u64::from(team.max_tokens) * u64::from(team.topk)
            + (size_of::<OwnerBlock>() as u64 + 4) * u64::from(team.ranks)
            + 4 * u64::from(team.experts)
    };
    let (size, experts) = (shape.ranks / domains, shape.experts / domains);
    let inside = leg(&Shape { ranks: size, experts, ..*shape });
    let rail = Shape { ranks: domains, ..*shape };
    let rail = if domains > 1 { leg(&rail) + RecvPlan::bytes_for(&rail) } else { 0 };
    u64::from(domains) * inside + RecvPlan::bytes_for(shape) + rail
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenyard_core::kernels::kernel_shape;

    fn bytes<T>(list: &Vec<T>) -> u64 {
        (list.capacity() * size_of::<T>()) as u64
    }

    #[test]
    fn a_handle_takes_as_much_as_is_announced_before() {
        let shape = Shape { ranks: 6, experts: 24, topk: 3, hidden: 64, max_tokens: 7 };
        for domains in [1, 2, 3] {
            let (owners, rail) = Exchange::of(&kernel_shape(&shape, domains, 2, 1), 0);
            let found = [Some(owners), rail].into_iter().flatten().map(|exchange| {
                let handle = HandleState::new(&exchange);
                let legs = handle.legs.iter().map(|leg| {
                    leg.send.memory_bytes() as u64
                        + bytes(&leg.topk)
                        + bytes(&leg.places)
                        + bytes(&leg.taken)
                        + bytes(&leg.expert_bases)
                });
                legs.sum::<u64>() + handle.recv.memory_bytes() as u64
            });
            assert_eq!(found.sum::<u64>(), handle_bytes(&shape, domains), "{domains} domains");
        }
    }
}
