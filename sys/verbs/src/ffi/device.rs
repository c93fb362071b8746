//! Devices, their ports and GIDs, and asynchronous events.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// Most GIDs that are requested, of all ports of a device. The kernel's limit is 2,047: it takes
/// the length of the table in 16 bits.
pub const MAX_GIDS: usize = 1024;
const _: () = assert!(MAX_GIDS * size_of::<GidEntry>() <= u16::MAX as usize);

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

/// Asynchronous events of a fault: of a completion queue, a queue pair (three), the device, a
/// shared receive queue.
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
/// See [`EVENT_CQ_ERR`]: a broken queue pair takes no more shared receives.
pub const EVENT_QP_LAST_WQE_REACHED: c_int = 16;
/// See [`EVENT_CQ_ERR`]: a port has gone down. It may come up again.
pub const EVENT_PORT_ERR: c_int = 10;

/// The sixteen bytes of a port's global id.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gid {
    /// The bytes in network order.
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

/// The capabilities of a device.
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

/// The attributes of a port.
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

/// An asynchronous event.
#[repr(C)]
#[derive(Debug)]
pub struct AsyncEvent {
    /// The subject of the event, by its type: a queue pair, a queue, or a port's number.
    pub element: *mut c_void,
    /// One of `EVENT_*`, or another one.
    pub event_type: c_int,
}
