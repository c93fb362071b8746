//! Queue pairs of reliable connections. The type contains the state: an operation that a state does
//! not allow has no method there.
//!
//! ```compile_fail
//! # use tokenyard_sys_verbs::{Qp, Init, ffi::SendWr};
//! fn too_early(qp: &mut Qp<Init>, list: &mut SendWr) {
//!     unsafe { qp.post(list) }; // only `Qp<Rts>` sends
//! }
//! ```

use std::ffi::c_int;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::ffi::{self, AhAttr, QpAttr, QpCap, QpInitAttr, RawQp, SendWr};
use crate::library::CallError;
use crate::memory::Pd;
use crate::queue::{Cq, Srq, missing};

/// State: made, and nothing else.
#[derive(Debug)]
pub struct Reset;
/// State: has its port and rights.
#[derive(Debug)]
pub struct Init;
/// State: receives.
#[derive(Debug)]
pub struct Rtr;
/// State: receives and sends.
#[derive(Debug)]
pub struct Rts;

/// The parameters of a new queue pair.
#[derive(Clone, Debug)]
pub struct QpRequest {
    /// The completion queue of its sends.
    pub send_cq: Arc<Cq>,
    /// The completion queue of its receives.
    pub recv_cq: Arc<Cq>,
    /// The shared receive queue of its receives; `None` if it never receives.
    pub srq: Option<Arc<Srq>>,
    /// Most work requests that were not polled yet.
    pub depth: u32,
    /// Bytes of a payload that may be copied while it is posted.
    pub inline: u32,
}

/// The address of the peer, and the route to it.
#[derive(Clone, Copy, Debug)]
pub struct Address {
    /// The route; its port is the local port.
    pub route: AhAttr,
    /// The peer's queue pair.
    pub qpn: u32,
    /// 1 to 5: 256 to 4096 bytes.
    pub mtu: c_int,
}

/// The parameters of the receiving side.
#[derive(Clone, Copy, Debug)]
pub struct Receive {
    /// First packet sequence number of the peer.
    pub psn: u32,
    /// Reads and atomics of the peer that may be in flight at once.
    pub reads: u8,
    /// The time that a peer waits after it found no receive, as a code of the specification.
    pub rnr_timer: u8,
}

/// The parameters of the sending side.
#[derive(Clone, Copy, Debug)]
pub struct Send {
    /// First packet sequence number.
    pub psn: u32,
    /// Reads and atomics that may be in flight at once.
    pub reads: u8,
    /// The wait for an answer is at least 4.096 us times two to this power.
    pub timeout: u8,
    /// Repetitions without an answer.
    pub retries: u8,
    /// Repetitions when the peer has no receive; 7 means without end.
    pub rnr_retries: u8,
}

/// A queue pair in state `S`.
#[derive(Debug)]
pub struct Qp<S> {
    inner: Inner,
    _state: PhantomData<S>,
}

/// Field order is drop order: the queue pair ends first, then the objects that it depends on.
#[derive(Debug)]
struct Inner {
    raw: Raw,
    post: unsafe extern "C" fn(*mut RawQp, *mut SendWr, *mut *mut SendWr) -> c_int,
    inline: u32,
    _send_cq: Arc<Cq>,
    _recv_cq: Arc<Cq>,
    _srq: Option<Arc<Srq>>,
}

#[derive(Debug)]
struct Raw {
    qp: NonNull<RawQp>,
    pd: Arc<Pd>,
}

// SAFETY: libibverbs locks the data that calls on one queue pair share.
unsafe impl std::marker::Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: made by the library, destroyed once. Posted work requests end without
        // completions.
        unsafe { (self.pd.context().library().destroy_qp)(self.qp.as_ptr()) };
    }
}

impl Qp<Reset> {
    /// Makes a queue pair.
    ///
    /// # Errors
    /// The library's error; `EINVAL` or `ENOMEM` where the depths exceed the device's limits.
    pub fn new(pd: &Arc<Pd>, request: &QpRequest) -> Result<Self, CallError> {
        let srq = request.srq.as_ref();
        let mut attr = QpInitAttr {
            qp_context: std::ptr::null_mut(),
            send_cq: request.send_cq.raw(),
            recv_cq: request.recv_cq.raw(),
            srq: srq.map_or(std::ptr::null_mut(), |srq| srq.raw()),
            cap: QpCap {
                max_send_wr: request.depth,
                // Some providers refuse a queue pair that could never receive.
                max_recv_wr: u32::from(srq.is_none()),
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: request.inline,
            },
            qp_type: ffi::QPT_RC,
            sq_sig_all: 0,
        };
        let context = pd.context();
        // SAFETY: domain and queues live; `attr` is valid for the call.
        let raw = unsafe { (context.library().create_qp)(pd.raw(), &mut attr) };
        let qp = NonNull::new(raw).ok_or_else(|| CallError::last("ibv_create_qp"))?;
        let raw = Raw { qp, pd: Arc::clone(pd) };
        // SAFETY: the provider filled its table when the device was opened, and does not change it.
        let post = unsafe { (*context.raw()).ops.post_send };
        let Some(post) = post else { return Err(missing("post_send")) };
        let inner = Inner {
            raw,
            post,
            inline: attr.cap.max_inline_data,
            _send_cq: Arc::clone(&request.send_cq),
            _recv_cq: Arc::clone(&request.recv_cq),
            _srq: srq.map(Arc::clone),
        };
        Ok(Self { inner, _state: PhantomData })
    }

    /// Assigns a port, and grants peers the rights of the bits `ACCESS_*`.
    ///
    /// # Errors
    /// The library's error.
    pub fn init(self, port: u8, pkey_index: u16, access: c_int) -> Result<Qp<Init>, CallError> {
        let attr = QpAttr {
            qp_state: ffi::QPS_INIT,
            pkey_index,
            port_num: port,
            qp_access_flags: access as u32,
            ..QpAttr::default()
        };
        let mask = ffi::QP_STATE | ffi::QP_PKEY_INDEX | ffi::QP_PORT | ffi::QP_ACCESS_FLAGS;
        self.modify(attr, mask, "ibv_modify_qp(INIT)")
    }
}

impl Qp<Init> {
    /// Connects it to the peer: from here on it receives.
    ///
    /// # Errors
    /// The library's error; on RoCE also if the peer's address cannot be resolved.
    pub fn receive(self, to: &Address, how: &Receive) -> Result<Qp<Rtr>, CallError> {
        let attr = QpAttr {
            qp_state: ffi::QPS_RTR,
            path_mtu: to.mtu,
            dest_qp_num: to.qpn,
            ah_attr: to.route,
            rq_psn: how.psn,
            max_dest_rd_atomic: how.reads,
            min_rnr_timer: how.rnr_timer,
            ..QpAttr::default()
        };
        let mask = ffi::QP_STATE
            | ffi::QP_AV
            | ffi::QP_PATH_MTU
            | ffi::QP_DEST_QPN
            | ffi::QP_RQ_PSN
            | ffi::QP_MAX_DEST_RD_ATOMIC
            | ffi::QP_MIN_RNR_TIMER;
        self.modify(attr, mask, "ibv_modify_qp(RTR)")
    }
}

impl Qp<Rtr> {
    /// Moves it to the state in which it sends.
    ///
    /// # Errors
    /// The library's error.
    pub fn send(self, how: &Send) -> Result<Qp<Rts>, CallError> {
        let attr = QpAttr {
            qp_state: ffi::QPS_RTS,
            sq_psn: how.psn,
            max_rd_atomic: how.reads,
            timeout: how.timeout,
            retry_cnt: how.retries,
            rnr_retry: how.rnr_retries,
            ..QpAttr::default()
        };
        let mask = ffi::QP_STATE
            | ffi::QP_SQ_PSN
            | ffi::QP_MAX_QP_RD_ATOMIC
            | ffi::QP_TIMEOUT
            | ffi::QP_RETRY_CNT
            | ffi::QP_RNR_RETRY;
        self.modify(attr, mask, "ibv_modify_qp(RTS)")
    }
}

impl Qp<Rts> {
    /// Posts a linked list of work requests with one doorbell. On failure it returns the errno and
    /// the first work request that was not posted; the requests before it were posted.
    ///
    /// # Errors
    /// The queue is full, or a work request is invalid.
    ///
    /// # Safety
    /// `first` and the requests that it links are valid for the call, and the list ends with null.
    /// Memory that they name stays registered and, unless it is inline, unchanged until they are
    /// completed; memory that is a destination of reads belongs to the device until then.
    #[inline]
    pub unsafe fn post(&self, first: *mut SendWr) -> Result<(), (CallError, *mut SendWr)> {
        let mut bad = std::ptr::null_mut();
        // SAFETY: by this function's contract; the queue pair lives.
        let status = unsafe { (self.inner.post)(self.inner.raw.qp.as_ptr(), first, &mut bad) };
        if status == 0 { Ok(()) } else { Err((refused(status), bad)) }
    }

    /// Breaks the connection: everything that was posted completes with an error. Further posts are
    /// possible, and complete as flushed.
    ///
    /// # Errors
    /// The library's error.
    pub fn give_up(&self) -> Result<(), CallError> {
        let attr = QpAttr { qp_state: ffi::QPS_ERR, ..QpAttr::default() };
        self.inner.modify(attr, ffi::QP_STATE, "ibv_modify_qp(ERR)")
    }
}

impl<S> Qp<S> {
    /// Its number, 24 bits.
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair lives.
        unsafe { self.inner.raw.qp.as_ref().qp_num }
    }

    /// Bytes of a payload that may be inline: at least the requested number.
    pub fn inline(&self) -> u32 {
        self.inner.inline
    }

    fn modify<T>(self, attr: QpAttr, mask: c_int, call: &'static str) -> Result<Qp<T>, CallError> {
        self.inner.modify(attr, mask, call)?;
        Ok(Qp { inner: self.inner, _state: PhantomData })
    }
}

impl Inner {
    fn modify(&self, mut attr: QpAttr, mask: c_int, call: &'static str) -> Result<(), CallError> {
        let library = self.raw.pd.context().library();
        // SAFETY: the queue pair lives; `attr` is valid for the call.
        let status = unsafe { (library.modify_qp)(self.raw.qp.as_ptr(), &mut attr, mask) };
        CallError::check(call, status)
    }
}

#[cold]
fn refused(status: c_int) -> CallError {
    CallError { call: "ibv_post_send", source: std::io::Error::from_raw_os_error(status.abs()) }
}
