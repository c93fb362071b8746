//! NICs of ranks that communicate with each other: equally many on every rank, and the same ones on a
//! rail.

use super::refuse_unless;
use crate::error::words::first_names;
use crate::topology::Place;
use crate::{Error, ErrorKind, Result};

/// The fix where ranks of a rail do not reach each other.
const COMPARE: &str = "`tokenyard doctor` on both nodes names the NIC that is missing or down";
/// The fix where a NIC is missing.
const GO_ON: &str = "`tokenyard doctor` on that node says all about it; to go on with the NICs that can be used, name \
                     them in `nics` of [topology.auto] on every node";

/// A rank with NICs.
#[derive(Clone, Copy)]
struct RankNics<'a> {
    rank: u32,
    place: &'a Place,
}

impl<'a> RankNics<'a> {
    /// The ranks of an iterator that have NICs.
    fn among<P: IntoIterator<Item = (u32, &'a Option<Place>)>>(
        ranks: P,
    ) -> impl Iterator<Item = Self> {
        let ranks = ranks.into_iter().filter_map(|(rank, place)| Some((rank, place.as_ref()?)));
        ranks.filter(|(_, place)| !place.nics.is_empty()).map(|(rank, place)| Self { rank, place })
    }

    fn count(self) -> usize {
        self.place.nics.len()
    }

    /// `rank 1 on b has 2 (n0, n1)`
    fn has(self) -> String {
        let Self { rank, place } = self;
        format!("rank {rank} on {} has {} ({})", place.host, self.count(), place.nics.join(", "))
    }

    /// `rank 1 on b uses n0, n1`
    fn uses(self) -> String {
        format!("rank {} on {} uses {}", self.rank, self.place.host, self.place.nics.join(", "))
    }

    fn is_elsewhere(self, other: Self) -> bool {
        self.place.host != other.place.host
    }
}

/// Gives all ranks equally many NICs, because ranks that communicate with each other pair up their NICs.
/// Returns warnings about removed NICs. A fault is an error only where transports use these NICs.
///
/// # Errors
/// [`ErrorKind::Config`] if the operator named unequally many NICs. [`ErrorKind::Mismatch`] if some ranks
/// have NICs and one has none or fewer, or if a rail has different ones: these do not reach each other on a
/// fabric without routes between rails. [`ErrorKind::Unavailable`] if a topology reports that a rank's NIC is
/// missing or cannot be used. The text names ranks and NICs. If a place states that NICs of all names reach
/// each other, all of these except the first are warnings.
pub(crate) fn even_out(
    places: &mut [Option<Place>],
    domains: u32,
    transports_use: bool,
) -> Result<Vec<String>> {
    let with_nics = || RankNics::among((0..).zip(places.iter()));
    let Some(poor) = with_nics().min_by_key(|one| one.count()) else { return Ok(Vec::new()) };
    let is_free = any_rails(places) || !transports_use;
    let compare = |is_free, found| refuse_unless(is_free, ErrorKind::Mismatch, found, COMPARE);
    let mut warnings = Vec::new();
    if let (Some(found), true) = (missing_nic(places), transports_use) {
        warnings.push(refuse_unless(is_free, ErrorKind::Unavailable, found, GO_ON)?);
    }
    if let Some(found) = without_nic(places) {
        warnings.push(compare(is_free, found)?);
    }
    let count = poor.count();
    let rich = with_nics().max_by_key(|one| (one.count(), u32::MAX - one.rank));
    if let Some(rich) = rich.filter(|rich| rich.count() > count) {
        let found = format!("{} and {}", poor.has(), rich.has());
        if transports_use && places.iter().flatten().any(|place| place.nics_given) {
            return Err(Error::new(
                ErrorKind::Config,
                "choose NICs",
                format!("ranks have unequally many NICs: {found}; expected equally many"),
            )
            .with_fix("name equally many in `nics` of [topology.auto] on every node"));
        }
        if let Some(found) = thin_rail(places, domains) {
            compare(is_free, found)?;
        }
        warnings.push(format!("every rank uses {count} of its NICs, because {found}"));
    }
    for place in places.iter_mut().flatten() {
        place.nics.truncate(count);
    }
    if let Some((found, is_given)) = crossed_rail(places, domains) {
        warnings.push(compare(is_free || is_given, found)?);
    }
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    Ok(warnings)
}

/// True if a place states that NICs of all names reach each other.
pub(crate) fn any_rails(places: &[Option<Place>]) -> bool {
    places.iter().flatten().any(|place| place.any_rails)
}

/// The first rank whose NIC is missing or cannot be used, from its topology.
fn missing_nic(places: &[Option<Place>]) -> Option<String> {
    let ranks = (0_u32..).zip(places);
    let mut missing = ranks.filter_map(|(rank, place)| {
        let place = place.as_ref()?;
        Some((rank, &place.host, place.missing_nic.as_ref()?))
    });
    let (rank, host, words) = missing.next()?;
    let others: Vec<u32> = missing.map(|(rank, ..)| rank).collect();
    let others = match others.as_slice() {
        [] => String::new(),
        [one] => format!(" (so does rank {one})"),
        some => format!(" (so do ranks {})", first_names(some)),
    };
    Some(format!(
        "rank {rank} on {host} lacks a NIC{others}: {words}. Ranks that share a NIC have half of its bandwidth \
         each, and all others wait for them"
    ))
}

/// The ranks with NICs of each rail, by the rail's number.
fn rails(
    places: &[Option<Place>],
    domains: u32,
) -> impl Iterator<Item = (usize, Vec<RankNics<'_>>)> {
    let size = places.len() / domains.max(1) as usize;
    let rail = move |index| RankNics::among((0..).zip(places).skip(index).step_by(size)).collect();
    (0..size).map(move |index| (index, rail(index)))
}

/// The first rail whose ranks on different machines have unequally many NICs: one is missing. Ranks of one
/// machine may differ, because they are near to different NICs.
fn thin_rail(places: &[Option<Place>], domains: u32) -> Option<String> {
    rails(places, domains).find_map(|(index, ranks)| {
        let least = *ranks.iter().min_by_key(|one| one.count())?;
        let is_richer =
            |one: &&RankNics<'_>| one.is_elsewhere(least) && one.count() > least.count();
        let most = ranks.iter().find(is_richer)?;
        let (has, more) = (least.has(), most.has());
        let absent = absent_on(places, least.place, most.place);
        Some(format!("ranks of rail {index} have unequally many NICs: {has} and {more}{absent}"))
    })
}

/// The NICs of `most` that no rank on the machine of `least` has: the missing ones.
fn absent_on(places: &[Option<Place>], least: &Place, most: &Place) -> String {
    let is_there = |nic: &String| {
        let of_host = places.iter().flatten().filter(|place| place.host == least.host);
        of_host.flat_map(|place| &place.nics).any(|other| other == nic)
    };
    let absent: Vec<&String> = most.nics.iter().filter(|nic| !is_there(nic)).collect();
    match absent.is_empty() {
        true => String::new(),
        false => format!("; no rank on {} has {}", least.host, first_names(absent)),
    }
}

/// The first rank that has no NIC where others have.
fn without_nic(places: &[Option<Place>]) -> Option<String> {
    let mut there = (0_u32..).zip(places).filter_map(|(rank, place)| Some((rank, place.as_ref()?)));
    let (poor, none) = there.find(|(_, place)| place.nics.is_empty())?;
    let rich = RankNics::among((0..).zip(places)).next()?;
    Some(format!("rank {poor} on {} has no NIC that can be used, and {}", none.host, rich.uses()))
}

/// The first rail whose ranks on different machines have different NICs, and whether the operator named both.
/// If each NIC is on a network of its own, these NICs do not reach each other.
fn crossed_rail(places: &[Option<Place>], domains: u32) -> Option<(String, bool)> {
    rails(places, domains).find_map(|(index, ranks)| {
        let one = *ranks.first()?;
        let crosses = |of: &&RankNics<'_>| of.is_elsewhere(one) && of.place.nics != one.place.nics;
        let other = ranks.iter().find(crosses)?;
        let found = format!(
            "rail {index} crosses: {} and {}; on a fabric without ways between rails they do not reach each other",
            one.uses(),
            other.uses()
        );
        Some((found, one.place.nics_given && other.place.nics_given))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nics::share::tests::places;

    #[test]
    fn a_node_with_fewer_nics_bounds_all_and_is_named() {
        let mut places = places(&[("a", &["n0", "n1"]), ("b", &["n1"])]);
        places[1].as_mut().unwrap().any_rails = true;
        let warnings = even_out(&mut places, 2, true).unwrap();
        assert_eq!(
            warnings[0],
            "every rank uses 1 of its NICs, because rank 1 on b has 1 (n1) and rank 0 on a has 2 (n0, n1)"
        );
        assert!(
            warnings[1].starts_with("rail 0 crosses: rank 0 on a uses n0 and rank 1 on b uses n1")
        );
        assert_eq!(places[0].as_ref().unwrap().nics, ["n0"]);
    }

    #[test]
    fn a_rail_of_different_nics_is_refused_with_both_unless_the_operator_named_them() {
        let two = || places(&[("a", &["n0"]), ("a", &["n3"]), ("b", &["n0"]), ("b", &["n1"])]);
        let error = even_out(&mut two(), 2, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        let text = error.to_string();
        assert!(
            text.contains("rail 1 crosses: rank 1 on a uses n3 and rank 3 on b uses n1")
                && text.contains("rails = \"any\""),
            "{text}"
        );
        let mut named = two();
        named.iter_mut().flatten().for_each(|place| place.nics_given = true);
        assert_eq!(even_out(&mut named, 2, true).unwrap().len(), 1);
    }

    #[test]
    fn a_rank_without_any_nic_is_named_where_others_have_some() {
        let mut nodes = places(&[("a", &["n0"]), ("b", &[])]);
        let text = even_out(&mut nodes, 2, true).unwrap_err().to_string();
        assert!(text.contains("rank 1 on b has no NIC that can be used, and rank 0 on a uses n0"));
        nodes[0].as_mut().unwrap().any_rails = true;
        assert_eq!(even_out(&mut nodes, 2, true).unwrap().len(), 1);
    }

    #[test]
    fn a_node_with_fewer_nics_is_refused_with_what_it_lacks() {
        let mut places = places(&[("a", &["n0", "n1"]), ("b", &["n0"])]);
        let error = even_out(&mut places, 2, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        let text = error.to_string();
        assert!(
            text.contains(
                "rank 1 on b has 1 (n0) and rank 0 on a has 2 (n0, n1); no rank on b has n1"
            ) && text.contains("rails = \"any\""),
            "{text}"
        );
        assert_eq!(places[0].as_ref().unwrap().nics.len(), 2, "nothing is taken away unsaid");
    }

    #[test]
    fn ranks_of_one_machine_may_be_near_to_fewer_nics_which_is_reported() {
        let two: [(&str, &[&str]); 2] = [("a", &["n0", "n1"]), ("a", &["n2"])];
        let warnings = even_out(&mut places(&two), 1, true).unwrap();
        assert!(warnings[0].contains("rank 1 on a has 1 (n2)"), "{warnings:?}");
        let four: [(&str, &[&str]); 4] = [two[0], two[1], ("b", &["n0", "n1"]), ("b", &["n2"])];
        assert_eq!(even_out(&mut places(&four), 2, true).unwrap().len(), 1);
    }

    #[test]
    fn unequally_many_named_nics_are_refused_with_rank_and_names() {
        let mut places = places(&[("a", &["n0", "n1"]), ("b", &["n1"])]);
        places[1].as_mut().unwrap().nics_given = true;
        let error = even_out(&mut places, 2, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        let text = error.to_string();
        assert!(text.contains("rank 1 on b has 1 (n1)") && text.contains("(n0, n1)"), "{text}");
    }

    #[test]
    fn equal_nodes_have_nothing_to_say() {
        let two: &[&str] = &["n0", "n1"];
        let mut nodes = places(&[("a", two), ("b", two)]);
        assert_eq!(even_out(&mut nodes, 2, true).unwrap(), Vec::<String>::new());
        assert_eq!(
            even_out(&mut places(&[("a", &[]), ("b", &[])]), 2, true).unwrap(),
            Vec::<String>::new()
        );
        assert_eq!(even_out(&mut [None, None], 2, true).unwrap(), Vec::<String>::new());
        // One machine, split into two domains.
        let mut split = places(&[("a", &["n0"]), ("a", &["n1"])]);
        assert_eq!(even_out(&mut split, 2, true).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_missing_nic_is_refused_where_transports_use_nics_and_else_says_nothing() {
        let node = || {
            let mut two = places(&[("a", &["n0"]), ("a", &["n0"])]);
            two[1].as_mut().unwrap().missing_nic = Some("GPU 1 has no NIC of its own".to_owned());
            two
        };
        let error = even_out(&mut node(), 1, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let text = error.to_string();
        assert!(text.contains("rank 1 on a lacks a NIC: GPU 1 has no NIC of its own"), "{text}");
        assert!(text.contains("`nics` of [topology.auto]"), "{text}");
        assert!(
            text.contains("half of its bandwidth each") && text.contains("rails = \"any\""),
            "{text}"
        );
        let mut both = node();
        both[0].as_mut().unwrap().missing_nic = Some("GPU 0 has none".to_owned());
        let text = even_out(&mut both, 1, true).unwrap_err().to_string();
        assert!(
            text.contains("rank 0 on a lacks a NIC (so does rank 1): GPU 0 has none"),
            "{text}"
        );
        let mut many: Vec<_> = (0..40).flat_map(|_| node()).collect();
        for place in many.iter_mut().flatten() {
            place.missing_nic = Some("none is there".to_owned());
        }
        let text = even_out(&mut many, 1, true).unwrap_err().to_string();
        assert!(
            text.contains("(so do ranks 1, 2, ") && text.contains(" more): none is there"),
            "{text}"
        );
        assert_eq!(even_out(&mut node(), 1, false).unwrap(), Vec::<String>::new());
        let mut free = node();
        free[0].as_mut().unwrap().any_rails = true;
        assert_eq!(even_out(&mut free, 1, true).unwrap().len(), 1);
    }

    #[test]
    fn rails_that_cross_are_no_error_where_no_transport_uses_nics() {
        let mut two = places(&[("a", &["n0"]), ("b", &["n1"])]);
        assert!(even_out(&mut two, 2, true).is_err());
        let warnings = even_out(&mut two, 2, false).unwrap();
        assert!(warnings[0].starts_with("rail 0 crosses"), "{warnings:?}");
    }
}
