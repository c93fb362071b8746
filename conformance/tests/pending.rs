//! What operations keep between their halves.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::sync::Arc;

use anyhow::Result;
use tokenyard_conformance::exchange::options;
use tokenyard_conformance::oracle::{Case, Layout};
use tokenyard_conformance::ranks::in_threads;
use tokenyard_conformance::round::Round;
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::{
    CallerMemory, Communicator, CommunicatorOptions, Dispatch, PendingDispatch, TensorRef,
};
use tokenyard_core::config::Config;

const RANKS: u32 = 2;

fn case(layout: Layout) -> Case {
    Case { ranks: RANKS as usize, experts: 4, topk: 2, layout, ..Case::default() }
}

/// Runs `body` on both ranks of a communicator that has so many handles.
fn with_handles(handles: u32, case: &Case, body: impl Fn(Communicator) -> Result<()> + Sync) {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let text = "[world]\ndeadline_ms = 10000\n[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";
    let config = Config::parse(text, "pending").unwrap();
    let options = CommunicatorOptions { handles, ..options(case) };
    let open = |world: &_| body(Communicator::open(world, &config, options)?);
    for result in in_threads(RANKS, &config, open).unwrap() {
        result.unwrap();
    }
}

#[test]
fn a_handle_that_is_dropped_between_the_halves_keeps_its_slot_until_the_operation_is_received() {
    for layout in [Layout::Flat, Layout::ExpertMajor { alignment: 1, zero_padding: false }] {
        let case = case(layout);
        with_handles(1, &case, |mut comm| {
            let round = Round::new(&case, comm.rank());
            let brought = round.brought.dispatch()?;
            let live = round.dispatch(&mut comm).unwrap();
            let mut buffers = round.experts(&live.received).unwrap();
            let combine = buffers.arguments(&round.brought, &live.handle).unwrap();
            let pending = comm.combine_send(&live.handle, combine)?;
            drop(live.handle);
            let full = comm.dispatch(&brought).unwrap_err();
            assert_eq!(full.kind(), ErrorKind::Full, "{full}");
            comm.combine_recv(pending)?;
            round.check_combined(&buffers.into_got()?)?;
            round.run(&mut comm).unwrap();

            let live = round.dispatch(&mut comm).unwrap();
            let replay = round.brought.replay_on(&comm).unwrap();
            let pending = comm.replay_send(&live.handle, &replay)?;
            drop(live.handle);
            assert_eq!(comm.dispatch(&brought).unwrap_err().kind(), ErrorKind::Full);
            round.check_received(&comm.replay_recv(pending)?).unwrap();
            round.run(&mut comm).unwrap();
            Ok(comm.close()?)
        });
    }
}

/// As a framework would: a dispatch whose tensors nobody borrows, in an object of its own.
fn send_owned(comm: &mut Communicator, round: &Arc<Round>) -> Result<PendingDispatch<'static>> {
    let borrowed = round.brought.dispatch()?;
    let owned = |tensor: &TensorRef<'_>| -> Result<TensorRef<'static>> {
        let memory = CallerMemory {
            data: tensor.address(),
            dtype: tensor.dtype().unwrap(),
            shape: [tensor.rows(), tensor.cols()],
            stride: [tensor.cols(), 1],
            device: None,
        };
        // SAFETY: the pending operation keeps the round, which nobody changes.
        Ok(unsafe { TensorRef::<'static>::from_memory(&memory)? })
    };
    let dispatch = Dispatch {
        x: owned(&borrowed.x)?,
        scales: borrowed.scales.as_ref().map(owned).transpose()?,
        topk_idx: owned(&borrowed.topk_idx)?,
        topk_weights: borrowed.topk_weights.as_ref().map(owned).transpose()?,
        layout: borrowed.layout,
        cast: borrowed.cast,
        sizes: borrowed.sizes,
    };
    Ok(comm.dispatch_send(&dispatch)?.keeping(Arc::clone(round)))
}

#[test]
fn a_pending_operation_keeps_what_it_was_given_until_it_is_received() {
    let case = case(Layout::Flat);
    with_handles(4, &case, |mut comm| {
        let round = Arc::new(Round::new(&case, comm.rank()));
        let pending = send_owned(&mut comm, &round)?;
        // On any thread.
        let pending = std::thread::spawn(move || pending).join().unwrap();
        assert_eq!(Arc::strong_count(&round), 2);
        let (received, _handle) = comm.dispatch_recv(pending)?;
        assert_eq!(Arc::strong_count(&round), 1);
        round.check_received(&received).unwrap();
        drop(received);
        Ok(comm.close()?)
    });
}

#[test]
fn what_an_operation_kept_that_is_never_received_lives_as_long_as_the_communicator() {
    let case = case(Layout::Flat);
    with_handles(4, &case, |mut comm| {
        let round = Arc::new(Round::new(&case, comm.rank()));
        drop(send_owned(&mut comm, &round)?);
        assert_eq!(Arc::strong_count(&round), 2, "others may still read it");
        drop(comm);
        assert_eq!(Arc::strong_count(&round), 1);
        Ok(())
    });
}
