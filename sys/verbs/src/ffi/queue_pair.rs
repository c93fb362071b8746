//! The creation of queue pairs and shared receive queues, and the attributes of `modify_qp`.

use std::ffi::{c_int, c_uint, c_void};

use super::device::Gid;
use super::{RawCq, RawSrq};

/// `qp_type` of a reliable connection.
pub const QPT_RC: c_int = 2;

/// `qp_state` after creation.
pub const QPS_RESET: c_int = 0;
/// `qp_state`: has its port.
pub const QPS_INIT: c_int = 1;
/// `qp_state`: ready to receive.
pub const QPS_RTR: c_int = 2;
/// `qp_state`: ready to send.
pub const QPS_RTS: c_int = 3;
/// `qp_state`: broken; everything posted is flushed.
pub const QPS_ERR: c_int = 6;

/// Bits of `modify_qp`'s mask.
pub const QP_STATE: c_int = 1;
/// See [`QP_STATE`].
pub const QP_ACCESS_FLAGS: c_int = 1 << 3;
/// See [`QP_STATE`].
pub const QP_PKEY_INDEX: c_int = 1 << 4;
/// See [`QP_STATE`].
pub const QP_PORT: c_int = 1 << 5;
/// See [`QP_STATE`].
pub const QP_AV: c_int = 1 << 7;
/// See [`QP_STATE`].
pub const QP_PATH_MTU: c_int = 1 << 8;
/// See [`QP_STATE`].
pub const QP_TIMEOUT: c_int = 1 << 9;
/// See [`QP_STATE`].
pub const QP_RETRY_CNT: c_int = 1 << 10;
/// See [`QP_STATE`].
pub const QP_RNR_RETRY: c_int = 1 << 11;
/// See [`QP_STATE`].
pub const QP_RQ_PSN: c_int = 1 << 12;
/// See [`QP_STATE`].
pub const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
/// See [`QP_STATE`].
pub const QP_MIN_RNR_TIMER: c_int = 1 << 15;
/// See [`QP_STATE`].
pub const QP_SQ_PSN: c_int = 1 << 16;
/// See [`QP_STATE`].
pub const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
/// See [`QP_STATE`].
pub const QP_DEST_QPN: c_int = 1 << 20;

/// Depths of a queue pair.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// The attributes of a new queue pair; the library writes the granted depths into `cap`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut RawCq,
    pub recv_cq: *mut RawCq,
    pub srq: *mut RawSrq,
    pub cap: QpCap,
    pub qp_type: c_int,
    pub sq_sig_all: c_int,
}

/// The routed part of an address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct GlobalRoute {
    pub dgid: Gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// The address of a peer's port.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct AhAttr {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// The attributes that `modify_qp` sets.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct QpAttr {
    pub qp_state: c_int,
    pub cur_qp_state: c_int,
    pub path_mtu: c_int,
    pub path_mig_state: c_int,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: QpCap,
    pub ah_attr: AhAttr,
    pub alt_ah_attr: AhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

/// Depth of a shared receive queue.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct SrqAttr {
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
}

/// The attributes of a new shared receive queue.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct SrqInitAttr {
    pub srq_context: *mut c_void,
    pub attr: SrqAttr,
}
