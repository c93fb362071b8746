//! How the software device executes requests that follow the rules.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Pair, inline, whole};
use tokenyard_hca::{Access, Config, Memory as _, State};
use tokenyard_sys_mlx5::cqe::Kind;
use tokenyard_sys_mlx5::doorbell::{FIRST_REGISTER, Ring};
use tokenyard_sys_mlx5::mailbox::{
    Mailbox, QP_STATE_RTS, QueryHcaCap, QueryHcaCapOut, QueryQp, QueryQpOut, ToErr,
};
use tokenyard_sys_mlx5::wqe::{Control, Request};

#[test]
fn writes_reads_and_additions_reach_the_memory_that_they_name() {
    let mut pair = Pair::new(Config::default(), 6);
    pair.arena.write(pair.a.window, &[7; 100]).unwrap();
    pair.arena.write(pair.b.window + 8192, &5_u64.to_ne_bytes()).unwrap();
    let (a, b) = (&pair.a, &pair.b);
    let requests = [
        Request::Write { to: b.remote(1000), from: a.local(0, 100) },
        Request::WriteInline { to: b.remote(4096), data: inline(0x0102_0304) },
        Request::FetchAdd { to: b.remote(8192), add: 37, sink: a.local(512, 8) },
        Request::Read { from: b.remote(1000), to: a.local(2000, 100) },
        Request::Nop,
    ];
    pair.post(&requests);
    pair.run();
    assert_eq!(pair.b.bytes(1000, 100), [7; 100]);
    assert_eq!(pair.b.bytes(1100, 1), [0], "and not a byte more");
    assert_eq!(pair.b.word(4096), 0x0102_0304);
    assert_eq!((pair.b.word(8192), pair.a.word(512)), (42, 5));
    assert_eq!(pair.a.bytes(2000, 100), [7; 100]);
    let word = pair.a.completed();
    assert_eq!((word.kind, word.counter), (Kind::Request, 4));
}

#[test]
fn only_requests_that_ask_for_it_complete() {
    let mut pair = Pair::new(Config::default(), 6);
    let request = Request::WriteInline { to: pair.b.remote(0), data: inline(1) };
    let block = pair.a.block(&request, false);
    pair.a.write(&block);
    pair.a.publish();
    let Pair { a, switch, .. } = &mut pair;
    a.ring(switch.device(1).unwrap());
    pair.run();
    assert_eq!(pair.b.word(0), 1);
    assert_eq!(pair.a.completed().kind, Kind::None);
}

#[test]
fn a_queue_goes_round_past_the_end_of_its_index() {
    let mut pair = Pair::new(Config::default(), 6);
    for round in 0..(70_000 / 50) {
        let requests: Vec<_> = (0..50)
            .map(|at| {
                let value = inline(round * 50 + at + 1);
                Request::WriteInline { to: pair.b.remote(8 * at), data: value }
            })
            .collect();
        pair.post(&requests);
        pair.run();
        assert_eq!(pair.a.completed().counter, pair.a.next.wrapping_sub(1));
    }
    assert_eq!(pair.b.word(8 * 49), 70_000);
}

#[test]
fn reads_and_additions_wait_for_their_turn() {
    let mut pair = Pair::new(Config::default(), 6);
    let add = Request::FetchAdd { to: pair.b.remote(0), add: 1, sink: pair.a.local(0, 8) };
    pair.post(&[add; 40]);
    pair.run();
    assert_eq!(pair.b.word(0), 40);
    let qpn = pair.a.qpn;
    assert_eq!(pair.hca().most_reads_seen(qpn), 4, "two to the power of log_sra_max");
}

#[test]
fn the_ring_of_libmlx5_is_taken_at_its_four_registers() {
    let mut pair = Pair::new(Config::default(), 6);
    for register in 0..4 {
        let request = Request::WriteInline { to: pair.b.remote(0), data: inline(register + 1) };
        let index = pair.a.next;
        let block = pair.a.block(&request, true);
        pair.a.write(&block);
        pair.a.publish();
        let (page, qpn) = (pair.a.page, pair.a.qpn);
        let ring =
            Ring::LastRequest { modifier: 0, index, opcode: request.opcode(), qpn, segments: 3 };
        assert_eq!(ring.to_bytes(), block[..8]);
        let offset = FIRST_REGISTER + 256 * register as usize;
        pair.hca().ring(page, offset, ring.to_bytes());
        pair.run();
        assert_eq!(pair.b.word(0), register + 1);
    }
}

#[test]
fn a_peer_that_is_gone_is_an_error_completion_and_the_rest_is_flushed() {
    let mut pair = Pair::new(Config::default(), 6);
    let qpn = pair.b.qpn;
    pair.switch.device(2).unwrap().destroy_qp(qpn);
    let request = Request::WriteInline { to: pair.b.remote(0), data: inline(1) };
    pair.post(&[request; 3]);
    pair.run();
    // The first cause is overwritten: a collapsed queue holds the last completion only.
    let last = pair.a.completion();
    assert_eq!((last.word.kind, last.word.counter), (Kind::RequestError, 2));
    assert_eq!(last.syndrome, 0x05);
    let waited = pair.switch.now();
    assert_eq!(waited, 4 * (4096 << 14), "the timeout, and three repetitions");
    assert_eq!(pair.b.word(0), 0);
    // A broken queue pair completes posted requests as flushed.
    pair.post(&[request]);
    pair.run();
    assert_eq!(pair.a.completed().counter, 3);
}

#[test]
fn the_device_says_what_it_can_and_what_state_a_queue_pair_has() {
    let mut pair = Pair::new(Config::default(), 6);
    let answer = pair.hca().command(&QueryHcaCap::default().to_bytes()).unwrap();
    assert_eq!(QueryHcaCapOut::from_answer(&answer).cqe_version, 1);
    pair.post(&[Request::Nop; 3]);
    pair.run();
    let qpn = pair.a.qpn;
    let answer = pair.hca().command(&QueryQp { qpn }.to_bytes()).unwrap();
    let answer = QueryQpOut::from_answer(&answer);
    assert_eq!((answer.state, answer.hw_sq_counter), (QP_STATE_RTS, 3));
    pair.hca().command(&ToErr { qpn }.to_bytes()).unwrap();
    assert_eq!(pair.hca().state(qpn), Some(State::Error));
}

#[test]
fn a_fence_waits_for_earlier_additions() {
    let mut pair = Pair::new(Config::default(), 6);
    let add = Request::FetchAdd { to: pair.b.remote(0), add: 9, sink: pair.a.local(64, 8) };
    let block = pair.a.block(&add, false);
    pair.a.write(&block);
    // Sends the value that the addition returned.
    let write = Request::Write { to: pair.b.remote(128), from: pair.a.local(64, 8) };
    pair.arena.write(pair.a.window + 64, &[0xff; 8]).unwrap();
    pair.arena.write(pair.b.window, &3_u64.to_ne_bytes()).unwrap();
    let control = Control { index: pair.a.next, qpn: pair.a.qpn, signaled: true, fence: true };
    pair.a.write(&write.to_block(control));
    pair.a.publish();
    let Pair { a, switch, .. } = &mut pair;
    a.ring(switch.device(1).unwrap());
    pair.run();
    assert_eq!((pair.b.word(0), pair.b.word(128)), (12, 3));
}

#[test]
fn what_is_unused_is_freed() {
    let mut pair = Pair::new(Config::default(), 6);
    let (pd, page, umem, cqn, qpn, key) =
        (pair.a.pd, pair.a.page, pair.a.umem, pair.a.cqn, pair.a.qpn, pair.a.key);
    let hca = pair.hca();
    hca.destroy_qp(qpn);
    hca.destroy_cq(cqn);
    hca.free_umem(umem);
    hca.free_page(page);
    hca.deregister(key);
    hca.free_pd(pd);
    assert_eq!(hca.violations(), []);
    assert!(hca.register(whole(pd, 0, 8, Access::ALL)).is_err());
}

#[test]
fn rings_in_one_register_are_found_by_the_records_of_its_page() {
    let mut pair = Pair::new(Config::default(), 6);
    for value in 1..=3 {
        let request = Request::WriteInline { to: pair.b.remote(8 * value), data: inline(value) };
        let block = pair.a.block(&request, true);
        pair.a.write(&block);
        pair.a.publish();
    }
    let ring = Ring::NextIndex { next: 1, qpn: pair.a.qpn };
    // The register holds the first of the three rings; the record is ahead.
    let register = pair.a.registers + FIRST_REGISTER as u64;
    pair.arena.write(register, &ring.to_bytes()).unwrap();
    assert!(pair.hca().poll_registers());
    assert!(!pair.hca().poll_registers(), "each ring is taken once");
    pair.run();
    assert_eq!([1, 2, 3].map(|at| pair.b.word(8 * at)), [1, 2, 3]);
    let slot = |at: u64| {
        let mut bytes = [0; 64];
        pair.arena.read(pair.a.sq + 64 * at, &mut bytes).unwrap();
        bytes
    };
    assert_eq!(slot(1), [0xa5; 64]);
    assert_ne!(slot(2), [0xa5; 64], "its ring may be on its way");
}
