//! The sending side of a queue pair.

use std::collections::VecDeque;

use tokenyard_sys_mlx5::cqe::syndrome;

use crate::completion::Completions;
use crate::fault::Fate;
use crate::hca::{Event, Order};
use crate::object::{Access, Sent, State};
use crate::parse::{Operation, Source, Work};
use crate::wire::{Body, End, Packet};

/// Numbers of messages have 24 bits.
const NUMBERS: u32 = 0x00ff_ffff;
/// The number of repetitions that stands for "without end".
const FOR_EVER: u8 = 7;

/// The connections of a device: what it sends and receives.
pub(crate) struct Link {
    pub(crate) completions: Completions,
    /// Local id: the address to which its peers send.
    pub(crate) lid: u16,
    pub(crate) order: Order,
    pub(crate) outbox: VecDeque<Packet>,
    pub(crate) port_is_up: bool,
}

impl Link {
    /// Sends the requests that may be sent. Returns whether there were any.
    pub(crate) fn send(&mut self, qpn: u32) -> bool {
        let mut moved = false;
        while !self.completions.is_stopped() && self.may_send(qpn) {
            let Some(qp) = self.completions.store.qps.get_mut(&qpn) else { break };
            let Some(work) = qp.waiting.pop_front() else { break };
            moved = true;
            if qp.state == State::Error {
                self.completions.complete_failed(qpn, &work, syndrome::FLUSHED);
                continue;
            }
            self.send_one(qpn, work);
        }
        moved
    }

    /// Whether the next request of a queue pair may be sent.
    fn may_send(&self, qpn: u32) -> bool {
        let Some(qp) = self.completions.store.qps.get(&qpn) else { return false };
        let Some(work) = qp.waiting.front() else { return false };
        if qp.state == State::Error {
            return true;
        }
        let reads = qp.reads_under_way();
        if qp.sent.back().is_some_and(|sent| sent.fails.is_some()) {
            return false;
        }
        let fenced = work.fence != 0 && reads > 0;
        let full = work.operation.reads() && reads >= qp.to.reads.max(1);
        qp.state == State::ReadyToSend && qp.pause.is_none() && !fenced && !full
    }

    fn send_one(&mut self, qpn: u32, work: Work) {
        let fate = self.completions.faults.fate();
        let broken = match fate {
            Fate::Fails(syndrome) => Some(syndrome),
            Fate::PortDown => {
                self.port_is_up = false;
                self.completions.events.push_back(Event::PortDown);
                None
            }
            Fate::Nothing => self.check_locals(qpn, &work),
        };
        let Some(qp) = self.completions.store.qps.get_mut(&qpn) else { return };
        let number = qp.next_number;
        let is_nop = work.operation == Operation::Nop;
        if !is_nop {
            qp.next_number = (number + 1) & NUMBERS;
        }
        let done = is_nop && broken.is_none();
        qp.sent.push_back(Sent { work, number, done, fails: broken });
        qp.most_reads_seen = qp.most_reads_seen.max(qp.reads_under_way());
        if is_nop || broken.is_some() {
            self.finish(qpn);
        } else {
            self.transmit(qpn, number);
        }
    }

    /// Checks that local keys cover their memory; returns the syndrome if one does not.
    fn check_locals(&mut self, qpn: u32, work: &Work) -> Option<u8> {
        let pd = self.completions.store.qps.get(&qpn)?.pd;
        let needed = if work.operation.reads() { Access::LOCAL_WRITE } else { Access::default() };
        for piece in work.operation.locals() {
            if let Err(text) = self.completions.store.resolve(pd, &piece.into(), needed) {
                self.completions
                    .store
                    .bad_key(qpn, format!("request {:#x}, local: {text}", work.index));
                return Some(syndrome::LOCAL_PROTECTION);
            }
        }
        None
    }

    /// Sends a request, for the first time or again.
    fn transmit(&mut self, qpn: u32, number: u32) {
        let Some(qp) = self.completions.store.qps.get(&qpn) else { return };
        let Some(sent) = qp.sent.iter().find(|sent| sent.number == number && !sent.done) else {
            return;
        };
        let (pd, peer, timeout) = (qp.pd, qp.to.peer, qp.to.timeout);
        let body = self.body(pd, &sent.work.operation);
        let due = (timeout > 0).then(|| self.completions.now + (4096_u64 << timeout));
        if let Some(qp) = self.completions.store.qps.get_mut(&qpn) {
            qp.due = qp.due.or(due);
        }
        let from = End { lid: self.lid, qpn };
        if let Some(body) = body
            && !self.completions.faults.silent
            && !self.completions.faults.stopped
            && self.port_is_up
        {
            self.outbox.push_back(Packet { from, to: peer, number, body });
        }
    }

    fn body(&self, pd: u32, operation: &Operation) -> Option<Body> {
        Some(match operation {
            Operation::Nop => return None,
            Operation::Write { to, from, imm } => {
                let data = self.gather(pd, from)?;
                Body::Write { key: to.key, address: to.address, data, imm: *imm }
            }
            Operation::Send { from, imm } => Body::Send { data: self.gather(pd, from)?, imm: *imm },
            Operation::Read { from, to } => {
                let bytes = to.iter().map(|piece| u64::from(piece.bytes)).sum();
                Body::Read { key: from.key, address: from.address, bytes }
            }
            Operation::Atomic { to, compare, value, .. } => {
                Body::Atomic { key: to.key, address: to.address, compare: *compare, value: *value }
            }
        })
    }

    fn gather(&self, pd: u32, source: &Source) -> Option<Vec<u8>> {
        let pieces = match source {
            Source::Inline(bytes) => return Some(bytes.clone()),
            Source::Memory(pieces) => pieces,
        };
        let mut data = Vec::new();
        for piece in pieces {
            let at = self.completions.store.resolve(pd, &piece.into(), Access::default()).ok()?;
            let begin = data.len();
            data.resize(begin + piece.bytes as usize, 0);
            self.completions.store.memory.read(at, &mut data[begin..]).ok()?;
        }
        Some(data)
    }

    /// Takes an answer.
    pub(crate) fn answered(&mut self, packet: Packet) {
        let qpn = packet.to.qpn;
        let Some(qp) = self.completions.store.qps.get(&qpn) else { return };
        if qp.state != State::ReadyToSend || qp.to.peer != packet.from {
            return;
        }
        let of = |sent: &&Sent| sent.number == packet.number && !sent.done;
        let Some(sent) = qp.sent.iter().find(of) else { return };
        let (pd, operation) = (qp.pd, sent.work.operation.clone());
        match packet.body {
            Body::NotReady { after } => return self.wait_for_receive(qpn, after),
            Body::Refused { syndrome } => return self.fail(qpn, packet.number, syndrome),
            Body::Data(data) if !self.scatter(pd, &operation, &data) => {
                return self.fail(qpn, packet.number, syndrome::LOCAL_PROTECTION);
            }
            _ => {}
        }
        let Some(qp) = self.completions.store.qps.get_mut(&qpn) else { return };
        (qp.tries, qp.rnr_tries, qp.due) = (0, 0, None);
        for sent in qp.sent.iter_mut().filter(|sent| sent.number == packet.number) {
            sent.done |= sent.work.operation != Operation::Nop;
        }
        self.finish(qpn);
        let rest = self
            .completions
            .store
            .qps
            .get(&qpn)
            .is_some_and(|qp| !qp.sent.is_empty() && qp.to.timeout > 0);
        if let (true, Some(qp)) = (rest, self.completions.store.qps.get_mut(&qpn)) {
            qp.due = Some(self.completions.now + (4096_u64 << qp.to.timeout));
        }
    }

    /// Writes the returned data to the places that the request names.
    fn scatter(&self, pd: u32, operation: &Operation, data: &[u8]) -> bool {
        let pieces = match operation {
            Operation::Read { to, .. } => to.as_slice(),
            Operation::Atomic { sink, .. } => std::slice::from_ref(sink),
            _ => return false,
        };
        self.completions.store.scatter_to(pd, pieces, data)
    }

    /// Completes requests that are done, in order, up to one that fails: that one breaks the queue pair.
    fn finish(&mut self, qpn: u32) {
        while let Some(qp) = self.completions.store.qps.get_mut(&qpn) {
            let ended = |sent: &&Sent| sent.done || sent.fails.is_some();
            if qp.sent.front().filter(ended).is_none() {
                break;
            }
            let Some(sent) = qp.sent.pop_front() else { break };
            if let Some(syndrome) = sent.fails {
                self.completions.complete_failed(qpn, &sent.work, syndrome);
                return self.completions.break_off(qpn);
            }
            let operation = &sent.work.operation;
            let back = if operation.reads() { operation.locals() } else { &[] };
            let bytes: u64 = back.iter().map(|piece| u64::from(piece.bytes)).sum();
            self.completions.complete(qpn, &sent.work, bytes as u32);
        }
    }

    /// Marks a request as failed. It fails once earlier ones are done.
    fn fail(&mut self, qpn: u32, number: u32, syndrome: u8) {
        let Some(qp) = self.completions.store.qps.get_mut(&qpn) else { return };
        let sent = qp.sent.iter_mut().find(|sent| sent.number == number && !sent.done);
        if let Some(sent) = sent {
            sent.fails = Some(syndrome);
        }
        self.finish(qpn);
    }

    fn wait_for_receive(&mut self, qpn: u32, after: u64) {
        let Some(qp) = self.completions.store.qps.get_mut(&qpn) else { return };
        qp.due = None;
        if qp.to.rnr_retries != FOR_EVER && qp.rnr_tries >= qp.to.rnr_retries {
            let number = qp.sent.iter().find(|sent| !sent.done).map(|sent| sent.number);
            if let Some(number) = number {
                self.fail(qpn, number, syndrome::RNR_RETRIES);
            }
            return;
        }
        qp.rnr_tries = qp.rnr_tries.saturating_add(1);
        qp.pause = Some(self.completions.now + after);
    }

    /// Repeats requests that were not answered in time, up to the limit of repetitions.
    pub(crate) fn look_at_timers(&mut self, qpn: u32) -> bool {
        let Some(qp) = self.completions.store.qps.get_mut(&qpn) else { return false };
        if qp.pause.is_some_and(|until| until <= self.completions.now) {
            qp.pause = None;
            self.repeat(qpn);
            return true;
        }
        if qp.due.is_none_or(|due| due > self.completions.now) {
            return false;
        }
        qp.due = None;
        let Some(first) = qp.sent.iter().find(|sent| !sent.done).map(|sent| sent.number) else {
            return false;
        };
        if qp.tries >= qp.to.retries {
            self.fail(qpn, first, syndrome::RETRIES);
        } else {
            qp.tries += 1;
            self.repeat(qpn);
        }
        true
    }

    fn repeat(&mut self, qpn: u32) {
        let Some(qp) = self.completions.store.qps.get(&qpn) else { return };
        let open = qp.sent.iter().filter(|sent| !sent.done).map(|sent| sent.number);
        let numbers: Vec<u32> = open.collect();
        numbers.into_iter().for_each(|number| self.transmit(qpn, number));
    }
}
