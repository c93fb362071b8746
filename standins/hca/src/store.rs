//! The objects of a device, the memory that it was given, and the rules that its driver broke.

use std::collections::{BTreeMap, BTreeSet};

use tokenyard_sys_mlx5::wqe::Local;

use crate::commands::Refused;
use crate::hca::Profile;
use crate::memory::Memory;
use crate::object::{Access, CompletionQueue, QueuePair, ReceiveQueue, Region, UserMemory};
use crate::violation::{Rule, Violation};

/// Memory that a request names by the key of its region.
#[derive(Clone, Copy)]
pub(crate) struct KeyedMemory {
    pub(crate) key: u32,
    /// The address, as requests name it.
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

/// The objects by number, in the memory of the machine.
pub(crate) struct Store {
    pub(crate) profile: Profile,
    pub(crate) memory: Box<dyn Memory>,
    pub(crate) numbers: u32,
    pub(crate) pds: BTreeSet<u32>,
    pub(crate) regions: BTreeMap<u32, Region>,
    pub(crate) umems: BTreeMap<u32, UserMemory>,
    /// Pages of registers, and where they lie.
    pub(crate) pages: BTreeMap<u32, u64>,
    pub(crate) cqs: BTreeMap<u32, CompletionQueue>,
    pub(crate) srqs: BTreeMap<u32, ReceiveQueue>,
    pub(crate) qps: BTreeMap<u32, QueuePair>,
    pub(crate) violations: Vec<Violation>,
}

impl Store {
    pub(crate) fn new(profile: Profile, memory: Box<dyn Memory>) -> Self {
        Self {
            profile,
            memory,
            numbers: 0x40,
            pds: BTreeSet::new(),
            regions: BTreeMap::new(),
            umems: BTreeMap::new(),
            pages: BTreeMap::new(),
            cqs: BTreeMap::new(),
            srqs: BTreeMap::new(),
            qps: BTreeMap::new(),
            violations: Vec::new(),
        }
    }

    pub(crate) fn violate(&mut self, rule: Rule, qpn: Option<u32>, text: String, bytes: &[u8]) {
        self.violations.push(Violation { rule, qpn, text, bytes: bytes.to_vec() });
    }

    /// A number that no object had before.
    pub(crate) fn number(&mut self) -> u32 {
        self.numbers += 1;
        self.numbers
    }

    /// Reads memory that the device was given. If nothing is mapped there, the driver passed a wrong address.
    pub(crate) fn read_array<const N: usize>(
        &self,
        address: u64,
    ) -> Result<[u8; N], crate::Unmapped> {
        let mut bytes = [0; N];
        self.memory.read(address, &mut bytes)?;
        Ok(bytes)
    }

    pub(crate) fn known_pd(&mut self, pd: u32) -> Result<(), Refused> {
        self.known("protection domain", self.pds.contains(&pd), pd)
    }

    pub(crate) fn known_page(&mut self, page: u32) -> Result<(), Refused> {
        self.known("page", self.pages.contains_key(&page), page)
    }

    pub(crate) fn known_cq(&mut self, cqn: u32) -> Result<(), Refused> {
        self.known("completion queue", self.cqs.contains_key(&cqn), cqn)
    }

    pub(crate) fn known_srq(&mut self, srqn: u32) -> Result<(), Refused> {
        self.known("shared receive queue", self.srqs.contains_key(&srqn), srqn)
    }

    pub(crate) fn known_qp(&mut self, qpn: u32) -> Result<(), Refused> {
        self.known("queue pair", self.qps.contains_key(&qpn), qpn)
    }

    fn known(&mut self, what: &str, is: bool, number: u32) -> Result<(), Refused> {
        if is { Ok(()) } else { Err(self.refuse(format!("found no {what} {number:#x}"))) }
    }

    /// A kernel would refuse, so a driver that asks has made a mistake.
    pub(crate) fn refuse(&mut self, text: String) -> Refused {
        self.violate(Rule::Mailbox, None, text.clone(), &[]);
        Refused(text)
    }

    /// Reports a wrong key. From kernels it is a violation; users of libmlx5 may use one.
    pub(crate) fn bad_key(&mut self, qpn: u32, text: String) {
        if self.profile == Profile::Kernels {
            self.violate(Rule::Key, Some(qpn), text, &[]);
        }
    }

    /// The address of memory that a key names.
    pub(crate) fn resolve(
        &self,
        pd: u32,
        memory: &KeyedMemory,
        needed: Access,
    ) -> Result<u64, String> {
        let KeyedMemory { key, address, bytes } = *memory;
        let Some(region) = self.regions.get(&key) else {
            return Err(format!("found key {key:#x}, which is none, or was revoked"));
        };
        if region.pd != pd {
            return Err(format!("found key {key:#x} of domain {:#x}; expected {pd:#x}", region.pd));
        }
        if !region.access.has(needed) {
            return Err(format!(
                "found key {key:#x} with rights {:#x}; expected {:#x}",
                region.access.0, needed.0
            ));
        }
        let offset = address.wrapping_sub(region.address);
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= region.bytes);
        if !inside {
            return Err(format!(
                "found {bytes} bytes at {address:#x}; key {key:#x} covers {} from {:#x}",
                region.bytes, region.address
            ));
        }
        Ok(region.memory + offset)
    }

    pub(crate) fn scatter_to(&self, pd: u32, pieces: &[Local], mut data: &[u8]) -> bool {
        for piece in pieces {
            let length = data.len().min(piece.bytes as usize);
            let (part, rest) = data.split_at(length);
            let Ok(at) = self.resolve(pd, &piece.into(), Access::LOCAL_WRITE) else {
                return false;
            };
            if self.memory.write(at, part).is_err() {
                return false;
            }
            data = rest;
        }
        data.is_empty()
    }
}

impl From<&Local> for KeyedMemory {
    fn from(piece: &Local) -> Self {
        Self { key: piece.key, address: piece.address, bytes: u64::from(piece.bytes) }
    }
}
