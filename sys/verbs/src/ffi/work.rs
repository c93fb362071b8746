//! Work requests and completions.

use std::ffi::{c_int, c_uint};

/// `opcode`: write to the peer.
pub const WR_RDMA_WRITE: c_int = 0;
/// `opcode`: write to the peer, where a receive with 32 bits completes.
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
/// `status`: the local queue pair refused it.
pub const WC_LOC_QP_OP_ERR: c_int = 2;
/// `status`: the local key or address is wrong.
pub const WC_LOC_PROT_ERR: c_int = 4;
/// `status`: flushed, because the queue pair broke before.
pub const WC_WR_FLUSH_ERR: c_int = 5;
/// `status`: the peer's answer was invalid.
pub const WC_BAD_RESP_ERR: c_int = 7;
/// `status`: the peer refused the request as invalid.
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

/// One completion. A kind that the library does not write is zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Wc {
    /// The id of the work request.
    pub wr_id: u64,
    /// One of `WC_*`.
    pub status: c_int,
    /// The kind of operation; only meaningful on success.
    pub opcode: c_int,
    /// The vendor's own code of the error.
    pub vendor_err: u32,
    /// Bytes that arrived.
    pub byte_len: u32,
    /// Immediate data in network order.
    pub imm_data: u32,
    /// The local queue pair.
    pub qp_num: u32,
    /// The peer's queue pair.
    pub src_qp: u32,
    /// Bits of the fields that are valid.
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

/// The target of an RDMA write or read.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct WrRdma {
    pub remote_addr: u64,
    pub rkey: u32,
}

/// The target and the operands of an atomic.
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
        // The fields contain the peer's key, so they are not printed.
        f.write_str("WrTarget")
    }
}

/// A work request of a send queue.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SendWr {
    /// The id, which the completion returns.
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
    /// The target.
    pub wr: WrTarget,
    /// Fields of other kinds of queue pairs and requests.
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
