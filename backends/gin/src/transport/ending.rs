//! How a communicator of NCCL ends: on a thread of its own, with a cap. `ncclCommAbort` joins threads of NCCL and has
//! hung where only some ranks called it. A communicator that has not ended within the cap stays for the life of the
//! process.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use tokenyard_gpu::driver::Context;
use tokenyard_sys_nccl::{Nccl, consts};

use super::memory::OwnedWindow;

const LOOK: Duration = Duration::from_millis(1);

/// A communicator, and the objects that were made of it.
#[derive(Debug)]
pub(super) struct Held {
    nccl: Arc<Nccl>,
    context: Arc<Context>,
    pub(super) comm: *mut c_void,
    /// `ncclWindow_t` by id.
    pub(super) windows: Vec<*mut c_void>,
    /// An `ncclDevComm`.
    pub(super) dev_comm: Option<Vec<u64>>,
    /// Memory that it has registered, or was asked to register: freed after the communicator, and never before (INV-8).
    pub(super) memory: Vec<OwnedWindow>,
}

// SAFETY: handles of NCCL's, which any thread may use, one at a time.
unsafe impl Send for Held {}

impl Held {
    pub(super) fn new(nccl: &Arc<Nccl>, context: &Arc<Context>, comm: *mut c_void) -> Self {
        Self {
            nccl: Arc::clone(nccl),
            context: Arc::clone(context),
            comm,
            windows: Vec::new(),
            dev_comm: None,
            memory: Vec::new(),
        }
    }

    /// Whether the last call has ended with success by `until`.
    fn is_over(&self, until: Instant) -> bool {
        loop {
            let mut state = consts::IN_PROGRESS;
            // SAFETY: a communicator that lives, and a place for the result.
            let asked = unsafe { (self.nccl.comm_get_async_error)(self.comm, &mut state) };
            match state {
                consts::IN_PROGRESS if asked == consts::SUCCESS && Instant::now() < until => {
                    std::thread::sleep(LOOK);
                }
                state => return asked == consts::SUCCESS && state == consts::SUCCESS,
            }
        }
    }

    /// Ends all parts in order, while every call succeeds. Returns whether all calls did.
    fn finish(&mut self, until: Instant) -> bool {
        if let Some(dev_comm) = self.dev_comm.take() {
            // SAFETY: made by NCCL, and no kernel uses it any more.
            let status =
                unsafe { (self.nccl.dev_comm_destroy)(self.comm, dev_comm.as_ptr().cast()) };
            if status != consts::SUCCESS && status != consts::IN_PROGRESS || !self.is_over(until) {
                std::mem::forget(dev_comm);
                return false;
            }
        }
        while let Some(window) = self.windows.pop() {
            // SAFETY: registered by NCCL.
            unsafe { (self.nccl.comm_window_deregister)(self.comm, window) };
            if !self.is_over(until) {
                return false;
            }
        }
        // SAFETY: a communicator that lives.
        unsafe { (self.nccl.comm_finalize)(self.comm) };
        // SAFETY: as above; it has ended all that it was asked for.
        self.is_over(until) && unsafe { (self.nccl.comm_destroy)(self.comm) } == consts::SUCCESS
    }

    fn end(mut self, is_well: bool, until: Instant) {
        let _entered = self.context.enter();
        // Kernels may still be ending. An error here is that of an earlier fault, which is already known.
        // SAFETY: the context is current, else the call returns an error.
        let _ = unsafe { sys::cuCtxSynchronize() };
        if !(is_well && self.finish(until)) {
            // SAFETY: a communicator that lives; nothing uses it afterwards.
            let status = unsafe { (self.nccl.comm_abort)(self.comm) };
            tracing::debug!("ncclCommAbort ended with status {status}");
        }
    }
}

/// Ends a communicator. One that takes longer than `cap` is left behind, with the windows that it has registered.
pub(super) fn end(held: Held, is_well: bool, cap: Duration) {
    let (ended, over) = mpsc::channel();
    // An orderly end gets half of the time: an abort after it needs the rest.
    let until = Instant::now() + cap / 2;
    let thread = std::thread::Builder::new().name("gin-end".into()).spawn(move || {
        held.end(is_well, until);
        let _ = ended.send(());
    });
    if thread.is_err() || over.recv_timeout(cap).is_err() {
        tracing::warn!(
            "NCCL has not let go of its communicator in {cap:?}: it is left behind, and so is what it has registered"
        );
    }
}
