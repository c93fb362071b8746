//! A caller that judges arguments before core can refuses an operation on all ranks.

// A helper of tests may panic as a test may.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, Barrier, Mutex};

use tokenyard_core::bootstrap::{Identity, RankId, Rendezvous, World, WorldOptions};
use tokenyard_core::communicator::{
    Combine, Communicator, CommunicatorOptions, Dispatch, Handle, RefusedCall, Replay, TensorMut,
    TensorRef,
};
use tokenyard_core::config::Config;
use tokenyard_core::moe::Layout;
use tokenyard_core::{Error, ErrorKind, Result};

const RANKS: usize = 2;
const HIDDEN: usize = 16;
const CONFIG: &str = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";
const LAYOUTS: [Layout; 3] =
    [Layout::Flat, Layout::ExpertMajor { alignment: 1, zero_padding: false }, Layout::Packed];

/// Runs `rank` on all ranks, which are threads.
fn on_ranks(rank: impl Fn(&mut Communicator) + Sync) {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let (meeting, items) = (Barrier::new(RANKS), Mutex::new(vec![Vec::new(); RANKS]));
    let meeting = Arc::new((meeting, items));
    std::thread::scope(|scope| {
        for me in 0..RANKS {
            let (meeting, rank) = (Arc::clone(&meeting), &rank);
            scope.spawn(move || {
                let exchange = move |mine: &[u8]| {
                    meeting.1.lock().unwrap()[me] = mine.to_vec();
                    meeting.0.wait();
                    Ok(meeting.1.lock().unwrap().clone())
                };
                let place = RankId { rank: me as u32, ranks: RANKS as u32, local_rank: me as u32 };
                let identity =
                    Identity::new(place, Rendezvous::Exchange(Box::new(exchange))).unwrap();
                let world = Arc::new(World::join(WorldOptions::new(identity)).unwrap());
                let config = Config::parse(CONFIG, "test").unwrap();
                let options = CommunicatorOptions::new(4, 2, HIDDEN as u32, 4);
                let mut comm = Communicator::open(&world, &config, options).unwrap();
                rank(&mut comm);
                comm.close().unwrap();
            });
        }
    });
}

fn dispatch(comm: &mut Communicator, layout: Layout) -> Result<(usize, Handle)> {
    let (rows, ids) = ([1.0_f32; HIDDEN], [0_i64, 3]);
    let (x, ids) = (TensorRef::from_slice(&rows, 1, HIDDEN)?, TensorRef::from_slice(&ids, 1, 2)?);
    let (received, handle) = comm.dispatch(&Dispatch { layout, ..Dispatch::new(x, ids) })?;
    Ok((received.tokens(), handle))
}

/// Rank 1 refuses; the others get a refusal, and rank 1 gets its own error back.
fn refused(
    comm: &mut Communicator,
    call: RefusedCall,
    others: impl FnOnce(&mut Communicator) -> Error,
) {
    if comm.rank() == 1 {
        let why = Error::new(ErrorKind::InvalidInput, "read x", "x is a list");
        let error = comm.refuse(call, why);
        assert_eq!((error.kind(), error.message()), (ErrorKind::InvalidInput, "x is a list"));
    } else {
        let error = others(comm);
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Refused, Some(1)), "{error}");
        assert!(error.to_string().contains("x is a list"), "{error}");
    }
}

#[test]
fn a_refused_call_of_every_kind_and_layout_ends_on_all_ranks_and_the_next_one_works() {
    on_ranks(|comm| {
        for layout in LAYOUTS {
            let call = RefusedCall::Dispatch(layout);
            refused(comm, call, |comm| dispatch(comm, layout).unwrap_err());
            let (tokens, handle) = dispatch(comm, layout).unwrap();
            assert_eq!(tokens, RANKS, "every rank sent its token here");
            let rows = [1.0_f32; HIDDEN];
            let x = TensorRef::from_slice(&rows, 1, HIDDEN).unwrap();
            let replay = Replay::new(x);
            refused(comm, RefusedCall::Replay(layout), |comm| {
                comm.replay(&handle, &replay).unwrap_err()
            });
            assert_eq!(comm.replay(&handle, &replay).unwrap().tokens(), RANKS);
            let expert_rows = vec![1.0_f32; handle.rows() * HIDDEN];
            let combine = |comm: &mut Communicator| {
                let mut out = [0.0_f32; HIDDEN];
                let x = TensorRef::from_slice(&expert_rows, handle.rows(), HIDDEN)?;
                let combine = Combine::new(x, TensorMut::from_slice(&mut out, 1, HIDDEN)?);
                comm.combine(&handle, combine)?;
                Ok::<_, Error>(out[0])
            };
            refused(comm, RefusedCall::Combine, |comm| combine(comm).unwrap_err());
            assert_eq!(combine(comm).unwrap(), 2.0, "one row of each of two ranks or experts");
        }
    });
}
