//! A driver of the software device, and two of them connected. The driver writes the same bytes as kernels.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use tokenyard_hca::{Access, Arena, Config, Hca, Memory as _, Region, Rule, Switch};
use tokenyard_sys_mlx5::cqe::{self, Cqe, Word};
use tokenyard_sys_mlx5::doorbell::{FIRST_REGISTER, Ring, SEND, record_word};
use tokenyard_sys_mlx5::mailbox::{
    CreateCq, CreateCqOut, CreateQp, CreateQpOut, Init2Rtr, Mailbox, Rst2Init, Rtr2Rts,
};
use tokenyard_sys_mlx5::wqe::{BLOCK, Control, InlineData, Local, Remote, Request};

/// Bytes of a driver's window.
pub(crate) const WINDOW: u64 = 1 << 16;
/// Seconds, in nanoseconds.
pub(crate) const SECOND: u64 = 1_000_000_000;

/// A region that requests address by its own addresses.
pub(crate) fn whole(pd: u32, memory: u64, bytes: u64, access: Access) -> Region {
    Region { pd, address: memory, bytes, memory, access }
}

/// A driver with one queue pair.
pub(crate) struct Driver {
    pub(crate) arena: Arc<Arena>,
    pub(crate) lid: u16,
    pub(crate) log_depth: u8,
    pub(crate) pd: u32,
    pub(crate) page: u32,
    /// The address of the page.
    pub(crate) registers: u64,
    pub(crate) umem: u32,
    pub(crate) cqn: u32,
    pub(crate) qpn: u32,
    pub(crate) sq: u64,
    pub(crate) record: u64,
    pub(crate) cq: u64,
    pub(crate) window: u64,
    pub(crate) key: u32,
    pub(crate) next: u16,
}

impl Driver {
    /// Makes all objects on a device, up to a queue pair that is not connected.
    pub(crate) fn new(hca: &mut Hca, arena: &Arc<Arena>, lid: u16, log_depth: u8) -> Self {
        let window = arena.allocate(WINDOW as usize);
        let queues = arena.allocate((BLOCK << log_depth) + 8192);
        let bytes = (BLOCK << log_depth) as u64;
        let (sq, cq, record) = (queues, queues + bytes, queues + bytes + 4096);
        arena.write(cq, &[cqe::FILL; cqe::BYTES]).unwrap();
        let pd = hca.allocate_pd();
        let registers = arena.allocate(4096);
        let page = hca.allocate_page(registers);
        let umem = hca.register_umem(queues, bytes + 8192);
        let key = hca.register(whole(pd, window, WINDOW, Access::ALL)).unwrap();
        let mut this = Self {
            arena: Arc::clone(arena),
            lid,
            log_depth,
            pd,
            page,
            registers,
            umem,
            cqn: 0,
            qpn: 0,
            sq,
            record,
            cq,
            window,
            key,
            next: 0,
        };
        let cq = hca.command(&this.create_cq().to_bytes()).unwrap();
        this.cqn = CreateCqOut::from_answer(&cq).cqn;
        let qp = hca.command(&this.create_qp().to_bytes()).unwrap();
        this.qpn = CreateQpOut::from_answer(&qp).qpn;
        this
    }

    pub(crate) fn create_cq(&self) -> CreateCq {
        CreateCq {
            dbr_umem_id: self.umem,
            log_size: 0,
            uar_page: self.page,
            eqn: 0,
            dbr_offset: self.record - self.sq + 8,
            buffer_offset: self.cq - self.sq,
            buffer_umem_id: self.umem,
        }
    }

    pub(crate) fn create_qp(&self) -> CreateQp {
        CreateQp {
            pd: self.pd,
            log_sq_size: self.log_depth,
            uar_page: self.page,
            user_index: 0,
            send_cqn: self.cqn,
            receive_cqn: self.cqn,
            dbr_offset: self.record - self.sq,
            dbr_umem_id: self.umem,
            wq_offset: 0,
            wq_umem_id: self.umem,
        }
    }

    pub(crate) fn to_init(&self) -> Rst2Init {
        Rst2Init {
            qpn: self.qpn,
            atomic_mode: 3,
            remote_read: true,
            remote_write: true,
            remote_atomic: true,
            pkey_index: 0,
            port: 1,
        }
    }

    pub(crate) fn to_rtr(&self, peer: (u16, u32)) -> Init2Rtr {
        Init2Rtr {
            qpn: self.qpn,
            mtu: 5,
            log_msg_max: 30,
            remote_qpn: peer.1,
            log_rra_max: 4,
            min_rnr_nak: 12,
            next_receive_psn: 0x00ff_fff0,
            remote_lid: peer.0,
            port: 1,
            ..Init2Rtr::default()
        }
    }

    pub(crate) fn to_rts(&self) -> Rtr2Rts {
        Rtr2Rts {
            qpn: self.qpn,
            ack_timeout: 14,
            log_sra_max: 2,
            retry_count: 3,
            rnr_retry: 7,
            next_send_psn: 0x00ff_fff0,
        }
    }

    /// Connects the queue pair.
    pub(crate) fn connect(&self, hca: &mut Hca, peer: (u16, u32)) {
        hca.command(&self.to_init().to_bytes()).unwrap();
        hca.command(&self.to_rtr(peer).to_bytes()).unwrap();
        hca.command(&self.to_rts().to_bytes()).unwrap();
    }

    /// The block of a request at the next place.
    pub(crate) fn block(&self, request: &Request, signaled: bool) -> [u8; BLOCK] {
        request.to_block(Control { index: self.next, qpn: self.qpn, signaled, fence: false })
    }

    /// Writes a block to the next place.
    pub(crate) fn write(&mut self, block: &[u8]) {
        let mask = (1_u64 << self.log_depth) - 1;
        let slot = self.sq + (u64::from(self.next) & mask) * BLOCK as u64;
        self.arena.write(slot, block).unwrap();
        self.next = self.next.wrapping_add(1);
    }

    /// Writes the record.
    pub(crate) fn publish(&self) {
        self.arena.write(self.record + SEND as u64, &record_word(self.next)).unwrap();
    }

    /// Stores to the register.
    pub(crate) fn ring(&self, hca: &mut Hca) {
        let ring = Ring::NextIndex { next: self.next, qpn: self.qpn };
        hca.ring(self.page, FIRST_REGISTER, ring.to_bytes());
    }

    /// Posts requests with one doorbell; the last completes.
    pub(crate) fn post(&mut self, hca: &mut Hca, requests: &[Request]) {
        for (at, request) in requests.iter().enumerate() {
            let block = self.block(request, at + 1 == requests.len());
            self.write(&block);
        }
        self.publish();
        self.ring(hca);
    }

    /// Memory of the window.
    pub(crate) fn local(&self, offset: u64, bytes: u32) -> Local {
        Local { address: self.window + offset, key: self.key, bytes }
    }

    /// Memory of the window, for the peer.
    pub(crate) fn remote(&self, offset: u64) -> Remote {
        Remote { address: self.window + offset, key: self.key }
    }

    pub(crate) fn bytes(&self, offset: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.arena.read(self.window + offset, &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn word(&self, offset: u64) -> u64 {
        u64::from_ne_bytes(self.bytes(offset, 8).try_into().unwrap())
    }

    /// The collapsed completion.
    pub(crate) fn completion(&self) -> Cqe {
        let mut bytes = [0; cqe::BYTES];
        self.arena.read(self.cq, &mut bytes).unwrap();
        Cqe::from_bytes(&bytes)
    }

    /// The word for which a kernel waits.
    pub(crate) fn completed(&self) -> Word {
        self.completion().word
    }
}

/// Two devices with a driver each, connected.
pub(crate) struct Pair {
    pub(crate) arena: Arc<Arena>,
    pub(crate) switch: Switch,
    pub(crate) a: Driver,
    pub(crate) b: Driver,
}

impl Pair {
    pub(crate) fn new(config: Config, log_depth: u8) -> Self {
        let (arena, mut switch) = (Arc::new(Arena::new()), Switch::new());
        let mut made = [1, 2].map(|lid| {
            let mut hca = Hca::new(Config { lid, ..config.clone() }, Arc::clone(&arena));
            let driver = Driver::new(&mut hca, &arena, lid, log_depth);
            (hca, driver)
        });
        let ends = [0, 1].map(|at| (made[at].1.lid, made[at].1.qpn));
        for (at, (hca, driver)) in made.iter_mut().enumerate() {
            driver.connect(hca, ends[1 - at]);
        }
        let [(first, a), (second, b)] = made;
        switch.add(first);
        switch.add(second);
        Self { arena, switch, a, b }
    }

    /// Posts on the first device.
    pub(crate) fn post(&mut self, requests: &[Request]) {
        self.a.post(self.switch.device(1).unwrap(), requests);
    }

    /// Runs until nothing is under way; no driver may break a rule.
    pub(crate) fn run(&mut self) {
        self.switch.run(100 * SECOND);
        if let Some(violation) = self.switch.violation() {
            panic!("{violation}");
        }
    }

    /// Runs, and returns the rule that was broken, with its text.
    pub(crate) fn broken(&mut self) -> Option<(Rule, String)> {
        self.switch.run(100 * SECOND);
        self.switch.violation().map(|found| (found.rule, found.text.clone()))
    }

    pub(crate) fn hca(&mut self) -> &mut Hca {
        self.switch.device(1).unwrap()
    }
}

pub(crate) fn inline(value: u64) -> InlineData {
    InlineData::new(&value.to_ne_bytes()).unwrap()
}
