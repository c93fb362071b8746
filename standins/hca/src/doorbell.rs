//! Doorbells, and the requests that the device takes at a doorbell.

use tokenyard_sys_mlx5::doorbell::{
    FIRST_REGISTER, PAGE, RECEIVE, REGISTER, REGISTERS, Ring, SEND,
};
use tokenyard_sys_mlx5::wqe::{BLOCK, SEGMENT};

use crate::Unmapped;
use crate::hca::Hca;
use crate::object::{Inlet, QueuePair};
use crate::parse::{self, POISON, Work, blocks};
use crate::violation::{Broken, Rule, ensure};

impl Hca {
    /// Stores eight bytes at `offset` of a page of registers. Everything that the driver stored before must be
    /// visible already, and nothing that it stores later may be visible.
    pub fn ring(&mut self, page: u32, offset: usize, bytes: [u8; 8]) {
        if self.link.completions.is_stopped() {
            return;
        }
        match self.judge_ring(page, offset, bytes) {
            Ok((qpn, next)) => self.heard(qpn, Some(next)),
            Err((rule, text)) => self.link.completions.store.violate(
                rule,
                Ring::from_bytes(bytes).map(Ring::qpn),
                text,
                &bytes,
            ),
        }
    }

    /// Looks for doorbells in the pages' memory, for drivers whose stores cannot be intercepted. Returns whether
    /// there was one.
    ///
    /// A register that several queue pairs share holds the last ring only. So at each ring the device looks at
    /// the records of all queue pairs of the page, and the records may be ahead of the ring.
    pub fn poll_registers(&mut self) -> bool {
        if self.link.completions.is_stopped() {
            return false;
        }
        let pages: Vec<(u32, u64)> =
            self.link.completions.store.pages.iter().map(|(page, at)| (*page, *at)).collect();
        let mut any = false;
        for (page, address) in pages {
            let mut rang = false;
            for register in 0..REGISTERS {
                let at = address + (FIRST_REGISTER + register * REGISTER) as u64;
                rang |= self.take_ring(page, at);
            }
            if rang {
                let on_page = self
                    .link
                    .completions
                    .store
                    .qps
                    .iter()
                    .filter(|(_, qp)| qp.page == page && qp.takes());
                let qpns: Vec<u32> = on_page.map(|(qpn, _)| *qpn).collect();
                qpns.into_iter().for_each(|qpn| self.heard(qpn, None));
            }
            any |= rang;
        }
        any
    }

    /// Takes the ring that is in one register.
    fn take_ring(&mut self, page: u32, at: u64) -> bool {
        let store = &mut self.link.completions.store;
        let Ok(bytes) = store.read_array::<8>(at) else { return false };
        if bytes == [0; 8] {
            return false;
        }
        let Ok(word) = store.memory.update(at, &|_| 0) else { return false };
        let bytes = word.to_ne_bytes();
        let ring = Ring::from_bytes(bytes);
        let fits =
            ring.and_then(|ring| store.qps.get(&ring.qpn())).is_some_and(|qp| qp.page == page);
        if !fits {
            // A queue pair that has ended may have rung just before its end.
            let known = ring.is_some_and(|ring| ring.qpn() <= store.numbers);
            if !known {
                let text = format!("found {bytes:02x?} in a register of page {page:#x}");
                store.violate(Rule::Doorbell, None, text, &bytes);
            }
        }
        true
    }

    /// Checks a ring that was seen when it was stored; returns the queue pair, and the index behind its last block.
    fn judge_ring(&self, page: u32, offset: usize, bytes: [u8; 8]) -> Result<(u32, u16), Broken> {
        let rule = Rule::Doorbell;
        let inside = (FIRST_REGISTER..PAGE).contains(&offset);
        ensure(inside && (offset - FIRST_REGISTER).is_multiple_of(REGISTER), rule, || {
            format!(
                "found a store at {offset:#x} of the page; expected {FIRST_REGISTER:#x} and every {REGISTER:#x}"
            )
        })?;
        let ring = Ring::from_bytes(bytes);
        let Some(ring) = ring else {
            return Err((
                rule,
                format!(
                    "found {bytes:02x?}; expected (next index << 8, number << 8), or a request's first 8 bytes"
                ),
            ));
        };
        let qpn = ring.qpn();
        let qp = self.link.completions.store.qps.get(&qpn).filter(|qp| qp.page == page);
        let Some(qp) = qp else {
            return Err((
                rule,
                format!("found queue pair {qpn:#x}, which is none of page {page:#x}"),
            ));
        };
        ensure(qp.takes(), rule, || format!("queue pair {qpn:#x} is in state {:?}", qp.state))?;
        let record = self.record(qp)?;
        let next = match ring {
            Ring::NextIndex { next, .. } => next,
            Ring::LastRequest { index, segments, .. } => index.wrapping_add(blocks(segments)),
        };
        ensure(next == record, rule, || {
            format!("found a ring up to index {next:#x}; the record says {record:#x}")
        })?;
        Ok((qpn, next))
    }

    /// The send word of a record.
    fn record(&self, qp: &QueuePair) -> Result<u16, Broken> {
        let store = &self.link.completions.store;
        let unmapped = |e: Unmapped| (Rule::Record, e.to_string());
        let word = u32::from_be_bytes(store.read_array(qp.record + SEND as u64).map_err(unmapped)?);
        ensure(word <= 0xffff, Rule::Record, || {
            format!("found {word:#x} in the record; expected at most 0xffff, big-endian")
        })?;
        if matches!(qp.inlet, Inlet::None) {
            let found: [u8; 4] = store.read_array(qp.record + RECEIVE as u64).map_err(unmapped)?;
            ensure(found == qp.receive_word, Rule::Record, || {
                format!(
                    "found the record's receive word changed to {found:02x?}, without a receive queue"
                )
            })?;
        }
        Ok(word as u16)
    }

    /// A queue pair has rung: takes its requests now, or later where a fault delays the ring. `next` is none where
    /// only the record was seen and not the ring itself.
    fn heard(&mut self, qpn: u32, next: Option<u16>) {
        if self.link.completions.faults.loses_ring() {
            return;
        }
        let most = self.link.completions.faults.doorbell_late;
        if most > 0 {
            let last = self.late_rings.back().map_or(0, |(due, _)| *due);
            let due =
                last.max(self.link.completions.now + self.link.completions.random.below(most));
            self.late_rings.push_back((due, qpn));
            return;
        }
        self.take(qpn, next);
    }

    /// Takes the doorbells that a fault has delayed and that are due.
    pub(crate) fn take_late_rings(&mut self) -> bool {
        let mut moved = false;
        while let Some((due, qpn)) = self.late_rings.front().copied() {
            if due > self.link.completions.now {
                break;
            }
            self.late_rings.pop_front();
            self.take(qpn, None);
            moved = true;
        }
        moved
    }

    /// Takes requests up to `next`, or up to the value of the record.
    fn take(&mut self, qpn: u32, next: Option<u16>) {
        let at_once = next.is_some();
        if let Err((rule, text)) = self.try_take(qpn, next) {
            let bytes = self.dump(qpn);
            self.link.completions.store.violate(rule, Some(qpn), text, &bytes);
            return;
        }
        if at_once {
            self.poison_last(qpn);
        }
        self.link.send(qpn);
    }

    fn try_take(&mut self, qpn: u32, next: Option<u16>) -> Result<(), Broken> {
        let Some(qp) = self.link.completions.store.qps.get(&qpn) else { return Ok(()) };
        let next = match next {
            Some(next) => next,
            None => self.record(qp)?,
        };
        let (taken, reported, room) = (qp.taken, qp.reported, qp.blocks);
        let posted = u32::from(next.wrapping_sub(reported));
        let ahead = u32::from(taken.wrapping_sub(reported));
        ensure(posted <= room && posted >= ahead, Rule::Record, || {
            format!(
                "found index {next:#x} in the record; {taken:#x} was taken and {reported:#x} reported, \
                 of a queue of {room} blocks"
            )
        })?;
        while let Some(qp) = self.link.completions.store.qps.get(&qpn) {
            let at = qp.taken;
            if at == next {
                break;
            }
            let work = self.read_request(qpn, qp)?;
            let behind = at.wrapping_add(work.blocks());
            ensure(
                behind.wrapping_sub(reported) <= next.wrapping_sub(reported),
                Rule::Doorbell,
                || format!("request {at:#x} ends at {behind:#x}; the record says {next:#x}"),
            )?;
            self.poison_last(qpn);
            let Some(qp) = self.link.completions.store.qps.get_mut(&qpn) else { break };
            qp.taken = behind;
            qp.unpoisoned = Some((at, work.blocks()));
            qp.waiting.push_back(work);
        }
        Ok(())
    }

    /// Reads the next request of a queue, which may wrap around.
    fn read_request(&self, qpn: u32, qp: &QueuePair) -> Result<Work, Broken> {
        let first = self.read_block(qp, qp.taken)?;
        let mut head = [0; SEGMENT];
        head.copy_from_slice(&first[..SEGMENT]);
        let segments = parse::segments(&head, qp.taken, qpn, &qp.limits)?;
        let mut bytes = first.to_vec();
        for block in 1..blocks(segments) {
            bytes.extend(self.read_block(qp, qp.taken.wrapping_add(block))?);
        }
        bytes.truncate(usize::from(segments) * SEGMENT);
        parse::request(&bytes, qp.taken, qpn, &qp.limits)
    }

    fn read_block(&self, qp: &QueuePair, index: u16) -> Result<[u8; BLOCK], Broken> {
        let unmapped = |e: Unmapped| (Rule::Request, e.to_string());
        self.link.completions.store.read_array(slot(qp, index)).map_err(unmapped)
    }

    /// Fills the slots of the last request with poison. It waits until now because a ring that was not seen may
    /// still be on its way: libmlx5 copies a request's first bytes to the register after the record. A request
    /// that was reported is not filled: its slots may hold later requests by now.
    fn poison_last(&mut self, qpn: u32) {
        let store = &mut self.link.completions.store;
        let Some(qp) = store.qps.get_mut(&qpn) else { return };
        let Some((first, count)) = qp.unpoisoned.take() else { return };
        if (1..1 << 15).contains(&qp.reported.wrapping_sub(first)) {
            return;
        }
        let slots: Vec<u64> = (0..count).map(|at| slot(qp, first.wrapping_add(at))).collect();
        for at in slots {
            // If the memory of the queue is gone, the next read finds that.
            let _ = store.memory.write(at, &[POISON; BLOCK]);
        }
    }

    /// The block that is taken next.
    fn dump(&self, qpn: u32) -> Vec<u8> {
        let block = self
            .link
            .completions
            .store
            .qps
            .get(&qpn)
            .and_then(|qp| self.read_block(qp, qp.taken).ok());
        block.map(Vec::from).unwrap_or_default()
    }
}

fn slot(qp: &QueuePair, index: u16) -> u64 {
    qp.sq + (u64::from(index) & u64::from(qp.blocks - 1)) * BLOCK as u64
}
