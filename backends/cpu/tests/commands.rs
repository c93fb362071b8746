//! The effects of the `shm` transport's commands, with threads as ranks.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use common::{Rank, command, needs, shm, table, with_ranks, with_ranks_that_need};
use tokenyard_core::{ErrorKind, abi};

/// Rounds of the loops that search for a violated order.
const ROUNDS: u64 = 100_000;

#[test]
fn a_payload_is_there_when_its_signal_is_seen() {
    /// Words of a payload.
    const WORDS: usize = 32;
    with_ranks(2, "", |rank| {
        let peer = 1 - rank.me;
        for round in 1..=ROUNDS {
            if rank.me == 0 {
                (0..WORDS).for_each(|i| rank.windows[0].write(i, round));
                let mut put = command(abi::TY_OP_PUT_SIGNAL, peer);
                (put.dst_window, put.bytes, put.signal) = (1, WORDS as u64 * 8, 3);
                assert_eq!(rank.post(0, &[put]), 1);
                // The receiver has read its place, which may be overwritten now.
                rank.wait(4, round);
            } else {
                rank.wait(3, round);
                for word in 0..WORDS {
                    assert_eq!(rank.windows[1].read(word), round, "word {word}");
                }
                let mut seen = command(abi::TY_OP_SIGNAL, peer);
                seen.signal = 4;
                assert_eq!(rank.post(0, &[seen]), 1);
            }
        }
    });
}

#[test]
fn eight_byte_values_never_tear() {
    with_ranks(2, "", |rank| {
        let (peer, start) = (1 - rank.me, Instant::now());
        if rank.me == 0 {
            let mut value = command(abi::TY_OP_PUT_VALUE, peer);
            value.dst_offset = 64;
            while rank.signal(0) == 0 {
                assert!(start.elapsed() < needs().deadline, "the reader found a torn value");
                value.value = !value.value;
                assert_eq!(rank.post(0, &[value]), 1);
            }
            return;
        }
        // SAFETY: the word is mapped and aligned, and written by atomic stores only.
        let place = unsafe { AtomicU64::from_ptr(rank.windows[0].word(8)) };
        let (mut seen, mut reads) = ([0_u64; 2], 0);
        // The loop must see both values often: the writer is at work while this thread reads.
        while reads < 10 * ROUNDS || seen.iter().any(|count| *count < ROUNDS / 100) {
            match place.load(Ordering::Acquire) {
                0 => seen[0] += 1,
                u64::MAX => seen[1] += 1,
                torn => panic!("found {torn:#x}"),
            }
            reads += 1;
            assert!(start.elapsed() < needs().deadline, "the values never change: {seen:?}");
        }
        assert_eq!(rank.post(0, &[command(abi::TY_OP_SIGNAL, peer)]), 1);
    });
}

#[test]
fn puts_reach_the_right_rank_window_and_offset() {
    for ranks in [1, 2, 4] {
        with_ranks(ranks, "", |rank| {
            for peer in 0..ranks {
                let word = 100 + u64::from(peer);
                rank.windows[0].write(word as usize, u64::from(rank.me * 10 + peer));
                let mut put = command(abi::TY_OP_PUT_SIGNAL, peer);
                (put.src_offset, put.dst_offset) = (word * 8, u64::from(200 + rank.me) * 8);
                (put.dst_window, put.bytes, put.signal) = (1, 8, rank.me);
                put.add = 65_535;
                assert_eq!(rank.post(0, &[put]), 1);
            }
            for peer in 0..ranks {
                rank.wait(peer, 65_535);
                let word = 200 + peer as usize;
                assert_eq!(rank.windows[1].read(word), u64::from(peer * 10 + rank.me));
            }
            let written = (0..512).filter(|i| rank.windows[1].read(*i) != 0).count();
            let zeros = usize::from(rank.me == 0);
            assert_eq!(written, ranks as usize - zeros, "0 for 0 writes a zero; nothing else");
        });
    }
}

#[test]
fn a_get_reads_the_peer_and_a_signal_without_payload_moves_nothing() {
    with_ranks(2, "", |rank| {
        let peer = 1 - rank.me;
        rank.windows[1].write(5, 1000 + u64::from(rank.me));
        assert_eq!(rank.post(0, &[command(abi::TY_OP_PUT_SIGNAL, peer)]), 1);
        rank.wait(0, 1);
        let mut get = command(abi::TY_OP_GET, peer);
        (get.dst_window, get.dst_offset, get.src_offset, get.bytes) = (1, 40, 80, 8);
        assert_eq!(rank.post(0, &[get]), 1);
        assert_eq!(rank.windows[0].read(10), 1000 + u64::from(peer));
        assert_eq!(rank.windows[0].read(0), 0);
    });
}

#[test]
fn a_put_to_oneself_may_overlap_its_source() {
    with_ranks(1, "", |rank| {
        (0..64).for_each(|i| rank.windows[0].write(i, i as u64));
        let mut put = command(abi::TY_OP_PUT, 0);
        (put.dst_offset, put.bytes) = (8, 64 * 8);
        assert_eq!(rank.post(0, &[put]), 1);
        for i in 0..64 {
            assert_eq!(rank.windows[0].read(i + 1), i as u64);
        }
    });
}

#[test]
fn done_events_carry_tags_in_order_and_only_on_request() {
    with_ranks(1, "", |rank| {
        let mut commands = [command(abi::TY_OP_SIGNAL, 0); 6];
        for (tag, command) in (70..).zip(&mut commands) {
            command.tag = tag;
            command.flags = if tag % 2 == 0 { abi::TY_FLAG_NOTIFY } else { 0 };
        }
        assert_eq!(rank.post(1, &commands), 6);
        assert!(rank.poll(0).is_empty(), "another queue has no events of this one");
        let events = rank.poll(1);
        assert_eq!(events.iter().map(|e| e.tag).collect::<Vec<_>>(), [70, 72, 74]);
        for event in events {
            assert_eq!((event.kind, event.status), (abi::TY_EVENT_DONE, abi::TY_OK));
            assert_eq!((event.queue, event.peer), (1, 0));
        }
        assert!(rank.poll(1).is_empty());
        assert_eq!(rank.signal(0), 6);
    });
}

#[test]
fn a_full_queue_accepts_no_more_until_it_is_polled() {
    with_ranks(1, "", |rank| {
        let mut one = command(abi::TY_OP_SIGNAL, 0);
        one.flags = abi::TY_FLAG_NOTIFY;
        let depth = needs().queue_depth as usize;
        assert_eq!(rank.post(0, &[one; 20]), depth);
        assert_eq!(rank.post(0, &[one]), 0);
        assert_eq!(rank.signal(0), depth as u64, "what was not accepted was not executed");
        assert_eq!(rank.post(1, &[one]), 1, "queues do not share room");
        assert_eq!(rank.poll(0).len(), 4);
        assert_eq!(rank.post(0, &[one; 20]), 4);
    });
}

#[test]
fn an_unknown_command_ends_as_an_error_event_and_health_stays_bad() {
    let mut rank = Rank::open(0, 1, "", &needs());
    let endpoint = rank.transport.endpoint(0).unwrap();
    rank.transport.connect(0, &endpoint).unwrap();
    rank.transport.health().unwrap();
    let (mut bad, good) = (command(99, 0), command(abi::TY_OP_SIGNAL, 0));
    bad.tag = 5;
    assert_eq!(rank.post(0, &[bad, good]), 2);
    let events = rank.poll(0);
    assert_eq!(events.len(), 1);
    assert_eq!((events[0].kind, events[0].tag), (abi::TY_EVENT_ERROR, 5));
    assert_eq!(events[0].status, abi::TY_TRANSPORT);
    assert_eq!(rank.signal(0), 1, "other commands go on");
    for _ in 0..2 {
        let error = rank.transport.health().unwrap_err();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Transport, None));
        assert!(error.to_string().contains("op: 99"), "{error}");
    }
}

#[test]
fn a_command_for_what_is_not_there_ends_as_an_error_event() {
    let mut rank = Rank::open(0, 2, "", &needs());
    let endpoint = rank.transport.endpoint(0).unwrap();
    rank.transport.connect(0, &endpoint).unwrap();
    let not_connected = command(abi::TY_OP_SIGNAL, 1);
    let mut no_signal = command(abi::TY_OP_SIGNAL, 0);
    no_signal.signal = needs().signals;
    let mut no_window = command(abi::TY_OP_PUT, 0);
    no_window.dst_window = 2;
    assert_eq!(rank.post(0, &[not_connected, no_signal, no_window]), 3);
    assert!(rank.poll(0).iter().all(|e| e.kind == abi::TY_EVENT_ERROR));
    let error = rank.transport.health().unwrap_err().to_string();
    assert!(error.contains("the peer is not connected"), "the first error stays: {error}");
}

#[test]
fn peer_addresses_show_the_peers_memory() {
    with_ranks(2, "", |rank| {
        let peer = 1 - rank.me;
        for window in 0..2 {
            let address = rank.transport.peer_address(window, peer).unwrap().cast::<u64>();
            // SAFETY: word 3 of a connected peer's window, written by this rank only.
            unsafe { address.add(3).write_volatile(50 + u64::from(window)) };
        }
        assert_eq!(rank.post(0, &[command(abi::TY_OP_SIGNAL, peer)]), 1);
        rank.wait(0, 1);
        assert_eq!([rank.windows[0].read(3), rank.windows[1].read(3)], [50, 51]);
        let own = rank.transport.peer_address(0, rank.me).unwrap();
        assert_eq!(own, rank.windows[0].word(0).cast::<u8>());
        assert!(rank.transport.peer_address(2, peer).is_err());
    });
}

#[test]
fn without_load_store_there_are_puts_and_no_addresses() {
    let flags = |text| shm().probe(&table(text)).unwrap().flags;
    assert_ne!(flags("") & abi::TY_CAP_LOAD_STORE, 0);
    assert_eq!(flags("load_store = false") & abi::TY_CAP_LOAD_STORE, 0);
    with_ranks(2, "load_store = false", |rank| {
        let error = rank.transport.peer_address(0, 1 - rank.me).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("load_store = false"), "{error}");
        assert_eq!(rank.post(0, &[command(abi::TY_OP_SIGNAL, 1 - rank.me)]), 1);
        rank.wait(0, 1);
    });
}

#[test]
fn unknown_config_keys_are_refused() {
    let error = shm().probe(&table("load_stor = false")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("load_stor"), "{error}");
}

#[test]
fn the_declared_limits_can_be_opened() {
    let found = shm().probe(&table("")).unwrap();
    let mut most = needs();
    most.queues = found.max_queues;
    most.signals = found.max_signals;
    most.queue_depth = found.max_queue_depth;
    with_ranks_that_need(&most, 2, "", |rank| {
        let mut last = command(abi::TY_OP_SIGNAL, 1 - rank.me);
        (last.signal, last.flags) = (most.signals - 1, abi::TY_FLAG_NOTIFY);
        for queue in 0..most.queues {
            assert_eq!(rank.post(queue, &[last]), 1);
            assert_eq!(rank.poll(queue).len(), 1);
        }
        rank.wait(most.signals - 1, u64::from(most.queues));
    });
}

#[test]
fn queues_of_several_threads_do_not_lose_signals() {
    with_ranks(1, "", |rank| {
        std::thread::scope(|scope| {
            for queue in 0..needs().queues {
                scope.spawn(move || {
                    for _ in 0..1000 {
                        assert_eq!(rank.post(queue, &[command(abi::TY_OP_SIGNAL, 0)]), 1);
                    }
                });
            }
        });
        assert_eq!(rank.signal(0), 1000 * u64::from(needs().queues));
    });
}
