//! Bugs that were found once, each told by the rule that it broke.

use std::sync::Arc;

use tokenyard_conformance::exchange::{self, Brought, Placed};
use tokenyard_conformance::oracle::{Case, Combine, Inputs, Layout, RowType};
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::Config;
use tokenyard_core::yard::Yard;
use tokenyard_core::{Error, ErrorKind};

fn config(load_store: bool) -> Config {
    tokenyard_cpu::link();
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
        combine: Combine { row: RowType::Bf16, biases: 0, weighted: false },
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
        let mut yard = Yard::open(world, config, exchange::options(&case))?;
        let rank = yard.rank() as usize;
        let brought = Brought::new(&case, rank, inputs.ranks[rank].clone());
        let first = yard.dispatch_send(&brought.dispatch()?)?;
        let second = yard.dispatch_send(&brought.dispatch()?)?;
        let (second, _handle) = yard.dispatch_recv(second)?;
        let error = expect_kind(yard.dispatch(&brought.dispatch()?), &[ErrorKind::InvalidInput])?;
        anyhow::ensure!(error.to_string().contains("operation 0 was sent and not received"));
        let (first, _handle) = yard.dispatch_recv(first)?;
        for received in [&first, &second] {
            exchange::check_received(&case, &inputs, rank, received)?;
        }
        exchange::check(&mut yard, &case, &inputs, Placed::Outside)
    });
}

#[test]
fn an_operation_is_received_only_by_the_yard_that_sent_it() {
    let case = small(2, Layout::Flat);
    let inputs = Inputs::all(&case);
    on_both_paths(2, |world, config| {
        let mut one = Yard::open(world, config, exchange::options(&case))?;
        let mut other = Yard::open(world, config, exchange::options(&case))?;
        let rank = one.rank() as usize;
        let brought = Brought::new(&case, rank, inputs.ranks[rank].clone());
        let pending = one.dispatch_send(&brought.dispatch()?)?;
        let mine = other.dispatch_send(&brought.dispatch()?)?;
        let error = expect_kind(other.dispatch_recv(pending), &[ErrorKind::InvalidInput])?;
        anyhow::ensure!(error.to_string().contains("sent by another yard"));
        let (received, _handle) = other.dispatch_recv(mine)?;
        exchange::check_received(&case, &inputs, rank, &received)
    });
}
