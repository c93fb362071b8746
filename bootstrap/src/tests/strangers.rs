//! Strangers that flood the door of rank 0 while ranks join.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::super::rendezvous::read_notice;
use super::masking::without_rank_1;
use super::*;

const SILENT: usize = 2000;
const NOISY: usize = 200;

/// Connections from the address of the ranks that prove nothing, and that are opened again at once when
/// they are closed. The flood ends with this value.
struct Flood {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Flood {
    /// Returns once the door has dropped some.
    fn at(address: SocketAddr) -> Self {
        // Both ends of all connections are of this process.
        let limit = getrlimit(Resource::Nofile);
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
        let stop = Arc::new(AtomicBool::new(false));
        let dropped = Arc::new(AtomicU32::new(0));
        let (stopped, count) = (Arc::clone(&stop), Arc::clone(&dropped));
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                for at in 0..SILENT + NOISY {
                    tokio::spawn(knock(address, at >= SILENT, Arc::clone(&count)));
                }
                while !stopped.load(Ordering::Relaxed) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            });
        });
        wait_for("a full door", 4 * LATE, || dropped.load(Ordering::Relaxed) > NOISY as u32);
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().unwrap().join();
    }
}

async fn knock(address: SocketAddr, speaks: bool, dropped: Arc<AtomicU32>) {
    loop {
        let Ok(mut stream) = tokio::net::TcpStream::connect(address).await else {
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        };
        if speaks {
            let _ = stream.write_all(b"TYBS\x03\0\x40\0, and then garbage of any kind").await;
            let _ = stream.write_all(&[7; 64]).await;
        }
        while matches!(stream.read(&mut [0; 64]).await, Ok(1..)) {}
        dropped.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn ranks_join_while_thousands_of_strangers_from_their_address_come_again_and_again() {
    let meeting = Meeting::new();
    let flooded = Gate::new(4);
    on_threads(4, |rank| {
        let mut flood = None;
        match rank {
            0 => {}
            _ => {
                wait_for("the file", LATE, || meeting.path().exists());
                let address = read_notice(&meeting.path()).unwrap();
                if rank == 3 {
                    flood = Some(Flood::at(format!("127.0.0.1:{}", address.port).parse().unwrap()));
                    flooded.arrived.fetch_add(2, Ordering::SeqCst);
                } else {
                    flooded.arrived.fetch_add(1, Ordering::SeqCst);
                }
                wait_for("all", 4 * LATE, || flooded.arrived.load(Ordering::SeqCst) >= 4);
            }
        }
        let late = 2 * LATE;
        let world = World::join(WorldOptions { late, ..meeting.options(rank, 4) }).unwrap();
        world.barrier("met").unwrap();
        drop(flood);
    });
}

#[test]
fn a_rank_comes_back_while_strangers_fill_the_door() {
    without_rank_1(|meeting, world| {
        world.admit(Ask::First).unwrap();
        std::thread::scope(|scope| {
            let mut flood = None;
            if world.rank() == 0 {
                let port = read_notice(&meeting.path()).unwrap().port;
                flood = Some(Flood::at(format!("127.0.0.1:{port}").parse().unwrap()));
                scope.spawn(|| {
                    let back = meeting.join(1, 3).unwrap();
                    assert!(back.admit(Ask::First).unwrap().has(1));
                    back.barrier("all three").unwrap();
                });
            }
            wait_for("its wish to come back", 4 * LATE, || world.liveness().waits_to_return(1));
            assert!(world.admit(Ask::First).unwrap().has(1));
            world.barrier("all three").unwrap();
            drop(flood);
        });
    });
}

#[test]
fn ranks_that_strangers_keep_out_are_missed_with_the_cause() {
    let meeting = Meeting::new();
    let late = Duration::from_millis(1500);
    std::thread::scope(|scope| {
        let rank_0 = scope
            .spawn(|| World::join(WorldOptions { late, ..meeting.options(0, 2) }).unwrap_err());
        wait_for("the file", LATE, || meeting.path().exists());
        let port = read_notice(&meeting.path()).unwrap().port;
        let _flood = Flood::at(format!("127.0.0.1:{port}").parse().unwrap());
        let text = rank_0.join().unwrap().to_string();
        assert!(text.contains("rank 1 did not join within 1.5 s"), "{text}");
        assert!(text.contains("the door is full of connections that prove nothing: "), "{text}");
        assert!(text.contains(" from 127.0.0.1"), "{text}");
    });
}
