//! Programs that run under the stand-in, and use our own bindings.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokenyard_ibgda::{QueueFault, QueuePair, Steps};
use tokenyard_sys_mlx5::cqe::syndrome;
use tokenyard_sys_mlx5::ffi::{Device, RawContext, RawPd};
use tokenyard_sys_mlx5::mailbox::{Init2Rtr, QueryHcaCap, QueryHcaCapOut, Rst2Init, Rtr2Rts};
use tokenyard_sys_mlx5::wqe::{Local, Remote, Request};
use tokenyard_sys_mlx5::{Devx, Library, Uar, UarKind};
use tokenyard_sys_verbs::ffi::RawMr;

/// Requests that the queue pair has room for.
const DEPTH: u32 = 64;

pub(crate) fn run(guest: &str) {
    match guest {
        "devices" => devices(),
        "devx" => devx(),
        "failure" => failure(),
        "violation" => {
            let mut guest = Guest::new();
            // An addition returns 8 bytes.
            let sink = Local { bytes: 16, ..guest.local(1) };
            guest.queue.post(&Request::FetchAdd { to: guest.to(0), add: 1, sink }, true);
            guest.queue.ring();
            let _ = guest.wait();
        }
        other => panic!("found guest {other}"),
    }
}

/// The calls of libibverbs that this needs.
struct Verbs(libloading::Library);

impl Verbs {
    fn new() -> Self {
        // SAFETY: libibverbs' initialisers set up its own data only.
        Self(unsafe { libloading::Library::new("libibverbs.so.1") }.unwrap())
    }

    /// # Safety
    /// The function has this type in verbs.h.
    unsafe fn call<T: Copy>(&self, name: &str) -> T {
        // SAFETY: by this function's contract.
        *unsafe { self.0.get::<T>(name.as_bytes()) }.unwrap()
    }

    fn list(&self) -> Vec<(*mut Device, String)> {
        type List = unsafe extern "C" fn(*mut c_int) -> *mut *mut Device;
        type Name = unsafe extern "C" fn(*mut Device) -> *const c_char;
        let mut count = 0;
        // SAFETY: types of verbs.h; the list is never freed, and has `count` devices with names.
        unsafe {
            let list = self.call::<List>("ibv_get_device_list")(&mut count);
            let name = self.call::<Name>("ibv_get_device_name");
            (0..count as usize)
                .map(|at| *list.add(at))
                .map(|device| (device, CStr::from_ptr(name(device)).to_str().unwrap().to_owned()))
                .collect()
        }
    }
}

fn devices() {
    Verbs::new().list().iter().for_each(|(_, name)| println!("{name}"));
}

/// A queue pair, made by our bindings and connected to itself, and a window.
struct Guest {
    queue: QueuePair,
    window: &'static [AtomicU64],
    key: u32,
    name: String,
}

/// The path of a queue pair to itself, on the port with local id 1.
fn to_itself(number: u32) -> Steps {
    let init = Rst2Init {
        qpn: 0,
        atomic_mode: 3,
        remote_read: true,
        remote_write: true,
        remote_atomic: true,
        pkey_index: 0,
        port: 1,
    };
    let receive = Init2Rtr {
        mtu: 5,
        log_msg_max: 30,
        remote_qpn: number,
        log_rra_max: 4,
        remote_lid: 1,
        port: 1,
        ..Init2Rtr::default()
    };
    let send = Rtr2Rts {
        qpn: 0,
        ack_timeout: 18,
        log_sra_max: 4,
        retry_count: 7,
        rnr_retry: 7,
        next_send_psn: 0,
    };
    Steps { init, receive, send }
}

impl Guest {
    fn new() -> Self {
        let (verbs, library) = (Verbs::new(), Library::get().unwrap());
        let (device, name) = verbs.list().remove(0);
        // SAFETY: a device of a list that is never freed; the context is never closed; types of verbs.h.
        let (devx, pd) = unsafe {
            assert!(library.is_supported(device));
            let context: NonNull<RawContext> = library.open(device).unwrap();
            type Alloc = unsafe extern "C" fn(*mut RawContext) -> *mut RawPd;
            let pd = verbs.call::<Alloc>("ibv_alloc_pd")(context.as_ptr());
            (Devx::new(library, context), pd)
        };
        let capabilities: QueryHcaCapOut = devx.command(&QueryHcaCap::default()).unwrap();
        assert_eq!(capabilities.cqe_version, 1);
        let window: &'static [AtomicU64] = Vec::leak((0..512).map(|_| AtomicU64::new(0)).collect());
        type Register = unsafe extern "C" fn(*mut RawPd, *mut c_void, usize, c_int) -> *mut RawMr;
        // SAFETY: the window stays; types of verbs.h.
        let (key, pdn) = unsafe {
            let at = window.as_ptr().cast_mut().cast();
            let mr = verbs.call::<Register>("ibv_reg_mr")(pd, at, size_of_val(window), 15);
            ((*mr).lkey, library.pd_number(pd).unwrap())
        };
        std::mem::forget(verbs);
        // rdma-core 44 does not know the kind that a GPU needs.
        assert!(Uar::new(&devx, UarKind::Dedicated).is_err());
        let uar = Arc::new(Uar::new(&devx, UarKind::Uncached).unwrap());
        assert_eq!(uar.register() as usize - uar.base() as usize, 0x800);
        for depth in [0, 32, 65, 1 << 16] {
            let refused = QueuePair::new(&devx, &uar, pdn, depth).unwrap_err().to_string();
            assert!(refused.contains("make queue pair"), "{refused}");
        }
        let queue = QueuePair::new(&devx, &uar, pdn, DEPTH).unwrap();
        queue.connect(&to_itself(queue.number())).unwrap();
        Self { queue, window, key, name }
    }

    fn at(&self, word: usize) -> u64 {
        self.window[word..].as_ptr() as u64
    }

    fn to(&self, word: usize) -> Remote {
        Remote { address: self.at(word), key: self.key }
    }

    fn local(&self, word: usize) -> Local {
        Local { address: self.at(word), key: self.key, bytes: 8 }
    }

    /// Waits until all that was posted is done.
    fn wait(&mut self) -> Result<(), QueueFault> {
        let limit = Instant::now() + Duration::from_secs(60);
        while self.queue.done()? < self.queue.posted() {
            assert!(Instant::now() < limit, "found {:?}", self.queue.done());
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// A thousand puts with signals, on a queue pair that our own mailboxes made.
fn devx() {
    let mut guest = Guest::new();
    let (source, target, total, sink) = (0, 100, 200, 201);
    for round in 1..=1000 {
        guest.window[source].store(round, Ordering::SeqCst);
        let write = Request::Write { to: guest.to(target), from: guest.local(source) };
        let add = Request::FetchAdd { to: guest.to(total), add: 1, sink: guest.local(sink) };
        assert!(guest.queue.post(&write, false) && guest.queue.post(&add, true));
        guest.queue.ring();
        guest.wait().unwrap();
        assert_eq!(guest.window[target].load(Ordering::SeqCst), round);
    }
    // Without a completion, there is room for `DEPTH` requests.
    let posted = (0..2 * DEPTH).filter(|_| guest.queue.post(&Request::Nop, true)).count();
    assert_eq!(posted, DEPTH as usize);
    guest.queue.ring();
    guest.wait().unwrap();
    let total = guest.window[total].load(Ordering::SeqCst);
    println!("{}: 1000 puts, total {total}", guest.name);
}

/// A plan of faults makes the second request fail.
fn failure() {
    let mut guest = Guest::new();
    for _ in 0..2 {
        guest.queue.post(&Request::Write { to: guest.to(1), from: guest.local(0) }, true);
        guest.queue.ring();
    }
    let fault = guest.wait().unwrap_err();
    let number = guest.queue.number();
    let expected = QueueFault { number, index: 1, syndrome: syndrome::RETRIES, ..fault };
    assert_eq!(fault, expected);
    println!("{}: {fault}", guest.name);
}
