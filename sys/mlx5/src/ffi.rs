//! Structures and constants of `infiniband/mlx5dv.h` (rdma-core 44), as far as they are used. Names are
//! those of the header without the prefix `mlx5dv_`; `tests/layout.rs` compares sizes, offsets and values
//! with the header. Objects of libibverbs are those of `tokenyard-sys-verbs`.

use std::ffi::{c_int, c_void};

pub use tokenyard_sys_verbs::ffi::{Device, RawContext, RawCq, RawPd, RawQp};

/// The device lets this process send commands of its own.
pub const CONTEXT_FLAGS_DEVX: u32 = 1;
/// Kind of an object for `mlx5dv_init_obj`: an address handle.
pub const OBJ_AH: u64 = 1 << 5;
/// A protection domain.
pub const OBJ_PD: u64 = 1 << 6;
/// [`DevxUmemIn`] names a dmabuf.
pub const UMEM_MASK_DMABUF: u64 = 1;
/// A page of registers that the processor writes in bursts.
pub const UAR_ALLOC_TYPE_BF: u32 = 0;
/// A page of registers that is not cached.
pub const UAR_ALLOC_TYPE_NC: u32 = 1;
/// A page of registers that is not cached, for this caller alone: rdma-core 44 refuses it, newer ones have it.
pub const UAR_ALLOC_TYPE_NC_DEDICATED: u32 = 1 << 31;

/// The input of `mlx5dv_open_device`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct ContextAttr {
    pub flags: u32,
    pub comp_mask: u64,
}

/// A page of doorbell registers.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct DevxUar {
    pub reg_addr: *mut c_void,
    pub base_addr: *mut c_void,
    pub page_id: u32,
    pub mmap_off: i64,
    pub comp_mask: u64,
}

/// Memory that commands can name.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct DevxUmem {
    pub umem_id: u32,
}

/// The input of `mlx5dv_devx_umem_reg_ex`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct DevxUmemIn {
    pub addr: *mut c_void,
    pub size: usize,
    pub access: u32,
    pub pgsz_bitmap: u64,
    pub comp_mask: u64,
    pub dmabuf_fd: c_int,
}

/// An object that a command made; the library owns it.
#[repr(C)]
#[derive(Debug)]
pub struct DevxObj {
    _data: [u8; 0],
}

/// The data of libmlx5 about a protection domain.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct Pd {
    pub pdn: u32,
    pub comp_mask: u64,
}

/// The data of libmlx5 about an address handle.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Ah {
    pub av: *const Av,
    pub comp_mask: u64,
}

/// An address, as the device takes it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct Av {
    pub key: u64,
    pub dqp_dct: u32,
    pub stat_rate_sl: u8,
    pub fl_mlid: u8,
    pub rlid: u16,
    pub reserved0: [u8; 4],
    pub rmac: [u8; 6],
    pub tclass: u8,
    pub hop_limit: u8,
    pub grh_gid_fl: u32,
    pub rgid: [u8; 16],
}

/// The data of libmlx5 about a queue pair of its own.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Qp {
    pub dbrec: *mut u32,
    pub sq: Queue,
    pub rq: Queue,
    pub bf: Registers,
    pub comp_mask: u64,
    pub uar_mmap_offset: i64,
    pub tirn: u32,
    pub tisn: u32,
    pub rqn: u32,
    pub sqn: u32,
    pub tir_icm_addr: u64,
}

/// A queue of [`Qp`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Queue {
    pub buf: *mut c_void,
    pub wqe_cnt: u32,
    pub stride: u32,
}

/// The doorbell registers of [`Qp`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Registers {
    pub reg: *mut c_void,
    pub size: u32,
}

/// The data of libmlx5 about a completion queue of its own.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Cq {
    pub buf: *mut c_void,
    pub dbrec: *mut u32,
    pub cqe_cnt: u32,
    pub cqe_size: u32,
    pub cq_uar: *mut c_void,
    pub cqn: u32,
    pub comp_mask: u64,
}

/// An object of libibverbs, and the place for the data of libmlx5 about it.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Pair<I, O> {
    pub input: *mut I,
    pub output: *mut O,
}

impl<I, O> Pair<I, O> {
    /// No object.
    pub const NONE: Self = Self { input: std::ptr::null_mut(), output: std::ptr::null_mut() };
}

/// The input of `mlx5dv_init_obj`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Obj {
    pub qp: Pair<RawQp, Qp>,
    pub cq: Pair<RawCq, Cq>,
    pub srq: Pair<c_void, c_void>,
    pub rwq: Pair<c_void, c_void>,
    pub dm: Pair<c_void, c_void>,
    pub ah: Pair<c_void, Ah>,
    pub pd: Pair<RawPd, Pd>,
}

impl Obj {
    /// Asks for nothing.
    pub const NONE: Self = Self {
        qp: Pair::NONE,
        cq: Pair::NONE,
        srq: Pair::NONE,
        rwq: Pair::NONE,
        dm: Pair::NONE,
        ah: Pair::NONE,
        pd: Pair::NONE,
    };
}
