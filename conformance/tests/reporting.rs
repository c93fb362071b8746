//! Reports of a communicator, requested by another thread.
#![allow(clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use tokenyard_conformance::moe::exchange::options;
use tokenyard_conformance::moe::oracle::Case;
use tokenyard_conformance::moe::round::Round;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::ErrorKind;
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{Communicator, Reporter};
use tokenyard_core::config::{Config, Reports};
use tokenyard_core::report::{Report, State};

/// A patience no longer than any deadline here.
const PATIENCE: Duration = Duration::from_secs(50);

fn config(more: &str) -> Config {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let text = format!(
        "[world]\ndeadline_ms = 60000\nlate_ms = 60000\n[kernels]\nuse = \"cpu\"\n\
         [transport.scale_up]\nuse = \"shm\"\n{more}"
    );
    Config::parse(&text, "test").expect("the config is right")
}

fn case(ranks: u32) -> Case {
    let ranks = ranks as usize;
    Case { ranks, experts: 2 * ranks, topk: 2, ..Case::default() }
}

fn on_ranks(
    ranks: u32,
    more: &str,
    body: impl Fn(&Arc<World>, &Config) -> anyhow::Result<()> + Sync,
) {
    let config = config(more);
    let results = in_threads(ranks, &config, |world| body(world, &config)).expect("a world");
    for (rank, result) in results.into_iter().enumerate() {
        result.unwrap_or_else(|error| panic!("{more:?}, rank {rank}: {error:#}"));
    }
}

/// Exchanges a few times; then all ranks are idle, and each returns its counts.
fn counted(world: &Arc<World>, config: &Config) -> anyhow::Result<Vec<Report>> {
    let case = case(world.ranks());
    let mut comm = Communicator::open(world, config, options(&case))?;
    let round = Round::new(&case, comm.rank());
    for _ in 0..5 {
        let live = round.dispatch(&mut comm)?;
        round.finish(&mut comm, &live)?;
    }
    comm.flush()?;
    world.barrier("still")?;
    let mine = serde_json::to_vec(&comm.reporter().capture("a test")?)?;
    let all = world.all_gather("reports of the test", &mine)?;
    let read = |bytes: &Vec<u8>| Ok(tokenyard_core::report::read(bytes)?);
    all.iter().map(read).collect()
}

#[test]
fn what_one_rank_sent_another_has_received_or_not_waited_for_yet() {
    let put = "[transport.scale_up.shm]\nload_store = false\n";
    let domains = "[transport.scale_out]\nuse = \"shm\"\n[topology]\ndomains = 2\n";
    for (ranks, more) in [(2, ""), (2, put), (4, domains)] {
        on_ranks(ranks, more, |world, config| {
            let reports = counted(world, config)?;
            let mut links = 0;
            for from in &reports {
                for peer in &from.peers {
                    let to = &reports[peer.rank as usize];
                    let back = to.peer(from.rank).expect("each knows each");
                    for (link, other) in peer.links.iter().zip(&back.links) {
                        let counts = link.counts.as_ref().expect("the cpu kernels count");
                        let theirs = other.counts.as_ref().expect("the cpu kernels count");
                        let raised = link.raised.iter().map(|(_, total)| total).sum::<u64>();
                        let names = format!("{} to {}: {link:?} {other:?}", from.rank, to.rank);
                        assert_eq!(raised, counts.sent, "{names}");
                        assert!(counts.sent > 0 && theirs.received <= counts.sent, "{names}");
                        assert_eq!(theirs.received, theirs.expected, "no rank waits: {names}");
                        assert!(counts.done <= counts.posted, "{names}");
                        links += 1;
                    }
                }
            }
            // With two domains of two ranks, each rank has a link in its own domain, and one on its rail.
            assert_eq!(links, ranks * (ranks / 2).max(1));
            Ok(())
        });
    }
}

#[test]
fn a_thread_beside_a_wait_sees_what_is_waited_for_and_the_wait_goes_on() {
    on_ranks(2, "", |world, config| {
        let case = case(2);
        let mut comm = Communicator::open(world, config, options(&case))?;
        let round = Round::new(&case, comm.rank());
        if comm.rank() == 0 {
            // Rank 1 waits for this rank until its report shows that wait.
            world.barrier("go on").map_err(|_| anyhow::anyhow!("rank 1 saw no wait"))?;
            round.dispatch(&mut comm)?;
            return Ok(());
        }
        let reporter = comm.reporter();
        let (done, seen) = channel();
        let world = Arc::clone(world);
        let beside = std::thread::spawn(move || {
            let report = await_wait(&reporter);
            done.send(report).expect("the test listens");
            world.barrier("go on").expect("rank 0 comes");
        });
        round.dispatch(&mut comm)?;
        beside.join().expect("no panic");
        let report = seen.recv()?;
        let wait = report.wait.expect("it waited");
        assert_eq!((wait.phase.as_str(), wait.peer, wait.operation), ("entry", 0, Some(0)));
        assert_eq!((report.activity.state, report.activity.begun), (State::Send, 1));
        assert!(report.peers[0].waited_ms >= wait.age_ms, "{:?}", report.peers[0]);
        let later = comm.reporter().capture("a test")?;
        assert_eq!((later.wait, later.activity.state), (None, State::Caller));
        assert_eq!(later.slowest[0].rank, 0);
        Ok(())
    });
}

fn await_wait(reporter: &Reporter) -> Report {
    let start = Instant::now();
    loop {
        let report = reporter.capture("a test").expect("the communicator is open");
        if report.wait.as_ref().is_some_and(|wait| wait.age_ms > 20) {
            return report;
        }
        assert!(start.elapsed() < PATIENCE, "no wait: {report:?}");
    }
}

#[test]
fn a_reporter_that_outlives_its_communicator_says_that_it_is_closed() {
    on_ranks(1, "", |world, config| {
        let folder = tempfile::tempdir()?;
        let mut config = config.clone();
        config.reports = Reports::Folder(folder.path().join("deep/reports"));
        let case = case(1);
        let comm = Communicator::open(world, &config, options(&case))?;
        let reporter = comm.reporter();
        let report = reporter.capture("a test")?;
        assert_eq!((report.transports.len(), report.queues.len()), (1, 1));
        let path = reporter.write("a test")?;
        let read = tokenyard_core::report::read(&std::fs::read(&path)?)?;
        assert_eq!((read.reason.text.as_str(), read.job), ("a test", report.job));
        drop(comm);
        let files = || std::fs::read_dir(folder.path().join("deep/reports")).map(Iterator::count);
        let before = files()?;
        for error in [reporter.capture("a test").err(), reporter.write("a test").err()] {
            let error = error.expect("an idle rank would be mistaken for a healthy one");
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(error.to_string().contains("take the reporter of a new one"), "{error}");
        }
        assert_eq!(files()?, before);
        config.reports = Reports::Nowhere;
        let comm = Communicator::open(world, &config, options(&case))?;
        let error = comm.reporter().write("a test").expect_err("nowhere to write").to_string();
        assert!(error.contains("TOKENYARD_REPORTS"), "{error}");
        Ok(())
    });
}
