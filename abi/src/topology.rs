//! The topology table: finds the place of this rank.

use crate::common::{TyError, TyExportHeader, TyStr};
use crate::host::TyHost;
use crate::transport::TyConfig;

/// Major version of the topology ABI.
pub const TY_TOPOLOGY_MAJOR: u32 = 1;
/// Minor version of the topology ABI.
pub const TY_TOPOLOGY_MINOR: u32 = 2;

/// Bytes that fit a host's identity.
pub const TY_HOST_BYTES: usize = 64;
/// Most NICs of a place.
pub const TY_PLACE_NICS: usize = 8;
/// Bytes that fit the name of a NIC.
pub const TY_NIC_BYTES: usize = 64;
/// Bytes that fit the text about a missing NIC.
pub const TY_MISSING_NIC_BYTES: usize = 1024;

/// The operator named the NICs: they are used unchanged, and not divided among ranks.
pub const TY_PLACE_NICS_GIVEN: u32 = 1;
/// NICs of all names reach each other, so ranks of a rail may have
/// different ones.
pub const TY_PLACE_ANY_RAILS: u32 = 2;

/// The place of one rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyPlace {
    /// `sizeof(TyPlace)`.
    pub size: usize,
    /// Identity of the machine: equal on ranks that share memory, different otherwise. UTF-8,
    /// ended by a zero byte or the array's end.
    pub host: [u8; TY_HOST_BYTES],
    /// Ordinal of the device that this rank drives, or -1 if it drives none.
    pub device: i32,
    /// NUMA node of the rank, or -1 if unknown.
    pub numa_node: i32,
    /// Number of logical processors that this process may run on; 0 if unknown.
    pub processors: u32,
    /// Bits `TY_PLACE_*`.
    pub flags: u32,
    /// How many of `nics` are set.
    pub nic_count: u32,
    /// Zero.
    pub reserved: u32,
    /// NICs that are nearest to the rank and equally near, in order. Ranks of a machine that name the
    /// same NICs divide them. UTF-8, ended by a zero byte or the array's end.
    pub nics: [[u8; TY_NIC_BYTES]; TY_PLACE_NICS],
    /// Text about the NIC that is missing near the rank, or cannot be used, if other ranks of this machine
    /// have a NIC and this rank has none. Otherwise empty (since minor version 2). With a text, the
    /// communicator does not open on a transport that uses placed NICs (`TY_CAP_PLACED_NICS`). UTF-8,
    /// ended by a zero byte or the array's end.
    pub missing_nic: [u8; TY_MISSING_NIC_BYTES],
}

/// Arguments of `discover`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyDiscover {
    /// `sizeof(TyDiscover)`.
    pub size: usize,
    /// The component's own table.
    pub config: TyConfig,
    /// World rank.
    pub rank: u32,
    /// Ranks in the world.
    pub ranks: u32,
    /// Index of the rank on its machine, from the launcher.
    pub local_rank: u32,
    /// Zero.
    pub reserved: u32,
}

/// A topology. `discover` is cold and has no instance.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyTopologyTable {
    /// `sizeof(TyTopologyTable)` of the plugin.
    pub size: usize,
    /// The component's name as a config writes it. Static.
    pub name: TyStr,
    /// The component's own version, as text for display. Static.
    pub version: TyStr,
    /// One line of text for display. Static.
    pub about: TyStr,
    /// Required. Finds this rank's place.
    pub discover: Option<
        unsafe extern "C" fn(
            host: *const TyHost,
            discover: *const TyDiscover,
            place: *mut TyPlace,
            error: *mut TyError,
        ) -> i32,
    >,
}

/// The symbol `tokenyard_topology_v1`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyTopologyExport {
    /// Checked first.
    pub header: TyExportHeader,
    /// `count` tables.
    pub components: *const *const TyTopologyTable,
    /// Number of tables.
    pub count: usize,
}
