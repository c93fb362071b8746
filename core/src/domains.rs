//! Places of ranks: the domains of the world, a rank's place among them, and the shapes of both levels.
//! Ranks are domain-major.

use crate::abi;
use crate::kernels::KernelShape;
use crate::moe::Shape;

/// The domains of a world and this rank's place. One domain: the direct algorithm.
///
/// A *place* is a number below R. It stands for a pair of a domain and a peer of this rank's own domain. The
/// place of a source is the source's world rank. The peer of that place is the source's *forwarder* here: the
/// rank of this domain that is on the source's rail, and dispatches the source's rows inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Domains {
    /// D.
    pub count: u32,
    /// S, ranks of a domain.
    pub size: u32,
    /// This rank's domain.
    pub mine: u32,
    /// This rank's index in its domain: its peer number there, and its rail.
    pub index: u32,
}

impl Domains {
    /// The domains of the world that a kernel set is opened for.
    pub fn new(shape: &KernelShape) -> Self {
        Self::of(shape.rank, shape.ranks, shape.domains)
    }

    /// The place of `rank` among `ranks` in `count` domains of equal size.
    pub fn of(rank: u32, ranks: u32, count: u32) -> Self {
        let size = ranks / count;
        Self { count, size, mine: rank / size, index: rank % size }
    }

    /// World ranks of this rank's domain, by their index.
    pub(crate) fn domain_ranks(&self) -> impl Iterator<Item = u32> + use<> {
        let domains = *self;
        (0..domains.size).map(move |peer| domains.place(domains.mine, peer))
    }

    /// World ranks of this rank's rail, by their domain.
    pub(crate) fn rail_ranks(&self) -> impl Iterator<Item = u32> + use<> {
        let domains = *self;
        (0..domains.count).map(move |domain| domains.place(domain, domains.index))
    }

    /// The place of a pair: the world rank of `peer` in `domain`.
    pub fn place(&self, domain: u32, peer: u32) -> u32 {
        domain * self.size + peer
    }

    /// The domain of a place, or of a world rank.
    pub fn domain_of(&self, place: u32) -> u32 {
        place / self.size
    }

    /// The peer of a place, or the index of a world rank in its domain.
    pub fn peer_of(&self, place: u32) -> u32 {
        place % self.size
    }

    /// Peers of this domain, this rank first: so that not all ranks turn to peer 0 at once.
    pub fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let (index, size) = (self.index, self.size);
        (0..size).map(move |i| (index + i) % size)
    }

    /// All domains, this rank's own first.
    pub fn all(&self) -> impl Iterator<Item = u32> + use<> {
        let (mine, count) = (self.mine, self.count);
        (0..count).map(move |i| (mine + i) % count)
    }

    /// The domains at the other ends of the rail.
    pub fn others(&self) -> impl Iterator<Item = u32> + use<> {
        self.all().skip(1)
    }

    /// All places, the own domain first: rows from there depend on no other domain.
    pub fn places(&self) -> impl Iterator<Item = u32> + use<> {
        let domains = *self;
        let of_domain = move |domain| domains.peers().map(move |peer| domains.place(domain, peer));
        domains.all().flat_map(of_domain)
    }

    /// The shape of one domain as its forwarders see it: S ranks, and their experts.
    pub fn inside(&self, world: &Shape) -> Shape {
        Shape { ranks: self.size, experts: self.size * world.local_experts(), ..*world }
    }

    /// The shape of the rail: one rank per domain, with all experts of the domain.
    pub fn rail(&self, world: &Shape) -> Shape {
        Shape { ranks: self.count, ..*world }
    }
}

/// World ranks of a team; neighbours in it have the same distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TeamRanks {
    /// The world rank of peer 0.
    pub first: u32,
    /// From one peer to the next.
    pub step: u32,
}

impl TeamRanks {
    /// The world rank of a peer.
    pub fn rank(self, peer: u32) -> u32 {
        self.first + peer * self.step
    }
}

/// This rank among those of one direct exchange. It never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// One of `TY_LEVEL_*`.
    pub level: u64,
    /// This rank, in the world.
    pub rank: u32,
    /// The places, and the team's peers. A place is a peer of the team together with the group of a source's rows.
    /// Inside one of several domains, groups are the domains that rows come from; otherwise there is one group.
    pub domains: Domains,
    /// World ranks of the peers.
    pub team: TeamRanks,
}

impl Member {
    /// A rank of a world of `ranks`, all of which a link of this level reaches.
    pub fn whole(rank: u32, ranks: u32, level: u64) -> Self {
        let team = TeamRanks { first: 0, step: 1 };
        Self { level, rank, domains: Domains::of(rank, ranks, 1), team }
    }

    /// A rank of several domains: inside its own, over a link of level `inside`, and on its rail.
    pub fn levels(domains: Domains, inside: u64) -> [Self; 2] {
        let Domains { count, size, mine, index } = domains;
        let rank = domains.place(mine, index);
        let first = domains.place(mine, 0);
        let on_rail = Self {
            level: abi::TY_LEVEL_SCALE_OUT,
            rank,
            domains: Domains::of(mine, count, 1),
            team: TeamRanks { first: index, step: size },
        };
        [Self { level: inside, rank, domains, team: TeamRanks { first, step: 1 } }, on_rail]
    }

    /// The shape of the exchange: its peers, and their experts.
    pub fn shape(&self, world: &Shape) -> Shape {
        if self.has_groups() { self.domains.inside(world) } else { self.regions(world) }
    }

    /// The shape that outputs are laid out for. Its ranks are the sources: one for each place.
    pub fn regions(&self, world: &Shape) -> Shape {
        Shape { ranks: self.places(), ..*world }
    }

    /// The number of peers in the team.
    pub fn peers(&self) -> u32 {
        self.domains.size
    }

    /// The number of places: that of the sources whose data comes.
    pub fn places(&self) -> u32 {
        self.domains.count * self.domains.size
    }

    /// The world rank of a peer.
    pub fn rank_of(&self, peer: u32) -> u32 {
        self.team.rank(peer)
    }

    /// The world rank of the peer of a place: the source of its rows, or that source's forwarder here.
    pub fn forwarder(&self, place: u32) -> u32 {
        self.rank_of(self.domains.peer_of(place))
    }

    /// The world rank that a place's rows come from.
    pub fn source(&self, place: u32) -> u32 {
        if self.has_groups() { place } else { self.rank_of(place) }
    }

    /// Whether this is the exchange on the rail, whose ranks are one of each domain.
    pub fn is_rail(&self) -> bool {
        self.team.step > 1
    }

    /// Whether rows come in groups: over the rail.
    pub fn has_groups(&self) -> bool {
        self.domains.count > 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOMAINS: Domains = Domains { count: 3, size: 2, mine: 1, index: 1 };

    #[test]
    fn every_place_is_met_once_and_the_own_domain_first() {
        let mut places: Vec<u32> = DOMAINS.places().collect();
        assert_eq!(places, [3, 2, 5, 4, 1, 0]);
        places.sort_unstable();
        assert_eq!(places, [0, 1, 2, 3, 4, 5]);
        assert_eq!(DOMAINS.others().collect::<Vec<_>>(), [2, 0]);
    }

    #[test]
    fn the_shapes_of_both_levels_agree_about_where_an_expert_lives() {
        let world = Shape { ranks: 6, experts: 24, topk: 2, hidden: 64, max_tokens: 8 };
        let (inside, rail) = (DOMAINS.inside(&world), DOMAINS.rail(&world));
        for expert in 0..world.experts {
            let domain = rail.rank_of(expert);
            let peer = inside.rank_of(expert - domain * rail.local_experts());
            assert_eq!(DOMAINS.place(domain, peer), world.rank_of(expert));
        }
    }

    #[test]
    fn both_exchanges_name_sources_and_peers_by_their_world_ranks() {
        let world = Shape { ranks: 6, experts: 12, topk: 2, hidden: 64, max_tokens: 8 };
        let [owners, rail] = Member::levels(Domains::of(3, 6, 3), abi::TY_LEVEL_SCALE_UP);
        assert_eq!([0, 1].map(|peer| owners.rank_of(peer)), [2, 3]);
        assert_eq!([0, 1, 4, 5].map(|place| owners.source(place)), [0, 1, 4, 5]);
        assert_eq!([0, 1, 4, 5].map(|place| owners.forwarder(place)), [2, 3, 2, 3]);
        assert_eq!([0, 1, 2].map(|peer| rail.rank_of(peer)), [1, 3, 5]);
        assert_eq!([0, 1, 2].map(|place| rail.source(place)), [1, 3, 5]);
        let [inside, on_rail] = [owners, rail].map(|member| member.shape(&world));
        assert_eq!((inside.ranks, inside.experts, owners.regions(&world).ranks), (2, 4, 6));
        assert_eq!((on_rail.ranks, on_rail.local_experts()), (3, 4));
        for member in [owners, rail] {
            let (shape, regions) = (member.shape(&world), member.regions(&world));
            assert_eq!((member.peers(), member.places()), (shape.ranks, regions.ranks));
            assert_eq!(member.rank, 3);
        }
        let whole = Member::whole(3, 6, abi::TY_LEVEL_SCALE_UP);
        assert_eq!([whole.shape(&world), whole.regions(&world)], [world; 2]);
        assert!(!whole.has_groups());
        assert_eq!([whole, owners, rail].map(|member| member.is_rail()), [false, false, true]);
        assert_eq!((whole.rank_of(5), whole.source(5)), (5, 5));
    }
}
