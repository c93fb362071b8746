//! Programs that run under the stand-in, and use our own bindings.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use tokenyard_sys_mlx5::cqe::{self, Kind, Word};
use tokenyard_sys_mlx5::doorbell::{Ring, SEND, record_word};
use tokenyard_sys_mlx5::ffi::{Device, RawContext, RawPd};
use tokenyard_sys_mlx5::mailbox::{
    CreateCq, CreateCqOut, CreateQp, CreateQpOut, Init2Rtr, QueryHcaCap, QueryHcaCapOut, QueryQp,
    QueryQpOut, Rst2Init, Rtr2Rts,
};
use tokenyard_sys_mlx5::wqe::{BLOCK, Control, Local, Remote, Request};
use tokenyard_sys_mlx5::{Devx, Library, Object, Uar, UarKind, Umem, UmemRequest};
use tokenyard_sys_verbs::ffi::RawMr;

/// Blocks of the send queue.
const DEPTH: u64 = 64;
/// Where completion and record lie behind the send queue.
const CQ: usize = 4096;
const RECORD: usize = 8192;

pub(crate) fn run(guest: &str) {
    match guest {
        "devices" => devices(),
        "devx" => devx(),
        "violation" => {
            let mut queue = Queue::new();
            let mut block = Request::Nop.to_block(queue.control());
            block[8] = 1;
            queue.post(&block);
            queue.wait();
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

/// Three pages: send queue, completion, record.
#[repr(align(4096))]
struct Pages([u8; 3 * 4096]);

/// A queue pair of our own, connected to itself, with a window.
struct Queue {
    // Dropped in this order.
    qp: Object,
    _cq: Object,
    _umem: Umem,
    uar: Uar,
    pages: &'static mut Pages,
    window: &'static [AtomicU64],
    key: u32,
    qpn: u32,
    next: u16,
    name: String,
}

/// Memory that requests read and write.
struct GuestWindow {
    words: &'static [AtomicU64],
    key: u32,
}

impl Queue {
    fn new() -> Self {
        let (verbs, library) = (Verbs::new(), Library::get().unwrap());
        let (device, name) = verbs.list().remove(0);
        // SAFETY: a device of a list that is never freed; the context is never closed; types of verbs.h.
        let (context, devx, pd) = unsafe {
            assert!(library.is_supported(device));
            let context: NonNull<RawContext> = library.open(device).unwrap();
            type Alloc = unsafe extern "C" fn(*mut RawContext) -> *mut RawPd;
            let pd = verbs.call::<Alloc>("ibv_alloc_pd")(context.as_ptr());
            (context, Devx::new(library, context), pd)
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
        let _ = context;
        let lid = 1;
        std::mem::forget(verbs);
        Self::connected(&devx, pdn, lid, GuestWindow { words: window, key }, name)
    }

    fn connected(devx: &Arc<Devx>, pd: u32, lid: u16, window: GuestWindow, name: String) -> Self {
        let GuestWindow { words: window, key } = window;
        // rdma-core 44 does not know the kind that a GPU needs.
        assert!(Uar::new(devx, UarKind::Dedicated).is_err());
        let uar = Uar::new(devx, UarKind::Uncached).unwrap();
        assert_eq!(uar.register() as usize - uar.base() as usize, 0x800);
        let pages = Box::leak(Box::new(Pages([0; 3 * 4096])));
        pages.0[CQ..CQ + cqe::BYTES].fill(cqe::FILL);
        let address = (&raw mut pages.0).expose_provenance() as u64;
        let request = UmemRequest { address, bytes: pages.0.len(), dmabuf: None };
        // SAFETY: the pages stay.
        let umem = unsafe { Umem::new(devx, &request) }.unwrap();
        let cq = CreateCq {
            dbr_umem_id: umem.id(),
            uar_page: uar.page(),
            eqn: devx.event_queue(0).unwrap() as u8,
            dbr_offset: RECORD as u64 + 64,
            buffer_offset: CQ as u64,
            buffer_umem_id: umem.id(),
            log_size: 0,
        };
        // SAFETY: umem and page live as long, beside it.
        let (cq, CreateCqOut { cqn, .. }) = unsafe { Object::new(devx, &cq) }.unwrap();
        let qp = CreateQp {
            pd,
            log_sq_size: DEPTH.ilog2() as u8,
            uar_page: uar.page(),
            send_cqn: cqn,
            receive_cqn: cqn,
            dbr_offset: RECORD as u64,
            dbr_umem_id: umem.id(),
            wq_umem_id: umem.id(),
            ..CreateQp::default()
        };
        // SAFETY: as above, and the completion queue.
        let (qp, CreateQpOut { qpn, .. }) = unsafe { Object::new(devx, &qp) }.unwrap();
        let rights = Rst2Init {
            qpn,
            atomic_mode: 3,
            remote_read: true,
            remote_write: true,
            remote_atomic: true,
            pkey_index: 0,
            port: 1,
        };
        qp.modify(&rights).unwrap();
        let peer = Init2Rtr {
            qpn,
            mtu: 5,
            log_msg_max: 30,
            remote_qpn: qpn,
            log_rra_max: 4,
            remote_lid: lid,
            port: 1,
            ..Init2Rtr::default()
        };
        qp.modify(&peer).unwrap();
        let send = Rtr2Rts {
            qpn,
            ack_timeout: 18,
            log_sra_max: 4,
            retry_count: 7,
            rnr_retry: 7,
            next_send_psn: 0,
        };
        qp.modify(&send).unwrap();
        let state: QueryQpOut = qp.query(&QueryQp { qpn }).unwrap();
        assert_eq!(state.state, 3);
        Self { qp, _cq: cq, _umem: umem, uar, pages, window, key, qpn, next: 0, name }
    }

    fn control(&self) -> Control {
        Control { index: self.next, qpn: self.qpn, signaled: true, fence: false }
    }

    fn store(&mut self, at: usize, bytes: &[u8]) {
        for (offset, word) in bytes.chunks_exact(4).enumerate() {
            let word = u32::from_ne_bytes(word.try_into().unwrap());
            let to: *mut u32 = self.pages.0[at + 4 * offset..].as_mut_ptr().cast();
            // SAFETY: inside the pages, and aligned: callers give multiples of 4.
            unsafe { to.write_volatile(word) };
        }
    }

    fn post(&mut self, block: &[u8; BLOCK]) {
        let slot = usize::from(self.next) % DEPTH as usize * BLOCK;
        self.store(slot, block);
        self.next = self.next.wrapping_add(1);
        fence(Ordering::SeqCst);
        self.store(RECORD + SEND, &record_word(self.next));
        fence(Ordering::SeqCst);
        let ring = Ring::NextIndex { next: self.next, qpn: self.qpn }.to_bytes();
        // SAFETY: the register of a page that lives.
        unsafe { self.uar.register().write_volatile(u64::from_ne_bytes(ring)) };
    }

    /// Waits until all that was posted is done.
    fn wait(&self) {
        let limit = Instant::now() + Duration::from_secs(60);
        loop {
            let at: *const u32 = self.pages.0[CQ + cqe::layout::COUNTER..].as_ptr().cast();
            // SAFETY: inside the pages, and aligned.
            let word = Word::from_bytes(unsafe { at.read_volatile() }.to_ne_bytes());
            match word.kind {
                Kind::Request if word.counter == self.next.wrapping_sub(1) => break,
                Kind::Request | Kind::None => {}
                other => panic!("found completion {other:?}"),
            }
            assert!(Instant::now() < limit, "found {word:?}; expected {:#x}", self.next);
            std::thread::yield_now();
        }
        fence(Ordering::SeqCst);
    }

    fn at(&self, word: usize) -> u64 {
        self.window[word..].as_ptr() as u64
    }
}

/// A thousand puts with signals, over queues that our own mailboxes made.
fn devx() {
    let mut queue = Queue::new();
    let (source, target, total, sink) = (0, 100, 200, 201);
    for round in 1..=1000 {
        queue.window[source].store(round, Ordering::SeqCst);
        let key = queue.key;
        let from = Local { address: queue.at(source), key, bytes: 8 };
        let to = |word| Remote { address: queue.at(word), key };
        let sink = Local { address: queue.at(sink), key, bytes: 8 };
        let write = Request::Write { to: to(target), from };
        let add = Request::FetchAdd { to: to(total), add: 1, sink };
        for request in [write, add] {
            let block = request.to_block(queue.control());
            queue.post(&block);
        }
        queue.wait();
        assert_eq!(queue.window[target].load(Ordering::SeqCst), round);
    }
    let state: QueryQpOut = queue.qp.query(&QueryQp { qpn: queue.qpn }).unwrap();
    assert_eq!(state.hw_sq_counter, 2000);
    let total = queue.window[total].load(Ordering::SeqCst);
    println!("{}: 1000 puts, total {total}", queue.name);
}
