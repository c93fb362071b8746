//! Objects: made, changed and ended. Ending an object that is in use is a violation.

use crate::commands::Refused;
use crate::hca::{Hca, Profile};
use crate::object::{
    Access, CompletionQueue, Connection, Inlet, QueuePair, ReceiveQueue, Region, State, UserMemory,
};
use crate::violation::Rule;

/// The arguments of a new completion queue.
#[derive(Clone, Debug)]
pub struct CqRequest {
    /// The address of its entries.
    pub buffer: u64,
    /// Entries, as a power of two.
    pub log_size: u8,
    /// Bytes of an entry: 64 or 128.
    pub stride: u64,
    /// Whether every completion goes to the first entry.
    pub collapsed: bool,
    /// Whether completions may overwrite entries that were not read.
    pub overrun_ignored: bool,
    /// The address of its doorbell record.
    pub record: u64,
    /// The umems of both.
    pub umems: Vec<u32>,
}

/// The arguments of a new receive queue.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveRequest {
    /// Its protection domain.
    pub pd: u32,
    /// The address of its entries.
    pub buffer: u64,
    /// Bytes of an entry.
    pub stride: u64,
    /// Entries, a power of two.
    pub entries: u32,
    /// The address of its doorbell record.
    pub record: u64,
}

/// The source of receives.
#[derive(Clone, Copy, Debug)]
pub enum Receives {
    /// There are none.
    None,
    /// A shared queue, by number.
    Shared(u32),
    /// A queue of its own.
    Own(ReceiveRequest),
}

/// The arguments of a new queue pair.
#[derive(Clone, Debug)]
pub struct QpRequest {
    /// Its protection domain.
    pub pd: u32,
    /// Its page of doorbell registers.
    pub page: u32,
    /// A number that its completions carry.
    pub user_index: u32,
    /// The address of its send queue.
    pub sq: u64,
    /// Blocks of the send queue, a power of two.
    pub blocks: u32,
    /// The address of its doorbell record.
    pub record: u64,
    /// The completion queue of requests.
    pub send_cq: u32,
    /// The completion queue of receives.
    pub receive_cq: u32,
    /// The source of receives.
    pub receives: Receives,
    /// The umems of send queue and record.
    pub umems: Vec<u32>,
}

impl Hca {
    /// Makes a protection domain, and returns its number.
    pub fn allocate_pd(&mut self) -> u32 {
        let store = self.store();
        let pd = store.number();
        store.pds.insert(pd);
        pd
    }

    /// Registers a region, and returns its key.
    ///
    /// # Errors
    /// There is no such domain.
    pub fn register(&mut self, region: Region) -> Result<u32, Refused> {
        let store = self.store();
        store.known_pd(region.pd)?;
        // The driver chooses the lowest 8 bits.
        let key = store.number() << 8;
        store.regions.insert(key, region);
        Ok(key)
    }

    /// Names memory for commands, and returns its id.
    pub fn register_umem(&mut self, address: u64, bytes: u64) -> u32 {
        let store = self.store();
        let id = store.number();
        store.umems.insert(id, UserMemory { address, bytes });
        id
    }

    /// Makes a page of doorbell registers that lies at `address`, and returns its number.
    pub fn allocate_page(&mut self, address: u64) -> u32 {
        let store = self.store();
        let page = store.number();
        store.pages.insert(page, address);
        page
    }

    /// Makes a completion queue, and returns its number.
    ///
    /// # Errors
    /// The arguments are not possible.
    pub fn create_cq(&mut self, request: CqRequest) -> Result<u32, Refused> {
        let store = self.store();
        let CqRequest { buffer, log_size, stride, collapsed, overrun_ignored, record, umems } =
            request;
        if log_size > 22 || !matches!(stride, 64 | 128) {
            let text = format!("a completion queue of 2^{log_size} entries of {stride} bytes");
            return Err(store.refuse(text));
        }
        let cqn = store.number();
        let (written, held) = (0, std::collections::VecDeque::new());
        let queue = CompletionQueue {
            buffer,
            log_size,
            stride,
            collapsed,
            overrun_ignored,
            record,
            umems,
            written,
            held,
        };
        store.cqs.insert(cqn, queue);
        Ok(cqn)
    }

    /// Makes a shared receive queue, and returns its number.
    ///
    /// # Errors
    /// There is no such domain.
    pub fn create_srq(&mut self, request: ReceiveRequest) -> Result<u32, Refused> {
        let store = self.store();
        store.known_pd(request.pd)?;
        let number = store.number();
        store.srqs.insert(number, receive_queue(request, true));
        Ok(number)
    }

    /// Makes a queue pair, and returns its number.
    ///
    /// # Errors
    /// An object that it names is missing, or its size is invalid.
    pub fn create_qp(&mut self, request: QpRequest) -> Result<u32, Refused> {
        let store = self.store();
        store.known_pd(request.pd)?;
        store.known_page(request.page)?;
        for cqn in [request.send_cq, request.receive_cq] {
            store.known_cq(cqn)?;
        }
        if let Receives::Shared(srqn) = request.receives {
            store.known_srq(srqn)?;
        }
        if !request.blocks.is_power_of_two() || request.blocks > 32_768 {
            return Err(store.refuse(format!("a send queue of {} blocks", request.blocks)));
        }
        let receive_word = store.read_array(request.record).unwrap_or_default();
        let qpn = store.number();
        let qp = queue_pair(request, receive_word, store.profile.limits());
        store.qps.insert(qpn, qp);
        Ok(qpn)
    }

    /// Gives a queue pair the rights of its peer.
    ///
    /// # Errors
    /// The queue pair is in another state than [`State::Reset`].
    pub fn to_init(&mut self, qpn: u32, access: Access) -> Result<(), Refused> {
        let qp = self.in_state(qpn, State::Reset)?;
        qp.access = access;
        qp.state = State::Init;
        Ok(())
    }

    /// Lets a queue pair receive from its peer. The fields about sending are ignored.
    ///
    /// # Errors
    /// The queue pair is in another state than [`State::Init`].
    pub fn to_ready_to_receive(&mut self, qpn: u32, to: Connection) -> Result<(), Refused> {
        let qp = self.in_state(qpn, State::Init)?;
        qp.to = to;
        qp.expected = to.receive_number;
        qp.state = State::ReadyToReceive;
        Ok(())
    }

    /// Lets a queue pair send. The fields about receiving are ignored.
    ///
    /// # Errors
    /// The queue pair is in another state than [`State::ReadyToReceive`].
    pub fn to_ready_to_send(&mut self, qpn: u32, to: Connection) -> Result<(), Refused> {
        let qp = self.in_state(qpn, State::ReadyToReceive)?;
        let Connection { peer, receive_number, rnr_timer, .. } = qp.to;
        qp.to = Connection { peer, receive_number, rnr_timer, ..to };
        qp.next_number = to.send_number;
        qp.state = State::ReadyToSend;
        Ok(())
    }

    /// Breaks a queue pair: posted requests complete as flushed.
    ///
    /// # Errors
    /// There is no queue pair of this number.
    pub fn to_error(&mut self, qpn: u32) -> Result<(), Refused> {
        self.store().known_qp(qpn)?;
        self.link.completions.break_off(qpn);
        Ok(())
    }

    /// The state of a queue pair.
    pub fn state(&self, qpn: u32) -> Option<State> {
        self.link.completions.store.qps.get(&qpn).map(|qp| qp.state)
    }

    /// Ends a protection domain.
    pub fn free_pd(&mut self, pd: u32) {
        let regions = self.store().regions.values().filter(|region| region.pd == pd).count();
        let qps = self.store().qps.values().filter(|qp| qp.pd == pd).count();
        self.unused("protection domain", pd, &[("regions", regions), ("queue pairs", qps)]);
        self.store().pds.remove(&pd);
    }

    /// Ends a region.
    pub fn deregister(&mut self, key: u32) {
        let names = |qp: &&QueuePair| {
            let sent = qp.sent.iter().filter(|sent| !sent.done).map(|sent| &sent.work);
            let mut works = sent.chain(&qp.waiting);
            works.any(|work| work.operation.locals().iter().any(|piece| piece.key == key))
        };
        let busy = self.store().qps.values().filter(names).count();
        // A user of libmlx5 may deregister memory that requests use, and then gets an error completion.
        if self.store().profile == Profile::Kernels {
            self.unused("region", key, &[("queue pairs with work under way", busy)]);
        }
        self.store().regions.remove(&key);
    }

    /// Ends a umem.
    pub fn free_umem(&mut self, id: u32) {
        let qps = self.store().qps.values().filter(|qp| qp.umems.contains(&id)).count();
        let cqs = self.store().cqs.values().filter(|cq| cq.umems.contains(&id)).count();
        self.unused("umem", id, &[("queue pairs", qps), ("completion queues", cqs)]);
        self.store().umems.remove(&id);
    }

    /// Ends a page of doorbell registers.
    pub fn free_page(&mut self, page: u32) {
        let qps = self.store().qps.values().filter(|qp| qp.page == page).count();
        self.unused("page of registers", page, &[("queue pairs", qps)]);
        self.store().pages.remove(&page);
    }

    /// Ends a completion queue.
    pub fn destroy_cq(&mut self, cqn: u32) {
        let uses = |qp: &&QueuePair| qp.send_cq == cqn || qp.receive_cq == cqn;
        let qps = self.store().qps.values().filter(uses).count();
        self.unused("completion queue", cqn, &[("queue pairs", qps)]);
        self.store().cqs.remove(&cqn);
    }

    /// Ends a shared receive queue.
    pub fn destroy_srq(&mut self, srqn: u32) {
        let uses = |qp: &&QueuePair| matches!(qp.inlet, Inlet::Shared(it) if it == srqn);
        let qps = self.store().qps.values().filter(uses).count();
        self.unused("shared receive queue", srqn, &[("queue pairs", qps)]);
        self.store().srqs.remove(&srqn);
    }

    /// Ends a queue pair.
    pub fn destroy_qp(&mut self, qpn: u32) {
        let busy = self.store().qps.get(&qpn).map_or(0, |qp| qp.sent.len() + qp.waiting.len());
        if self.store().profile == Profile::Kernels {
            self.unused("queue pair", qpn, &[("requests under way", busy)]);
        }
        self.store().qps.remove(&qpn);
    }

    fn unused(&mut self, what: &str, number: u32, uses: &[(&str, usize)]) {
        let used: Vec<String> =
            uses.iter().filter(|(_, n)| *n > 0).map(|(by, n)| format!("{n} {by}")).collect();
        if !used.is_empty() {
            let text = format!("{what} {number:#x} is freed; it is used by {}", used.join(" and "));
            self.store().violate(Rule::Lifetime, None, text, &[]);
        }
    }

    fn in_state(&mut self, qpn: u32, expected: State) -> Result<&mut QueuePair, Refused> {
        self.store().known_qp(qpn)?;
        let found = self.state(qpn);
        if found != Some(expected) {
            let text = format!("queue pair {qpn:#x}: found state {found:?}; expected {expected:?}");
            return Err(self.store().refuse(text));
        }
        self.store().qps.get_mut(&qpn).ok_or_else(|| Refused("no queue pair".to_owned()))
    }
}

fn receive_queue(request: ReceiveRequest, linked: bool) -> ReceiveQueue {
    let ReceiveRequest { pd, buffer, stride, entries, record } = request;
    ReceiveQueue { buffer, stride, entries, record, taken: 0, at: 0, linked, pd }
}

fn queue_pair(
    request: QpRequest,
    receive_word: [u8; 4],
    limits: crate::parse::Limits,
) -> QueuePair {
    let inlet = match request.receives {
        Receives::None => Inlet::None,
        Receives::Shared(number) => Inlet::Shared(number),
        Receives::Own(request) => Inlet::Own(receive_queue(request, false)),
    };
    QueuePair {
        pd: request.pd,
        page: request.page,
        user_index: request.user_index,
        limits,
        sq: request.sq,
        blocks: request.blocks,
        record: request.record,
        receive_word,
        umems: request.umems,
        send_cq: request.send_cq,
        receive_cq: request.receive_cq,
        inlet,
        state: State::Reset,
        access: Access::default(),
        to: Connection::default(),
        taken: 0,
        reported: 0,
        unpoisoned: None,
        waiting: Default::default(),
        sent: Default::default(),
        next_number: 0,
        tries: 0,
        rnr_tries: 0,
        due: None,
        pause: None,
        most_reads_seen: 0,
        expected: 0,
        answers: Default::default(),
        inbox: Default::default(),
        landing: Vec::new(),
    }
}
