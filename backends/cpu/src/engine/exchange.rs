//! One direct exchange: over the only level; or, with several domains, inside this one or on the rail.

use tokenyard_core::abi;
use tokenyard_core::domains::Domains;
use tokenyard_core::kernels::KernelShape;
use tokenyard_core::moe::Shape;

/// The team of an exchange, this rank in it, and the shapes that it works with. They never change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exchange {
    /// One of `TY_LEVEL_*`.
    pub(crate) level: u64,
    /// This rank, in the world.
    pub(crate) rank: u32,
    /// The shape of the team: its ranks, and their experts.
    pub(crate) shape: Shape,
    /// The shape that outputs are laid out for. Its ranks are the sources: one for each *place*.
    pub(crate) regions: Shape,
    /// The number of places. A place is a peer of the team together with the group of a source's rows. Inside
    /// one of several domains, groups are the domains that rows come from; otherwise there is one group.
    pub(crate) domains: Domains,
    /// World rank of peer 0, and from one peer to the next.
    pub(crate) team: (u32, u32),
}

impl Exchange {
    /// Everything, over one level.
    fn whole(shape: &KernelShape, level: u64) -> Self {
        let world = Shape::from(shape);
        Self {
            level,
            rank: shape.rank,
            shape: world,
            regions: world,
            domains: Domains::of(shape.rank, shape.ranks, 1),
            team: (0, 1),
        }
    }

    /// The exchange with owners, and the exchange on the rail if there are several domains. `level`: the level of
    /// the first.
    pub(crate) fn of(shape: &KernelShape, level: u64) -> (Self, Option<Self>) {
        let (world, domains) = (Shape::from(shape), Domains::new(shape));
        if domains.count == 1 {
            return (Self::whole(shape, level), None);
        }
        let first = domains.place(domains.mine, 0);
        let inside = domains.inside(&world);
        let owners = Self { shape: inside, domains, team: (first, 1), ..Self::whole(shape, level) };
        let rail = domains.rail(&world);
        let rail = Self {
            level: abi::TY_LEVEL_SCALE_OUT,
            rank: shape.rank,
            shape: rail,
            regions: rail,
            domains: Domains::of(domains.mine, domains.count, 1),
            team: (domains.index, domains.size),
        };
        (owners, Some(rail))
    }

    /// The world rank of a peer.
    pub(crate) fn rank_of(&self, peer: u32) -> u32 {
        self.team.0 + peer * self.team.1
    }

    /// The world rank of the peer of a place: the source of its rows, or that source's forwarder here.
    pub(crate) fn forwarder(&self, place: u32) -> u32 {
        self.rank_of(self.domains.peer_of(place))
    }

    /// The world rank that a place's rows come from.
    pub(crate) fn source(&self, place: u32) -> u32 {
        if self.has_groups() { place } else { self.rank_of(place) }
    }

    /// Whether this is the exchange on the rail, whose ranks are one of each domain.
    pub(crate) fn is_rail(&self) -> bool {
        self.team.1 > 1
    }

    /// Whether rows come in groups: over the rail.
    pub(crate) fn has_groups(&self) -> bool {
        self.domains.count > 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_exchanges_name_sources_and_peers_by_their_world_ranks() {
        let shape = KernelShape {
            size: size_of::<KernelShape>(),
            rank: 3,
            ranks: 6,
            domains: 3,
            experts: 12,
            topk: 2,
            hidden: 64,
            max_tokens: 8,
            in_flight: 2,
            handles: 1,
            reserved: 0,
        };
        let (owners, rail) = Exchange::of(&shape, abi::TY_LEVEL_SCALE_UP);
        let rail = rail.unwrap();
        assert_eq!([0, 1].map(|peer| owners.rank_of(peer)), [2, 3]);
        assert_eq!([0, 1, 4, 5].map(|place| owners.source(place)), [0, 1, 4, 5]);
        assert_eq!([0, 1, 4, 5].map(|place| owners.forwarder(place)), [2, 3, 2, 3]);
        assert_eq!([0, 1, 2].map(|peer| rail.rank_of(peer)), [1, 3, 5]);
        assert_eq!([0, 1, 2].map(|place| rail.source(place)), [1, 3, 5]);
        assert_eq!((owners.shape.ranks, owners.shape.experts, owners.regions.ranks), (2, 4, 6));
        assert_eq!((rail.shape.ranks, rail.shape.local_experts()), (3, 4));
        let (whole, none) = Exchange::of(&KernelShape { domains: 1, ..shape }, 0);
        assert!(none.is_none() && !whole.has_groups());
        assert_eq!([whole, owners, rail].map(|exchange| exchange.is_rail()), [false, false, true]);
        assert_eq!((whole.rank_of(5), whole.source(5)), (5, 5));
    }
}
