//! The receiving side of a queue pair.

use tokenyard_sys_mlx5::cqe::{Cqe, Kind, syndrome};

use crate::completion::receive_cqe;
use crate::hca::Order;
use crate::object::{Access, Landing, State};
use crate::requester::Link;
use crate::store::KeyedMemory;
use crate::wire::{Body, End, Packet};

/// Numbers of messages have 24 bits.
const NUMBERS: u32 = 0x00ff_ffff;
/// Answers that are stored, for requests that come again.
const ANSWERS: usize = 1024;
/// Bytes of a write that land at once where the fabric reorders.
const PIECE: usize = 64;
/// One more piece lands at once for each this many that wait.
const MANY: usize = 1024;
/// The wait of a peer that found no receive, by code, in units of 10 us.
const RNR_TIMERS: [u32; 32] = [
    65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
];

/// The outcome of a request.
enum Outcome {
    Answer(Body),
    /// Its bytes land later.
    Lands(Vec<Landing>),
    /// There is no receive.
    NotReady,
}

impl Link {
    /// Takes a packet.
    pub(crate) fn receive(&mut self, packet: Packet) {
        if self.completions.is_stopped() || !self.port_is_up {
            return;
        }
        if !packet.body.is_request() {
            return self.answered(packet);
        }
        let late = self.completions.faults.payload_late;
        let late = if late > 0 { self.completions.random.below(late) } else { 0 };
        let qpn = packet.to.qpn;
        let Some(qp) = self.completions.store.qps.get_mut(&qpn) else { return };
        let receives = matches!(qp.state, State::ReadyToReceive | State::ReadyToSend);
        if !receives || qp.to.peer != packet.from {
            return;
        }
        let last = qp.inbox.back().map_or(0, |(due, _)| *due);
        qp.inbox.push_back((last.max(self.completions.now + late), packet));
        self.serve(qpn);
    }

    /// Serves the requests that have come, in order, as far as is allowed. Returns whether there were any.
    pub(crate) fn serve(&mut self, qpn: u32) -> bool {
        let mut moved = false;
        while let Some(packet) = self.next_request(qpn) {
            moved = true;
            let (from, number) = (packet.from, packet.number);
            match self.execute(qpn, packet) {
                Outcome::Answer(body) => {
                    self.expect_next(qpn);
                    self.answer(qpn, from, number, body);
                }
                Outcome::Lands(landing) => {
                    self.expect_next(qpn);
                    if let Some(qp) = self.completions.store.qps.get_mut(&qpn) {
                        qp.landing.extend(landing);
                    }
                }
                Outcome::NotReady => self.not_ready(qpn, from, number),
            }
        }
        moved
    }

    /// The next request that may be served now. Requests out of sequence are dropped.
    fn next_request(&mut self, qpn: u32) -> Option<Packet> {
        loop {
            let qp = self.completions.store.qps.get_mut(&qpn)?;
            let (due, packet) = qp.inbox.front()?;
            let behind = packet.number.wrapping_sub(qp.expected) & NUMBERS;
            if behind == 0 {
                let waits = !qp.landing.is_empty() && !is_plain_write(&packet.body);
                if *due > self.completions.now || waits {
                    return None;
                }
                return qp.inbox.pop_front().map(|(_, packet)| packet);
            }
            let (_, packet) = qp.inbox.pop_front()?;
            // A request that was served comes again if its answer was lost, so it gets that answer. A request that is
            // ahead is dropped, and its sender repeats it.
            if behind > NUMBERS / 2 {
                let answer = qp.answers.iter().find(|answer| answer.number == packet.number);
                self.outbox.extend(answer.cloned());
            }
        }
    }

    fn expect_next(&mut self, qpn: u32) {
        if let Some(qp) = self.completions.store.qps.get_mut(&qpn) {
            qp.expected = (qp.expected + 1) & NUMBERS;
        }
    }

    fn answer(&mut self, qpn: u32, to: End, number: u32, body: Body) {
        let from = End { lid: self.lid, qpn };
        let answer = Packet { from, to, number, body };
        if let Some(qp) = self.completions.store.qps.get_mut(&qpn) {
            if qp.answers.len() == ANSWERS {
                qp.answers.pop_front();
            }
            qp.answers.push_back(answer.clone());
        }
        self.outbox.push_back(answer);
    }

    /// Answers that there is no receive. The sender repeats this request and all later ones.
    fn not_ready(&mut self, qpn: u32, to: End, number: u32) {
        let from = End { lid: self.lid, qpn };
        let Some(qp) = self.completions.store.qps.get_mut(&qpn) else { return };
        qp.inbox.clear();
        let code = usize::from(qp.to.rnr_timer).min(RNR_TIMERS.len() - 1);
        let after = u64::from(RNR_TIMERS[code]) * 10_000;
        self.outbox.push_back(Packet { from, to, number, body: Body::NotReady { after } });
    }

    fn execute(&mut self, qpn: u32, packet: Packet) -> Outcome {
        let refused = |syndrome| Outcome::Answer(Body::Refused { syndrome });
        match packet.body {
            Body::Write { key, address, data, imm } => {
                let memory = KeyedMemory { key, address, bytes: data.len() as u64 };
                let at = self.resolve_remote(qpn, &memory, Access::REMOTE_WRITE);
                match (at, imm) {
                    (Err(()), _) => refused(syndrome::REMOTE_ACCESS),
                    (Ok(at), None) => self.write(at, data, packet.number),
                    (Ok(at), Some(imm)) => self.write_imm(qpn, at, &data, imm),
                }
            }
            Body::Send { data, imm } => self.take_message(qpn, &data, imm),
            Body::Read { key, address, bytes } => {
                let memory = KeyedMemory { key, address, bytes };
                let at = self.resolve_remote(qpn, &memory, Access::REMOTE_READ);
                let data = at.ok().and_then(|at| {
                    let mut data = vec![0; usize::try_from(bytes).ok()?];
                    self.completions.store.memory.read(at, &mut data).ok()?;
                    Some(data)
                });
                data.map_or_else(
                    || refused(syndrome::REMOTE_ACCESS),
                    |data| Outcome::Answer(Body::Data(data)),
                )
            }
            Body::Atomic { key, address, compare, value } => {
                if !address.is_multiple_of(8) {
                    self.completions
                        .store
                        .bad_key(qpn, format!("atomic at {address:#x}; expected a multiple of 8"));
                    return refused(syndrome::REMOTE_INVALID_REQUEST);
                }
                let memory = KeyedMemory { key, address, bytes: 8 };
                let at = self.resolve_remote(qpn, &memory, Access::REMOTE_ATOMIC);
                let change = move |old: u64| match compare {
                    None => old.wrapping_add(value),
                    Some(compare) if compare == old => value,
                    Some(_) => old,
                };
                let old =
                    at.ok().and_then(|at| self.completions.store.memory.update(at, &change).ok());
                old.map_or_else(
                    || refused(syndrome::REMOTE_ACCESS),
                    |old| Outcome::Answer(Body::Data(old.to_ne_bytes().to_vec())),
                )
            }
            _ => refused(syndrome::REMOTE_INVALID_REQUEST),
        }
    }

    fn resolve_remote(
        &mut self,
        qpn: u32,
        memory: &KeyedMemory,
        needed: Access,
    ) -> Result<u64, ()> {
        let Some(qp) = self.completions.store.qps.get(&qpn) else { return Err(()) };
        let found = if qp.access.has(needed) {
            // A write of 0 bytes names no memory.
            if memory.bytes == 0 {
                Ok(0)
            } else {
                self.completions.store.resolve(qp.pd, memory, needed)
            }
        } else {
            Err(format!("the queue pair gives its peer rights {:#x}", qp.access.0))
        };
        found.map_err(|text| self.completions.store.bad_key(qpn, format!("remote: {text}")))
    }

    fn write(&mut self, at: u64, data: Vec<u8>, number: u32) -> Outcome {
        if self.order == Order::InOrder || data.is_empty() {
            return match self.completions.store.memory.write(at, &data) {
                Ok(()) => Outcome::Answer(Body::Ack),
                Err(_) => Outcome::Answer(Body::Refused { syndrome: syndrome::REMOTE_OPERATION }),
            };
        }
        // Pieces end at multiples of their size, so that aligned words stay whole.
        let mut landing = Vec::new();
        let (mut memory, mut rest) = (at, data.as_slice());
        while !rest.is_empty() {
            let room = PIECE - memory as usize % PIECE;
            let (piece, behind) = rest.split_at(room.min(rest.len()));
            landing.push(Landing { memory, data: piece.to_vec(), number });
            memory += piece.len() as u64;
            rest = behind;
        }
        Outcome::Lands(landing)
    }

    /// Lets a piece of the writes under way land, or several where many wait: a long write has to end before its sender
    /// repeats it. Returns whether there was one.
    pub(crate) fn land(&mut self, qpn: u32) -> bool {
        let waiting = self.completions.store.qps.get(&qpn).map_or(0, |qp| qp.landing.len());
        (0..=waiting / MANY).fold(false, |moved, _| self.land_one(qpn) || moved)
    }

    /// Lets one piece land, at random. Returns whether there was one.
    fn land_one(&mut self, qpn: u32) -> bool {
        let Some(qp) = self.completions.store.qps.get_mut(&qpn) else { return false };
        if qp.landing.is_empty() {
            return false;
        }
        let at = self.completions.random.below(qp.landing.len() as u64) as usize;
        let Landing { memory, data, number } = qp.landing.swap_remove(at);
        let (peer, ended) = (qp.to.peer, qp.landing.iter().all(|landing| landing.number != number));
        let landed = self.completions.store.memory.write(memory, &data);
        if landed.is_err() {
            let syndrome = syndrome::REMOTE_OPERATION;
            self.answer(qpn, peer, number, Body::Refused { syndrome });
        } else if ended {
            self.answer(qpn, peer, number, Body::Ack);
        }
        true
    }

    fn write_imm(&mut self, qpn: u32, at: u64, data: &[u8], imm: [u8; 4]) -> Outcome {
        let Some(taken) = self.completions.store.take_receive(qpn) else {
            return Outcome::NotReady;
        };
        if !data.is_empty() && self.completions.store.memory.write(at, data).is_err() {
            let syndrome = syndrome::REMOTE_OPERATION;
            return Outcome::Answer(Body::Refused { syndrome });
        }
        let cqe = receive_cqe(Kind::WriteImm, taken.counter);
        self.completions.complete_receive(qpn, Cqe { imm, byte_count: data.len() as u32, ..cqe });
        Outcome::Answer(Body::Ack)
    }

    fn take_message(&mut self, qpn: u32, data: &[u8], imm: Option<[u8; 4]>) -> Outcome {
        let Some(taken) = self.completions.store.take_receive(qpn) else {
            return Outcome::NotReady;
        };
        let room: u64 = taken.pieces.iter().map(|piece| u64::from(piece.bytes)).sum();
        let (answer, kind, code) = if room < data.len() as u64 {
            (syndrome::REMOTE_INVALID_REQUEST, Kind::ReceiveError, syndrome::LOCAL_LENGTH)
        } else if !self.completions.store.scatter_to(taken.pd, &taken.pieces, data) {
            (syndrome::REMOTE_OPERATION, Kind::ReceiveError, syndrome::LOCAL_PROTECTION)
        } else {
            let kind = if imm.is_some() { Kind::ReceiveImm } else { Kind::Receive };
            let (imm, byte_count) = (imm.unwrap_or_default(), data.len() as u32);
            let cqe = receive_cqe(kind, taken.counter);
            self.completions.complete_receive(qpn, Cqe { imm, byte_count, ..cqe });
            return Outcome::Answer(Body::Ack);
        };
        let cqe = receive_cqe(kind, taken.counter);
        self.completions.complete_receive(qpn, Cqe { syndrome: code, ..cqe });
        self.completions.break_off(qpn);
        Outcome::Answer(Body::Refused { syndrome: answer })
    }
}

fn is_plain_write(body: &Body) -> bool {
    matches!(body, Body::Write { imm: None, .. })
}
