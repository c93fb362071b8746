//! Which NICs a rank uses.
//!
//! A topology names those that are near to each rank, from what the files of its machine say
//! ([`Place::nics`](crate::topology::Place::nics)). All that follows is decided here: [`share_nics`] gives the ranks
//! of a machine their own, the communicator compares those of ranks that talk to each other, and [`Nics::choose`]
//! finds a rank's own among those that a transport lists.
//!
//! One rule holds for all of them. A rank that would go on over the NIC of another, or over fewer than others have, is
//! refused before anything moves: all ranks would wait for it, and nobody would know why. It is a warning where NICs of
//! all names reach each other, for then the operator has said so; and nothing is passed over without a word.

pub(crate) mod rails;
pub(crate) mod share;

pub use share::share_nics;

use crate::error::first_names;
use crate::{Error, ErrorKind, Result};

/// The NICs that the topology chose for a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nics {
    /// Names as in `/sys/class/infiniband`, in the order in which they are used; empty where it chose none.
    pub names: Vec<String>,
    /// NICs of all names reach each other.
    pub any_rails: bool,
}

/// A NIC that a transport lists, or a port of one.
#[derive(Clone, Debug)]
pub struct ListedNic {
    /// The NIC's name, with or without an ending: `mlx5_0`, `rdmap85s0-rdm`.
    pub name: String,
    /// What keeps it from being used, in words: `port 1 is not active`.
    pub fault: Option<String>,
}

/// How a transport looks for the NICs of a rank.
#[derive(Clone, Copy, Debug)]
pub struct NicSearch<'a> {
    /// The transport, for people: `verbs`, `provider efa`.
    pub transport: &'a str,
    /// What it lists.
    pub listed: &'a [ListedNic],
    /// How many NICs a rank uses; at least 1.
    pub most: usize,
    /// It may have names of its own: a NIC that it does not list may be there.
    pub own_names: bool,
    /// How to make a NIC usable, and which key names others.
    pub fix: &'a str,
}

impl Nics {
    /// Indices of the rank's NICs in what the transport lists: as many as it uses, the first that the topology chose
    /// and that can be used. What it passes over is a warning. Fewer, or none, where the topology chose no more, or
    /// where others will do: a transport that gets none takes others.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] where fewer can be used than the transport would use, with the reasons and with
    /// those that can: the rank would go on over the NICs of others, or over fewer than others have. No error where
    /// NICs of all names reach each other, or where the transport has names of its own.
    pub fn choose(&self, search: &NicSearch<'_>) -> Result<Vec<usize>> {
        let (mut own, mut faulty) = (Vec::new(), Vec::new());
        for nic in &self.names {
            if own.len() < search.most {
                match search.usable(nic) {
                    Some(index) => own.push(index),
                    None => faulty.push(search.fault_of(nic)),
                }
            }
        }
        if !faulty.is_empty() {
            let others = search.listed.iter().filter(|of| of.fault.is_none());
            let mut others: Vec<&str> = others.map(|of| of.name.as_str()).collect();
            others.dedup();
            let found = format!(
                "{} cannot use {}, which the topology chose for this rank; it can use {}",
                search.transport,
                first_names(faulty),
                first_names(others)
            );
            let are_enough = own.len() == search.most.min(self.names.len());
            let is_free = are_enough || self.any_rails || search.own_names;
            let warning = refuse_unless(is_free, ErrorKind::Unavailable, found, search.fix)?;
            let used = own.iter().map(|index| &search.listed[*index].name);
            tracing::warn!("{warning}; of the rank's own it uses {}", first_names(used));
        }
        Ok(own)
    }
}

impl ListedNic {
    fn is_of(&self, nic: &str) -> bool {
        let ending = self.name.strip_prefix(nic);
        ending.is_some_and(|ending| ending.is_empty() || ending.starts_with('-'))
    }
}

impl NicSearch<'_> {
    /// Where a NIC is listed that can be used.
    fn usable(&self, nic: &str) -> Option<usize> {
        self.listed.iter().position(|of| of.fault.is_none() && of.is_of(nic))
    }

    /// A NIC that cannot be used, with the reason.
    fn fault_of(&self, nic: &str) -> String {
        let ports = self.listed.iter().filter(|of| of.is_of(nic));
        let faults: Vec<&str> = ports.filter_map(|of| of.fault.as_deref()).collect();
        let faults = if faults.is_empty() { "not listed".to_owned() } else { faults.join(", ") };
        format!("{nic} ({faults})")
    }
}

/// What was found, as a warning where NICs need not be those of the rail, else as an error.
fn refuse_unless(is_free: bool, kind: ErrorKind, found: String, fix: &str) -> Result<String> {
    if is_free {
        return Ok(found);
    }
    Err(Error::new(kind, "choose NICs", found).with_fix(format!(
        "{fix}; or set rails = \"any\" in [topology.auto], where NICs of all names reach each other"
    )))
}

#[cfg(test)]
mod tests;
