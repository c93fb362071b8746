//! Ranks as threads for the tests of operations: their windows lie in the memory of this process.

use std::ffi::c_void;
use std::time::Duration;

use tokenyard_core::abi;
use tokenyard_core::kernels::{KernelShape, kernel_shape};
use tokenyard_core::moe::Shape;
use tokenyard_core::transport::{Command, Event, NO_CAPABILITIES};
use tokenyard_core::wait::WaitBoard;

/// The windows of all ranks.
pub(crate) struct Ranks {
    shape: KernelShape,
    windows: Vec<Vec<CacheLine>>,
    cap: Duration,
}

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct CacheLine([u8; 64]);

impl Ranks {
    /// `shape`: that of rank 0. `bytes`: of a window. `cap`: the end of each wait.
    pub(crate) fn new(shape: KernelShape, bytes: u64, cap: Duration) -> Self {
        let window = vec![CacheLine([0; 64]); bytes.div_ceil(64) as usize];
        Self { shape, windows: vec![window; shape.ranks as usize], cap }
    }

    /// Runs a body on each rank, in a thread of its own.
    pub(crate) fn run(mut self, body: impl Fn(KernelShape, u64, &abi::TyPlan) + Sync) {
        let windows: Vec<u64> =
            self.windows.iter_mut().map(|window| window.as_mut_ptr() as u64).collect();
        let (shape, cap_ns) = (self.shape, self.cap.as_nanos() as u64);
        std::thread::scope(|scope| {
            for rank in 0..shape.ranks {
                let (windows, body) = (&windows, &body);
                scope.spawn(move || {
                    let (board, table) = (WaitBoard::default(), table());
                    let plan = abi::TyPlan {
                        size: size_of::<abi::TyPlan>(),
                        scale_up: link(&table, windows),
                        scale_out: abi::TyLink { table: std::ptr::null(), ..link(&table, windows) },
                        windows: std::ptr::null(),
                        window_count: 0,
                        board: (&raw const board).cast_mut().cast(),
                        cap_ns,
                        lost: std::ptr::null(),
                    };
                    body(KernelShape { rank, ..shape }, windows[rank as usize], &plan);
                });
            }
        });
    }
}

/// The shape of an operation, for rank 0 of one domain.
pub(crate) fn shape(ranks: u32, in_flight: u32, message_bytes: u64, runs: u32) -> KernelShape {
    let world = Shape { ranks, experts: ranks, topk: 1, hidden: 1, max_tokens: 1 };
    KernelShape { runs, message_bytes, ..kernel_shape(&world, 1, in_flight, 1) }
}

fn link(table: &abi::TyTransportTable, windows: &Vec<u64>) -> abi::TyLink {
    let instance = std::ptr::from_ref(windows).cast_mut().cast();
    abi::TyLink { table, instance, capabilities: NO_CAPABILITIES }
}

/// A transport that maps the windows, and does nothing else.
fn table() -> abi::TyTransportTable {
    // SAFETY: numbers, pointers and slots, for which zero means nothing.
    let none: abi::TyTransportTable = unsafe { std::mem::zeroed() };
    abi::TyTransportTable {
        name: abi::TyStr { data: b"mapped".as_ptr().cast(), bytes: 6 },
        post: Some(post),
        poll: Some(poll),
        read_signal: Some(read_signal),
        peer_address: Some(peer_address),
        health: Some(health),
        ..none
    }
}

unsafe extern "C" fn peer_address(
    instance: *mut c_void,
    _: u32,
    peer: u32,
    address: *mut *mut u8,
    _: *mut abi::TyError,
) -> i32 {
    // SAFETY: `link` has made the instance of the list of windows; the host passes a place for the result.
    unsafe { *address = (&*instance.cast::<Vec<u64>>())[peer as usize] as *mut u8 };
    abi::TY_OK
}

unsafe extern "C" fn health(_: *mut c_void, _: *mut abi::TyError) -> i32 {
    abi::TY_OK
}

unsafe extern "C" fn post(
    _: *mut c_void,
    _: u32,
    _: *const Command,
    _: usize,
    _: *mut usize,
) -> i32 {
    abi::TY_INTERNAL
}

unsafe extern "C" fn poll(_: *mut c_void, _: u32, _: *mut Event, _: usize, _: *mut usize) -> i32 {
    abi::TY_INTERNAL
}

unsafe extern "C" fn read_signal(_: *mut c_void, _: u32, _: u32) -> u64 {
    0
}
