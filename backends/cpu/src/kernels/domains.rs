//! Places of ranks: the domains of the world, and this rank's place among them.

use tokenyard_core::kernels::KernelShape;
use tokenyard_core::moe::Shape;

/// Where this rank is, and the shapes that it works with. They never change.
#[derive(Clone, Copy, Debug)]
pub(super) struct World {
    pub(super) rank: u32,
    pub(super) shape: Shape,
    pub(super) domains: Domains,
    /// The shape of this rank's domain: its ranks, and their experts.
    pub(super) inside: Shape,
}

impl World {
    pub(super) fn new(shape: &KernelShape) -> Self {
        let (moe, domains) = (moe_shape(shape), Domains::new(shape));
        Self { rank: shape.rank, shape: moe, domains, inside: domains.inside(&moe) }
    }
}

pub(super) fn moe_shape(shape: &KernelShape) -> Shape {
    Shape {
        ranks: shape.ranks,
        experts: shape.experts,
        topk: shape.topk,
        hidden: shape.hidden,
        max_tokens: shape.max_tokens,
    }
}

/// The domains of a world and this rank's place. One domain: the direct algorithm.
///
/// A *place* is a number below R for a pair of a domain and a peer of this rank's own domain. As
/// the name of a source it is its world rank, and the peer is its *forwarder* here: the rank of this
/// domain that is on the source's rail, takes its rows and hands them on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Domains {
    /// D.
    pub(super) count: u32,
    /// S, ranks of a domain.
    pub(super) size: u32,
    /// This rank's domain.
    pub(super) mine: u32,
    /// This rank's index in its domain: its peer number there, and its rail.
    pub(super) index: u32,
}

impl Domains {
    pub(super) fn new(shape: &KernelShape) -> Self {
        let size = shape.ranks / shape.domains;
        Self { count: shape.domains, size, mine: shape.rank / size, index: shape.rank % size }
    }

    /// The place of a pair: the world rank of `peer` in `domain`.
    pub(super) fn place(&self, domain: u32, peer: u32) -> u32 {
        domain * self.size + peer
    }

    pub(super) fn domain_of(&self, place: u32) -> u32 {
        place / self.size
    }

    pub(super) fn peer_of(&self, place: u32) -> u32 {
        place % self.size
    }

    /// The world rank of the forwarder here that stands for a source: in the own domain itself.
    pub(super) fn forwarder(&self, source: u32) -> u32 {
        self.place(self.mine, self.peer_of(source))
    }

    /// Peers of this domain, this rank first: so that not all ranks turn to peer 0 at once.
    pub(super) fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let (index, size) = (self.index, self.size);
        (0..size).map(move |i| (index + i) % size)
    }

    /// All domains, this rank's own first.
    pub(super) fn all(&self) -> impl Iterator<Item = u32> + use<> {
        let (mine, count) = (self.mine, self.count);
        (0..count).map(move |i| (mine + i) % count)
    }

    /// The domains at the other ends of the rail.
    pub(super) fn others(&self) -> impl Iterator<Item = u32> + use<> {
        self.all().skip(1)
    }

    /// All places, the own domain first: rows from there depend on no other domain.
    pub(super) fn places(&self) -> impl Iterator<Item = u32> + use<> {
        let domains = *self;
        let of_domain = move |domain| domains.peers().map(move |peer| domains.place(domain, peer));
        domains.all().flat_map(of_domain)
    }

    /// The shape of one domain as its forwarders see it: S ranks, and their experts.
    pub(super) fn inside(&self, world: &Shape) -> Shape {
        Shape { ranks: self.size, experts: self.size * world.local_experts(), ..*world }
    }

    /// The shape of the rail: one rank per domain, with all experts of the domain.
    pub(super) fn rail(&self, world: &Shape) -> Shape {
        Shape { ranks: self.count, ..*world }
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
    fn the_forwarder_of_a_source_is_in_this_domain_and_on_its_rail() {
        let forwarders: Vec<u32> = (0..6).map(|source| DOMAINS.forwarder(source)).collect();
        assert_eq!(forwarders, [2, 3, 2, 3, 2, 3]);
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
}
