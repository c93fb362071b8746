//! Bugs that were found once, each as a test of the rule that it broke.

// A helper of tests may panic as a test may.
#![allow(clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use tokenyard_conformance::moe::exchange::{self, InputTensors, Placed};
use tokenyard_conformance::moe::oracle::{Case, Combine, Inputs, Layout, Routing, RowType, Sums};
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{self, Communicator, CommunicatorOptions, Dispatch, TensorMut};
use tokenyard_core::config::{ComponentTable, Config};
use tokenyard_core::{Error, ErrorKind};

const RANK_MAJOR: Layout = Layout::RankMajor { zero_padding: false };

fn config(load_store: bool) -> Config {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let text = format!(
        "[world]\ndeadline_ms = 10000\nlate_ms = 20000\n[kernels]\nuse = \"cpu\"\n\
         [transport.scale_up]\nuse = \"shm\"\n[transport.scale_up.shm]\nload_store = {load_store}\n"
    );
    Config::parse(&text, "test").expect("the config is right")
}

fn small(ranks: usize, layout: Layout) -> Case {
    Case {
        ranks,
        experts: 2 * ranks,
        topk: 2,
        layout,
        combine: Combine { row: RowType::Bf16, biases: 0, weighted: false, sums: Sums::ByRank },
        ..Case::default()
    }
}

/// Runs `body` on all ranks over both row paths; every rank must succeed.
fn on_both_paths(ranks: u32, body: impl Fn(&Arc<World>, &Config) -> anyhow::Result<()> + Sync) {
    for load_store in [true, false] {
        let config = config(load_store);
        let results = in_threads(ranks, &config, |world| body(world, &config)).expect("a world");
        for (rank, result) in results.into_iter().enumerate() {
            result.unwrap_or_else(|e| panic!("load_store = {load_store}, rank {rank}: {e:#}"));
        }
    }
}

fn expect_kind<T>(result: tokenyard_core::Result<T>, kinds: &[ErrorKind]) -> anyhow::Result<Error> {
    match result {
        Err(error) if kinds.contains(&error.kind()) => Ok(error),
        Err(error) => Err(anyhow::anyhow!("found {:?}: {error}", error.kind())),
        Ok(_) => Err(anyhow::anyhow!("it succeeded; expected one of {kinds:?}")),
    }
}

#[test]
fn an_operation_cannot_start_while_the_one_before_it_in_its_slot_is_open() {
    let case = small(2, Layout::Flat);
    let inputs = Inputs::all(&case);
    on_both_paths(2, |world, config| {
        let mut comm = Communicator::open(world, config, exchange::options(&case))?;
        let rank = comm.rank() as usize;
        let tensors = InputTensors::new(&case, rank, inputs.ranks[rank].clone());
        let first = comm.dispatch_send(&tensors.dispatch()?)?;
        let second = comm.dispatch_send(&tensors.dispatch()?)?;
        let (second, _handle) = comm.dispatch_recv(second)?;
        let error = expect_kind(comm.dispatch(&tensors.dispatch()?), &[ErrorKind::InvalidInput])?;
        anyhow::ensure!(error.to_string().contains("operation 0 was sent and not received"));
        let (first, _handle) = comm.dispatch_recv(first)?;
        for received in [&first, &second] {
            exchange::check_received(&case, &inputs, rank, received)?;
        }
        exchange::check(&mut comm, &case, &inputs, Placed::Outside)
    });
}

#[test]
fn an_operation_is_received_only_by_the_communicator_that_sent_it() {
    let case = small(2, Layout::Flat);
    let inputs = Inputs::all(&case);
    on_both_paths(2, |world, config| {
        let mut one = Communicator::open(world, config, exchange::options(&case))?;
        let mut other = Communicator::open(world, config, exchange::options(&case))?;
        let rank = one.rank() as usize;
        let tensors = InputTensors::new(&case, rank, inputs.ranks[rank].clone());
        let pending = one.dispatch_send(&tensors.dispatch()?)?;
        let mine = other.dispatch_send(&tensors.dispatch()?)?;
        let error = expect_kind(other.dispatch_recv(pending), &[ErrorKind::InvalidInput])?;
        anyhow::ensure!(error.to_string().contains("sent by another communicator"));
        let (received, _handle) = other.dispatch_recv(mine)?;
        exchange::check_received(&case, &inputs, rank, &received)
    });
}

/// Two bugs. The next record of a rank that had left an operation could overwrite its last one before a
/// slower rank had read it. And a rank that refused a packed dispatch, and so had no rows of its own,
/// miscounted those of its peers, so that a later operation read rows before they had arrived.
#[test]
fn refused_dispatches_in_one_slot_keep_ranks_in_step() {
    let ranks = 4;
    for layout in [Layout::Flat, Layout::Packed, RANK_MAJOR] {
        let case = small(ranks, layout);
        let inputs = Inputs::all(&case);
        on_both_paths(ranks as u32, |world, config| {
            let options = CommunicatorOptions { in_flight: 1, ..exchange::options(&case) };
            let mut comm = Communicator::open(world, config, options)?;
            let rank = comm.rank() as usize;
            let tensors = InputTensors::new(&case, rank, inputs.ranks[rank].clone());
            for round in 0..200 {
                let mut dispatch = tensors.dispatch()?;
                if round % ranks == rank {
                    dispatch = Dispatch { topk_idx: dispatch.x, ..dispatch };
                }
                let kinds = [ErrorKind::InvalidInput, ErrorKind::Refused];
                let error = expect_kind(comm.dispatch(&dispatch), &kinds)?;
                let own = error.kind() == ErrorKind::InvalidInput;
                anyhow::ensure!(own == (round % ranks == rank), "round {round}: {error}");
            }
            exchange::check(&mut comm, &case, &inputs, Placed::Outside)
        });
    }
}

#[test]
fn refused_combines_in_one_slot_keep_ranks_in_step() {
    let ranks = 4;
    let case = small(ranks, Layout::Flat);
    let inputs = Inputs::all(&case);
    on_both_paths(ranks as u32, |world, config| {
        let options = CommunicatorOptions { in_flight: 1, ..exchange::options(&case) };
        let mut comm = Communicator::open(world, config, options)?;
        let rank = comm.rank() as usize;
        let tensors = InputTensors::new(&case, rank, inputs.ranks[rank].clone());
        let (received, handle) = comm.dispatch(&tensors.dispatch()?)?;
        let mut out = vec![half::bf16::ZERO; handle.tokens() * case.hidden];
        for round in 0..200 {
            let out = TensorMut::from_slice(&mut out, handle.tokens(), case.hidden)?;
            let combine = communicator::Combine {
                // Flat rows are merged already: the call is invalid, so this rank refuses it in its turn.
                weighted: round % ranks == rank,
                ..communicator::Combine::new(received.x(), out)
            };
            let kinds = [ErrorKind::InvalidInput, ErrorKind::Refused];
            expect_kind(comm.combine(&handle, combine), &kinds)?;
        }
        drop((received, handle));
        exchange::check(&mut comm, &case, &inputs, Placed::Outside)
    });
}

/// A rank that refused took its peers' rows for never sent, so it read later ones too early.
#[test]
fn a_refusal_of_another_sort_of_operation_closes_the_communicator_on_every_rank() {
    for layouts in [[Layout::Flat, Layout::Packed], [Layout::Packed, RANK_MAJOR]] {
        let cases = layouts.map(|layout| small(2, layout));
        let inputs = Inputs::all(&cases[0]);
        on_both_paths(2, |world, config| {
            let mut comm = Communicator::open(world, config, exchange::options(&cases[0]))?;
            let rank = comm.rank() as usize;
            let tensors = InputTensors::new(&cases[rank], rank, inputs.ranks[rank].clone());
            let mut dispatch = tensors.dispatch()?;
            if rank == 0 {
                dispatch = Dispatch { topk_idx: dispatch.x, ..dispatch };
            }
            let kinds = [ErrorKind::Mismatch, ErrorKind::PeerLost];
            expect_kind(comm.dispatch(&dispatch), &kinds)?;
            expect_kind(comm.dispatch(&dispatch), &kinds)?;
            Ok(())
        });
    }
}

/// Places of one handle were used in a region with the layout of another one.
#[test]
fn ranks_that_replay_different_handles_receive_an_error() {
    let case = small(2, Layout::ExpertMajor { alignment: 1, zero_padding: false });
    let inputs = Inputs::all(&case);
    on_both_paths(2, |world, config| {
        let mut comm = Communicator::open(world, config, exchange::options(&case))?;
        let rank = comm.rank() as usize;
        let tensors = InputTensors::new(&case, rank, inputs.ranks[rank].clone());
        let handles =
            [comm.dispatch(&tensors.dispatch()?)?.1, comm.dispatch(&tensors.dispatch()?)?.1];
        let result = comm.replay(&handles[rank], &tensors.replay()?);
        let error = expect_kind(result, &[ErrorKind::Mismatch, ErrorKind::PeerLost])?;
        anyhow::ensure!(error.to_string().contains("used the handle of dispatch"), "{error}");
        Ok(())
    });
}

#[test]
fn a_full_arena_on_one_rank_is_everybodys_answer_and_the_communicator_goes_on() {
    let case = Case {
        routing: Routing::OneExpert,
        hidden: 4096,
        max_tokens: 64,
        ..small(4, Layout::Flat)
    };
    let nothing = Case { routing: Routing::Nothing, ..case.clone() };
    let (inputs, none) = (Inputs::all(&case), Inputs::all(&nothing));
    on_both_paths(4, |world, config| {
        let mut config = config.clone();
        config.kernels.table = ComponentTable::from_text("arena_mib = 1", "test");
        let options = CommunicatorOptions { in_flight: 1, ..exchange::options(&case) };
        let mut comm = Communicator::open(world, &config, options)?;
        let rank = comm.rank() as usize;
        let tensors = InputTensors::new(&case, rank, inputs.ranks[rank].clone());
        for _ in 0..20 {
            let error = expect_kind(comm.dispatch(&tensors.dispatch()?), &[ErrorKind::Full])?;
            anyhow::ensure!(error.to_string().contains("the arena has 1048576 bytes"), "{error}");
        }
        exchange::check(&mut comm, &nothing, &none, Placed::Outside)
    });
}

/// As above: a rank with rows for itself only waits for no peer's rows and runs ahead.
#[test]
fn replays_one_after_the_other_in_one_slot_keep_ranks_in_step() {
    let ranks = 4;
    let case = Case { routing: Routing::OwnRank, ..small(ranks, Layout::Flat) };
    let inputs = Inputs::all(&case);
    on_both_paths(ranks as u32, |world, config| {
        let options = CommunicatorOptions { in_flight: 1, ..exchange::options(&case) };
        let mut comm = Communicator::open(world, config, options)?;
        let rank = comm.rank() as usize;
        let tensors = InputTensors::new(&case, rank, inputs.ranks[rank].clone());
        let (received, handle) = comm.dispatch(&tensors.dispatch()?)?;
        drop(received);
        for _ in 0..400 {
            let received = comm.replay(&handle, &tensors.replay()?)?;
            exchange::check_received(&case, &inputs, rank, &received)?;
        }
        Ok(())
    });
}

/// Ranks computed offsets in windows of other sizes from the sizes of their own.
#[test]
fn windows_that_differ_between_ranks_are_named_before_they_are_made() {
    let case = small(2, Layout::Flat);
    on_both_paths(2, |world, config| {
        let mut config = config.clone();
        let mib = 1 + world.rank();
        config.kernels.table = ComponentTable::from_text(&format!("arena_mib = {mib}"), "test");
        let result = Communicator::open(world, &config, exchange::options(&case));
        let error = expect_kind(result, &[ErrorKind::Mismatch])?.to_string();
        for part in ["bytes of window 1", "1048576", "2097152"] {
            anyhow::ensure!(error.contains(part), "{part} is missing in: {error}");
        }
        Ok(())
    });
}

/// A forwarder that sends its next operation before it receives the last one still has rows to forward, and
/// ranks that are already receiving wait for them.
#[test]
fn a_forwarder_hands_on_rows_before_it_sends_the_next_operation() {
    for (layout, load_store) in
        [Layout::Flat, Layout::Packed, RANK_MAJOR].into_iter().flat_map(|l| [(l, true), (l, false)])
    {
        let case = Case { domains: 2, ..small(4, layout) };
        let inputs = Inputs::all(&case);
        let text = format!(
            "[world]\ndeadline_ms = 10000\nlate_ms = 20000\n[kernels]\nuse = \"cpu\"\n\
             [transport.scale_up]\nuse = \"shm\"\n\
             [transport.scale_up.shm]\nload_store = {load_store}\n\
             [transport.scale_out]\nuse = \"shm\"\n[topology]\ndomains = 2\n"
        );
        tokenyard_cpu::link();
        tokenyard_topology::link();
        let config = Config::parse(&text, "test").expect("the config is right");
        let results = in_threads(4, &config, |world| -> anyhow::Result<()> {
            let mut comm = Communicator::open(world, &config, exchange::options(&case))?;
            let rank = comm.rank() as usize;
            let tensors = InputTensors::new(&case, rank, inputs.ranks[rank].clone());
            let call = tensors.dispatch()?;
            for turn in 0..20 {
                let first = comm.dispatch_send(&call)?;
                // Half of the ranks, in turn, receive before they send again.
                let (first, second) = if (rank + turn).is_multiple_of(2) {
                    (comm.dispatch_recv(first)?, comm.dispatch_send(&call)?)
                } else {
                    let second = comm.dispatch_send(&call)?;
                    (comm.dispatch_recv(first)?, second)
                };
                let second = comm.dispatch_recv(second)?;
                for (received, _handle) in [&first, &second] {
                    exchange::check_received(&case, &inputs, rank, received)?;
                }
            }
            Ok(())
        });
        for (rank, result) in results.expect("a world").into_iter().enumerate() {
            result.unwrap_or_else(|e| panic!("{layout}, load_store = {load_store}, {rank}: {e:#}"));
        }
    }
}
