//! This rank among those of one exchange.

use tokenyard_core::domains::Domains;

/// See the [module](self). It never changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    /// One of `TY_LEVEL_*`.
    pub(crate) level: u64,
    /// This rank, in the world.
    pub(crate) rank: u32,
    /// The places, and the team's peers. A place is a peer of the team together with the group of a source's rows.
    /// Inside one of several domains, groups are the domains that rows come from; otherwise there is one group.
    pub(crate) domains: Domains,
    /// World rank of peer 0, and from one peer to the next.
    pub(crate) team: (u32, u32),
}

impl Member {
    /// The number of peers in the team.
    pub(crate) fn peers(&self) -> u32 {
        self.domains.size
    }

    /// The number of places: that of the sources whose data comes.
    pub(crate) fn places(&self) -> u32 {
        self.domains.count * self.domains.size
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
