//! One direct exchange: over the only level; or, with several domains, inside this one or on the rail.

use tokenyard_core::abi;
use tokenyard_core::domains::{Domains, Member};
use tokenyard_core::kernels::KernelShape;
use tokenyard_core::moe::Shape;

/// This rank in an exchange, and the shapes that it works with. They never change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exchange {
    pub(crate) member: Member,
    /// The shape of the team: its ranks, and their experts.
    pub(crate) shape: Shape,
    /// The shape that outputs are laid out for. Its ranks are the sources: one for each place.
    pub(crate) regions: Shape,
}

impl Exchange {
    /// Everything, over one level.
    fn whole(shape: &KernelShape, level: u64) -> Self {
        let world = Shape::from(shape);
        let domains = Domains::of(shape.rank, shape.ranks, 1);
        let member = Member { level, rank: shape.rank, domains, team: (0, 1) };
        Self { member, shape: world, regions: world }
    }

    /// The exchange with owners, and the exchange on the rail if there are several domains. `level`: the level of
    /// the first.
    pub(crate) fn of(shape: &KernelShape, level: u64) -> (Self, Option<Self>) {
        let (world, domains) = (Shape::from(shape), Domains::new(shape));
        if domains.count == 1 {
            return (Self::whole(shape, level), None);
        }
        let first = domains.place(domains.mine, 0);
        let inside = Member { level, rank: shape.rank, domains, team: (first, 1) };
        let on_rail = Member {
            level: abi::TY_LEVEL_SCALE_OUT,
            rank: shape.rank,
            domains: Domains::of(domains.mine, domains.count, 1),
            team: (domains.index, domains.size),
        };
        let owners = Self { member: inside, shape: domains.inside(&world), regions: world };
        let rail = domains.rail(&world);
        (owners, Some(Self { member: on_rail, shape: rail, regions: rail }))
    }
}

#[cfg(test)]
mod tests {
    use tokenyard_core::kernels::kernel_shape;

    use super::*;

    #[test]
    fn both_exchanges_name_sources_and_peers_by_their_world_ranks() {
        let world = Shape { ranks: 6, experts: 12, topk: 2, hidden: 64, max_tokens: 8 };
        let shape = KernelShape { rank: 3, ..kernel_shape(&world, 3, 2, 1) };
        let (owners, rail) = Exchange::of(&shape, abi::TY_LEVEL_SCALE_UP);
        let rail = rail.unwrap();
        assert_eq!([0, 1].map(|peer| owners.member.rank_of(peer)), [2, 3]);
        assert_eq!([0, 1, 4, 5].map(|place| owners.member.source(place)), [0, 1, 4, 5]);
        assert_eq!([0, 1, 4, 5].map(|place| owners.member.forwarder(place)), [2, 3, 2, 3]);
        assert_eq!([0, 1, 2].map(|peer| rail.member.rank_of(peer)), [1, 3, 5]);
        assert_eq!([0, 1, 2].map(|place| rail.member.source(place)), [1, 3, 5]);
        assert_eq!((owners.shape.ranks, owners.shape.experts, owners.regions.ranks), (2, 4, 6));
        assert_eq!((rail.shape.ranks, rail.shape.local_experts()), (3, 4));
        for exchange in [owners, rail] {
            let Exchange { member, shape, regions } = exchange;
            assert_eq!((member.peers(), member.places()), (shape.ranks, regions.ranks));
        }
        let (whole, none) = Exchange::of(&KernelShape { domains: 1, ..shape }, 0);
        assert!(none.is_none() && !whole.member.has_groups());
        assert_eq!(
            [whole, owners, rail].map(|exchange| exchange.member.is_rail()),
            [false, false, true]
        );
        assert_eq!((whole.member.rank_of(5), whole.member.source(5)), (5, 5));
    }
}
