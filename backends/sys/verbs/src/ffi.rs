//! Structures, constants and function types of `infiniband/verbs.h` (rdma-core 44), cut down to what
//! is used. Names are those of the header without the prefix `ibv_`; `tests/layout.rs` compares
//! sizes, offsets and values with the header.
//!
//! Enumerations that the library writes are plain integers here: a newer library may know values
//! that are not in this file.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::marker::{PhantomData, PhantomPinned};

/// What the library hides: made and read by it alone.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug)]
        pub struct $name {
            _data: [u8; 0],
            _pin: PhantomData<(*mut u8, PhantomPinned)>,
        }
    )*};
}

opaque! {
    /// A device of the list.
    Device,
    /// A completion channel; never made here.
    CompChannel,
}

/// Most GIDs that are asked for, of all ports of a device. The kernel's limit is 2,047: it takes the
/// length of the table in 16 bits.
pub const MAX_GIDS: usize = 1024;
const _: () = assert!(MAX_GIDS * size_of::<GidEntry>() <= u16::MAX as usize);

/// Transport types of a device that can have RC queue pairs: InfiniBand and RoCE.
pub const TRANSPORT_IB: c_int = 0;

/// `state` of a port that carries traffic.
pub const PORT_ACTIVE: c_int = 4;
/// `link_layer` of InfiniBand.
pub const LINK_LAYER_INFINIBAND: u8 = 1;
/// `link_layer` of RoCE.
pub const LINK_LAYER_ETHERNET: u8 = 2;

/// `gid_type` of InfiniBand.
pub const GID_TYPE_IB: u32 = 0;
/// `gid_type` of RoCE version 1.
pub const GID_TYPE_ROCE_V1: u32 = 1;
/// `gid_type` of RoCE version 2.
pub const GID_TYPE_ROCE_V2: u32 = 2;

/// `atomic_cap` of a device without remote atomics.
pub const ATOMIC_NONE: c_int = 0;

/// The owner, and this device, may write.
pub const ACCESS_LOCAL_WRITE: c_int = 1;
/// Peers may write.
pub const ACCESS_REMOTE_WRITE: c_int = 1 << 1;
/// Peers may read.
pub const ACCESS_REMOTE_READ: c_int = 1 << 2;
/// Peers may add.
pub const ACCESS_REMOTE_ATOMIC: c_int = 1 << 3;

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

/// `opcode`: write to the peer.
pub const WR_RDMA_WRITE: c_int = 0;
/// `opcode`: the same, and a receive with 32 bits completes there.
pub const WR_RDMA_WRITE_WITH_IMM: c_int = 1;
/// `opcode`: read from the peer.
pub const WR_RDMA_READ: c_int = 4;
/// `opcode`: add to 8 bytes of the peer.
pub const WR_ATOMIC_FETCH_AND_ADD: c_int = 6;

/// Ask for a completion.
pub const SEND_SIGNALED: c_uint = 1 << 1;
/// The payload is copied while it is posted.
pub const SEND_INLINE: c_uint = 1 << 3;

/// `status` of a work request that is done.
pub const WC_SUCCESS: c_int = 0;
/// `status`: the payload did not fit.
pub const WC_LOC_LEN_ERR: c_int = 1;
/// `status`: this side's queue pair refused it.
pub const WC_LOC_QP_OP_ERR: c_int = 2;
/// `status`: this side's key or address is wrong.
pub const WC_LOC_PROT_ERR: c_int = 4;
/// `status`: given up, because the queue pair broke before.
pub const WC_WR_FLUSH_ERR: c_int = 5;
/// `status`: the peer's answer made no sense.
pub const WC_BAD_RESP_ERR: c_int = 7;
/// `status`: the peer refused the request's form.
pub const WC_REM_INV_REQ_ERR: c_int = 9;
/// `status`: the peer refused access.
pub const WC_REM_ACCESS_ERR: c_int = 10;
/// `status`: the peer could not do it.
pub const WC_REM_OP_ERR: c_int = 11;
/// `status`: no answer, however often it was sent.
pub const WC_RETRY_EXC_ERR: c_int = 12;
/// `status`: the peer had no receive for it, however often it was sent.
pub const WC_RNR_RETRY_EXC_ERR: c_int = 13;
/// `status`: the device failed.
pub const WC_FATAL_ERR: c_int = 19;

/// `opcode` of a completed receive that came with an RDMA write.
pub const WC_RECV_RDMA_WITH_IMM: c_int = (1 << 7) + 1;

/// Asynchronous events that break something: a completion queue, a queue pair (three), the device,
/// a shared receive queue.
pub const EVENT_CQ_ERR: c_int = 0;
/// See [`EVENT_CQ_ERR`].
pub const EVENT_QP_FATAL: c_int = 1;
/// See [`EVENT_CQ_ERR`].
pub const EVENT_QP_REQ_ERR: c_int = 2;
/// See [`EVENT_CQ_ERR`].
pub const EVENT_QP_ACCESS_ERR: c_int = 3;
/// See [`EVENT_CQ_ERR`].
pub const EVENT_DEVICE_FATAL: c_int = 8;
/// See [`EVENT_CQ_ERR`].
pub const EVENT_SRQ_ERR: c_int = 14;
/// See [`EVENT_CQ_ERR`]: a queue pair that is broken takes no more shared receives.
pub const EVENT_QP_LAST_WQE_REACHED: c_int = 16;
/// See [`EVENT_CQ_ERR`]: a port has gone down. It may come back.
pub const EVENT_PORT_ERR: c_int = 10;

/// Sixteen bytes that name a port.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gid {
    /// In network order.
    pub raw: [u8; 16],
}

/// One entry of a port's GID table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GidEntry {
    /// The GID.
    pub gid: Gid,
    /// Place in the table.
    pub gid_index: u32,
    /// Port, from 1.
    pub port_num: u32,
    /// One of `GID_TYPE_*`.
    pub gid_type: u32,
    /// Network interface, or 0.
    pub ndev_ifindex: u32,
}

/// What a device can do.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct DeviceAttr {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: c_int,
    pub max_ee: c_int,
    pub max_rdd: c_int,
    pub max_mw: c_int,
    pub max_raw_ipv6_qp: c_int,
    pub max_raw_ethy_qp: c_int,
    pub max_mcast_grp: c_int,
    pub max_mcast_qp_attach: c_int,
    pub max_total_mcast_qp_attach: c_int,
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// How a port is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct PortAttr {
    pub state: c_int,
    pub max_mtu: c_int,
    pub active_mtu: c_int,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

/// The part of a protection domain that the library shows.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RawPd {
    pub context: *mut RawContext,
    pub handle: u32,
}

/// A memory region.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RawMr {
    pub context: *mut RawContext,
    pub pd: *mut RawPd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// The first field of a completion queue; the rest is the library's.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RawCq {
    pub context: *mut RawContext,
}

/// The first field of a shared receive queue; the rest is the library's.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RawSrq {
    pub context: *mut RawContext,
}

/// The first fields of a queue pair; the rest is the library's.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RawQp {
    pub context: *mut RawContext,
    pub qp_context: *mut c_void,
    pub pd: *mut RawPd,
    pub send_cq: *mut RawCq,
    pub recv_cq: *mut RawCq,
    pub srq: *mut RawSrq,
    pub handle: u32,
    pub qp_num: u32,
}

/// An unused slot of [`ContextOps`].
type Unused = *const c_void;

/// The provider's own functions; the names that start with `_` are never called here.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct ContextOps {
    _before_poll: [Unused; 11],
    pub poll_cq: Option<unsafe extern "C" fn(*mut RawCq, c_int, *mut Wc) -> c_int>,
    _before_srq: [Unused; 8],
    pub post_srq_recv:
        Option<unsafe extern "C" fn(*mut RawSrq, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _before_send: [Unused; 4],
    pub post_send: Option<unsafe extern "C" fn(*mut RawQp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    _after_send: [Unused; 6],
}

/// The first fields of an open device; the rest is the library's.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RawContext {
    pub device: *mut Device,
    pub ops: ContextOps,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
}

/// One completion. A kind that the library does not write is zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Wc {
    /// What the work request was posted with.
    pub wr_id: u64,
    /// One of `WC_*`.
    pub status: c_int,
    /// What it was; only meaningful on success.
    pub opcode: c_int,
    /// The vendor's own code of the error.
    pub vendor_err: u32,
    /// Bytes that arrived.
    pub byte_len: u32,
    /// Immediate data in network order.
    pub imm_data: u32,
    /// This side's queue pair.
    pub qp_num: u32,
    /// The peer's queue pair.
    pub src_qp: u32,
    /// Bits that say which fields hold.
    pub wc_flags: c_uint,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// The sender's local id.
    pub slid: u16,
    /// Service level.
    pub sl: u8,
    /// Destination path bits.
    pub dlid_path_bits: u8,
}

/// A piece of local memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Sge {
    /// First byte.
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// Key of the region; ignored for inline payloads.
    pub lkey: u32,
}

/// Where an RDMA write or read goes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct WrRdma {
    pub remote_addr: u64,
    pub rkey: u32,
}

/// Where an atomic goes, and with what.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct WrAtomic {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}

/// The part of a work request that depends on its opcode.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub union WrTarget {
    pub atomic: WrAtomic,
    pub rdma: WrRdma,
}

impl std::fmt::Debug for WrTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // It holds the peer's key.
        f.write_str("WrTarget")
    }
}

/// A work request of a send queue.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SendWr {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// The next of the list, or null.
    pub next: *mut SendWr,
    /// `num_sge` pieces.
    pub sg_list: *mut Sge,
    /// Pieces.
    pub num_sge: c_int,
    /// One of `WR_*`.
    pub opcode: c_int,
    /// Bits `SEND_*`.
    pub send_flags: c_uint,
    /// Immediate data in network order.
    pub imm_data: u32,
    /// Where it goes.
    pub wr: WrTarget,
    /// For other kinds of queue pairs and requests.
    pub unused: [u64; 7],
}

impl SendWr {
    /// A work request with everything zero.
    pub const BLANK: Self = Self {
        wr_id: 0,
        next: std::ptr::null_mut(),
        sg_list: std::ptr::null_mut(),
        num_sge: 0,
        opcode: 0,
        send_flags: 0,
        imm_data: 0,
        wr: WrTarget { atomic: WrAtomic { remote_addr: 0, compare_add: 0, swap: 0, rkey: 0 } },
        unused: [0; 7],
    };
}

/// A work request of a receive queue.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct RecvWr {
    pub wr_id: u64,
    pub next: *mut RecvWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

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

/// How a queue pair is made; the library writes what it granted into `cap`.
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

/// What `modify_qp` sets.
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

/// How a shared receive queue is made.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct SrqInitAttr {
    pub srq_context: *mut c_void,
    pub attr: SrqAttr,
}

/// An asynchronous event.
#[repr(C)]
#[derive(Debug)]
pub struct AsyncEvent {
    /// What it is about: a queue pair, a queue, or a port's number, as the type says.
    pub element: *mut c_void,
    /// One of `EVENT_*`, or another one.
    pub event_type: c_int,
}
