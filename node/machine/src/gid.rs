//! The choice of the GID by which a port is addressed. The transports that open ports and the
//! doctor that judges them share this rule.

use std::net::Ipv6Addr;

use crate::{Gid, GidKind, LinkLayer};

/// How good an address is for RoCE; less is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Preference {
    /// An IPv4 address.
    Ipv4,
    /// An IPv4 address that no router forwards (`169.254.0.0/16`).
    Ipv4LinkLocal,
    /// An IPv6 address.
    Ipv6,
    /// An IPv6 address that no router forwards (`fe80::/10`).
    Ipv6LinkLocal,
}

impl Preference {
    /// The rank of an entry's address.
    pub fn of(address: &Ipv6Addr) -> Self {
        match address.to_ipv4_mapped() {
            Some(v4) if v4.is_link_local() => Self::Ipv4LinkLocal,
            Some(_) => Self::Ipv4,
            None if address.is_unicast_link_local() => Self::Ipv6LinkLocal,
            None => Self::Ipv6,
        }
    }

    /// Routers do not forward it.
    pub fn is_link_local(self) -> bool {
        matches!(self, Self::Ipv4LinkLocal | Self::Ipv6LinkLocal)
    }
}

/// The entry of a port's table that is used where nothing is configured.
///
/// InfiniBand: entry 0. RoCE: of the entries of version 2, the first with an IPv4 address; without
/// one, the first with a routable IPv6 address, then the first with a link-local one.
pub fn choose(layer: LinkLayer, gids: &[Gid]) -> Option<&Gid> {
    if layer == LinkLayer::InfiniBand {
        return gids.iter().find(|gid| gid.index == 0);
    }
    gids.iter()
        .filter(|gid| gid.kind.known() == Some(&GidKind::RoceV2))
        // The route names the entry by 8 bits.
        .filter(|gid| gid.index <= u32::from(u8::MAX))
        .min_by_key(|gid| (Preference::of(&gid.address), gid.index))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Fact;

    fn entry(index: u32, address: &str, kind: GidKind) -> Gid {
        let address = address.parse().unwrap();
        Gid { index, address, kind: Fact::Known(kind), interface: Fact::Missing }
    }

    #[test]
    fn the_first_of_the_best_kind_is_taken() {
        let table = [
            entry(0, "fe80::1", GidKind::IbOrRoceV1),
            entry(1, "fe80::1", GidKind::RoceV2),
            entry(2, "::ffff:10.0.0.1", GidKind::IbOrRoceV1),
            entry(3, "::ffff:169.254.3.4", GidKind::RoceV2),
            entry(4, "2001:db8::1", GidKind::RoceV2),
            entry(5, "::ffff:10.0.0.1", GidKind::RoceV2),
            entry(256, "::ffff:10.0.0.2", GidKind::RoceV2),
        ];
        let chosen = |gids: &[Gid]| choose(LinkLayer::Ethernet, gids).map(|gid| gid.index);
        assert_eq!(chosen(&table), Some(5));
        assert_eq!(chosen(&table[..5]), Some(3));
        assert_eq!(chosen(&table[..2]), Some(1));
        assert_eq!(chosen(&table[..1]), None);
        assert_eq!(chosen(&table[6..]), None);
        assert_eq!(choose(LinkLayer::InfiniBand, &table).map(|gid| gid.index), Some(0));
    }
}
