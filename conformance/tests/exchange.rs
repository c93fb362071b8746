//! The ranks of a team exchange bytes while their transports open.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::sync::{Arc, Mutex};

use tokenyard_conformance::moe::exchange::options;
use tokenyard_conformance::moe::oracle::Case;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::Communicator;
use tokenyard_core::config::{ComponentTable, Config};
use tokenyard_core::export::find_transport;
use tokenyard_core::host::OpenTransport;
use tokenyard_core::transport::{Capabilities, MemoryNeeds, Transport, TransportOpen};
use tokenyard_core::{Error, ErrorKind, Result};

const RANKS: u32 = 4;

/// The results of each rank: its world rank, its team, and the bytes of the team's ranks.
type Got = (u32, Vec<u32>, Vec<Vec<u8>>);
static GOT: Mutex<Vec<Got>> = Mutex::new(Vec::new());

/// `shm`, whose ranks exchange their numbers while they open.
struct Asking {
    inner: OpenTransport,
    memory: MemoryNeeds,
}

impl Transport for Asking {
    const NAME: &'static str = "asking";
    const ABOUT: &'static str = "exchanges bytes in open";
    type Config = AskingConfig;

    fn probe(_: &AskingConfig) -> Result<Capabilities> {
        find_transport("shm")?.probe(&ComponentTable::empty())
    }

    fn open(config: AskingConfig, open: &TransportOpen<'_>) -> Result<Self> {
        let me = open.team.world_ranks[open.team.me as usize];
        assert_eq!(open.device, None, "the kernels run on the host");
        if config.fails == Some(me) {
            return Err(Error::new(ErrorKind::Unavailable, "open", "no such fabric here"));
        }
        let mut mine = vec![me as u8; 100];
        if config.says_more == Some(me) {
            mine.push(0);
        }
        let all = open.exchange.all_gather(&mine)?;
        if config.is_recorded {
            GOT.lock().unwrap().push((me, open.team.world_ranks.clone(), all));
        }
        let mut inner = find_transport("shm")?.open(&ComponentTable::empty(), open)?;
        Ok(Self { memory: inner.memory_needs()?, inner })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        self.memory
    }

    tokenyard_testkit::pass_on!(
        inner: register, endpoint, connect, peer_address, post, poll, read_signal, health
    );
}

#[derive(Default, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
struct AskingConfig {
    /// Whether the test checks the bytes that the ranks received.
    is_recorded: bool,
    /// A rank that cannot open.
    fails: Option<u32>,
    /// A rank that passes another number of bytes.
    says_more: Option<u32>,
}

tokenyard_testkit::built_in_transport!(Asking);

/// Opens a communicator of two domains of two ranks, and returns the results of the ranks.
fn open_all(table: &str) -> Vec<Result<()>> {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let text = format!(
        "[world]\ndeadline_ms = 2000\n[kernels]\nuse = \"cpu\"\n[topology]\ndomains = 2\n\
         [transport.scale_up]\nuse = \"asking\"\n[transport.scale_up.asking]\n{table}\n\
         [transport.scale_out]\nuse = \"asking\"\n[transport.scale_out.asking]\n{table}\n"
    );
    let config = Config::parse(&text, "exchange").unwrap();
    let case = Case { ranks: RANKS as usize, experts: 8, topk: 2, ..Case::default() };
    let open = |world: &Arc<World>| {
        Communicator::open(world, &config, options(&case)).and_then(Communicator::close)
    };
    in_threads(RANKS, &config, open).unwrap()
}

#[test]
fn every_rank_gets_the_bytes_of_its_own_team_on_each_level() {
    assert!(open_all("is_recorded = true").into_iter().all(|result| result.is_ok()));
    let mut got = std::mem::take(&mut *GOT.lock().unwrap());
    got.sort();
    let teams: Vec<_> = got.iter().map(|(rank, team, _)| (*rank, team.clone())).collect();
    let expected = [(0, [0, 1]), (0, [0, 2]), (1, [0, 1]), (1, [1, 3])];
    let expected = expected.into_iter().chain([(2, [0, 2]), (2, [2, 3]), (3, [1, 3]), (3, [2, 3])]);
    assert_eq!(teams, expected.map(|(rank, team)| (rank, team.to_vec())).collect::<Vec<_>>());
    for (rank, team, all) in got {
        let expected: Vec<_> = team.iter().map(|rank| vec![*rank as u8; 100]).collect();
        assert_eq!(all, expected, "rank {rank}");
    }
}

#[test]
fn a_rank_that_cannot_open_ends_the_exchange_of_the_others_with_its_words() {
    for (rank, result) in open_all("fails = 2").into_iter().enumerate() {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("no such fabric here"), "rank {rank}: {text}");
    }
}

#[test]
fn ranks_that_give_other_numbers_of_bytes_are_refused() {
    let results = open_all("says_more = 3");
    let text = results[2].as_ref().unwrap_err().to_string();
    assert!(text.contains("found 101 bytes of peer 1; expected 100"), "{text}");
    assert!(results.iter().all(Result::is_err), "{results:?}");
}
