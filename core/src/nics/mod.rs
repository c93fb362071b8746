//! The NICs that a rank uses.
//!
//! A topology names the NICs that are near to each rank, from the files of its machine
//! ([`Place::nics`](crate::topology::Place::nics)). This module makes the later decisions. [`share_nics`]
//! divides the NICs of a machine among its ranks. The communicator compares the NICs of ranks that
//! communicate with each other. [`Nics::choose`] finds a rank's NICs among those that a transport lists.
//!
//! One rule holds for all of them. A rank that would use the NIC of another rank, or fewer NICs than others,
//! is refused before anything moves. Otherwise all ranks would wait for it, without a visible reason. It is a
//! warning where NICs of all names reach each other, because the operator has then configured that; no NIC is
//! skipped without a message.
//!
//! Watched by the tests in these files, and `conformance/tests/nics.rs`.

pub(crate) mod rails;
pub(crate) mod share;

pub use share::share_nics;

use crate::error::words::first_names;
use crate::{Error, ErrorKind, Result};

/// The NICs that the topology chose for a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nics {
    /// Names as in `/sys/class/infiniband`, in the order in which they are used; empty where the topology
    /// chose none.
    pub names: Vec<String>,
    /// NICs of all names reach each other.
    pub any_rails: bool,
}

/// A NIC that a transport lists, or a port of one.
#[derive(Clone, Debug)]
pub struct ListedNic {
    /// The NIC's name, with or without an ending: `mlx5_0`, `rdmap85s0-rdm`.
    pub name: String,
    /// The reason why it cannot be used, as text: `port 1 is not active`.
    pub fault: Option<String>,
}

/// The search of a transport for the NICs of a rank.
#[derive(Clone, Copy, Debug)]
pub struct NicSearch<'a> {
    /// The transport's name for display: `verbs`, `provider efa`.
    pub transport: &'a str,
    /// The NICs that it lists.
    pub listed: &'a [ListedNic],
    /// The number of NICs that a rank uses; at least 1.
    pub most: usize,
    /// True if it may use names of its own: a NIC that it does not list may exist.
    pub own_names: bool,
    /// The fix: how to make a NIC usable, and the key that names others.
    pub fix: &'a str,
}

impl Nics {
    /// Indices of the rank's NICs in the transport's list: as many as it uses, the first usable ones that the
    /// topology chose. A skipped NIC is a warning. Fewer, or none, where the topology chose no more, or where
    /// other NICs are allowed: a transport without a chosen NIC uses others.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if fewer NICs can be used than the transport would use: the rank would use
    /// the NICs of others, or fewer than others. The error has the reasons and the usable NICs. No error
    /// where NICs of all names reach each other, or where the transport has names of its own.
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
    /// The index of a NIC in the list, if it can be used.
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

/// The finding, as a warning where NICs need not be those of the rail, else as an error.
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
