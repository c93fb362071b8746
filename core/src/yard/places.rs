//! Who is where: the places of all ranks, and the domains they make.

use std::collections::BTreeSet;

use crate::bootstrap::Members;
use crate::config::Config;
use crate::host::{Registry, discover};
use crate::topology::{Discover, Place};
use crate::{Error, ErrorKind, Result};

/// Finds this rank's place and gathers everybody's; nothing for a rank that is not there. Collective.
pub(super) fn discover_all(
    members: &Members<'_>,
    config: &Config,
    registry: &Registry,
) -> Result<Vec<Option<Place>>> {
    let part = registry.topology(&config.topology.name)?;
    let (rank, ranks) = (members.rank(), members.ranks());
    let ask = Discover { rank, ranks, local_rank: members.local_rank() };
    let mine = discover(&part, &config.topology.table, &ask)?;
    let encode = |e: serde_json::Error| {
        Error::new(ErrorKind::Protocol, "gather places", "a place cannot be read").with_source(e)
    };
    let all = members.all_gather("places", &serde_json::to_vec(&mine).map_err(encode)?)?;
    let place = |(rank, bytes): (u32, &Vec<u8>)| {
        members.has(rank).then(|| serde_json::from_slice(bytes).map_err(encode)).transpose()
    };
    (0..).zip(&all).map(place).collect()
}

/// The number of machines, where no transport is for inside of a domain: ranks may be anywhere.
pub(super) fn scattered(places: &[Option<Place>]) -> u32 {
    let machines: BTreeSet<&str> = places.iter().flatten().map(|p| p.host.as_str()).collect();
    machines.len() as u32
}

/// The number of domains: what the config says, or machines. Ranks are domain-major, domains equal,
/// and no domain spans machines. Of ranks that are not there the machine is not known: they are taken
/// to have been where that makes domains equal.
pub(super) fn domains(places: &[Option<Place>], wanted: Option<u32>) -> Result<u32> {
    let machines = machines(places)?;
    let ranks = places.len() as u32;
    let fewest = |machines| {
        let fits = |domains: &u32| ranks.is_multiple_of(*domains) && are_whole(places, *domains);
        (machines..=ranks).find(fits).unwrap_or(machines)
    };
    let Some(domains) = wanted else { return Ok(fewest(machines)) };
    let expected = if !ranks.is_multiple_of(domains) {
        format!("a divisor of {ranks} ranks")
    } else if !domains.is_multiple_of(machines) {
        format!("a multiple of {machines}, because a domain cannot span machines")
    } else {
        return Ok(domains);
    };
    Err(Error::new(
        ErrorKind::Config,
        "split domains",
        format!("found topology.domains = {domains}; expected {expected}"),
    ))
}

/// Whether no domain of so many spans machines, and no machine is in two, as far as is known.
fn are_whole(places: &[Option<Place>], domains: u32) -> bool {
    let mut hosts = BTreeSet::new();
    places.chunks(places.len() / domains as usize).all(|domain| {
        let here: BTreeSet<&str> = domain.iter().flatten().map(|p| p.host.as_str()).collect();
        here.len() <= 1 && here.iter().all(|host| hosts.insert(*host))
    })
}

/// Counts the machines: runs of ranks on one.
fn machines(places: &[Option<Place>]) -> Result<u32> {
    let mut sizes: Vec<(&str, usize)> = Vec::new();
    for place in places.iter().flatten() {
        match sizes.iter().position(|(host, _)| *host == place.host) {
            None => sizes.push((&place.host, 1)),
            Some(last) if last + 1 == sizes.len() => sizes[last].1 += 1,
            Some(_) => {
                return Err(Error::new(
                    ErrorKind::Mismatch,
                    "check places",
                    format!("the ranks of machine {} do not follow each other", place.host),
                )
                .with_fix("number ranks machine by machine (srun --distribution=block does)"));
            }
        }
    }
    let whole = places.iter().all(Option::is_some);
    let equal = !whole || sizes.windows(2).all(|pair| pair[0].1 == pair[1].1);
    if !equal {
        let found: Vec<_> = sizes.iter().map(|(host, n)| format!("{n} on {host}")).collect();
        return Err(Error::new(
            ErrorKind::Mismatch,
            "check places",
            format!("domains differ in size: {}; expected equal", found.join(", ")),
        )
        .with_fix("start the same number of ranks on every machine"));
    }
    Ok(sizes.len() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An empty name: the rank is not there.
    fn places(hosts: &[&str]) -> Vec<Option<Place>> {
        hosts
            .iter()
            .map(|host| {
                let host = (*host).to_owned();
                (!host.is_empty()).then_some(Place {
                    host,
                    device: None,
                    numa_node: None,
                    processors: 1,
                })
            })
            .collect()
    }

    #[test]
    fn domains_are_runs_of_ranks_on_one_machine() {
        assert_eq!(domains(&places(&["a"]), None).expect("one"), 1);
        assert_eq!(domains(&places(&["a", "a", "b", "b"]), None).expect("two"), 2);
    }

    #[test]
    fn a_rank_that_is_not_there_makes_no_domain_unequal() {
        assert_eq!(domains(&places(&["a", "", "a"]), None).expect("one"), 1);
        assert_eq!(domains(&places(&["a", "", "b", "b"]), None).expect("two"), 2);
        assert_eq!(domains(&places(&["", "a", "b", "b"]), None).expect("two"), 2);
    }

    #[test]
    fn no_domain_spans_two_machines_where_a_third_is_not_there() {
        let third = places(&["a", "a", "b", "b", "", ""]);
        assert_eq!(domains(&third, None).expect("three"), 3);
        // Domains of three do as well for those that are there.
        let second = places(&["a", "a", "", "", "b", "b"]);
        assert_eq!(domains(&second, None).expect("two"), 2);
    }

    #[test]
    fn a_config_may_split_machines_but_not_join_them() {
        let four = places(&["a", "a", "b", "b"]);
        assert_eq!(domains(&four, Some(2)).expect("as found"), 2);
        assert_eq!(domains(&four, Some(4)).expect("split"), 4);
        let joined = domains(&four, Some(1)).expect_err("joined").to_string();
        assert!(
            joined.contains("found topology.domains = 1; expected a multiple of 2"),
            "{joined}"
        );
        let uneven = domains(&four, Some(3)).expect_err("uneven").to_string();
        assert!(uneven.contains("expected a divisor of 4 ranks"), "{uneven}");
    }

    #[test]
    fn scattered_ranks_and_unequal_domains_are_refused_with_the_fix() {
        let scattered = domains(&places(&["a", "b", "a", "b"]), None).expect_err("scattered");
        assert!(scattered.to_string().contains("do not follow each other"), "{scattered}");
        assert_eq!(super::scattered(&places(&["a", "b", "", "b"])), 2);
        let unequal = domains(&places(&["a", "a", "b"]), None).expect_err("unequal");
        assert!(unequal.to_string().contains("2 on a, 1 on b"), "{unequal}");
    }
}
