//! The processes of a group, as they introduce themselves in the exchange of their caller. A group may be a
//! part of the ranks that a launcher started, so its members say themselves where they run.

use serde::{Deserialize, Serialize};

use super::identity::Launched;
use super::message::MAX_HOST;
use super::text::Text;
use crate::machine::{host_name, identity};
use tokenyard_errors::Error;

/// One process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Card {
    #[serde(with = "Text::<MAX_HOST>")]
    pub(super) host: String,
    /// Equal for processes that reach each other at loopback addresses.
    #[serde(with = "Text::<MAX_HOST>")]
    pub(super) machine: String,
    pid: u32,
    /// Its rank as its launcher counts.
    launched_rank: Option<u32>,
}

impl Card {
    /// The card of this process.
    pub(super) fn mine(launched: Launched) -> Self {
        let host = host_name();
        // A system without these files has host names, too.
        let machine = identity().unwrap_or_else(|_| host.clone());
        Self { host, machine, pid: std::process::id(), launched_rank: launched.rank }
    }
}

/// The processes by rank; none where the ranks came without an exchange.
#[derive(Debug, Default)]
pub(super) struct Roster(Vec<Card>);

impl Roster {
    pub(super) fn new(cards: Vec<Card>) -> Self {
        Self(cards)
    }

    /// The index of `rank` among the members on its machine.
    pub(super) fn local_rank(&self, rank: u32) -> u32 {
        let before = self.0.get(..rank as usize).unwrap_or_default();
        let machine = self.0.get(rank as usize).map(|card| &card.machine);
        before.iter().filter(|card| Some(&card.machine) == machine).count() as u32
    }

    /// The process of `rank`, for people: `rank 1 of this group is world rank 3, pid 4242 on node-7`.
    pub(super) fn describe(&self, rank: u32) -> Option<String> {
        let Card { host, pid, launched_rank, .. } = self.0.get(rank as usize)?;
        let launched = launched_rank.map(|rank| format!("world rank {rank}, "));
        let launched = launched.unwrap_or_default();
        Some(format!("rank {rank} of this group is {launched}pid {pid} on {host}"))
    }

    /// The error with the process of the rank that it is about.
    pub(super) fn locate(&self, error: Error) -> Error {
        match error.rank().and_then(|rank| self.describe(rank)) {
            Some(process) => error.with_context("process", process),
            None => error,
        }
    }

    /// The first of `ranks`, as text that follows their list.
    pub(super) fn list(&self, ranks: &[u32]) -> String {
        const SHOWN: usize = 4;
        let shown = ranks.iter().take(SHOWN).filter_map(|rank| self.describe(*rank));
        shown.map(|process| format!("; {process}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenyard_errors::ErrorKind;

    fn card(machine: &str, pid: u32, launched_rank: Option<u32>) -> Card {
        Card { host: "node".into(), machine: machine.into(), pid, launched_rank }
    }

    #[test]
    fn a_member_is_local_to_the_members_of_its_machine_whatever_the_launcher_counts() {
        // Ranks 1, 3, 5 and 7 of two machines with four ranks each, whose hosts have one name.
        let cards = [("a", 1), ("a", 3), ("b", 5), ("b", 7)];
        let roster = Roster::new(cards.map(|(m, rank)| card(m, 9, Some(rank))).into());
        assert_eq!([0, 1, 2, 3].map(|rank| roster.local_rank(rank)), [0, 1, 0, 1]);
        assert_eq!(Roster::default().local_rank(3), 0);
    }

    #[test]
    fn an_error_about_a_member_names_its_process_and_its_rank_in_the_world() {
        let roster = Roster::new(vec![card("a", 1, None), card("a", 42, Some(3))]);
        let error = |rank| {
            let error = Error::new(ErrorKind::PeerLost, "test", "it closed").with_rank(rank);
            roster.locate(error).to_string()
        };
        let of_1 = "rank 1 of this group is world rank 3, pid 42 on node";
        assert_eq!(error(1), format!("test: it closed [process: {of_1}]"));
        assert_eq!(error(0), "test: it closed [process: rank 0 of this group is pid 1 on node]");
        assert_eq!(error(7), "test: it closed");
        assert_eq!(roster.list(&[1, 7]), format!("; {of_1}"));
    }
}
