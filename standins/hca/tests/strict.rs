//! Drivers that break a rule, each in one way, and are caught. Device and drivers have the same authors, so
//! these tests are the evidence that the device would catch a driver's mistake.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Pair, inline, whole};
use tokenyard_hca::{Access, Config, CqRequest, Memory as _, QpRequest, Receives, Rule};
use tokenyard_sys_mlx5::doorbell::{FIRST_REGISTER, Ring};
use tokenyard_sys_mlx5::mailbox::{Init2Rtr, Mailbox, Rtr2Rts};
use tokenyard_sys_mlx5::wqe::{BLOCK, Local, Request};

fn pair() -> Pair {
    Pair::new(Config::default(), 6)
}

/// A driver that follows the rules, except for the change that `spoil` makes to its block.
fn spoiled(request: impl Fn(&Pair) -> Request, spoil: impl Fn(&mut [u8; BLOCK])) -> (Rule, String) {
    let mut pair = pair();
    let request = request(&pair);
    let mut block = pair.a.block(&request, true);
    spoil(&mut block);
    pair.a.write(&block);
    pair.a.publish();
    let Pair { a, switch, .. } = &mut pair;
    a.ring(switch.device(1).unwrap());
    let broken = pair.broken().expect("nothing was wrong");
    assert_eq!(pair.b.word(0), 0, "nothing of a wrong request is done");
    broken
}

fn write(pair: &Pair) -> Request {
    Request::Write { to: pair.b.remote(0), from: pair.a.local(0, 64) }
}

fn write_inline(pair: &Pair) -> Request {
    Request::WriteInline { to: pair.b.remote(0), data: inline(1) }
}

fn add(pair: &Pair) -> Request {
    Request::FetchAdd { to: pair.b.remote(0), add: 1, sink: pair.a.local(0, 8) }
}

#[track_caller]
fn assert_broken(found: (Rule, String), rule: Rule, text: &str) {
    assert_eq!(found.0, rule, "{}", found.1);
    assert!(found.1.contains(text), "found `{}`; expected `{text}`", found.1);
}

/// A driver that follows the rules, except for its ring.
fn rung(spoil: impl Fn(&mut Pair)) -> (Rule, String) {
    let mut pair = pair();
    let block = pair.a.block(&write_inline(&pair), true);
    pair.a.write(&block);
    pair.a.publish();
    spoil(&mut pair);
    pair.broken().expect("nothing was wrong")
}

#[test]
fn rule_1_a_ring_that_is_no_ring() {
    let ring = |offset: usize, bytes: [u8; 8]| {
        rung(move |pair| {
            let page = pair.a.page;
            pair.hca().ring(page, offset, bytes);
        })
    };
    let good = Ring::NextIndex { next: 1, qpn: pair().a.qpn }.to_bytes();
    assert_broken(ring(FIRST_REGISTER + 4, good), Rule::Doorbell, "store at 0x804");
    assert_broken(ring(0, good), Rule::Doorbell, "store at 0x0");
    let mut little = good;
    little[..4].reverse();
    assert_broken(ring(FIRST_REGISTER, little), Rule::Doorbell, "ring up to index 0x100");
    let mut modified = good;
    modified[0] = 1;
    assert_broken(ring(FIRST_REGISTER, modified), Rule::Doorbell, "next index << 8");
    let other = Ring::NextIndex { next: 1, qpn: 0xabcdef }.to_bytes();
    assert_broken(ring(FIRST_REGISTER, other), Rule::Doorbell, "found queue pair 0xabcdef");
}

#[test]
fn rule_1_a_ring_on_the_page_of_another_queue_pair() {
    let found = rung(|pair| {
        let (next, qpn) = (pair.a.next, pair.a.qpn);
        let at = pair.arena.allocate(4096);
        let hca = pair.hca();
        let page = hca.allocate_page(at);
        hca.ring(page, FIRST_REGISTER, Ring::NextIndex { next, qpn }.to_bytes());
    });
    assert_broken(found, Rule::Doorbell, "which is none of page");
}

#[test]
fn rule_1_a_ring_that_is_ahead_of_the_record() {
    let mut pair = pair();
    let block = pair.a.block(&write_inline(&pair), true);
    pair.a.write(&block);
    // The ring comes before the record.
    let Pair { a, switch, .. } = &mut pair;
    a.ring(switch.device(1).unwrap());
    assert_broken(pair.broken().unwrap(), Rule::Doorbell, "the record says 0x0");
}

#[test]
fn rule_1_the_own_index_where_the_next_one_is_due() {
    let found = rung(|pair| {
        let (page, qpn) = (pair.a.page, pair.a.qpn);
        pair.hca().ring(page, FIRST_REGISTER, Ring::NextIndex { next: 0, qpn }.to_bytes());
    });
    assert_broken(found, Rule::Doorbell, "ring up to index 0x0; the record says 0x1");
}

#[test]
fn rule_2_a_record_in_the_wrong_byte_order_or_with_more_bits() {
    for (word, text) in [([1, 0, 0, 0], "0x1000000"), ([0, 1, 0, 1], "0x10001")] {
        let found = rung(|pair| {
            pair.arena.write(pair.a.record + 4, &word).unwrap();
            let Pair { a, switch, .. } = pair;
            a.ring(switch.device(1).unwrap());
        });
        assert_broken(found, Rule::Record, text);
    }
}

#[test]
fn rule_2_the_receive_word_where_there_is_no_receive_queue() {
    let found = rung(|pair| {
        pair.arena.write(pair.a.record, &[0, 0, 0, 1]).unwrap();
        let Pair { a, switch, .. } = pair;
        a.ring(switch.device(1).unwrap());
    });
    assert_broken(found, Rule::Record, "receive word changed");
}

#[test]
fn rule_2_a_record_that_goes_back() {
    let mut pair = pair();
    pair.post(&[Request::Nop; 3]);
    pair.a.next = 2;
    pair.a.publish();
    let Pair { a, switch, .. } = &mut pair;
    a.ring(switch.device(1).unwrap());
    assert_broken(pair.broken().unwrap(), Rule::Record, "0x3 was taken");
}

#[test]
fn rule_2_more_requests_than_were_reported_free() {
    let mut pair = pair();
    let request = write_inline(&pair);
    // None of the first 60 asks for a completion, so the driver does not know that their slots are free.
    for _ in 0..60 {
        let block = pair.a.block(&request, false);
        pair.a.write(&block);
    }
    pair.a.publish();
    let Pair { a, switch, .. } = &mut pair;
    a.ring(switch.device(1).unwrap());
    pair.run();
    pair.post(&[request; 5]);
    assert_broken(pair.broken().unwrap(), Rule::Record, "of a queue of 64 blocks");
}

#[test]
fn rule_3_the_index_queue_pair_and_size_of_a_request() {
    let broken = |at: usize, value: u8| spoiled(write, move |block| block[at] = value);
    assert_broken(broken(2, 1), Rule::Request, "found index 0x1; expected 0x0");
    assert_broken(broken(5, 0x7f), Rule::Request, "found queue pair 0x7f");
    assert_broken(broken(7, 0), Rule::Request, "found 0 segments");
    assert_broken(broken(7, 5), Rule::Request, "found 5 segments");
    assert_broken(broken(7, 4), Rule::Request, "found 4 segments; expected 3");
    assert_broken(spoiled(add, |block| block[7] = 3), Rule::Request, "expected 4");
    assert_broken(spoiled(|_| Request::Nop, |b| b[7] = 2), Rule::Request, "expected 1");
}

#[test]
fn rule_3_unknown_opcodes_modifiers_and_flags() {
    let broken = |at: usize, value: u8| spoiled(write, move |block| block[at] = value);
    assert_broken(broken(3, 0x0a), Rule::Request, "found opcode 0x0a");
    assert_broken(broken(3, 0x15), Rule::Request, "found opcode 0x15");
    assert_broken(broken(0, 8), Rule::Request, "found opcode modifier 0x8");
    assert_broken(broken(11, 1 << 2), Rule::Request, "found completion mode 1");
    assert_broken(broken(11, 3 << 2), Rule::Request, "found completion mode 3");
    assert_broken(broken(11, 5 << 5), Rule::Request, "found fence 5");
    assert_broken(broken(11, 2 << 2 | 1), Rule::Request, "found flags 0x01");
}

#[test]
fn rule_3_reserved_bytes() {
    let broken = |at: usize| spoiled(write, move |block| block[at] = 1);
    for at in 8..11 {
        assert_broken(broken(at), Rule::Request, &format!("reserved byte {at}"));
    }
    assert_broken(broken(12), Rule::Request, "immediate data");
    assert_broken(broken(31), Rule::Request, "reserved word 0x1 behind the key");
    let compared = spoiled(add, |block| block[47] = 1);
    assert_broken(compared, Rule::Request, "behind the addend");
}

#[test]
fn rule_3_sizes_that_mean_something_else() {
    let bytes = |bytes: u32| {
        spoiled(write, move |block| block[32..36].copy_from_slice(&bytes.to_be_bytes()))
    };
    assert_broken(bytes(0), Rule::Request, "0 counts as 2^31");
    assert_broken(bytes((1 << 30) + 1), Rule::Request, "0x40000001 bytes");
    let inline = |bytes: u8| spoiled(write_inline, move |block| block[35] = bytes);
    assert_broken(inline(0), Rule::Request, "found 0 inline bytes");
    assert_broken(inline(13), Rule::Request, "found 13 inline bytes; expected 1 to 12");
    let sink = spoiled(add, |block| block[51] = 4);
    assert_broken(sink, Rule::Request, "sink of 4 bytes");
}

#[test]
fn rule_4_a_doorbell_before_each_store_of_a_request() {
    // The first turn fills the slots with poison; in the second, one of the four stores is missing.
    for missing in 0..4 {
        let mut pair = pair();
        for _ in 0..2 {
            pair.post(&[Request::Nop; 32]);
            pair.run();
        }
        let request = add(&pair);
        let block = pair.a.block(&request, true);
        let slot = pair.a.sq;
        pair.a.next = pair.a.next.wrapping_add(1);
        for segment in (0..4).filter(|segment| *segment != missing) {
            let at = segment * 16;
            pair.arena.write(slot + at as u64, &block[at..at + 16]).unwrap();
        }
        pair.a.publish();
        let Pair { a, switch, .. } = &mut pair;
        a.ring(switch.device(1).unwrap());
        let text = if missing == 0 { "the first segment" } else { "was written" };
        assert_broken(pair.broken().unwrap(), Rule::Poison, text);
        assert_eq!(pair.b.word(0), 0);
    }
}

#[test]
fn rule_4_a_request_of_an_earlier_turn() {
    let mut pair = pair();
    let old = pair.a.block(&Request::Nop, true);
    for _ in 0..2 {
        pair.post(&[Request::Nop; 32]);
        pair.run();
    }
    pair.a.write(&old);
    pair.a.publish();
    let Pair { a, switch, .. } = &mut pair;
    a.ring(switch.device(1).unwrap());
    assert_broken(pair.broken().unwrap(), Rule::Request, "found index 0x0; expected 0x40");
}

/// A request with other keys than those of the pair.
fn keyed(request: impl Fn(&mut Pair) -> Request) -> (Rule, String) {
    let mut pair = pair();
    let request = request(&mut pair);
    pair.post(&[request]);
    pair.broken().expect("nothing was wrong")
}

#[test]
fn rule_5_local_keys() {
    let from = |change: fn(&mut Pair, &mut Local)| {
        keyed(move |pair| {
            let mut from = pair.a.local(0, 64);
            change(pair, &mut from);
            Request::Write { to: pair.b.remote(0), from }
        })
    };
    assert_broken(from(|_, local| local.key = 0x999900), Rule::Key, "which is none");
    assert_broken(
        from(|pair, local| {
            let hca = pair.hca();
            let pd = hca.allocate_pd();
            local.key = hca.register(whole(pd, local.address, 64, Access::ALL)).unwrap();
        }),
        Rule::Key,
        "of domain",
    );
    assert_broken(from(|_, local| local.address -= 1), Rule::Key, "local: found 64 bytes");
    assert_broken(from(|_, local| local.address += common::WINDOW - 63), Rule::Key, "covers");
    assert_broken(
        from(|pair, local| {
            let key = local.key;
            pair.hca().deregister(key);
        }),
        Rule::Key,
        "was revoked",
    );
}

#[test]
fn rule_5_remote_keys_and_rights() {
    let to = |access: Access| {
        keyed(move |pair| {
            let (pd, window) = (pair.b.pd, pair.b.window);
            let hca = pair.switch.device(2).unwrap();
            pair.b.key = hca.register(whole(pd, window, 4096, access)).unwrap();
            write(pair)
        })
    };
    assert_broken(to(Access::LOCAL_WRITE), Rule::Key, "remote: found key");
    let beyond = keyed(|pair| Request::Write {
        to: pair.b.remote(common::WINDOW - 63),
        from: pair.a.local(0, 64),
    });
    assert_broken(beyond, Rule::Key, "remote: found 64 bytes");
    let unaligned =
        keyed(|pair| Request::FetchAdd { to: pair.b.remote(4), add: 1, sink: pair.a.local(0, 8) });
    assert_broken(unaligned, Rule::Key, "expected a multiple of 8");
    let sink = keyed(|pair| {
        let (pd, window) = (pair.a.pd, pair.a.window);
        let key = pair.hca().register(whole(pd, window, 8, Access::default())).unwrap();
        let sink = Local { address: window, key, bytes: 8 };
        Request::FetchAdd { to: pair.b.remote(0), add: 1, sink }
    });
    assert_broken(sink, Rule::Key, "with rights 0x0; expected 0x1");
}

#[test]
fn rule_6_a_completion_queue_that_overruns() {
    let mut pair = pair();
    let (pd, page, sq, record) = (pair.a.pd, pair.a.page, pair.a.sq, pair.a.record);
    let buffer = pair.arena.allocate(4096);
    let peer = (pair.b.lid, pair.b.qpn);
    let hca = pair.switch.device(1).unwrap();
    let (log_size, stride, umems) = (2, 64, Vec::new());
    let cq = CqRequest {
        buffer,
        log_size,
        stride,
        collapsed: false,
        overrun_ignored: false,
        record: buffer + 2048,
        umems: umems.clone(),
    };
    let cqn = hca.create_cq(cq).unwrap();
    let (send_cq, receive_cq, receives) = (cqn, cqn, Receives::None);
    let request = QpRequest {
        pd,
        page,
        user_index: 0,
        sq,
        blocks: 64,
        record,
        send_cq,
        receive_cq,
        receives,
        umems,
    };
    pair.a.qpn = hca.create_qp(request).unwrap();
    pair.a.connect(hca, peer);
    for turn in 0..5 {
        pair.post(&[Request::Nop]);
        assert_eq!(pair.hca().violations().is_empty(), turn < 4);
    }
    assert_broken(pair.broken().unwrap(), Rule::Completion, "4 completions were not read");
}

#[test]
fn rule_7_commands_with_wrong_bits_states_and_sizes() {
    let refused = |bytes: fn(&Pair) -> Vec<u8>| {
        let mut pair = pair();
        let bytes = bytes(&pair);
        assert!(pair.hca().command(&bytes).is_err());
        pair.broken().expect("nothing was wrong")
    };
    let mailbox = Rule::Mailbox;
    let reserved = |pair: &Pair| {
        let mut bytes = pair.a.create_qp().to_bytes();
        bytes[0xc0] = 1;
        bytes
    };
    assert_broken(refused(reserved), mailbox, "reserved bits are set in byte 0xc0");
    let scatter = |pair: &Pair| {
        let mut bytes = pair.a.create_qp().to_bytes();
        bytes[0x18 + 0xc6] = 0x11;
        bytes
    };
    assert_broken(refused(scatter), mailbox, "scatter_requester = 0x11; expected 0x0");
    let spread = |pair: &Pair| {
        let mut bytes = pair.a.create_cq().to_bytes();
        bytes[0x11] &= !0x10;
        bytes
    };
    assert_broken(refused(spread), mailbox, "collapsed = 0x0; expected 0x1");
    let large = |pair: &Pair| {
        let mut create = pair.a.create_qp();
        create.log_sq_size = 10;
        create.to_bytes()
    };
    assert_broken(refused(large), mailbox, "found 65536 bytes at 0x0; it has");
    let again = |pair: &Pair| pair.a.to_init().to_bytes();
    assert_broken(refused(again), mailbox, "found state Some(ReadyToSend); expected Reset");
    let reads = |pair: &Pair| Rtr2Rts { log_sra_max: 5, ..pair.a.to_rts() }.to_bytes();
    assert_broken(refused(reads), mailbox, "found log_sra_max 5");
    let mtu = |pair: &Pair| Init2Rtr { mtu: 6, ..pair.a.to_rtr((2, 1)) }.to_bytes();
    assert_broken(refused(mtu), mailbox, "found mtu 6");
    assert_broken(refused(|_| vec![9; 16]), mailbox, "command 0x909: not known");
}

#[test]
fn rule_8_nothing_is_freed_that_is_in_use() {
    let freed = |free: fn(&mut Pair)| {
        let mut pair = pair();
        free(&mut pair);
        pair.broken().expect("nothing was wrong")
    };
    let used = |free: fn(&mut Pair), text: &str| assert_broken(freed(free), Rule::Lifetime, text);
    used(
        |p| {
            let x = p.a.umem;
            p.hca().free_umem(x)
        },
        "1 queue pairs and 1 completion queues",
    );
    used(
        |p| {
            let x = p.a.page;
            p.hca().free_page(x)
        },
        "used by 1 queue pairs",
    );
    used(
        |p| {
            let x = p.a.cqn;
            p.hca().destroy_cq(x)
        },
        "used by 1 queue pairs",
    );
    used(
        |p| {
            let x = p.a.pd;
            p.hca().free_pd(x)
        },
        "1 regions and 1 queue pairs",
    );
    let under_way = |p: &mut Pair| {
        let request = write(p);
        p.post(&[request]);
    };
    let mut pair = pair();
    under_way(&mut pair);
    let (key, qpn) = (pair.a.key, pair.a.qpn);
    pair.hca().deregister(key);
    pair.hca().destroy_qp(qpn);
    let texts: Vec<_> = pair.hca().violations().iter().map(|v| v.text.clone()).collect();
    assert!(texts[0].contains("1 queue pairs with work under way"), "{texts:?}");
    assert!(texts[1].contains("1 requests under way"), "{texts:?}");
}

#[test]
fn the_device_stops_at_the_first_violation_and_dumps_what_it_is_about() {
    let mut pair = pair();
    let mut block = pair.a.block(&write_inline(&pair), true);
    block[8] = 0xee;
    pair.a.write(&block);
    pair.a.publish();
    let Pair { a, switch, .. } = &mut pair;
    a.ring(switch.device(1).unwrap());
    pair.post(&[Request::Nop]);
    let text = pair.switch.violation().unwrap().to_string();
    assert!(text.starts_with("rule 3 (Request), queue pair 0x"), "{text}");
    assert!(text.contains("\n  0000: 00000008 ") && text.contains("mlx5dv.h"), "{text}");
    assert_eq!(pair.hca().violations().len(), 1);
}
