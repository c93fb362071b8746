//! One direct exchange: over the only level; or, with several domains, over one of the two.

use tokenyard_core::abi;
use tokenyard_core::domains::{Domains, Member, TeamRanks};
use tokenyard_core::kernels::{KernelShape, LinkNeeds};
use tokenyard_core::moe::Shape;
use tokenyard_core::transport::Capabilities;

use crate::compile::Role;
use crate::engine::member;
use crate::engine::path::Path;
use crate::moe::sizes::Sizes;

/// Commands of kernels, on one queue, that the transport has not ended.
const QUEUE_DEPTH: u32 = 256;

/// The part of the work that an exchange does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// All of the work: one link reaches all ranks.
    Flat,
    /// From rank to rank inside one of several domains, with rows of all domains.
    IntraDomain,
    /// From domain to domain, on a rail. The ranks of its shape are domains.
    InterDomain,
}

/// See the [module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exchange {
    pub(crate) scope: Scope,
    /// One of `TY_LEVEL_*`.
    pub(crate) level: u64,
    /// Ranks of the team, their experts, and the most tokens of one of them.
    pub(crate) shape: Shape,
    /// The shape that outputs are laid out for.
    pub(crate) regions: Shape,
    /// Groups of a rank's tokens: domains, inside one of several.
    pub(crate) groups: u32,
    pub(crate) team: TeamRanks,
    /// This rank in the team.
    pub(crate) rank: u32,
    /// How rows leave.
    pub(crate) path: Path,
    /// Operations of callers that may be open.
    pub(crate) in_flight: u32,
    /// Whether rows of the packed layout are sent without a request: see `decode`.
    pub(crate) decodes: bool,
    /// Inside one of several domains: rows are forwarded as they arrive, while the exchange on the rail is under way.
    pub(crate) awaits_rows: bool,
}

impl Exchange {
    fn new(scope: Scope, member: Member, shape: &KernelShape, path: Path) -> Self {
        let world = Shape::from(shape);
        Self {
            scope,
            level: member.level,
            shape: member.shape(&world),
            regions: member.regions(&world),
            groups: member.domains.count,
            team: member.team,
            rank: member.domains.index,
            path,
            in_flight: shape.in_flight,
            decodes: false,
            awaits_rows: false,
        }
    }

    /// Everything, over one level.
    pub(crate) fn whole(shape: &KernelShape, level: u64, path: Path) -> Self {
        Self::new(Scope::Flat, Member::whole(shape.rank, shape.ranks, level), shape, path)
    }

    /// Both levels of several domains: inside this domain, and between domains. Ranks are
    /// domain-major.
    pub(crate) fn levels(shape: &KernelShape, paths: [Path; 2]) -> [Self; 2] {
        let domains = Domains::new(shape);
        let [owners, rail] = Member::levels(domains, abi::TY_LEVEL_SCALE_UP);
        let mut inside = Self::new(Scope::IntraDomain, owners, shape, paths[0]);
        // A forwarder forwards the rows of one rank of each domain. A count that overflows the
        // number is refused like any other that is too large.
        inside.shape.max_tokens = domains.count.saturating_mul(shape.max_tokens);
        inside.awaits_rows = paths[1].puts();
        [inside, Self::new(Scope::InterDomain, rail, shape, paths[1])]
    }

    pub(crate) fn world_rank(&self) -> u32 {
        self.team.rank(self.rank)
    }

    /// This rank among those of the exchange.
    pub(crate) fn member(&self) -> member::Member {
        member::Member {
            level: self.level,
            team: self.team,
            rank: self.rank,
            ranks: self.shape.ranks,
            path: self.path,
            slots: self.slots(),
            steps: self.steps(),
            is_whole: self.scope == Scope::Flat,
        }
    }

    /// The most rows that a rank of this exchange sends to another one, in a call with this M: a forwarder sends those
    /// of one rank of each domain. Kernels lay regions out by it, as the host does by the ranks of the world.
    pub(crate) fn call_tokens(&self, max_tokens: u32) -> u32 {
        max_tokens.saturating_mul(self.groups)
    }

    /// The program of the kernels; `is_masked`: some ranks may be masked.
    pub(crate) fn role(&self, is_masked: bool) -> Role {
        match self.scope {
            Scope::IntraDomain => Role::IntraDomain,
            Scope::InterDomain => Role::InterDomain,
            _ if is_masked => Role::Masked,
            _ => Role::Direct,
        }
    }

    /// The reason why this exchange does not go on without a lost rank, if there is one.
    pub(crate) fn ends_with_a_rank(&self) -> Option<&'static str> {
        let ends = "decode = \"direct\"; only low-latency operations go on without a lost rank";
        (!self.decodes).then_some(ends)
    }

    /// Numbers of this exchange that one operation of a caller takes: between domains there is a
    /// second one, which reports how the operation ended inside them.
    pub(crate) fn steps(&self) -> u32 {
        if self.scope == Scope::InterDomain { 2 } else { 1 }
    }

    /// Whether rows cross in runs, and are forwarded as they arrive: see `runs.cuh`.
    pub(crate) fn has_runs(&self) -> bool {
        self.scope == Scope::InterDomain && self.path.puts()
    }

    /// Operations whose records have places of their own. At least two of callers, because a rank may enter
    /// the next one while others still read its record of the last. Twice as many as may be open, where
    /// senders wait for no rank: see `decode.cuh`.
    pub(crate) fn slots(&self) -> u32 {
        let open = self.in_flight.max(2) * self.steps();
        if self.decodes { 2 * open } else { open }
    }

    /// The exchange's use of its level's transport.
    pub(crate) fn link_needs(&self, sizes: &Sizes, limits: &Capabilities) -> LinkNeeds {
        let depth = QUEUE_DEPTH.min(limits.max_queue_depth);
        LinkNeeds {
            queues: self.path.queues,
            signals: sizes.signals(),
            queue_depth: if self.path.puts() { depth } else { 1 },
            reserved: 0,
            largest_put: self.path.largest_put,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use tokenyard_core::kernels::kernel_shape;
    use tokenyard_core::moe::{Layout, RegionRows, RegionSpec, RowFormat};

    use super::*;

    const WORLD: Shape = Shape { ranks: 6, experts: 24, topk: 2, hidden: 64, max_tokens: 8 };
    pub(crate) const SHAPE: KernelShape = KernelShape { rank: 5, ..kernel_shape(&WORLD, 3, 2, 1) };

    #[test]
    fn both_levels_agree_about_where_an_expert_lives() {
        for rank in 0..6 {
            let [inside, between] =
                Exchange::levels(&KernelShape { rank, ..SHAPE }, [Path::STORE; 2]);
            assert_eq!((inside.world_rank(), between.world_rank()), (rank, rank));
            let world = inside.regions;
            for expert in 0..world.experts {
                let domain = between.shape.rank_of(expert);
                let forwarder = between.team.rank(domain);
                let there =
                    Exchange::levels(&KernelShape { rank: forwarder, ..SHAPE }, [Path::STORE; 2]);
                let local = expert - domain * between.shape.local_experts();
                let owner = there[0].team.rank(there[0].shape.rank_of(local));
                assert_eq!(owner, world.rank_of(expert));
            }
        }
    }

    #[test]
    fn a_forwarder_has_room_for_the_rows_of_one_rank_of_each_domain() {
        let [inside, between] = Exchange::levels(&SHAPE, [Path::STORE; 2]);
        assert_eq!((inside.shape.ranks, inside.shape.max_tokens, inside.groups), (2, 24, 3));
        assert_eq!((between.shape.ranks, between.shape.experts, between.groups), (3, 24, 1));
        assert_eq!((inside.slots(), between.slots()), (2, 4));
        assert_eq!(between.member().world_ranks(), [1, 3, 5]);
        assert_eq!(inside.member().world_ranks(), [4, 5]);
    }

    #[test]
    fn kernels_lay_a_region_out_for_as_many_rows_as_the_host() {
        let [inside, between] = Exchange::levels(&SHAPE, [Path::STORE; 2]);
        let whole = Exchange::whole(&SHAPE, abi::TY_LEVEL_SCALE_UP, Path::STORE);
        for (exchange, max_tokens) in [(whole, 5), (inside, 8), (inside, 5), (between, 8)] {
            let shape = Shape { max_tokens, ..exchange.regions };
            let row = RowFormat { x_bytes: 128, scale_bytes: 0, weights: false };
            let spec = RegionSpec::new(shape, Layout::Packed, row);
            let rows = u64::from(exchange.shape.ranks * exchange.call_tokens(max_tokens));
            assert_eq!(RegionRows::worst(&spec).unwrap().tokens, rows, "{:?}", exchange.scope);
        }
    }

    #[test]
    fn only_low_latency_operations_go_on_without_a_lost_rank() {
        let direct = Exchange::whole(&SHAPE, abi::TY_LEVEL_SCALE_UP, Path::STORE);
        assert!(
            direct.ends_with_a_rank().is_some_and(|found| found.contains("decode = \"direct\""))
        );
        assert_eq!(Exchange { decodes: true, ..direct }.ends_with_a_rank(), None);
    }
}
