//! A rank whose process is killed while another one gets its entries.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

mod users;

use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tokenyard_core::ErrorKind;
use tokenyard_core::bootstrap::{Identity, RankId, Rendezvous, Secret, World, WorldOptions};
use tokenyard_core::communicator::{TensorMut, TensorRef};
use tokenyard_core::ops::table::{Entries, Table, TableOptions};
use tokenyard_libfabric::Libfabric;
use users::{GETS, config};

tokenyard_testkit::built_in_transport!(Libfabric);

/// The rendezvous of the process that owns the entries, which is this program, too.
const OWNER: &str = "TOKENYARD_TEST_OWNER";
const SECRET: &str = "TOKENYARD_TEST_OWNER_SECRET";
const NAME: &str =
    "a_rank_that_is_killed_while_its_entries_are_got_ends_the_fetch_of_another_and_is_named";

/// Bytes of an entry, and entries: more than a socket holds.
const BYTES: usize = 1 << 20;
const ENTRIES: usize = 16;
/// How long the fetch waits before the owner is killed.
const UNDER_WAY: Duration = Duration::from_millis(300);

#[test]
fn a_rank_that_is_killed_while_its_entries_are_got_ends_the_fetch_of_another_and_is_named() {
    if let Some(path) = std::env::var_os(OWNER) {
        let _table = opened(1, Path::new(&path), &std::env::var(SECRET).unwrap());
        loop {
            std::thread::park();
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rendezvous");
    let secret = Secret::generate().unwrap().reveal().unwrap().to_owned();
    let me = std::env::current_exe().unwrap();
    let child = Command::new(me)
        .args(["--exact", NAME])
        .envs([(OWNER, path.as_os_str()), (SECRET, secret.as_ref())])
        .spawn();
    let owner = Owner(child.unwrap());
    let (world, mut table) = opened(0, &path, &secret);
    owner.stop();
    let first = ENTRIES as i32;
    let indices: Vec<i32> = (first..2 * first).collect();
    let pending = table.fetch_send(0, TensorRef::from_slice(&indices, 1, ENTRIES).unwrap());
    let pending = pending.unwrap();
    let mut values = vec![0xa5_u8; ENTRIES * BYTES];
    let start = Instant::now();
    let received = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(UNDER_WAY);
            owner.signal(Signal::KILL);
        });
        let mut values = TensorMut::from_slice(&mut values, ENTRIES, BYTES).unwrap();
        table.fetch_recv(pending, &mut values, None)
    });
    let (lasted, error) = (start.elapsed(), received.unwrap_err());
    assert!(lasted >= UNDER_WAY, "the entries came from a stopped process within {lasted:?}");
    assert!(lasted < Duration::from_secs(9), "it took {lasted:?}: a deadline ended it");
    // The broken connection may be noticed before the loss.
    let is_kind = matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Transport);
    assert!(is_kind && error.rank() == Some(1), "{error}");
    assert!(table.is_closed());
    drop((table, world));
}

/// A table whose entries both ranks have written.
fn opened(rank: u32, path: &Path, secret: &str) -> (Arc<World>, Table) {
    let config = config(GETS);
    let place = RankId { rank, ranks: 2, local_rank: rank };
    let identity = Identity::new(place, Rendezvous::File { path: path.to_owned() }).unwrap();
    let mut options = WorldOptions::configured(&config.world, identity);
    options.secret = Secret::from_text(secret).unwrap();
    let world = Arc::new(World::join(options).unwrap());
    let options = TableOptions::new(BYTES as u64, ENTRIES as u64, ENTRIES as u32);
    let mut table = Table::open(&world, &config, options).unwrap();
    let values = vec![rank as u8; ENTRIES * BYTES];
    let values = TensorRef::from_slice(&values, ENTRIES, BYTES).unwrap();
    table.write(&[Entries { values, scales: None }]).unwrap();
    (world, table)
}

/// The process of the owner. It ends with this.
struct Owner(Child);

impl Owner {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Stops it: it serves no get from then on.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let stopped = waitpid(Some(Pid::from_child(&self.0)), WaitOptions::UNTRACED).unwrap();
        assert!(stopped.is_some_and(|(_, status)| status.stopped()), "{stopped:?}");
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _it_may_have_ended = self.0.kill();
        let _ended = self.0.wait();
    }
}
