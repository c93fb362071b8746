//! Divides the near NICs of a machine among its ranks.

use std::collections::{BTreeMap, BTreeSet};

use crate::topology::Place;

/// Divides the NICs of each machine among its ranks: no two ranks have the same NIC while another,
/// equally near NIC is idle, and all ranks of a machine have equally many. All ranks compute the same
/// result from the same places.
pub fn share_nics(places: &mut [Option<Place>]) {
    let mut machines: BTreeMap<String, Vec<&mut Place>> = BTreeMap::new();
    for place in places.iter_mut().flatten() {
        if !place.nics_given && !place.nics.is_empty() {
            machines.entry(place.host.clone()).or_default().push(place);
        }
    }
    for ranks in machines.values_mut() {
        let near: Vec<Vec<String>> = ranks.iter().map(|place| place.nics.clone()).collect();
        for (place, own) in ranks.iter_mut().zip(shares(&near)) {
            place.nics = own;
        }
    }
}

/// The NICs of each rank, of those that it is near to.
fn shares(near: &[Vec<String>]) -> Vec<Vec<String>> {
    let mut own = match_one_each(near);
    let mut taken: BTreeSet<String> = own.iter().flatten().cloned().collect();
    // A rank without a NIC of its own shares the NIC that the fewest ranks have.
    for (rank, nics) in near.iter().enumerate() {
        if own[rank].is_empty() {
            let users = |nic: &&String| own.iter().flatten().filter(|of| of == nic).count();
            let fewest = nics.iter().min_by_key(users).cloned();
            own[rank].extend(fewest);
        }
    }
    // The remaining NICs are dealt in rounds, while there is one for every rank.
    loop {
        let mut round: Vec<String> = Vec::new();
        for nics in near {
            round.extend(
                nics.iter().find(|nic| !taken.contains(*nic) && !round.contains(nic)).cloned(),
            );
        }
        if round.len() < near.len() {
            break;
        }
        taken.extend(round.iter().cloned());
        for (own, nic) in own.iter_mut().zip(round) {
            own.push(nic);
        }
    }
    in_order(near, &mut own);
    own
}

/// One NIC of its own for as many ranks as possible: a maximum matching, earlier ranks and nearer
/// entries first.
fn match_one_each(near: &[Vec<String>]) -> Vec<Vec<String>> {
    fn place<'a>(
        rank: usize,
        near: &'a [Vec<String>],
        owner: &mut BTreeMap<&'a str, usize>,
        seen: &mut BTreeSet<&'a str>,
    ) -> bool {
        for nic in &near[rank] {
            if seen.insert(nic) {
                let free = match owner.get(nic.as_str()).copied() {
                    None => true,
                    Some(other) => place(other, near, owner, seen),
                };
                if free {
                    owner.insert(nic, rank);
                    return true;
                }
            }
        }
        false
    }
    let mut owner = BTreeMap::new();
    for rank in 0..near.len() {
        place(rank, near, &mut owner, &mut BTreeSet::new());
    }
    let mut own = vec![Vec::new(); near.len()];
    for (nic, rank) in owner {
        own[rank].push(nic.to_owned());
    }
    own
}

/// Reorders the NICs of ranks with equal choices in the order of the choice: neighbours go to one rank.
fn in_order(near: &[Vec<String>], own: &mut [Vec<String>]) {
    let mut groups: BTreeMap<&[String], Vec<usize>> = BTreeMap::new();
    for (rank, nics) in near.iter().enumerate() {
        groups.entry(nics).or_default().push(rank);
    }
    for (nics, ranks) in groups {
        let of_group = || ranks.iter().flat_map(|rank| &own[*rank]);
        let mut pool: Vec<String> = of_group().cloned().collect();
        pool.sort_by_key(|nic| nics.iter().position(|of| of == nic));
        let mut pool = pool.into_iter();
        for rank in ranks {
            let count = own[rank].len();
            own[rank] = pool.by_ref().take(count).collect();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Ranks by machine, each with its NICs.
    pub(crate) fn places(ranks: &[(&str, &[&str])]) -> Vec<Option<Place>> {
        ranks
            .iter()
            .map(|(host, nics)| {
                Some(Place {
                    host: (*host).to_owned(),
                    device: None,
                    numa_node: None,
                    processors: 1,
                    nics: nics.iter().map(|nic| (*nic).to_owned()).collect(),
                    nics_given: false,
                    any_rails: false,
                    missing_nic: None,
                })
            })
            .collect()
    }

    fn shared(ranks: &[(&str, &[&str])]) -> Vec<String> {
        let mut places = places(ranks);
        share_nics(&mut places);
        places.into_iter().flatten().map(|place| place.nics.join(",")).collect()
    }

    #[test]
    fn ranks_that_are_near_to_the_same_nics_share_them_out_in_order() {
        let four: &[&str] = &["n0", "n1", "n2", "n3"];
        assert_eq!(shared(&[("a", four), ("a", four)]), ["n0,n1", "n2,n3"]);
        assert_eq!(shared(&[("a", four), ("b", four)]), ["n0,n1,n2,n3", "n0,n1,n2,n3"]);
        assert_eq!(shared(&[("a", four), ("a", four), ("a", four)]), ["n0", "n1", "n2"]);
    }

    #[test]
    fn where_there_are_too_few_they_are_shared_evenly() {
        let two: &[&str] = &["n0", "n1"];
        assert_eq!(shared(&[("a", two); 4]), ["n0", "n0", "n1", "n1"]);
        assert_eq!(shared(&[("a", &["n0"]), ("a", &["n0"])]), ["n0", "n0"]);
    }

    #[test]
    fn a_rank_gives_way_to_one_that_has_no_other() {
        assert_eq!(shared(&[("a", &["n0", "n1"]), ("a", &["n0"])]), ["n1", "n0"]);
    }

    #[test]
    fn named_nics_are_left_alone_and_ranks_without_any_too() {
        let mut places = places(&[("a", &["n0"]), ("a", &["n0"]), ("a", &[])]);
        places[0].as_mut().unwrap().nics_given = true;
        share_nics(&mut places);
        let nics: Vec<_> = places.iter().flatten().map(|place| place.nics.join(",")).collect();
        assert_eq!(nics, ["n0", "n0", ""]);
    }

    proptest! {
        /// Ranks with arbitrary ranges of NICs.
        #[test]
        fn no_two_ranks_share_a_nic_while_one_is_idle_that_is_as_near(
            sets in proptest::collection::vec((0_usize..6, 1_usize..5), 1..7),
        ) {
            let near: Vec<Vec<String>> = sets
                .iter()
                .map(|(from, count)| (*from..from + count).map(|n| format!("n{n}")).collect())
                .collect();
            let own = shares(&near);
            let users = |nic: &String| own.iter().filter(|own| own.contains(nic)).count();
            for (near, own) in near.iter().zip(&own) {
                prop_assert_eq!(own.len(), own.iter().collect::<BTreeSet<_>>().len());
                prop_assert!(!own.is_empty() && own.iter().all(|nic| near.contains(nic)));
                let shares_one = own.iter().any(|nic| users(nic) > 1);
                prop_assert!(!shares_one || near.iter().all(|nic| users(nic) > 0));
            }
            prop_assert!(own.windows(2).all(|pair| pair[0].len() == pair[1].len()));
        }
    }
}
