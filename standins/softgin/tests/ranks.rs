//! The plugin as NCCL uses it: loaded from its file, driven through its C interface, by real processes. Memory is the
//! host's; memory of GPUs takes GPUs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use tokenyard_softgin::abi::{self, HANDLE_BYTES, NetProperties, Plugin, RmaConfig};

/// `SCENARIO RANK RANKS FOLDER LIBRARY`, for this program as a rank.
const AS_RANK: &str = "SOFTGIN_AS_RANK";
/// The variable of the plugin.
const DAY: &str = "TOKENYARD_SOFTGIN";
const PATIENCE: Duration = Duration::from_secs(120);

fn main() {
    if let Ok(text) = std::env::var(AS_RANK) {
        let words: Vec<&str> = text.split(' ').collect();
        return as_rank(&words);
    }
    let good = |scenario, ranks, day| move || end_well(scenario, ranks, day);
    let mut trials = vec![
        trial("bytes_and_signals_reach_every_rank_and_oneself", good("all_to_all", 2, "")),
        trial("so_they_do_among_eight_ranks", good("all_to_all", 8, "")),
        trial("bytes_come_from_a_peer", good("get", 2, "")),
        trial("arguments_that_make_no_sense_are_refused", good("nonsense", 1, "")),
        trial("a_planted_failure_ends_every_test_from_then_on", good("fails", 2, "fail_at=10")),
        trial("what_stops_is_never_done", good("stops", 2, "stop_at=5")),
        trial("a_peer_that_is_gone_is_an_error", gone),
        trial("a_day_that_makes_no_sense_is_refused", good("bad_day", 1, "loose=1")),
    ];
    for seed in 1..=3 {
        let name = format!("payload_comes_before_its_signal_in_any_order_{seed}");
        trials.push(trial(&name, move || {
            let day = format!("seed={seed},reorder=16,delay_us=300");
            end_well("all_to_all", 3, &day)
        }));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn trial(name: &str, test: impl FnOnce() + Send + 'static) -> Trial {
    Trial::test(name, move || {
        test();
        Ok::<(), Failed>(())
    })
}

fn library() -> &'static Path {
    static LIBRARY: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    LIBRARY.get_or_init(|| tokenyard_testkit::built_plugin("tokenyard-softgin"))
}

fn start(scenario: &str, ranks: usize, day: &str, folder: &Path) -> Vec<Child> {
    let program = std::env::current_exe().unwrap();
    let of_rank = |rank: usize| {
        let words =
            format!("{scenario} {rank} {ranks} {} {}", folder.display(), library().display());
        let mut command = Command::new(&program);
        command.env(AS_RANK, words).env(DAY, day).stdin(Stdio::null()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    (0..ranks).map(of_rank).collect()
}

fn end_well(scenario: &str, ranks: usize, day: &str) {
    let folder = tempfile::tempdir().unwrap();
    for (rank, child) in start(scenario, ranks, day, folder.path()).into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "rank {rank}: {}: {errors}", output.status);
    }
}

/// Rank 1 of two is killed once both are connected; rank 0 sees the result of its puts.
fn gone() {
    let folder = tempfile::tempdir().unwrap();
    let mut ranks = start("gone", 2, "", folder.path());
    let mut lost = ranks.pop().unwrap();
    wait_for(&folder.path().join("ready.1"));
    lost.kill().unwrap();
    lost.wait().unwrap();
    std::fs::write(folder.path().join("killed"), "").unwrap();
    let output = ranks.pop().unwrap().wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    assert!(errors.contains("process_vm_writev"), "{errors}");
}

fn wait_for(file: &Path) {
    let until = Instant::now() + PATIENCE;
    while !file.exists() {
        assert!(Instant::now() < until, "{} has not come", file.display());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn as_rank(words: &[&str]) {
    let [scenario, rank, ranks, folder, library] = words else { panic!("found {words:?}") };
    // SAFETY: the plugin's constructors do nothing.
    let library = unsafe { libloading::Library::new(*library) }.unwrap();
    // SAFETY: the symbol is a table of this type.
    let table = unsafe { *library.get::<*const Plugin>(abi::SYMBOL.as_bytes()).unwrap() };
    std::mem::forget(library);
    // SAFETY: the library stays.
    let table = unsafe { &*table };
    let rank = Rank {
        table,
        me: rank.parse().unwrap(),
        ranks: ranks.parse().unwrap(),
        folder: PathBuf::from(folder),
    };
    match *scenario {
        "all_to_all" => all_to_all(&rank),
        "get" => get(&rank),
        "nonsense" => nonsense(&rank),
        "fails" => fails(&rank),
        "stops" => stops(&rank),
        "gone" => goes(&rank),
        "bad_day" => bad_day(&rank),
        other => panic!("found scenario {other}"),
    }
}

struct Rank {
    table: &'static Plugin,
    me: usize,
    ranks: usize,
    folder: PathBuf,
}

/// A connected rank with a window and signals.
struct Connected<'a> {
    rank: &'a Rank,
    plugin: *mut c_void,
    team: *mut c_void,
    context: *mut c_void,
    window: Vec<u64>,
    signals: Vec<AtomicU64>,
    /// Handles of the two.
    window_region: *mut c_void,
    signal_region: *mut c_void,
}

const WINDOW_WORDS: usize = 1 << 16;
const SIGNALS: usize = 4096;

impl Rank {
    fn mark(&self, what: &str) {
        let (name, new) = (format!("{what}.{}", self.me), format!("new-{what}.{}", self.me));
        std::fs::write(self.folder.join(&new), "").unwrap();
        std::fs::rename(self.folder.join(new), self.folder.join(name)).unwrap();
    }

    fn meet(&self, what: &str) {
        self.mark(what);
        (0..self.ranks).for_each(|rank| wait_for(&self.folder.join(format!("{what}.{rank}"))));
    }

    /// The calls that NCCL makes before it connects: `init` twice.
    fn init(&self) -> *mut c_void {
        let (mut first, mut second, mut devices) = (null_mut(), null_mut(), 0);
        // SAFETY: places for results.
        unsafe {
            assert_eq!((self.table.init)(&mut first, 1, None), abi::SUCCESS);
            assert_eq!((self.table.init)(&mut second, 1, None), abi::SUCCESS);
            assert_eq!((self.table.devices)(&mut devices), abi::SUCCESS);
            assert_eq!(devices, 1);
            let mut properties = std::mem::zeroed::<NetProperties>();
            assert_eq!((self.table.get_properties)(0, &mut properties), abi::SUCCESS);
            assert_eq!(properties.device_type, abi::DEVICE_TYPE_PROXY);
            assert!(properties.max_recvs.count_ones() == 1);
            assert_eq!((self.table.finalize)(first), abi::SUCCESS);
        }
        second
    }

    /// The handles of all ranks, and the listener of this rank.
    fn handles(&self, plugin: *mut c_void) -> (Vec<[u8; HANDLE_BYTES]>, *mut c_void) {
        let (mut handle, mut listener) = ([0_u8; HANDLE_BYTES], null_mut());
        // SAFETY: room for a handle and a result.
        let status =
            unsafe { (self.table.listen)(plugin, 0, handle.as_mut_ptr().cast(), &mut listener) };
        assert_eq!(status, abi::SUCCESS);
        std::fs::write(self.folder.join(format!("handle.{}", self.me)), handle).unwrap();
        self.meet("listening");
        let read = |rank| {
            let bytes = std::fs::read(self.folder.join(format!("handle.{rank}"))).unwrap();
            bytes.try_into().unwrap()
        };
        ((0..self.ranks).map(read).collect(), listener)
    }

    fn connect(&self) -> Connected<'_> {
        let plugin = self.init();
        let (mut handles, listener) = self.handles(plugin);
        let mut pointers: Vec<*mut c_void> =
            handles.iter_mut().map(|handle| handle.as_mut_ptr().cast()).collect();
        let (mut team, mut context) = (null_mut(), null_mut());
        let mut config = RmaConfig { contexts: 1, traffic_class: c_int::MIN, rank_stride: 1 };
        let (count, me) = (self.ranks as c_int, self.me as c_int);
        // SAFETY: handles of all ranks, and places for results.
        unsafe {
            let handles = pointers.as_mut_ptr();
            let status = (self.table.connect)(plugin, handles, count, me, listener, &mut team);
            assert_eq!(status, abi::SUCCESS);
            assert_eq!((self.table.close_listen)(listener), abi::SUCCESS);
            let status = (self.table.create_context)(team, &mut config, &mut context);
            assert_eq!(status, abi::SUCCESS);
        }
        let mut connected = Connected {
            rank: self,
            plugin,
            team,
            context,
            window: vec![0; WINDOW_WORDS],
            signals: (0..SIGNALS).map(|_| AtomicU64::new(0)).collect(),
            window_region: null_mut(),
            signal_region: null_mut(),
        };
        let (window, signals) = (connected.window.as_mut_ptr(), connected.signals.as_mut_ptr());
        connected.window_region = connected.register(window.cast(), 8 * WINDOW_WORDS);
        connected.signal_region = connected.register(signals.cast(), 8 * SIGNALS);
        connected
    }
}

/// One put with its signal: words of this rank's window, words of a peer's, the signal there, and its addend.
#[derive(Clone, Copy)]
struct Put {
    from: usize,
    to: usize,
    words: usize,
    peer: usize,
    signal: usize,
    add: u64,
}

impl Connected<'_> {
    fn register(&self, at: *mut c_void, bytes: usize) -> *mut c_void {
        let mut region = null_mut();
        let table = self.rank.table;
        // SAFETY: memory that lives until the process ends.
        let status =
            unsafe { (table.reg_mr_sym)(self.team, at, bytes, abi::PTR_HOST, 0, &mut region) };
        assert_eq!(status, abi::SUCCESS);
        region
    }

    fn put_signal(&self, put: Put) -> *mut c_void {
        let mut request = null_mut();
        // Where nothing is copied there are no regions: NCCL does the same.
        let region = if put.words == 0 { null_mut() } else { self.window_region };
        // SAFETY: pointers that the plugin gave, and a place for the result.
        let status = unsafe {
            (self.rank.table.iput_signal)(
                self.context,
                0,
                8 * put.from as u64,
                region,
                8 * put.words,
                8 * put.to as u64,
                region,
                put.peer as u32,
                8 * put.signal as u64,
                self.signal_region,
                put.add,
                abi::SIGNAL_ADD,
                false,
                &mut request,
            )
        };
        assert_eq!(status, abi::SUCCESS);
        request
    }

    /// Status, and whether the request has ended.
    fn test(&self, request: *mut c_void) -> (c_int, bool) {
        let mut done = 0;
        // SAFETY: pointers that the plugin gave.
        let status = unsafe { (self.rank.table.test)(self.team, request, &mut done) };
        (status, done != 0)
    }

    fn progress(&self) -> c_int {
        // SAFETY: pointers that the plugin gave.
        unsafe { (self.rank.table.rma_progress)(self.context) }
    }

    fn signal(&self, id: usize) -> u64 {
        self.signals[id].load(Ordering::Acquire)
    }

    /// A word of the window, which peers write.
    fn word(&self, at: usize) -> u64 {
        // SAFETY: in the window.
        unsafe { self.window.as_ptr().add(at).read_volatile() }
    }

    fn drive(&self, what: &str, mut over: impl FnMut() -> bool) {
        let until = Instant::now() + PATIENCE;
        while !over() {
            assert_eq!(self.progress(), abi::SUCCESS, "{what}");
            assert!(Instant::now() < until, "{what}: not over in {PATIENCE:?}");
            std::thread::yield_now();
        }
    }

    fn end(self) {
        let (rank, table) = (self.rank, self.rank.table);
        // No rank closes while others still look at its memory.
        rank.mark("over");
        let all = |what: &str| {
            (0..rank.ranks).all(|peer| rank.folder.join(format!("{what}.{peer}")).exists())
        };
        self.drive("the end", || all("over"));
        // SAFETY: pointers that the plugin gave, in NCCL's order.
        unsafe {
            assert_eq!((table.destroy_context)(self.context), abi::SUCCESS);
            for region in [self.signal_region, self.window_region] {
                assert_eq!((table.dereg_mr_sym)(self.team, region), abi::SUCCESS);
            }
            assert_eq!((table.close_coll)(self.team), abi::SUCCESS);
            assert_eq!((table.finalize)(self.plugin), abi::SUCCESS);
        }
    }
}

/// Puts to each peer, and words of each.
const PUTS: usize = 120;
const WORDS: usize = 16;

fn pattern(from: usize, put: usize, word: usize) -> u64 {
    ((from as u64 + 1) << 48 | (put as u64) << 16 | word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Every rank puts to every rank, itself included, each put with a signal of its own, and more bare signals.
fn all_to_all(rank: &Rank) {
    let mut connected = rank.connect();
    let (me, ranks) = (rank.me, rank.ranks);
    let block = PUTS * WORDS;
    for (at, word) in connected.window[..block].iter_mut().enumerate() {
        *word = pattern(me, at / WORDS, at % WORDS);
    }
    rank.meet("filled");
    let mut requests = Vec::new();
    for put in 0..PUTS {
        for peer in 0..ranks {
            requests.push(connected.put_signal(Put {
                from: put * WORDS,
                to: (1 + me) * block + put * WORDS,
                words: WORDS,
                peer,
                signal: me * PUTS + put,
                add: 3,
            }));
            let bare = Put { from: 0, to: 0, words: 0, peer, signal: SIGNALS - 1, add: 1 << 33 };
            requests.push(connected.put_signal(bare));
        }
    }
    let total = (ranks * PUTS) as u64 * (1 << 33);
    let mut seen = vec![false; ranks * PUTS];
    connected.drive("puts", || {
        for (at, seen) in seen.iter_mut().enumerate().filter(|(_, seen)| !**seen) {
            if connected.signal(at) == 0 {
                continue;
            }
            // The signal has arrived, so its own payload has, too, even if others are missing (INV-1).
            let (from, put) = (at / PUTS, at % PUTS);
            for word in 0..WORDS {
                let found = connected.word((1 + from) * block + put * WORDS + word);
                assert_eq!(found, pattern(from, put, word), "put {put} of rank {from}");
            }
            *seen = true;
        }
        requests.retain(|request| {
            let (status, done) = connected.test(*request);
            assert_eq!(status, abi::SUCCESS);
            !done
        });
        requests.is_empty() && seen.iter().all(|it| *it) && connected.signal(SIGNALS - 1) == total
    });
    assert!((0..ranks * PUTS).all(|at| connected.signal(at) == 3));
    connected.end();
}

fn get(rank: &Rank) {
    let mut connected = rank.connect();
    connected.window[7] = 1000 + rank.me as u64;
    rank.meet("filled");
    let peer = (rank.me + 1) % rank.ranks;
    let mut request = null_mut();
    // SAFETY: pointers that the plugin gave, and a place for the result.
    let status = unsafe {
        (rank.table.iget)(
            connected.context,
            0,
            56,
            connected.window_region,
            8,
            80,
            connected.window_region,
            peer as u32,
            &mut request,
        )
    };
    assert_eq!(status, abi::SUCCESS);
    connected.drive("get", || connected.test(request) == (abi::SUCCESS, true));
    assert_eq!(connected.word(10), 1000 + peer as u64);
    connected.end();
}

fn one_word(peer: usize) -> Put {
    Put { from: 0, to: 1, words: 1, peer, signal: 0, add: 1 }
}

/// `fail_at=10`.
fn fails(rank: &Rank) {
    let connected = rank.connect();
    if rank.me == 0 {
        for _ in 1..10 {
            let request = connected.put_signal(one_word(1));
            connected.drive("puts", || connected.test(request) == (abi::SUCCESS, true));
        }
        let request = connected.put_signal(one_word(1));
        for _ in 0..3 {
            assert_eq!(connected.test(request), (abi::REMOTE_ERROR, false));
            assert_eq!(connected.progress(), abi::REMOTE_ERROR);
        }
        rank.meet("failed");
        return;
    }
    connected.drive("signals", || connected.signal(0) == 9);
    rank.meet("failed");
    assert_eq!((connected.progress(), connected.signal(0)), (abi::SUCCESS, 9));
}

/// `stop_at=5`.
fn stops(rank: &Rank) {
    let connected = rank.connect();
    let peer = (rank.me + 1) % rank.ranks;
    let requests: Vec<_> = (0..8).map(|_| connected.put_signal(one_word(peer))).collect();
    connected.drive("four", || connected.signal(0) == 4);
    let until = Instant::now() + Duration::from_millis(300);
    connected.drive("nothing more", || Instant::now() > until);
    assert_eq!(connected.signal(0), 4);
    let done = requests.iter().map(|request| connected.test(*request));
    let done: Vec<bool> =
        done.inspect(|found| assert_eq!(found.0, abi::SUCCESS)).map(|it| it.1).collect();
    assert_eq!(done, [true, true, true, true, false, false, false, false]);
    rank.meet("over");
}

/// Rank 1 waits to be killed.
fn goes(rank: &Rank) {
    let connected = rank.connect();
    rank.mark("ready");
    wait_for(&rank.folder.join("killed"));
    let request = connected.put_signal(one_word(1));
    assert_eq!(connected.test(request), (abi::SYSTEM_ERROR, false));
}

fn bad_day(rank: &Rank) {
    let plugin = rank.init();
    let (mut handles, listener) = rank.handles(plugin);
    let (mut handle, mut team) = ([handles[0].as_mut_ptr().cast::<c_void>()], null_mut());
    // SAFETY: a handle, and a place for the result.
    let status =
        unsafe { (rank.table.connect)(plugin, handle.as_mut_ptr(), 1, 0, listener, &mut team) };
    assert_eq!((status, team.is_null()), (abi::INVALID_USAGE, true));
}

fn nonsense(rank: &Rank) {
    let connected = rank.connect();
    let table = rank.table;
    let (team, context, window) = (connected.team, connected.context, connected.window_region);
    let mut out = null_mut();
    let unknown = 999 as *mut c_void;
    let beyond = 8 * WINDOW_WORDS as u64;
    let mut put = |source: u64, region, bytes, to: u64, rank| {
        // SAFETY: numbers that are never followed, and a place for the result.
        unsafe { (table.iput)(context, 0, source, region, bytes, to, window, rank, &mut out) }
    };
    for status in [
        put(0, window, 8, 0, 1),
        put(0, unknown, 8, 0, 0),
        put(0, null_mut(), 8, 0, 0),
        put(beyond, window, 8, 0, 0),
        put(0, window, 16, beyond - 8, 0),
        put(u64::MAX, window, 8, 0, 0),
    ] {
        assert_eq!(status, abi::INVALID_ARGUMENT);
    }
    assert_eq!(connected.test(unknown), (abi::INVALID_ARGUMENT, false));
    // The request that `iflush` gives.
    assert_eq!(connected.test(null_mut()), (abi::SUCCESS, true));
    let mut handle = [0_u8; HANDLE_BYTES];
    let mut handles = [handle.as_mut_ptr().cast::<c_void>()];
    let mut region = null_mut();
    // SAFETY: null where the plugin is to see it, else places for results.
    unsafe {
        let at = handles.as_mut_ptr();
        for (ranks, me) in [(1, 0), (0, 0), (9, 0), (1, -1)] {
            let status = (table.connect)(null_mut(), at, ranks, me, null_mut(), &mut region);
            assert_eq!(status, abi::INVALID_ARGUMENT, "{ranks} {me}");
        }
        assert_eq!((table.rma_progress)(null_mut()), abi::INVALID_ARGUMENT);
        assert_eq!((table.devices)(null_mut()), abi::INVALID_ARGUMENT);
        assert_eq!((table.dereg_mr_sym)(team, unknown), abi::INVALID_ARGUMENT);
        let word = (&raw const *connected.window).cast::<c_void>().cast_mut();
        let status = (table.reg_mr_sym)(team, word, 8, abi::PTR_CUDA, 0, &mut region);
        assert_eq!(status, abi::INVALID_USAGE, "there is no CUDA context");
    }
    connected.end();
}
