//! Receive queues, which users of libmlx5 have, and kernels do not.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;

use common::{Driver, Pair, SECOND};
use tokenyard_hca::{
    Arena, Config, Connection, CqRequest, End, Event, Hca, Memory as _, Profile, QpRequest,
    ReceiveRequest, Receives, Switch,
};
use tokenyard_sys_mlx5::cqe::{self, Cqe, Kind, syndrome};
use tokenyard_sys_mlx5::doorbell::record_word;
use tokenyard_sys_mlx5::wqe::Request;

/// A driver that writes with immediate data, and a peer with a shared receive queue.
struct World {
    pair: Pair,
    /// The peer's receive queue, completions and queue pair.
    queue: u64,
    cq: u64,
    qpn: u32,
}

const ENTRY: u64 = 32;

impl World {
    fn new(rnr_retries: u8) -> Self {
        let config = Config { profile: Profile::Library, ..Config::default() };
        let (arena, mut switch) = (Arc::new(Arena::new()), Switch::new());
        let hca = |lid| Hca::new(Config { lid, ..config.clone() }, Arc::clone(&arena));
        let (mut first, mut second) = (hca(1), hca(2));
        let a = Driver::new(&mut first, &arena, 1, 6);
        let b = Driver::new(&mut second, &arena, 2, 6);
        let (queue, cq) = (arena.allocate(8192), arena.allocate(8192));
        let qpn = peer(&mut second, &b, queue, cq);
        let from = End { lid: 1, qpn: a.qpn };
        second.to_init(qpn, tokenyard_hca::Access::ALL).unwrap();
        let to = Connection { peer: from, rnr_timer: 12, ..Connection::default() };
        second.to_ready_to_receive(qpn, to).unwrap();
        first.to_init(a.qpn, tokenyard_hca::Access::ALL).unwrap();
        let to = Connection {
            peer: End { lid: 2, qpn },
            timeout: 14,
            retries: 7,
            rnr_retries,
            reads: 4,
            ..Connection::default()
        };
        first.to_ready_to_receive(a.qpn, to).unwrap();
        first.to_ready_to_send(a.qpn, to).unwrap();
        switch.add(first);
        switch.add(second);
        Self { pair: Pair { arena, switch, a, b }, queue, cq, qpn }
    }

    /// Links entries as libmlx5 does, and posts `count` of them.
    fn post_receives(&self, first: u16, count: u16) {
        for at in first..first + count {
            let mut entry = [0; ENTRY as usize];
            entry[2..4].copy_from_slice(&(at + 1).to_be_bytes());
            entry[20..24].copy_from_slice(&0x100_u32.to_be_bytes());
            let place = self.queue + u64::from(at) * ENTRY;
            self.pair.arena.write(place, &entry).unwrap();
        }
        let record = self.queue + 4096;
        self.pair.arena.write(record, &record_word(first + count)).unwrap();
    }

    fn write(&mut self, imm: u32) {
        let (to, from) = (self.pair.b.remote(0), self.pair.a.local(0, 8));
        let imm = imm.to_be_bytes();
        self.pair.post(&[Request::WriteImm { to, from, imm }]);
    }

    fn completion(&self, at: u64) -> Cqe {
        let mut bytes = [0; cqe::BYTES];
        self.pair.arena.read(self.cq + at * 64, &mut bytes).unwrap();
        Cqe::from_bytes(&bytes)
    }
}

fn peer(hca: &mut Hca, b: &Driver, queue: u64, cq: u64) -> u32 {
    let request = ReceiveRequest {
        pd: b.pd,
        buffer: queue,
        stride: ENTRY,
        entries: 64,
        record: queue + 4096,
    };
    let srqn = hca.create_srq(request).unwrap();
    let cqn = hca
        .create_cq(CqRequest {
            buffer: cq,
            log_size: 4,
            stride: 64,
            collapsed: false,
            overrun_ignored: false,
            record: cq + 4096,
            umems: Vec::new(),
        })
        .unwrap();
    hca.create_qp(QpRequest {
        pd: b.pd,
        page: b.page,
        user_index: 9,
        sq: b.sq,
        blocks: 64,
        record: b.record,
        send_cq: cqn,
        receive_cq: cqn,
        receives: Receives::Shared(srqn),
        umems: Vec::new(),
    })
    .unwrap()
}

#[test]
fn immediate_data_take_the_receives_of_a_shared_queue_in_order() {
    let mut world = World::new(7);
    world.post_receives(0, 3);
    for imm in 1..=3 {
        world.write(imm);
    }
    world.pair.run();
    for at in 0..3 {
        let found = world.completion(at);
        assert_eq!((found.word.kind, found.word.counter), (Kind::WriteImm, at as u16));
        assert_eq!(u32::from_be_bytes(found.imm), at as u32 + 1);
        assert_eq!((found.byte_count, found.user_index), (8, 9));
    }
    assert_eq!(world.pair.a.completed().counter, 2);
}

#[test]
fn a_peer_without_receives_is_waited_for() {
    let mut world = World::new(7);
    world.write(5);
    world.write(6);
    world.pair.switch.run(SECOND / 10);
    assert_eq!(world.pair.a.completed().kind, Kind::None);
    world.post_receives(0, 2);
    world.pair.switch.run(SECOND);
    assert_eq!(world.pair.a.completed().counter, 1);
    let found = [0, 1].map(|at| u32::from_be_bytes(world.completion(at).imm));
    assert_eq!(found, [5, 6], "each once, and in order");
}

#[test]
fn a_peer_without_receives_is_an_error_when_the_repetitions_run_out() {
    let mut world = World::new(3);
    world.write(5);
    world.pair.run();
    let failed = world.pair.a.completion();
    assert_eq!(failed.syndrome, syndrome::RNR_RETRIES);
    assert_eq!(world.pair.switch.now(), 3 * 640_000, "the peer's code 12, three times");
}

#[test]
fn a_queue_pair_that_breaks_takes_no_more_shared_receives() {
    let mut world = World::new(7);
    world.post_receives(0, 1);
    let qpn = world.qpn;
    let hca = world.pair.switch.device(2).unwrap();
    hca.to_error(qpn).unwrap();
    hca.to_error(qpn).unwrap();
    assert_eq!(hca.take_events(), [Event::LastReceive { qpn }], "once");
}
