use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use super::*;

/// A port below the range of ephemeral ports, so that no other test gets it.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let ports = std::iter::repeat_with(|| {
        let next = NEXT.fetch_add(1, Ordering::Relaxed) + 37 * std::process::id();
        10_000 + (next % 20_000) as u16
    });
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    ports.take(1000).find(is_free).unwrap()
}

fn at(port: u16) -> Rendezvous {
    Rendezvous::parse(&format!("tcp://127.0.0.1:{port}")).unwrap()
}

/// The address of rank 0, once its file exists.
fn address_in(path: &Path) -> SocketAddr {
    wait_for("the file", LATE, || path.exists());
    let text = std::fs::read_to_string(path).unwrap();
    let mut words = text.split(' ');
    let (host, port) = (words.next().unwrap(), words.next().unwrap());
    format!("{host}:{port}").parse().unwrap()
}

#[test]
fn ranks_meet_over_tcp_whoever_comes_first() {
    for slow in [0, 1] {
        let port = free_port();
        on_threads(2, |rank| {
            if rank == slow {
                std::thread::sleep(Duration::from_millis(100));
            }
            let world = World::join(options(rank, 2, at(port))).unwrap();
            world.barrier("met").unwrap();
        });
        // Nothing is left behind: the port can be had at once.
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    }
}

#[test]
fn several_worlds_of_one_process_share_an_address_one_after_the_other() {
    let port = free_port();
    on_threads(2, |rank| {
        let first = World::join(options(rank, 2, at(port))).unwrap();
        let second = World::join(options(rank, 2, at(port))).unwrap();
        second.barrier("second").unwrap();
        first.barrier("first").unwrap();
    });
}

#[test]
fn a_world_of_one_rank_needs_no_peer() {
    let nowhere = Rendezvous::Tcp { host: "no.such.host.invalid".into(), port: 1 };
    let world = World::join(options(0, 1, nowhere)).unwrap();
    assert_eq!(world.all_gather("alone", b"me").unwrap(), [b"me"]);
}

#[test]
fn a_stale_file_does_not_mislead_and_none_is_left() {
    // The file of an earlier job names a port that now belongs to a stranger that never gives a valid
    // answer, then a port where no process listens.
    let stranger = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let strange_port = stranger.local_addr().unwrap().port();
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = stranger.accept().unwrap();
        let _ = stream.write_all(&[b'x'; 400]);
    });
    for port in [strange_port, free_port()] {
        let meeting = Meeting::new();
        std::fs::write(meeting.path(), format!("127.0.0.1 {port} {}\n", "ab".repeat(16))).unwrap();
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(meeting.path(), private).unwrap();
        on_threads(2, |rank| {
            if rank == 0 {
                std::thread::sleep(Duration::from_millis(150));
            }
            let world = meeting.join(rank, 2).unwrap();
            world.barrier("met").unwrap();
        });
        assert_eq!(files_in(meeting.folder.path()), 0);
    }
    answering.join().unwrap();
}

#[test]
fn the_file_of_another_living_job_is_refused_by_that_job() {
    let (ours, theirs) = (Meeting::new(), Meeting::new());
    // Else our rank 0 may publish its file first, and the wrong one replaces it.
    let written = Gate::new(3);
    on_threads(4, |thread| match thread {
        // The other job waits for its rank 1, which joins last.
        0 => drop(theirs.join(0, 2).unwrap()),
        1 => {
            written.wait();
            std::thread::sleep(Duration::from_millis(300));
            drop(theirs.join(1, 2).unwrap());
        }
        // Our rank 1 first reads a file with their address, but our nonce.
        2 => {
            let port = address_in(&theirs.path()).port();
            let text = format!("127.0.0.1 {port} {}\n", "cd".repeat(16));
            std::fs::write(ours.path(), text).unwrap();
            let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
            std::fs::set_permissions(ours.path(), private).unwrap();
            written.wait();
            let world = ours.join(1, 2).unwrap();
            world.barrier("met").unwrap();
        }
        _ => {
            written.wait();
            std::thread::sleep(Duration::from_millis(150));
            let world = ours.join(0, 2).unwrap();
            world.barrier("met").unwrap();
        }
    });
}

#[test]
fn a_callers_exchange_spreads_the_address_and_a_secret() {
    let board = Arc::new((Mutex::new(vec![Vec::new(); 3]), Gate::new(3)));
    on_threads(3, |rank| {
        let world = World::join(options(rank, 3, exchange_on(&board, rank))).unwrap();
        world.barrier("met").unwrap();
    });
    let items = board.0.lock().unwrap();
    let is_digit = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    let has_secret = |item: &Vec<u8>| item.windows(64).any(|part| part.iter().all(is_digit));
    assert_eq!(items.iter().map(has_secret).collect::<Vec<_>>(), [true, false, false]);
}

/// The exchange of `rank` with threads that fill `board`, all of them at once.
fn exchange_on(board: &Arc<(Mutex<Vec<Vec<u8>>>, Gate)>, rank: u32) -> Rendezvous {
    let board = Arc::clone(board);
    Rendezvous::Exchange(Box::new(move |mine: &[u8]| {
        board.0.lock().unwrap()[rank as usize] = mine.to_vec();
        board.1.wait();
        Ok(board.0.lock().unwrap().clone())
    }))
}

#[test]
fn members_of_an_exchange_find_out_who_is_local_and_where_each_is() {
    let board = Arc::new((Mutex::new(vec![Vec::new(); 2]), Gate::new(2)));
    // Ranks 6 and 7 of a world of 8, whose launcher counts them as 2 and 3 of their machine.
    on_threads(2, |rank| {
        let place = RankId { rank, ranks: 2, local_rank: 0 };
        let identity = Identity::new(place, exchange_on(&board, rank)).unwrap();
        let launched = Launched { rank: Some(6 + rank), local_rank: Some(2 + rank) };
        let options = WorldOptions { launched, ..WorldOptions::new(identity) };
        let world = World::join(options).unwrap();
        assert_eq!((world.local_rank(), world.machine_index()), (rank, 2 + rank));
        if rank == 1 {
            return world.report_failure("out of memory");
        }
        let text = world.barrier("without rank 1").unwrap_err().to_string();
        let pid = std::process::id();
        let process = format!("rank 1 of this group is world rank 7, pid {pid} on ");
        assert!(text.contains("rank 1 failed: out of memory") && text.contains(&process), "{text}");
    });
}

#[test]
fn members_of_an_exchange_that_do_not_join_are_named_with_their_processes() {
    let board = Arc::new((Mutex::new(vec![Vec::new(); 2]), Gate::new(2)));
    on_threads(2, |rank| {
        let rendezvous = exchange_on(&board, rank);
        if rank == 1 {
            let Rendezvous::Exchange(mut exchange) = rendezvous else { panic!("no exchange") };
            let place = RankId { rank, ranks: 2, local_rank: 0 };
            let launched = Launched { rank: Some(3), local_rank: None };
            let silent = Box::new(move |mine: &[u8]| {
                exchange(mine)?;
                Err("it stops here".to_owned())
            });
            let identity = Identity::new(place, Rendezvous::Exchange(silent)).unwrap();
            let options = WorldOptions { launched, ..WorldOptions::new(identity) };
            return drop(World::join(options).unwrap_err());
        }
        let late = Duration::from_millis(300);
        let options = WorldOptions { late, ..options(rank, 2, rendezvous) };
        let text = World::join(options).unwrap_err().to_string();
        assert!(text.contains("rank 1 did not join within 0.3 s"), "{text}");
        assert!(text.contains("rank 1 of this group is world rank 3, pid "), "{text}");
    });
}

#[test]
fn members_of_an_exchange_that_miss_a_collective_are_named_with_their_processes() {
    let (board, left) = (Arc::new((Mutex::new(vec![Vec::new(); 2]), Gate::new(2))), Gate::new(2));
    on_threads(2, |rank| {
        let late = Duration::from_millis(300);
        let options = WorldOptions { late, ..options(rank, 2, exchange_on(&board, rank)) };
        let world = World::join(options).unwrap();
        if rank == 0 {
            let text = world.barrier("start").unwrap_err().to_string();
            assert!(text.contains("rank 1 did not arrive within 0.3 s"), "{text}");
            assert!(text.contains("; rank 1 of this group is "), "{text}");
        }
        left.wait();
    });
}

#[test]
fn an_exchange_that_fails_ends_the_join_with_its_reason() {
    let broken = Rendezvous::Exchange(Box::new(|_| Err("the store is down".to_owned())));
    let error = World::join(options(1, 2, broken)).unwrap_err();
    assert!(error.message().contains("the store is down"), "{error}");
}

#[test]
fn a_wrong_secret_is_no_end_before_late_and_the_joiner_then_learns_why() {
    let meeting = Meeting::new();
    on_threads(3, |rank| {
        let secret = |text: &str| Secret::from_text(text).unwrap();
        // Lateness is compared only for processes that prove the secret.
        let with = |late, secret| WorldOptions { late, secret, ..meeting.options(rank, 3) };
        let right = "the right secret, long enough";
        if rank == 2 {
            address_in(&meeting.path());
            for wrong in [secret("the wrong secret, long enough"), Secret::none()] {
                let late = Duration::from_millis(300);
                let started = Instant::now();
                let error = World::join(with(late, wrong)).unwrap_err();
                assert!(started.elapsed() >= late / 2, "it did not try again: {error}");
                assert_eq!(error.kind(), ErrorKind::Protocol);
                let text = error.to_string();
                let says = "failed the proof: another job has this port, or the secrets differ";
                assert!(text.contains(says) && text.contains(" answers at "), "{text}");
                assert!(text.contains(SECRET_VARIABLE) && !text.contains("long enough"), "{text}");
            }
        }
        // The real rank 2 still gets in.
        let world = World::join(with(LATE, secret(right))).unwrap();
        world.barrier("met").unwrap();
    });
}

#[test]
fn no_secret_is_refused_off_loopback_on_both_sides() {
    for (rank, bind) in [(0, Some(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)))), (1, None)] {
        let rendezvous = Rendezvous::Tcp { host: "192.0.2.1".into(), port: 9 };
        let error = World::join(WorldOptions { bind, ..options(rank, 2, rendezvous) }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        let text = error.to_string();
        assert!(text.contains("found no job secret") && text.contains(SECRET_VARIABLE), "{text}");
    }
}

#[test]
fn garbage_and_silence_at_the_door_do_not_disturb_the_join() {
    let meeting = Meeting::new();
    on_threads(3, |rank| {
        if rank == 2 {
            let address = address_in(&meeting.path());
            let _silent: Vec<_> = (0..20).map(|_| TcpStream::connect(address).unwrap()).collect();
            for garbage in
                [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], b"TYBS", b"TYBS\x01\0\x08\0"]
            {
                let mut stream = TcpStream::connect(address).unwrap();
                // Rank 0 may close while this is still being sent.
                let _ = stream.write_all(&garbage.repeat(4));
            }
            // A first message that announces more bytes than any can have, and one of another version.
            for first in [b"TYBS\x05\0\xff\xff", b"TYBS\x02\0\x20\0"] {
                let mut stream = TcpStream::connect(address).unwrap();
                let _ = stream.write_all(first);
                stream.set_read_timeout(Some(LATE)).unwrap();
                // Refused at once, with the version of rank 0.
                let mut answer = [0; 8];
                stream.read_exact(&mut answer).unwrap();
                assert_eq!(&answer, b"TYBS\x05\0\0\0");
            }
            let world = meeting.join(2, 3).unwrap();
            return world.barrier("met").unwrap();
        }
        let world = meeting.join(rank, 3).unwrap();
        world.barrier("met").unwrap();
    });
}

/// A joiner's error where another program, at the address of rank 0, answers with `answer`.
fn join_where_others_answer(answer: &'static [u8]) -> Error {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let (ended, end) = std::sync::mpsc::channel::<()>();
    let stranger = std::thread::spawn(move || {
        listener.set_nonblocking(true).unwrap();
        let mut open = Vec::new();
        while end.try_recv().is_err() {
            if let Ok((mut stream, _)) = listener.accept() {
                let _ = stream.write_all(answer);
                open.push(stream);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let late = Duration::from_millis(200);
    let error = World::join(WorldOptions { late, ..options(1, 2, at(port)) }).unwrap_err();
    ended.send(()).unwrap();
    stranger.join().unwrap();
    error
}

#[test]
fn a_stranger_at_the_address_of_rank_0_is_recognised() {
    let error = join_where_others_answer(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(error.to_string().contains("does not speak this protocol"), "{error}");
}

#[test]
fn a_rank_0_of_another_version_is_named_with_the_way_out() {
    let error = join_where_others_answer(b"TYBS\x09\0\0\0");
    assert_eq!(error.kind(), ErrorKind::Protocol);
    let text = error.to_string();
    assert!(text.contains("found version 9 of the protocol, expected 5"), "{text}");
    assert!(text.contains("run the same tokenyard on every rank"), "{text}");
}

#[test]
fn two_processes_with_one_rank_are_named_to_each_other() {
    let meeting = Meeting::new();
    on_threads(3, |thread| match thread {
        0 => drop(meeting.join(0, 3).unwrap()),
        1 => drop(meeting.join(1, 3).unwrap()),
        _ => {
            // Rank 1 may need a moment to be first.
            address_in(&meeting.path());
            std::thread::sleep(Duration::from_millis(200));
            let error = meeting.join(1, 3).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch);
            let pid = format!("pid {}", std::process::id());
            let text = error.to_string();
            assert!(text.contains("two processes that claim rank 1"), "{text}");
            assert_eq!(text.matches(&pid).count(), 2, "{text}");
            drop(meeting.join(2, 3).unwrap());
        }
    });
}

#[test]
fn a_rank_that_expects_another_world_ends_the_join_of_all() {
    let size = |meeting: &Meeting| meeting.options(1, 4);
    let time = |meeting: &Meeting| WorldOptions { deadline: 2 * DEADLINE, ..meeting.options(1, 3) };
    type Options<'a> = &'a (dyn Fn(&Meeting) -> WorldOptions + Sync);
    let [deadline, late] = [DEADLINE, LATE].map(|time| time.as_millis());
    let times = format!("{} and {late} ms, rank 0 has {deadline} and {late}", 2 * deadline);
    let cases: [(Options<'_>, &str); 2] =
        [(&size, "found a world of 4 ranks, rank 0 expects 3"), (&time, &times)];
    for (odd, says) in cases {
        let meeting = Meeting::new();
        let errors = on_threads(3, |rank| {
            // The last rank joins after the differing rank was seen, and receives the error as well.
            std::thread::sleep(u32::from(rank == 2) * Duration::from_millis(150));
            let options = if rank == 1 { odd(&meeting) } else { meeting.options(rank, 3) };
            World::join(options).unwrap_err()
        });
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            assert!(error.message().contains(says), "{error}");
        }
        assert_eq!(files_in(meeting.folder.path()), 0);
    }
}

#[test]
fn ranks_that_wait_say_for_whom_to_whoever_asks() {
    // No other test has worlds of these sizes.
    let line = |rank: u32, ranks: u32| {
        let start = format!("rank {rank} of {ranks} has waited ");
        joins_under_way().into_iter().find(|line| line.starts_with(&start)).unwrap_or_default()
    };
    let meeting = Meeting::new();
    std::thread::scope(|scope| {
        for rank in [0, 1] {
            scope.spawn({
                let meeting = &meeting;
                move || drop(meeting.join(rank, 23).unwrap_err())
            });
        }
        wait_for("the word of rank 0", LATE, || {
            line(0, 23).ends_with("to join: ranks 2-22 did not join yet")
        });
        wait_for("the word of rank 1", LATE, || {
            line(1, 23).ends_with("to join: rank 0 answers, and waits for ranks 2-22")
        });
    });
    assert_eq!((line(0, 23), line(1, 23)), (String::new(), String::new()));
    let late = Duration::from_millis(300);
    let alone = WorldOptions { late, ..options(1, 29, at(free_port())) };
    std::thread::scope(|scope| {
        scope.spawn(|| World::join(alone).unwrap_err());
        wait_for("the word of a lone rank", LATE, || {
            let line = line(1, 29);
            line.contains("rank 0 at 127.0.0.1:") && line.contains("does not answer yet")
        });
    });
}

#[test]
fn ranks_that_never_come_are_named_to_all_that_came() {
    let meeting = Meeting::new();
    let late = Duration::from_millis(600);
    let errors = on_threads(2, |rank| {
        World::join(WorldOptions { late, ..meeting.options(rank, 5) }).unwrap_err()
    });
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Deadline);
        assert!(error.message().contains("ranks 2-4 did not join within 0.6 s"), "{error}");
    }
    assert_eq!(files_in(meeting.folder.path()), 0);
}

#[test]
fn a_missing_rank_0_is_an_error_that_says_where_and_why() {
    let late = Duration::from_millis(200);
    let error = World::join(WorldOptions { late, ..options(1, 2, at(free_port())) }).unwrap_err();
    assert_eq!((error.kind(), error.rank()), (ErrorKind::Deadline, Some(0)));
    let text = error.to_string();
    assert!(text.contains("127.0.0.1:") && text.contains("refused"), "{text}");
    assert!(text.contains(" (this host)"), "{text}");
    let nowhere = Meeting::new();
    let error = World::join(WorldOptions { late, ..nowhere.options(1, 2) }).unwrap_err();
    assert!(error.to_string().contains("No such file"), "{error}");
}

#[test]
fn a_name_without_an_address_is_an_error_on_every_rank_long_before_late() {
    let late = Duration::from_secs(600);
    let errors = on_threads(2, |rank| {
        let nowhere = Rendezvous::Tcp { host: "no.such.host.invalid".into(), port: 9 };
        World::join(WorldOptions { late, ..options(rank, 2, nowhere) }).unwrap_err()
    });
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::System);
        let text = error.to_string();
        let says = "cannot resolve the host of rank 0, \"no.such.host.invalid\"";
        assert!(text.contains(says) && text.contains("Fix: give all ranks"), "{text}");
    }
}

#[test]
fn a_host_that_is_loopback_here_is_refused_on_every_rank_where_ranks_are_on_other_hosts() {
    let late = Duration::from_secs(600);
    for (others, why) in [
        (OtherHosts::Stated, "the launcher has ranks on several hosts"),
        (OtherHosts::Unknown, "no launcher says that all ranks are on this one"),
    ] {
        let errors = on_threads(2, |rank| {
            let place = RankId { rank, ranks: 2, local_rank: rank };
            let own_name = Rendezvous::Tcp { host: "LOCALHOST".into(), port: free_port() };
            let mut identity = Identity::new(place, own_name).unwrap();
            identity.others = others;
            World::join(WorldOptions { late, ..WorldOptions::new(identity) }).unwrap_err()
        });
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            let text = error.message();
            assert!(text.contains("rank 0 would listen on loopback only"), "{error}");
            assert!(text.contains(why), "{error}");
        }
    }
}

#[test]
fn a_host_that_is_loopback_here_is_refused_where_tokenyard_s_variables_alone_give_the_ranks() {
    let join = |host: &str, ranks: &str| {
        let port = free_port();
        let spec = format!("tcp://{host}:{port}");
        let variable = |name: &str| match name {
            "TOKENYARD_BOOTSTRAP" => Some(spec.clone()),
            "TOKENYARD_RANK" | "TOKENYARD_LOCAL_RANK" => Some("0".to_owned()),
            "TOKENYARD_RANKS" => Some(ranks.to_owned()),
            _ => None,
        };
        let identity = Identity::resolve("env", &variable).unwrap();
        let late = Duration::from_millis(200);
        World::join(WorldOptions { late, ..WorldOptions::new(identity) })
    };
    let error = join("LOCALHOST", "2").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("can meet at localhost or 127.0.0.1"), "{error}");
    // A user who writes these means one host. The other rank does not come.
    for host in ["localhost", "127.0.0.1"] {
        assert_eq!(join(host, "2").unwrap_err().kind(), ErrorKind::Deadline, "{host}");
    }
    assert!(join("LOCALHOST", "1").is_ok());
}

#[test]
fn a_rank_0_that_no_other_host_reaches_says_so_where_ranks_do_not_join() {
    let late = Duration::from_millis(200);
    let error = World::join(WorldOptions { late, ..options(0, 2, at(free_port())) }).unwrap_err();
    let text = error.to_string();
    let says = "rank 0 listens on loopback only (127.0.0.1), where no other host reaches it";
    assert!(
        text.contains(says) && text.contains("if ranks are on other hosts, give all"),
        "{text}"
    );
    // Through a file they are on this host.
    let meeting = Meeting::new();
    let error = World::join(WorldOptions { late, ..meeting.options(0, 2) }).unwrap_err();
    assert!(!error.to_string().contains("loopback"), "{error}");
}

#[test]
fn a_rank_0_that_says_nothing_is_waited_for_no_longer_than_late() {
    // The kernel accepts the connection; no process answers.
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = at(silent.local_addr().unwrap().port());
    let late = Duration::from_millis(300);
    let error = World::join(WorldOptions { late, ..options(1, 2, address) }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Deadline);
    assert!(error.to_string().contains("found no answer within 0.3 s"), "{error}");
}

#[test]
fn waits_that_no_machine_keeps_are_refused() {
    let meeting = Meeting::new();
    let good = || meeting.options(0, 2);
    for options in [
        WorldOptions { deadline: Duration::from_millis(10), ..good() },
        WorldOptions { deadline: Duration::MAX, ..good() },
        WorldOptions { late: Duration::MAX, ..good() },
    ] {
        assert_eq!(World::join(options).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}
