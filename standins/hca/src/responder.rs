//! The receiving side of a queue pair.

use tokenyard_sys_mlx5::cqe::{Cqe, Kind, Word, syndrome};
use tokenyard_sys_mlx5::wqe::{Local, SEGMENT, layout};

use crate::hca::{Hca, Order};
use crate::object::{Access, Inlet, Landing, ReceiveQueue, State};
use crate::requester::KeyedMemory;
use crate::wire::{Body, End, Packet};

/// Numbers of messages have 24 bits.
const NUMBERS: u32 = 0x00ff_ffff;
/// Answers that are stored, for requests that come again.
const ANSWERS: usize = 1024;
/// Bytes of a write that land at once where the fabric reorders.
const PIECE: usize = 64;
/// One more piece lands at once for each this many that wait.
const MANY: usize = 1024;
/// The end of a receive's list of memory.
const NO_KEY: u32 = 0x100;
/// The wait of a peer that found no receive, by code, in units of 10 us.
const RNR_TIMERS: [u32; 32] = [
    65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
];

/// A receive that was taken.
struct Taken {
    counter: u16,
    /// The domain of its keys.
    pd: u32,
    pieces: Vec<Local>,
}

/// The outcome of a request.
enum Outcome {
    Answer(Body),
    /// Its bytes land later.
    Lands(Vec<Landing>),
    /// There is no receive.
    NotReady,
}

impl Hca {
    /// Takes a packet.
    pub fn receive(&mut self, packet: Packet) {
        if self.is_stopped() || !self.port_is_up {
            return;
        }
        if !packet.body.is_request() {
            return self.answered(packet);
        }
        let late = self.faults.payload_late;
        let late = if late > 0 { self.random.below(late) } else { 0 };
        let qpn = packet.to.qpn;
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        let receives = matches!(qp.state, State::ReadyToReceive | State::ReadyToSend);
        if !receives || qp.to.peer != packet.from {
            return;
        }
        let last = qp.inbox.back().map_or(0, |(due, _)| *due);
        qp.inbox.push_back((last.max(self.now + late), packet));
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
                    if let Some(qp) = self.qps.get_mut(&qpn) {
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
            let qp = self.qps.get_mut(&qpn)?;
            let (due, packet) = qp.inbox.front()?;
            let behind = packet.number.wrapping_sub(qp.expected) & NUMBERS;
            if behind == 0 {
                let waits = !qp.landing.is_empty() && !is_plain_write(&packet.body);
                if *due > self.now || waits {
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
        if let Some(qp) = self.qps.get_mut(&qpn) {
            qp.expected = (qp.expected + 1) & NUMBERS;
        }
    }

    fn answer(&mut self, qpn: u32, to: End, number: u32, body: Body) {
        let from = End { lid: self.config.lid, qpn };
        let answer = Packet { from, to, number, body };
        if let Some(qp) = self.qps.get_mut(&qpn) {
            if qp.answers.len() == ANSWERS {
                qp.answers.pop_front();
            }
            qp.answers.push_back(answer.clone());
        }
        self.outbox.push_back(answer);
    }

    /// Answers that there is no receive. The sender repeats this request and all later ones.
    fn not_ready(&mut self, qpn: u32, to: End, number: u32) {
        let from = End { lid: self.config.lid, qpn };
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
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
                    self.memory.read(at, &mut data).ok()?;
                    Some(data)
                });
                data.map_or_else(
                    || refused(syndrome::REMOTE_ACCESS),
                    |data| Outcome::Answer(Body::Data(data)),
                )
            }
            Body::Atomic { key, address, compare, value } => {
                if !address.is_multiple_of(8) {
                    self.bad_key(qpn, format!("atomic at {address:#x}; expected a multiple of 8"));
                    return refused(syndrome::REMOTE_INVALID_REQUEST);
                }
                let memory = KeyedMemory { key, address, bytes: 8 };
                let at = self.resolve_remote(qpn, &memory, Access::REMOTE_ATOMIC);
                let change = move |old: u64| match compare {
                    None => old.wrapping_add(value),
                    Some(compare) if compare == old => value,
                    Some(_) => old,
                };
                let old = at.ok().and_then(|at| self.memory.update(at, &change).ok());
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
        let Some(qp) = self.qps.get(&qpn) else { return Err(()) };
        let found = if qp.access.has(needed) {
            // A write of 0 bytes names no memory.
            if memory.bytes == 0 { Ok(0) } else { self.resolve(qp.pd, memory, needed) }
        } else {
            Err(format!("the queue pair gives its peer rights {:#x}", qp.access.0))
        };
        found.map_err(|text| self.bad_key(qpn, format!("remote: {text}")))
    }

    fn write(&mut self, at: u64, data: Vec<u8>, number: u32) -> Outcome {
        if self.config.order == Order::InOrder || data.is_empty() {
            return match self.memory.write(at, &data) {
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
        let waiting = self.qps.get(&qpn).map_or(0, |qp| qp.landing.len());
        (0..=waiting / MANY).fold(false, |moved, _| self.land_one(qpn) || moved)
    }

    /// Lets one piece land, at random. Returns whether there was one.
    fn land_one(&mut self, qpn: u32) -> bool {
        let Some(qp) = self.qps.get_mut(&qpn) else { return false };
        if qp.landing.is_empty() {
            return false;
        }
        let at = self.random.below(qp.landing.len() as u64) as usize;
        let Landing { memory, data, number } = qp.landing.swap_remove(at);
        let (peer, ended) = (qp.to.peer, qp.landing.iter().all(|landing| landing.number != number));
        let landed = self.memory.write(memory, &data);
        if landed.is_err() {
            let syndrome = syndrome::REMOTE_OPERATION;
            self.answer(qpn, peer, number, Body::Refused { syndrome });
        } else if ended {
            self.answer(qpn, peer, number, Body::Ack);
        }
        true
    }

    fn write_imm(&mut self, qpn: u32, at: u64, data: &[u8], imm: [u8; 4]) -> Outcome {
        let Some(taken) = self.take_receive(qpn) else { return Outcome::NotReady };
        if !data.is_empty() && self.memory.write(at, data).is_err() {
            let syndrome = syndrome::REMOTE_OPERATION;
            return Outcome::Answer(Body::Refused { syndrome });
        }
        let cqe = receive_cqe(Kind::WriteImm, taken.counter);
        self.complete_receive(qpn, Cqe { imm, byte_count: data.len() as u32, ..cqe });
        Outcome::Answer(Body::Ack)
    }

    fn take_message(&mut self, qpn: u32, data: &[u8], imm: Option<[u8; 4]>) -> Outcome {
        let Some(taken) = self.take_receive(qpn) else { return Outcome::NotReady };
        let room: u64 = taken.pieces.iter().map(|piece| u64::from(piece.bytes)).sum();
        let (answer, kind, code) = if room < data.len() as u64 {
            (syndrome::REMOTE_INVALID_REQUEST, Kind::ReceiveError, syndrome::LOCAL_LENGTH)
        } else if !self.scatter_to(taken.pd, &taken.pieces, data) {
            (syndrome::REMOTE_OPERATION, Kind::ReceiveError, syndrome::LOCAL_PROTECTION)
        } else {
            let kind = if imm.is_some() { Kind::ReceiveImm } else { Kind::Receive };
            let (imm, byte_count) = (imm.unwrap_or_default(), data.len() as u32);
            let cqe = receive_cqe(kind, taken.counter);
            self.complete_receive(qpn, Cqe { imm, byte_count, ..cqe });
            return Outcome::Answer(Body::Ack);
        };
        let cqe = receive_cqe(kind, taken.counter);
        self.complete_receive(qpn, Cqe { syndrome: code, ..cqe });
        self.break_off(qpn);
        Outcome::Answer(Body::Refused { syndrome: answer })
    }

    /// Takes the next receive of a queue pair, if there is one.
    fn take_receive(&mut self, qpn: u32) -> Option<Taken> {
        let qp = self.qps.get(&qpn)?;
        let queue = match &qp.inlet {
            Inlet::None => return None,
            Inlet::Shared(srqn) => self.srqs.get(srqn)?,
            Inlet::Own(queue) => queue,
        };
        let (taken, next) = self.read_receive(queue)?;
        let queue = match &mut self.qps.get_mut(&qpn)?.inlet {
            Inlet::None => return None,
            Inlet::Shared(srqn) => self.srqs.get_mut(srqn)?,
            Inlet::Own(queue) => queue,
        };
        queue.taken = queue.taken.wrapping_add(1);
        queue.at = next;
        Some(taken)
    }

    /// Reads the next receive of a queue, and the index of the one after it.
    fn read_receive(&self, queue: &ReceiveQueue) -> Option<(Taken, u16)> {
        let posted = u32::from_be_bytes(self.read_array(queue.record).ok()?) as u16;
        if posted == queue.taken {
            return None;
        }
        let index = u64::from(queue.at) & u64::from(queue.entries - 1);
        let mut entry = vec![0; usize::try_from(queue.stride).ok()?];
        self.memory.read(queue.buffer + index * queue.stride, &mut entry).ok()?;
        let first = if queue.linked { SEGMENT } else { 0 };
        let next = match queue.linked {
            true => u16::from_be_bytes([entry[2], entry[3]]),
            false => queue.at.wrapping_add(1),
        };
        let pieces = entry[first..].chunks_exact(SEGMENT).map(piece);
        let pieces = pieces.take_while(|piece| piece.key != NO_KEY);
        let pieces = pieces.filter(|piece| piece.bytes > 0).collect();
        Some((Taken { counter: queue.at, pd: queue.pd, pieces }, next))
    }

    /// Completes the receives of a broken queue pair as flushed. Shared receives stay for other queue pairs.
    pub(crate) fn flush_receives(&mut self, qpn: u32) {
        let is_own = |hca: &Self| matches!(hca.qps.get(&qpn)?.inlet, Inlet::Own(_)).then_some(());
        while is_own(self).is_some()
            && let Some(taken) = self.take_receive(qpn)
        {
            let cqe = receive_cqe(Kind::ReceiveError, taken.counter);
            self.complete_receive(qpn, Cqe { syndrome: syndrome::FLUSHED, ..cqe });
        }
    }
}

fn is_plain_write(body: &Body) -> bool {
    matches!(body, Body::Write { imm: None, .. })
}

fn receive_cqe(kind: Kind, counter: u16) -> Cqe {
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

fn piece(segment: &[u8]) -> Local {
    let word = |at: usize| std::array::from_fn(|i| segment[at + i]);
    let long = std::array::from_fn(|i| segment[layout::DATA_ADDRESS + i]);
    Local {
        bytes: u32::from_be_bytes(word(layout::DATA_BYTES)),
        key: u32::from_be_bytes(word(layout::DATA_KEY)),
        address: u64::from_be_bytes(long),
    }
}
