//! INV-8: a rank that the others have given up is alive, and writes.

use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokenyard_conformance::moe::exchange;
use tokenyard_conformance::moe::oracle::Case;
use tokenyard_conformance::moe::round::{Live, Round};
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::communicator::Communicator;

use crate::wrapper::ROWS_PUT;
use crate::{DEADLINE, config, meeting, small};

const RANKS: u32 = 3;
/// Commands of rank 1 that arrive in time: those of its first dispatch, which are 21, and some of the next
/// exchange, so that the missing ones begin at different places of it.
const IN_TIME: [u64; 6] = [24, 28, 32, 36, 42, 46];

/// The state of a rank after the world has given rank 1 up.
struct Left {
    comm: Communicator,
    first: Live,
    arrived: Vec<u8>,
}

/// One dispatch; then exchanges until rank 1's commands are held back and every rank gives up.
fn until_given_up(in_time: u64) -> Vec<Left> {
    let transport = format!(
        "use = \"faulty\"\n[transport.scale_up.faulty]\ninner = \"between\"\nseed = 5\n\
         fault = {{ kind = \"late\", rank = 1, at = {in_time} }}\n\
         between = {{ inner = \"shm\", counts = true, shm.load_store = false }}"
    );
    let broken = config(&transport, DEADLINE);
    let results = in_threads(RANKS, &meeting(), |world| -> anyhow::Result<Left> {
        let case = small(RANKS as usize);
        let mut comm = Communicator::open(world, &broken, exchange::options(&case))?;
        let round = Round::new(&case, comm.rank());
        let first = round.dispatch(&mut comm)?;
        let arrived = first.received.x().bytes().to_vec();
        for seed in 1..1000 {
            if Round::new(&Case { seed, ..case.clone() }, comm.rank()).run(&mut comm).is_err() {
                return Ok(Left { comm, first, arrived });
            }
        }
        anyhow::bail!("no rank was given up in 1000 exchanges")
    });
    results.unwrap().into_iter().collect::<anyhow::Result<_>>().unwrap()
}

/// The number of row puts that rank 1 made late, during exchanges on a new communicator whose results must
/// all be right.
fn written_late(in_time: u64) -> u64 {
    let left = until_given_up(in_time).into_iter().map(|left| Mutex::new(Some(left)));
    let left: Vec<_> = left.collect();
    let before = ROWS_PUT.load(Ordering::Relaxed);
    let whole = config("use = \"shm\"\nshm.load_store = false", Duration::from_secs(20));
    let results = in_threads(RANKS, &meeting(), |world| -> anyhow::Result<()> {
        let rank = world.rank();
        let mut old = left[rank as usize].lock().unwrap().take();
        let case = small(RANKS as usize);
        let mut comm = Communicator::open(world, &whole, exchange::options(&case))?;
        for seed in 0..30 {
            let round = Round::new(&Case { seed, ..case.clone() }, rank);
            let live = round.dispatch(&mut comm)?;
            if seed == 10 {
                if rank == 1 {
                    // The transport now sends every command that it has held back, during a new exchange.
                    drop(old.take());
                }
                world.barrier("the late writer has written")?;
            }
            round.finish(&mut comm, &live)?;
        }
        if let Some(old) = &mut old {
            let found = old.first.received.x().bytes();
            anyhow::ensure!(found == old.arrived, "an output from before the loss has changed");
            let again = Round::new(&case, rank).dispatch(&mut old.comm);
            anyhow::ensure!(again.is_err(), "a communicator that lost a rank goes on");
        }
        Ok(comm.close()?)
    });
    results.unwrap().into_iter().collect::<anyhow::Result<Vec<()>>>().unwrap();
    ROWS_PUT.load(Ordering::Relaxed) - before
}

#[test]
fn what_a_rank_writes_that_was_given_up_reaches_no_later_communicator_and_no_earlier_output() {
    let late: Vec<u64> = IN_TIME.into_iter().map(written_late).collect();
    assert!(late.iter().any(|rows| *rows > 0), "no rows were written late: {late:?}");
}
