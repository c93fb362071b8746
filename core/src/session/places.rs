//! The places of all ranks, and the domains that they form.

use std::collections::{BTreeMap, BTreeSet};

use crate::bootstrap::Members;
use crate::config::{Config, wrong_domains};
use crate::host::{Registry, discover};
use crate::topology::{Discover, Place};
use crate::{Error, ErrorKind, Result};

/// Finds this rank's place and gathers those of all ranks; nothing for an absent rank. Collective.
pub(crate) fn discover_all(
    members: &Members<'_>,
    config: &Config,
    registry: &Registry,
) -> Result<Vec<Option<Place>>> {
    let component = registry.choose_topology(&config.topology)?;
    let (rank, ranks) = (members.rank(), members.ranks());
    let ask = Discover { rank, ranks, local_rank: members.machine_index() };
    let mine = discover(&component, &config.topology.table, &ask)?;
    let encode = |e: serde_json::Error| {
        Error::new(ErrorKind::Protocol, "gather places", "a place cannot be read").with_source(e)
    };
    let all = members.all_gather("places", &serde_json::to_vec(&mine).map_err(encode)?)?;
    let place = |(rank, bytes): (u32, &Vec<u8>)| {
        members.has(rank).then(|| serde_json::from_slice(bytes).map_err(encode)).transpose()
    };
    (0..).zip(&all).map(place).collect()
}

/// Names machines by their host names, which ranks sent in `known`, where those names distinguish the
/// machines: a topology's identity of a machine may be a number that no operator knows. All ranks compute the
/// same names.
pub(crate) fn name_hosts(places: &mut [Option<Place>], known: &[Option<(String, u32)>]) {
    let name = |rank: usize| Some(known.get(rank)?.as_ref()?.0.as_str());
    let mut names: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    let mut machines: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for (rank, place) in places.iter().enumerate() {
        let Some(Place { host, .. }) = place else { continue };
        let name = name(rank).filter(|name| !["", "unknown"].contains(name)).unwrap_or(host);
        names.entry(host.clone()).or_default().insert(name);
        machines.entry(name).or_default().insert(host.clone());
    }
    let name_of = |place: &Place| {
        let own = names.get(&place.host).filter(|names| names.len() == 1)?.first()?;
        machines.get(own).is_some_and(|machines| machines.len() == 1).then(|| (*own).to_owned())
    };
    let found: Vec<Option<String>> =
        places.iter().map(|place| place.as_ref().and_then(name_of)).collect();
    for (place, name) in places.iter_mut().zip(found) {
        if let (Some(place), Some(name)) = (place, name) {
            place.host = name;
        }
    }
}

/// The number of machines, where no transport works inside a domain: ranks may be on any machine.
pub(crate) fn scattered(places: &[Option<Place>]) -> u32 {
    let machines: BTreeSet<&str> = places.iter().flatten().map(|p| p.host.as_str()).collect();
    machines.len() as u32
}

/// The number of domains: that of the config, or of machines. Ranks are domain-major, domains equal, and
/// no domain spans machines. The machine of an absent rank is not known. So where ranks are absent, the
/// result is the largest number of domains that divides no known machine: then as few ranks as possible
/// need an absent rank to reach others. Where only one machine is known, the result is one domain,
/// because that machine's ranks need no link between domains.
pub(crate) fn domains(places: &[Option<Place>], wanted: Option<u32>) -> Result<u32> {
    let machines = machines(places)?;
    let ranks = places.len() as u32;
    let is_equal = |domains: &u32| ranks.is_multiple_of(*domains);
    let Some(domains) = wanted else {
        let most = if machines == 1 { 1 } else { ranks };
        let fits = |domains: &u32| is_equal(domains) && are_whole(places, *domains);
        return Ok((machines..=most).rev().find(fits).unwrap_or(machines));
    };
    let expected = if !is_equal(&domains) {
        format!("a divisor of {ranks} ranks")
    } else if span_machines(places, domains) {
        format!("more, because a domain cannot span machines, of which {machines} are known")
    } else {
        return Ok(domains);
    };
    Err(wrong_domains(domains, &expected))
}

/// The known machines of each domain, for a number of domains.
fn hosts_of(places: &[Option<Place>], domains: u32) -> impl Iterator<Item = BTreeSet<&str>> {
    let domains = places.chunks(places.len() / domains as usize);
    domains.map(|domain| domain.iter().flatten().map(|p| p.host.as_str()).collect())
}

/// True if, with this number of domains, a domain spans machines, as far as is known.
fn span_machines(places: &[Option<Place>], domains: u32) -> bool {
    hosts_of(places, domains).any(|hosts| hosts.len() > 1)
}

/// True if, with this number of domains, no domain spans machines, and no machine is in two domains, as
/// far as is known.
fn are_whole(places: &[Option<Place>], domains: u32) -> bool {
    let mut known = BTreeSet::new();
    let is_new = |hosts: BTreeSet<_>| hosts.into_iter().all(|host| known.insert(host));
    !span_machines(places, domains) && hosts_of(places, domains).all(is_new)
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

    /// An empty name means that the rank is absent.
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
                    nics: Vec::new(),
                    nics_given: false,
                    any_rails: false,
                    missing_nic: None,
                })
            })
            .collect()
    }

    #[test]
    fn machines_have_the_names_of_their_hosts_where_these_tell_them_apart() {
        let named = |hosts: &[&str], known: &[&str]| {
            let mut places = places(hosts);
            let known: Vec<_> = known.iter().map(|name| Some(((*name).to_owned(), 7))).collect();
            name_hosts(&mut places, &known);
            let host = |place: Option<Place>| place.map_or(String::new(), |place| place.host);
            places.into_iter().map(host).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(named(&["7f", "7f", "", "9a"], &["n1", "n1", "n2", "n2"]), "n1 n1  n2");
        // Two machines of one name, and containers of one machine that have names of their own.
        assert_eq!(named(&["7f", "9a", "3c"], &["n1", "n1", "n2"]), "7f 9a n2");
        assert_eq!(named(&["7f", "7f", "9a"], &["pod1", "pod2", "n2"]), "7f 7f n2");
        // No machine takes the name of a machine with a name of its own.
        assert_eq!(named(&["7f", "9a"], &["unknown", "7f"]), "7f 9a");
        assert_eq!(named(&["7f", "9a"], &[]), "7f 9a");
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
        let second = places(&["a", "a", "", "", "b", "b"]);
        assert_eq!(domains(&second, None).expect("three"), 3);
        assert_eq!(domains(&second, Some(3)).expect("as the config says"), 3);
    }

    #[test]
    fn who_is_there_reaches_all_others_where_machines_between_are_not_there() {
        let reaches_all = |places: &[Option<Place>]| {
            let domains = domains(places, None).expect("a number of domains") as usize;
            let size = places.len() / domains;
            let is_there = |rank: usize| places[rank].is_some();
            let there = || (0..places.len()).filter(|rank| is_there(*rank));
            // The forwarder is the rank of the destination's domain on the sender's rail.
            let forwarder = |from: usize, to: usize| to / size * size + from % size;
            let reach = |a: usize, b: usize| a / size == b / size || is_there(forwarder(a, b));
            there().all(|a| there().all(|b| reach(a, b)))
        };
        assert!(reaches_all(&places(&["a", "a", "", "", "b", "b"])));
        assert!(reaches_all(&places(&["a", "a", "", "", "", "", "b", "b"])));
        let node = |host| vec![host; 8];
        assert!(reaches_all(&places(&[node("a"), node(""), node("b")].concat())));
        // One of each of two machines.
        assert!(reaches_all(&places(&["a", "", "", "b"])));
    }

    #[test]
    fn where_one_machine_is_known_there_is_one_domain() {
        assert_eq!(domains(&places(&["a", "a", "", ""]), None).expect("one"), 1);
        assert_eq!(domains(&places(&["a", ""]), None).expect("one"), 1);
    }

    #[test]
    fn a_config_may_split_machines_but_not_join_them() {
        let four = places(&["a", "a", "b", "b"]);
        assert_eq!(domains(&four, Some(2)).expect("as found"), 2);
        assert_eq!(domains(&four, Some(4)).expect("split"), 4);
        let joined = domains(&four, Some(1)).expect_err("joined").to_string();
        assert!(joined.contains("found topology.domains = 1; expected more, because"), "{joined}");
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
