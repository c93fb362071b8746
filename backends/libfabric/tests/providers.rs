//! Ranks over real providers, as threads of one process. The conformance suite tests the behaviour
//! of every transport. These tests cover the rest: mailboxes, rails, names, refusals.

// The helpers below may panic as a test may.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokenyard_core::transport::{
    Command, NO_COMMAND, Team, Transport, TransportNeeds, TransportOpen,
};
use tokenyard_core::{ErrorKind, abi};
use tokenyard_libfabric::{Efa, EfaConfig, Libfabric};

use common::{Rank, WINDOW_BYTES, config, needs, with_ranks};

/// Tests with endpoints of `shm` take turns: their names are counted by process.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn put_signal(peer: u32, bytes: u64, signal: u32) -> Command {
    Command {
        op: abi::TY_OP_PUT_SIGNAL,
        peer,
        bytes,
        signal,
        add: 1,
        dst_offset: WINDOW_BYTES as u64 / 2,
        ..NO_COMMAND
    }
}

/// Sends more values than there are mailboxes to a rank that sends as many back.
fn values_go_on_when_all_mailboxes_were_used(provider: &str) {
    const VALUES: u64 = 200;
    with_ranks(2, &format!("provider = \"{provider}\""), |rank| {
        let peer = 1 - rank.me;
        let value = |i: u64| Command {
            op: abi::TY_OP_PUT_VALUE,
            peer,
            dst_offset: 8 * i,
            value: u64::from(rank.me) << 32 | i,
            ..NO_COMMAND
        };
        rank.post(0, &(1..=VALUES).map(value).collect::<Vec<_>>());
        for i in 1..=VALUES {
            let expected = u64::from(peer) << 32 | i;
            let found = |rank: &Rank| rank.memory.0[i as usize].load(Ordering::Acquire);
            rank.until("a value", |rank| found(rank) != 0);
            assert_eq!(found(rank), expected);
        }
        // The peer still needs credits of this rank.
        rank.post(0, &[put_signal(peer, 0, 1)]);
        rank.wait_signal(1, 1);
    });
}

#[test]
fn values_over_tcp_go_on_when_all_mailboxes_were_used() {
    values_go_on_when_all_mailboxes_were_used("tcp");
}

#[test]
fn values_over_shm_go_on_when_all_mailboxes_were_used() {
    let _turn = one_at_a_time();
    values_go_on_when_all_mailboxes_were_used("shm");
}

fn two_rails_share_the_commands(keys: &str) {
    let text = format!("provider = \"tcp\"\nrails = 2\n{keys}");
    assert!(Libfabric::probe(&config(&text)).is_ok(), "a machine with a network beside lo");
    with_ranks(2, &text, |rank| {
        let (peer, count) = (1 - rank.me, 300);
        let puts: Vec<_> =
            (0..count).map(|i| put_signal(peer, [8, 4096, 20_000][i % 3], 0)).collect();
        rank.post(0, &puts);
        rank.post(1, &puts);
        rank.wait_signal(0, 2 * count as u64);
        let name = rank.transport.link_name(peer);
        assert_eq!(name.matches("->").count(), 2, "{name}");
    });
}

#[test]
fn two_rails_share_the_commands_and_lose_none() {
    two_rails_share_the_commands("");
}

#[test]
fn two_proxy_threads_with_a_rail_each_lose_no_command() {
    two_rails_share_the_commands("proxy_threads = 2");
}

#[test]
fn one_proxy_thread_drives_all_rails_and_queues() {
    two_rails_share_the_commands("proxy_threads = 1");
}

#[test]
fn every_signal_counts_once_when_it_waits_for_a_read_back() {
    two_rails_share_the_commands("flush = \"always\"");
    two_rails_share_the_commands("flush = \"always\"\nproxy_threads = 2");
}

#[test]
fn a_link_names_provider_interface_and_both_addresses() {
    with_ranks(2, "provider = \"tcp\"", |rank| {
        let name = rank.transport.link_name(1 - rank.me);
        // The name in libfabric 1.17 is `net`.
        assert!(name.starts_with("tcp ") || name.starts_with("net "), "{name}");
        assert_eq!(name.matches("fi_sockaddr").count(), 2, "{name}");
    });
}

#[test]
fn connected_ranks_of_shm_leave_no_name_behind() {
    let _turn = one_at_a_time();
    let names = || std::fs::read_dir("/dev/shm").unwrap().flatten().map(|entry| entry.file_name());
    let own = format!("{}:", std::process::id());
    with_ranks(2, "provider = \"shm\"", |rank| {
        let link = rank.transport.link_name(1 - rank.me);
        let addresses: Vec<_> = link.split("fi_shm://").skip(1).collect();
        assert_eq!(addresses.len(), 2, "{link}");
        for address in addresses {
            let name = address.split(' ').next().unwrap();
            assert!(name.starts_with(&own), "{link}");
            rank.until("a name goes", |_| names().all(|found| found.to_str() != Some(name)));
        }
    });
}

/// Names are `PROCESS:USER:NUMBER`; the number counts the endpoints of the process.
#[test]
fn a_name_that_a_killed_process_of_the_same_number_left_holds_up_no_endpoint_of_shm() {
    const LEFT: u32 = 64;
    let _turn = one_at_a_time();
    let shown = Rank::open(0, 2, "provider = \"shm\"");
    let own = format!("{}:", std::process::id());
    let names = std::fs::read_dir("/dev/shm").unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let name = names.filter(|name| name.starts_with(&own)).max().unwrap();
    drop(shown);
    let (stem, last) = name.rsplit_once(':').unwrap();
    let last: u32 = last.parse().unwrap();
    let left: Vec<_> = (last + 1..=last + LEFT)
        .map(|number| std::path::Path::new("/dev/shm").join(format!("{stem}:{number}")))
        .collect();
    for path in &left {
        std::fs::File::create_new(path).unwrap().set_len(1 << 16).unwrap();
    }
    drop(Rank::open(0, 2, "provider = \"shm\""));
    let gone = left.iter().filter(|path| std::fs::remove_file(path).is_err()).count();
    assert_eq!(gone, 1);
}

#[test]
fn ranks_with_different_providers_get_an_error_that_names_them() {
    let _turn = one_at_a_time();
    let mut tcp = Rank::open(0, 2, "provider = \"tcp\"");
    let mut shm = Rank::open(1, 2, "provider = \"shm\"");
    let endpoint = shm.transport.endpoint(0).unwrap();
    let error = tcp.transport.connect(1, &endpoint).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(error.to_string().contains("provider: found shm; expected "), "{error}");
}

#[test]
fn a_peer_that_never_answers_is_a_deadline_with_the_link() {
    let team = Team::world(0, 2);
    let short = TransportNeeds { deadline: Duration::from_millis(300), ..needs() };
    let mut alone = Libfabric::open(config(""), &TransportOpen::new(&team, &short)).unwrap();
    let mut silent =
        Libfabric::open(config(""), &TransportOpen::new(&Team::world(1, 2), &short)).unwrap();
    let endpoint = silent.endpoint(0).unwrap();
    let error = alone.connect(1, &endpoint).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Deadline, "{error}");
    assert!(error.to_string().contains("->"), "{error}");
}

#[test]
fn an_unknown_provider_is_unavailable_and_others_are_named() {
    let error = Libfabric::probe(&config("provider = \"nothing\"")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let text = error.to_string();
    assert!(text.contains("\"nothing\"") && text.contains("available:"), "{text}");
    assert!(text.contains("shm") && text.contains("Fix: "), "{text}");
}

#[test]
fn an_unknown_interface_is_unavailable_and_others_are_named() {
    let error = Libfabric::probe(&config("rails = [\"nothing0\"]")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let text = error.to_string();
    assert!(text.contains("\"nothing0\"; available: ") && text.contains("lo"), "{text}");
}

#[test]
fn without_an_adapter_efa_is_unavailable_with_the_fix() {
    if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut found| found.next().is_some()) {
        panic!("a machine without RDMA adapters is expected here");
    }
    let error = Efa::probe(&EfaConfig::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let text = error.to_string();
    assert!(text.contains("\"efa\"") && text.contains("fi_info -p efa"), "{text}");
}

#[test]
fn get_is_offered_only_where_the_config_says_so() {
    let get = |text: &str| Libfabric::probe(&config(text)).unwrap().flags & abi::TY_CAP_GET;
    assert_eq!(get(""), 0);
    assert_ne!(get("get = true"), 0);
}

#[test]
fn providers_for_sockets_do_not_go_by_the_nics_of_the_topology() {
    let placed =
        |text: &str| Libfabric::probe(&config(text)).unwrap().flags & abi::TY_CAP_PLACED_NICS;
    for provider in ["tcp", "shm"] {
        assert_eq!(placed(&format!("provider = \"{provider}\"")), 0, "{provider}");
    }
}

#[test]
fn a_lost_peer_holds_up_no_other_over_tcp_and_other_providers_do_not_declare_it() {
    let masking = |text: &str| Libfabric::probe(&config(text)).unwrap().flags & abi::TY_CAP_MASKING;
    assert_ne!(masking(""), 0);
    assert_ne!(masking("proxy_threads = 2"), 0);
    assert_eq!(masking("provider = \"shm\""), 0);
    assert_eq!(masking("provider = \"shm\"\nproxy_threads = 1"), 0);
}
