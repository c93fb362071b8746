//! Bytes of a peer that lies, in the layouts whose rows land before anything about them is known. Nothing that it
//! writes leads to a place beyond the rows that it may have.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokenyard_conformance::moe::exchange;
use tokenyard_conformance::moe::oracle::{Case, Layout, Tokens};
use tokenyard_conformance::moe::round::Round;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::abi;
use tokenyard_core::communicator::Communicator;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::export::find_transport;
use tokenyard_core::host::OpenTransport;
use tokenyard_core::signature::Signature;
use tokenyard_core::transport::{
    Capabilities, Command, MemoryNeeds, Transport, TransportOpen, Window,
};
use tokenyard_core::{ErrorKind, Result};

use crate::{config, meeting, small};

/// The kinds of signals of the `cpu` kernel set: those of one kind have consecutive ids. The first kind announces
/// entries, the third one counts rows.
const KINDS: u32 = 4;
/// Words of an entry: the operation, the number of rows, and two with the signature.
const OPERATION: usize = 0;
const SIGNATURE: [usize; 2] = [2, 6];
const ROWS: usize = 3;
/// Local experts of a rank of [`small`].
const LOCAL_EXPERTS: i32 = 4;
/// M of the calls, below that of the communicator.
const MAX_TOKENS: usize = 4;

/// `lying`: `shm` by puts, over which rank 1 lies to rank 0 in one operation.
pub(crate) struct Lying {
    inner: OpenTransport,
    memory: MemoryNeeds,
    /// Of rank 1 alone.
    lie: Option<LyingConfig>,
    /// Signals of one kind.
    kind: u32,
    /// This rank's control window.
    control: AtomicUsize,
    /// The operation whose rows are put next.
    operation: AtomicU64,
    /// The rest of a refused command, which comes again and is altered already.
    left: Mutex<VecDeque<Command>>,
}

#[derive(Clone, Copy, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LyingConfig {
    /// The operation.
    at: u64,
    /// How many rows more than it has the entry names. Their signal comes, and they do not.
    more_rows: u32,
    /// Added to the first id of the first row.
    to_id: i32,
}

impl Transport for Lying {
    const NAME: &'static str = "lying";
    const ABOUT: &'static str = "alters what rank 1 sends to rank 0";
    type Config = LyingConfig;

    fn probe(_: &LyingConfig) -> Result<Capabilities> {
        find_transport("shm")?.probe(&by_puts())
    }

    fn open(config: LyingConfig, open: &TransportOpen<'_>) -> Result<Self> {
        let mut inner = find_transport("shm")?.open(&by_puts(), open)?;
        Ok(Self {
            memory: inner.memory_needs()?,
            inner,
            lie: (open.team.me == 1).then_some(config),
            kind: open.needs.signals / KINDS,
            control: AtomicUsize::new(0),
            operation: AtomicU64::new(0),
            left: Mutex::default(),
        })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        self.memory
    }

    unsafe fn register(&mut self, window: &Window) -> Result<()> {
        if window.id == 0 {
            self.control.store(window.pointer as usize, Ordering::Relaxed);
        }
        // SAFETY: by this function's contract.
        unsafe { self.inner.register(window) }
    }

    tokenyard_testkit::pass_on!(inner: endpoint, connect, poll, read_signal, health, progress);

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32> {
        let Some(lie) = self.lie else {
            // SAFETY: by this function's contract.
            return unsafe { self.inner.post(queue, commands) };
        };
        for (accepted, command) in commands.iter().enumerate() {
            let mut left = self.left.lock().unwrap();
            if left.is_empty() {
                let may_lie = command.peer == 0 && command.bytes > 0 && command.src_window == 0;
                left.extend(may_lie.then(|| self.alter(&lie, command)).flatten());
                left.push_back(*command);
            }
            while let Some(command) = left.front() {
                // SAFETY: by this function's contract; the signal before an entry has no source.
                if unsafe { self.inner.post(queue, std::slice::from_ref(command))? } == 0 {
                    return Ok(accepted);
                }
                left.pop_front();
            }
        }
        Ok(commands.len())
    }
}

impl Lying {
    /// Alters the bytes that a put to rank 0 takes. Returns the signal of rows that do not come.
    fn alter(&self, lie: &LyingConfig, command: &Command) -> Option<Command> {
        let source =
            (self.control.load(Ordering::Relaxed) + command.src_offset as usize) as *mut u8;
        if command.signal / self.kind == 0 {
            // SAFETY: an entry of this rank, which it has just written, aligned to 64 bytes.
            let header = unsafe { &mut *source.cast::<[u64; 8]>() };
            self.operation.store(header[OPERATION] + 1, Ordering::Relaxed);
            if header[OPERATION] != lie.at || lie.more_rows == 0 {
                return None;
            }
            header[ROWS] += u64::from(lie.more_rows);
            let [word, extent] = SIGNATURE.map(|at| header[at]);
            let arrays = Signature { word, extent: (extent >> 32) as u32 }.arrays();
            return Some(Command {
                op: abi::TY_OP_SIGNAL,
                flags: 0,
                signal: command.signal + 2 * self.kind,
                add: lie.more_rows * arrays as u32,
                bytes: 0,
                ..*command
            });
        }
        if command.signal / self.kind == 2 && self.operation.load(Ordering::Relaxed) == lie.at {
            // SAFETY: staged numbers of this rank, or the halves of rows, all of a multiple of 4 bytes.
            let words = unsafe {
                std::slice::from_raw_parts_mut(source.cast::<i32>(), command.bytes as usize / 4)
            };
            // The only array of such small numbers.
            if words.iter().all(|id| (-1..LOCAL_EXPERTS).contains(id)) {
                words[0] += lie.to_id;
            }
        }
        None
    }
}

fn by_puts() -> ComponentTable {
    ComponentTable::from_text("load_store = false", "lies")
}

tokenyard_testkit::built_in_transport!(Lying);

const LAYOUTS: [Layout; 3] = [
    Layout::Packed,
    Layout::RankMajor { zero_padding: false },
    Layout::RankMajor { zero_padding: true },
];

/// The error of rank 0 where rank 1 lies in this operation: the first one is a dispatch, the second one its replay.
fn error_of(layout: Layout, lie: LyingConfig) -> tokenyard_core::Error {
    let LyingConfig { at, more_rows, to_id } = lie;
    let transport = format!(
        "use = \"lying\"\nlying = {{ at = {at}, more_rows = {more_rows}, to_id = {to_id} }}"
    );
    let lying = config(&transport, Duration::from_secs(10));
    let results = in_threads(2, &meeting(), |world| -> anyhow::Result<_> {
        let options = exchange::options(&small(2));
        let tokens = Tokens::Exactly(vec![MAX_TOKENS; 2]);
        let case = Case { layout, tokens, max_tokens: MAX_TOKENS, weights: false, ..small(2) };
        let mut comm = Communicator::open(world, &lying, options)?;
        let round = Round::new(&case, comm.rank());
        let dispatched = comm.dispatch(&round.tensors.dispatch()?);
        let found = match (dispatched, at) {
            (Err(error), 0) => Some(error),
            (Ok((received, handle)), 1) => {
                round.check_received(&received)?;
                comm.replay(&handle, &round.tensors.replay()?).err()
            }
            (Ok(_), _) => None,
            (Err(error), _) => return Err(error.into()),
        };
        // Rank 1 stays until rank 0 has received the lie. The error of rank 0 ends the world.
        let _ = world.barrier("the lie was received");
        Ok(found)
    });
    let found = results.unwrap().swap_remove(0).unwrap();
    found.unwrap_or_else(|| panic!("{layout}: rank 0 believes what rank 1 says"))
}

fn expect_refused(layout: Layout, lie: LyingConfig, why: &str) {
    let error = error_of(layout, lie);
    assert_eq!(error.kind(), ErrorKind::Protocol, "{layout}: {error}");
    assert_eq!(error.rank(), Some(1), "{layout}: {error}");
    let text = error.to_string();
    assert!(text.contains("rank 1 sent a record with") && text.contains(why), "{layout}: {text}");
}

#[test]
fn rows_beyond_m_of_the_call_are_refused_although_the_communicator_has_places_for_them() {
    // M of the communicator is 12.
    let lie = LyingConfig { at: 0, more_rows: 8, to_id: 0 };
    for layout in LAYOUTS {
        expect_refused(layout, lie, "rows of at most 4");
    }
}

#[test]
fn a_replay_with_another_number_of_rows_than_its_dispatch_had_is_refused() {
    let lie = LyingConfig { at: 1, more_rows: 1, to_id: 0 };
    for layout in LAYOUTS {
        expect_refused(layout, lie, "rows in a replay of");
    }
}

#[test]
fn a_row_for_an_expert_that_the_rank_does_not_have_is_refused_in_a_dispatch_and_in_a_replay() {
    for (layout, at) in LAYOUTS.into_iter().flat_map(|layout| [(layout, 0), (layout, 1)]) {
        let lie = LyingConfig { at, more_rows: 0, to_id: 1000 };
        expect_refused(layout, lie, "local expert");
    }
}
