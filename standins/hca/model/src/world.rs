//! Devices of one process, each with the objects of a rank.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokenyard_hca::{Access, Config, FaultPlan, Hca, HostMemory, Order, Region, Switch};
use tokenyard_sys_mlx5::cqe;
use tokenyard_sys_mlx5::doorbell::{PAGE, RECORD};
use tokenyard_sys_mlx5::mailbox::{
    CreateCq, CreateCqOut, CreateQp, CreateQpOut, Init2Rtr, Mailbox, Rst2Init, Rtr2Rts,
};
use tokenyard_sys_mlx5::wqe::BLOCK;

/// The memory of a queue pair.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct QueueMemory {
    /// The send queue: 64 bytes times `depth`.
    pub requests: u64,
    /// The doorbell record: 8 bytes.
    pub record: u64,
    /// The collapsed completion: 64 bytes, filled with 0xff.
    pub completion: u64,
    /// The register by which it rings: the first one of the rank's page, or one of those that follow every 256 bytes.
    pub register: u64,
    /// Blocks, a power of two.
    pub depth: u32,
}

/// The state of a rank beside its device.
#[derive(Debug, Default)]
struct Objects {
    pd: u32,
    /// Pages of registers by address.
    pages: BTreeMap<u64, u32>,
}

/// The devices of all ranks.
#[derive(Debug)]
pub struct World {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    switch: Switch,
    objects: Vec<Objects>,
}

/// Local ids begin at 1.
fn lid(rank: u32) -> u16 {
    (rank + 1) as u16
}

impl World {
    /// Makes `ranks` devices; the device of rank `faulty` has a plan of faults, as TOML.
    ///
    /// # Errors
    /// The plan is invalid.
    ///
    /// # Safety
    /// As for [`HostMemory::new`].
    pub unsafe fn new(
        ranks: u32,
        adaptive: bool,
        seed: u64,
        faulty: u32,
        faults: &str,
    ) -> Result<Self, String> {
        let mut inner = Inner { switch: Switch::new(), objects: Vec::new() };
        for rank in 0..ranks {
            let plan = FaultPlan::parse(if rank == faulty { faults } else { "" })?;
            let config = Config {
                lid: lid(rank),
                order: if adaptive { Order::Adaptive } else { Order::InOrder },
                faults: FaultPlan { seed: seed + u64::from(rank), ..plan },
                ..Config::default()
            };
            // SAFETY: by this function's contract.
            let mut hca = Hca::new(config, unsafe { HostMemory::new() });
            inner.objects.push(Objects { pd: hca.allocate_pd(), pages: BTreeMap::new() });
            inner.switch.add(hca);
        }
        Ok(Self { inner: Mutex::new(inner) })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers memory that requests address by its own addresses; returns its key.
    ///
    /// # Errors
    /// There is no such rank, or the device refuses.
    pub fn register(&self, rank: u32, address: u64, bytes: u64) -> Result<u32, String> {
        let mut inner = self.inner();
        let pd = inner.objects(rank)?.pd;
        let region = Region { pd, address, bytes, memory: address, access: Access::ALL };
        inner.device(rank)?.register(region).map_err(|e| e.to_string())
    }

    /// Makes a queue pair as a driver does, by mailboxes; returns its number.
    ///
    /// # Errors
    /// There is no such rank, or the device refuses.
    pub fn queue(&self, rank: u32, at: QueueMemory) -> Result<u32, String> {
        let mut inner = self.inner();
        let uar_page = inner.page(rank, at.register & !(PAGE as u64 - 1))?;
        let pd = inner.objects(rank)?.pd;
        let hca = inner.device(rank)?;
        let wq_umem_id = hca.register_umem(at.requests, BLOCK as u64 * u64::from(at.depth));
        let dbr_umem_id = hca.register_umem(at.record, 2 * RECORD as u64);
        let buffer_umem_id = hca.register_umem(at.completion, cqe::BYTES as u64);
        let cq = CreateCq {
            dbr_umem_id,
            uar_page,
            dbr_offset: RECORD as u64,
            buffer_umem_id,
            ..CreateCq::default()
        };
        let answer = hca.command(&cq.to_bytes()).map_err(|e| e.to_string())?;
        let cqn = CreateCqOut::from_answer(&answer).cqn;
        let qp = CreateQp {
            pd,
            log_sq_size: at.depth.ilog2() as u8,
            uar_page,
            send_cqn: cqn,
            receive_cqn: cqn,
            dbr_umem_id,
            wq_umem_id,
            ..CreateQp::default()
        };
        let answer = hca.command(&qp.to_bytes()).map_err(|e| e.to_string())?;
        Ok(CreateQpOut::from_answer(&answer).qpn)
    }

    /// Takes a queue pair to the state in which it sends to `peer_qpn` of rank `peer`, and receives from it.
    ///
    /// # Errors
    /// There is no such rank, or the device refuses.
    pub fn connect(&self, rank: u32, qpn: u32, peer: u32, peer_qpn: u32) -> Result<(), String> {
        let mut inner = self.inner();
        let hca = inner.device(rank)?;
        let init = Rst2Init {
            qpn,
            atomic_mode: 3,
            remote_read: true,
            remote_write: true,
            remote_atomic: true,
            pkey_index: 0,
            port: 1,
        };
        let rtr = Init2Rtr {
            qpn,
            mtu: 5,
            log_msg_max: 30,
            remote_qpn: peer_qpn,
            log_rra_max: 4,
            min_rnr_nak: 12,
            remote_lid: lid(peer),
            port: 1,
            ..Init2Rtr::default()
        };
        let rts = Rtr2Rts {
            qpn,
            ack_timeout: 14,
            log_sra_max: 4,
            retry_count: 3,
            rnr_retry: 7,
            next_send_psn: 0,
        };
        for command in [init.to_bytes(), rtr.to_bytes(), rts.to_bytes()] {
            hca.command(&command).map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    /// Stores eight bytes to a register of some rank.
    pub fn ring(&self, address: u64, bytes: [u8; 8]) {
        let mut inner = self.inner();
        let base = address & !(PAGE as u64 - 1);
        let owner = (0..)
            .zip(&inner.objects)
            .find_map(|(rank, objects)| objects.pages.get(&base).map(|page| (rank, *page)));
        match owner {
            Some((rank, page)) => {
                if let Ok(hca) = inner.device(rank) {
                    hca.ring(page, (address - base) as usize, bytes);
                }
            }
            None => {
                eprintln!("found a store to a register at {address:#x}, which is none");
                std::process::abort();
            }
        }
        inner.end_if_violated();
    }

    /// Does the work that is due now; if there is none, lets time pass until some is due. Returns whether there
    /// was work.
    pub fn step(&self) -> bool {
        let mut inner = self.inner();
        let moved = inner.switch.step() || inner.switch.skip();
        inner.end_if_violated();
        moved
    }
}

impl Inner {
    /// Ends the process with a dump if a driver has broken a rule.
    fn end_if_violated(&self) {
        if let Some(violation) = self.switch.violation() {
            eprintln!("software ConnectX: {violation}");
            std::process::abort();
        }
    }

    fn objects(&mut self, rank: u32) -> Result<&mut Objects, String> {
        let ranks = self.objects.len();
        let found = self.objects.get_mut(rank as usize);
        found.ok_or_else(|| format!("found rank {rank}; expected below {ranks}"))
    }

    fn device(&mut self, rank: u32) -> Result<&mut Hca, String> {
        self.switch.device(lid(rank)).ok_or_else(|| format!("found no device of rank {rank}"))
    }

    /// The number of a page of registers of a rank.
    fn page(&mut self, rank: u32, base: u64) -> Result<u32, String> {
        if let Some(page) = self.objects(rank)?.pages.get(&base) {
            return Ok(*page);
        }
        let page = self.device(rank)?.allocate_page(base);
        self.objects(rank)?.pages.insert(base, page);
        Ok(page)
    }
}

/// A text that stays for the life of the process.
pub(crate) fn c_words(words: &str) -> *const c_char {
    CString::new(words).unwrap_or_default().into_raw()
}
