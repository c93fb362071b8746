//! State that operations hold between their halves.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::sync::Arc;

use anyhow::Result;
use tokenyard_conformance::moe::exchange::options;
use tokenyard_conformance::moe::oracle::{Case, Layout};
use tokenyard_conformance::moe::round::Round;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::{
    CallerMemory, Communicator, CommunicatorOptions, Dispatch, PendingDispatch, TensorRef,
};
use tokenyard_core::config::Config;

const RANKS: u32 = 2;

fn case(layout: Layout) -> Case {
    Case { ranks: RANKS as usize, experts: 4, topk: 2, layout, ..Case::default() }
}

/// Runs `body` on both ranks of a communicator with `handles` handles.
fn with_handles(handles: u32, case: &Case, body: impl Fn(Communicator) -> Result<()> + Sync) {
    with_world("", handles, case, body);
}

/// Runs `body` as [`with_handles`] does, with more of the config's `[world]`.
fn with_world(
    world: &str,
    handles: u32,
    case: &Case,
    body: impl Fn(Communicator) -> Result<()> + Sync,
) {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let components = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";
    let text = format!("[world]\ndeadline_ms = 10000\n{world}\n{components}");
    let config = Config::parse(&text, "pending").unwrap();
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
            let tensors = round.tensors.dispatch()?;
            let live = round.dispatch(&mut comm).unwrap();
            let mut buffers = round.experts(&live.received).unwrap();
            let combine = buffers.arguments(&round.tensors, &live.handle).unwrap();
            let pending = comm.combine_send(&live.handle, combine)?;
            drop(live.handle);
            let full = comm.dispatch(&tensors).unwrap_err();
            assert_eq!(full.kind(), ErrorKind::Full, "{full}");
            comm.combine_recv(pending)?;
            round.check_combined(&buffers.into_got()?)?;
            round.run(&mut comm).unwrap();

            let live = round.dispatch(&mut comm).unwrap();
            let replay = round.tensors.replay_on(&comm).unwrap();
            let pending = comm.replay_send(&live.handle, &replay)?;
            drop(live.handle);
            assert_eq!(comm.dispatch(&tensors).unwrap_err().kind(), ErrorKind::Full);
            round.check_received(&comm.replay_recv(pending)?).unwrap();
            round.run(&mut comm).unwrap();
            Ok(comm.close()?)
        });
    }
}

/// A dispatch as a framework sends it: the tensors are not borrowed, and an object of its own holds the
/// operation.
fn send_owned(comm: &mut Communicator, round: &Arc<Round>) -> Result<PendingDispatch<'static>> {
    let borrowed = round.tensors.dispatch()?;
    let owned = |tensor: &TensorRef<'_>| -> Result<TensorRef<'static>> {
        let memory = CallerMemory {
            data: tensor.address(),
            dtype: tensor.dtype().unwrap(),
            shape: [tensor.rows(), tensor.cols()],
            stride: [tensor.cols(), 1],
            device: None,
        };
        // SAFETY: the pending operation holds the round, which no code changes.
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
        max_tokens: borrowed.max_tokens,
        cap: borrowed.cap,
        scale_layout: borrowed.scale_layout,
        source_index: borrowed.source_index,
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
fn inputs_that_an_operation_holds_and_that_is_never_received_live_as_long_as_the_communicator() {
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

/// Address, shape and columns: the whole description of a tensor of another language.
type Named = (usize, [usize; 2], [usize; 2]);

fn announced(memory: Option<CallerMemory>) -> Option<Named> {
    memory.map(|memory| (memory.data as usize, memory.shape, memory.stride))
}

fn arrived(tensor: Option<TensorRef<'_>>) -> Option<Named> {
    let columns = |tensor: &TensorRef<'_>| tensor.cols();
    tensor.map(|t| (t.address() as usize, [t.rows(), columns(&t)], [columns(&t), 1]))
}

#[test]
fn outputs_have_their_places_from_the_send_on_and_keep_them_while_they_are_held() {
    let expert_major = Layout::ExpertMajor { alignment: 8, zero_padding: true };
    let rank_major = Layout::RankMajor { zero_padding: true };
    for layout in [Layout::Flat, expert_major, Layout::Packed, rank_major] {
        let case = case(layout);
        with_handles(8, &case, |mut comm| {
            let round = Round::new(&case, comm.rank());
            let pending = comm.dispatch_send(&round.tensors.dispatch()?)?;
            let arriving = comm.dispatch_output(&pending)?.unwrap();
            let (received, handle) = comm.dispatch_recv(pending)?;
            round.check_received(&received).unwrap();
            assert_eq!(announced(arriving.x()), arrived(Some(received.x())));
            assert_eq!(announced(arriving.ids()), arrived(received.ids()));
            assert_eq!(announced(arriving.weights()), arrived(received.weights()));
            assert_eq!(announced(arriving.slots()), arrived(received.slots()));
            assert_eq!(announced(arriving.ranges()), arrived(received.ranges()));
            assert_eq!(arriving.x().unwrap().dtype, received.x().dtype().unwrap());
            drop((received, handle));
            let held = arriving.x().unwrap().data as usize;
            let apart = |comm: &mut Communicator| -> Result<bool> {
                let live = round.dispatch(comm)?;
                let found = live.received.x().address() as usize;
                let pending = comm.replay_send(&live.handle, &round.tensors.replay_on(comm)?)?;
                let replayed = comm.replay_output(&pending)?.unwrap();
                let received = comm.replay_recv(pending)?;
                assert_eq!(announced(replayed.x()), arrived(Some(received.x())));
                Ok(found != held)
            };
            assert!(apart(&mut comm)?, "the memory is held");
            // On any thread.
            std::thread::spawn(move || drop(arriving)).join().unwrap();
            assert!(!apart(&mut comm)?, "the memory is used again");
            Ok(comm.close()?)
        });
    }
}

#[test]
fn an_output_that_may_still_move_has_no_place_before_it_is_received() {
    let case = case(Layout::Flat);
    with_world("on_failure = \"mask\"", 4, &case, |mut comm| {
        let round = Round::new(&case, comm.rank());
        let pending = comm.dispatch_send(&round.tensors.dispatch()?)?;
        assert!(comm.dispatch_output(&pending)?.is_none(), "a rank may be left out");
        comm.dispatch_recv(pending)?;
        Ok(comm.close()?)
    });
}
