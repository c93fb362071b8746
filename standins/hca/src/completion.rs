//! Completions, by which programs see that work is done.

use std::collections::VecDeque;

use tokenyard_sys_mlx5::cqe::{self, Cqe, Kind, Word};

use crate::fault::{FaultPlan, Faults};
use crate::hca::Event;
use crate::object::{Held, Inlet, State};
use crate::parse::Work;
use crate::random::Random;
use crate::store::Store;
use crate::violation::{Rule, ensure};

/// Completion queues, as they fill in the course of time.
pub(crate) struct Completions {
    pub(crate) store: Store,
    pub(crate) random: Random,
    pub(crate) faults: Faults,
    /// Nanoseconds.
    pub(crate) now: u64,
    pub(crate) events: VecDeque<Event>,
}

impl Completions {
    pub(crate) fn new(store: Store, plan: &FaultPlan) -> Self {
        Self {
            store,
            random: Random::new(plan.seed),
            faults: Faults::new(plan),
            now: 0,
            events: VecDeque::new(),
        }
    }

    /// Whether the device has stopped: by a violation, or by a fault.
    pub(crate) fn is_stopped(&self) -> bool {
        !self.store.violations.is_empty() || self.faults.stopped
    }

    /// Completes a request that is done.
    pub(crate) fn complete(&mut self, qpn: u32, work: &Work, byte_count: u32) {
        if work.signaled {
            let cqe = self.request_cqe(qpn, work, Kind::Request, 0);
            let cqe = cqe.map(|cqe| Cqe { byte_count, ..cqe });
            self.report(qpn, work, cqe);
        }
    }

    /// Completes a request that failed, also where no completion was asked for.
    pub(crate) fn complete_failed(&mut self, qpn: u32, work: &Work, syndrome: u8) {
        let cqe = self.request_cqe(qpn, work, Kind::RequestError, syndrome);
        self.report(qpn, work, cqe);
    }

    fn request_cqe(&self, qpn: u32, work: &Work, kind: Kind, syndrome: u8) -> Option<Cqe> {
        let qp = self.store.qps.get(&qpn)?;
        Some(Cqe {
            word: Word { kind, counter: work.index, owner: false },
            qpn,
            opcode: work.opcode,
            user_index: qp.user_index,
            imm: [0; 4],
            byte_count: 0,
            syndrome,
            // A code by which a dump shows that this device wrote the completion.
            vendor: if syndrome == 0 { 0 } else { 0x51 },
        })
    }

    fn report(&mut self, qpn: u32, work: &Work, cqe: Option<Cqe>) {
        let (Some(cqe), Some(qp)) = (cqe, self.store.qps.get(&qpn)) else { return };
        let behind = Some(work.index.wrapping_add(work.blocks()));
        self.hold(qp.send_cq, Held { due: self.now, cqe, behind });
    }

    /// Completes a receive that was used.
    pub(crate) fn complete_receive(&mut self, qpn: u32, cqe: Cqe) {
        let Some(qp) = self.store.qps.get(&qpn) else { return };
        let cqe = Cqe { user_index: qp.user_index, qpn, ..cqe };
        self.hold(qp.receive_cq, Held { due: self.now, cqe, behind: None });
    }

    fn hold(&mut self, cqn: u32, held: Held) {
        let most = self.faults.completions_late;
        let late = if most > 0 { self.random.below(most) } else { 0 };
        let Some(cq) = self.store.cqs.get_mut(&cqn) else { return };
        let last = cq.held.back().map_or(0, |held| held.due);
        cq.held.push_back(Held { due: last.max(held.due + late), ..held });
        if most == 0 && self.faults.merged == 0 {
            self.write_held();
        }
    }

    /// Writes the completions that were held back and are due. Returns whether there were any.
    pub(crate) fn write_held(&mut self) -> bool {
        let mut moved = false;
        let cqns: Vec<u32> = self.store.cqs.keys().copied().collect();
        for cqn in cqns {
            while let Some(held) = self.next_held(cqn) {
                self.write_cqe(cqn, &held);
                moved = true;
            }
        }
        moved
    }

    /// The next completion of a queue; the last of those that are merged.
    fn next_held(&mut self, cqn: u32) -> Option<Held> {
        let merged = self.faults.merged;
        let cq = self.store.cqs.get(&cqn)?;
        let is_good = |held: &Held| held.cqe.word.kind == Kind::Request;
        let first = cq.held.front().filter(|held| held.due <= self.now)?;
        if merged == 0 || !cq.collapsed || !is_good(first) {
            return self.store.cqs.get_mut(&cqn)?.held.pop_front();
        }
        let due = cq.held.iter().take_while(|held| held.due <= self.now && is_good(held)).count();
        let failed = cq.held.len() > due;
        let busy = self.store.qps.values().any(|qp| qp.send_cq == cqn && qp.is_busy());
        if busy && !failed && (due as u64) < u64::from(merged) {
            return None;
        }
        let count = due.min(merged as usize);
        self.store.cqs.get_mut(&cqn)?.held.drain(..count).next_back()
    }

    fn write_cqe(&mut self, cqn: u32, held: &Held) {
        let Some(cq) = self.store.cqs.get_mut(&cqn) else { return };
        let entries = 1_u32 << cq.log_size;
        let (at, written) = (cq.written, cq.written.wrapping_add(1));
        cq.written = written;
        let index = if cq.collapsed { 0 } else { at & (entries - 1) };
        let entry = cq.buffer + u64::from(index) * cq.stride + (cq.stride - cqe::BYTES as u64);
        let (record, ignored) = (cq.record, cq.overrun_ignored);
        let owner = at >> cq.log_size & 1 == 1;
        let bytes = Cqe { word: Word { owner, ..held.cqe.word }, ..held.cqe }.to_bytes();
        let consumed = self.store.read_array(record).map_or(0, u32::from_be_bytes) & 0x00ff_ffff;
        let unread = at.wrapping_sub(consumed) & 0x00ff_ffff;
        let room = ensure(ignored || unread < entries, Rule::Completion, || {
            format!(
                "completion queue {cqn:#x}: {unread} completions were not read, of {entries} entries"
            )
        });
        // The word that programs wait for comes last.
        let (front, back) = bytes.split_at(cqe::layout::COUNTER);
        let wrote = self.store.memory.write(entry, front);
        let wrote = wrote.and_then(|()| self.store.memory.write(entry + front.len() as u64, back));
        let wrote = wrote.map_err(|e| (Rule::Completion, e.to_string()));
        if let Err((rule, text)) = room.and(wrote) {
            self.store.violate(rule, Some(held.cqe.qpn), text, &bytes);
        }
        if let (Some(behind), Some(qp)) = (held.behind, self.store.qps.get_mut(&held.cqe.qpn)) {
            qp.reported = behind;
        }
    }

    /// Breaks a queue pair: posted requests complete as flushed.
    pub(crate) fn break_off(&mut self, qpn: u32) {
        let Some(qp) = self.store.qps.get_mut(&qpn) else { return };
        let first = qp.state != State::Error;
        qp.state = State::Error;
        (qp.due, qp.pause) = (None, None);
        qp.inbox.clear();
        qp.landing.clear();
        let sent: Vec<_> =
            qp.sent.drain(..).filter(|sent| !sent.done).map(|sent| sent.work).collect();
        let waiting: Vec<_> = qp.waiting.drain(..).collect();
        let shared = matches!(qp.inlet, Inlet::Shared(_));
        for work in sent.iter().chain(&waiting) {
            self.complete_failed(qpn, work, cqe::syndrome::FLUSHED);
        }
        if shared && first {
            self.events.push_back(Event::LastReceive { qpn });
        }
        self.flush_receives(qpn);
    }

    /// Completes the receives of a broken queue pair as flushed. Shared receives stay for other queue pairs.
    pub(crate) fn flush_receives(&mut self, qpn: u32) {
        let is_own =
            |it: &Self| matches!(it.store.qps.get(&qpn)?.inlet, Inlet::Own(_)).then_some(());
        while is_own(self).is_some()
            && let Some(taken) = self.store.take_receive(qpn)
        {
            let cqe = receive_cqe(Kind::ReceiveError, taken.counter);
            self.complete_receive(qpn, Cqe { syndrome: cqe::syndrome::FLUSHED, ..cqe });
        }
    }
}

pub(crate) fn receive_cqe(kind: Kind, counter: u16) -> Cqe {
    Cqe {
        word: Word { kind, counter, owner: false },
        qpn: 0,
        opcode: 0,
        user_index: 0,
        imm: [0; 4],
        byte_count: 0,
        syndrome: 0,
        vendor: 0,
    }
}
