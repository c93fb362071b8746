//! The software ConnectX behind C functions: a **stand-in for hardware, for tests only**. Kernels that run on
//! the CPU's model of a GPU (`backends/gpu/tests/model`) store to its registers, and it reads and writes the
//! memory of their process. `model.h` declares the functions.
//!
//! A [`World`] has one device per rank, and a thread that lets time pass. Time is its own: it moves on only
//! when no device has anything to do now.
//!
//! A violation prints a dump and ends the process (`abort`).

mod world;

use std::ffi::{CStr, c_char};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tokenyard_sys_mlx5::cqe::syndrome;

pub use world::{QueueMemory, World};

/// A world, and the thread that drives it.
pub struct Running {
    world: Arc<World>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// The pause of the thread while there is no work.
const NAP: Duration = Duration::from_micros(20);

fn drive(world: &World, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        if !world.step() {
            std::thread::sleep(NAP);
        }
    }
}

/// Makes `ranks` devices. `faults` is a plan for device `faulty`, as TOML; null for none.
///
/// Returns null, and writes the cause to standard error, if the plan is invalid.
///
/// # Safety
/// `faults` is null or a string that ends with 0. All memory that the world is given stays mapped until it has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hca_world(
    ranks: u32,
    adaptive: bool,
    seed: u64,
    faulty: u32,
    faults: *const c_char,
) -> *mut Running {
    let text = if faults.is_null() {
        String::new()
    } else {
        // SAFETY: by this function's contract.
        unsafe { CStr::from_ptr(faults) }.to_string_lossy().into_owned()
    };
    // SAFETY: by this function's contract.
    match unsafe { World::new(ranks, adaptive, seed, faulty, &text) } {
        Ok(world) => {
            let (world, stop) = (Arc::new(world), Arc::default());
            Box::into_raw(Box::new(Running { world, stop, thread: None }))
        }
        Err(text) => {
            eprintln!("hca_world: {text}");
            std::ptr::null_mut()
        }
    }
}

/// Registers memory of a rank, for all uses. Returns its key; 0 if it is refused.
///
/// # Safety
/// A world that lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hca_register(
    world: *const Running,
    rank: u32,
    address: u64,
    bytes: u64,
) -> u32 {
    // SAFETY: by this function's contract.
    let running = unsafe { &*world };
    running.world.register(rank, address, bytes).unwrap_or_else(|text| {
        eprintln!("hca_register: {text}");
        0
    })
}

/// Makes a queue pair of a rank. Returns its number; 0 if it is refused.
///
/// # Safety
/// A world that lives, and a queue's memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hca_queue(
    world: *const Running,
    rank: u32,
    memory: *const QueueMemory,
) -> u32 {
    // SAFETY: by this function's contract.
    let (running, memory) = unsafe { (&*world, *memory) };
    running.world.queue(rank, memory).unwrap_or_else(|text| {
        eprintln!("hca_queue: {text}");
        0
    })
}

/// Connects a queue pair to a queue pair of a peer. Returns whether that succeeded.
///
/// # Safety
/// A world that lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hca_connect(
    world: *const Running,
    rank: u32,
    number: u32,
    peer: u32,
    peer_number: u32,
) -> bool {
    // SAFETY: by this function's contract.
    let running = unsafe { &*world };
    let connected = running.world.connect(rank, number, peer, peer_number);
    connected.inspect_err(|text| eprintln!("hca_connect: {text}")).is_ok()
}

/// Starts the thread that lets time pass.
///
/// # Safety
/// A world that lives and was not started, and that no other thread uses now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hca_start(world: *mut Running) {
    // SAFETY: by this function's contract.
    let running = unsafe { &mut *world };
    let (world, stop) = (Arc::clone(&running.world), Arc::clone(&running.stop));
    running.thread = Some(std::thread::spawn(move || drive(&world, &stop)));
}

/// Stores eight bytes to a register, in the order in which they lie in memory.
///
/// # Safety
/// A world that lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hca_ring(world: *const Running, address: u64, value: u64) {
    // SAFETY: by this function's contract.
    unsafe { &*world }.world.ring(address, value.to_ne_bytes());
}

/// The meaning of a completion's syndrome, as text.
#[unsafe(no_mangle)]
pub extern "C" fn hca_syndrome(code: u32) -> *const c_char {
    let words = syndrome::words(u8::try_from(code).unwrap_or(0));
    world::c_words(words)
}

/// Ends a world.
///
/// # Safety
/// A world that lives, and that no thread uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hca_end(world: *mut Running) {
    // SAFETY: by this function's contract: made by `hca_world`, freed once.
    let mut running = unsafe { Box::from_raw(world) };
    running.stop.store(true, Ordering::Release);
    if running.thread.take().is_some_and(|thread| thread.join().is_err()) {
        eprintln!("hca_end: the thread of the world has panicked");
        std::process::abort();
    }
}
