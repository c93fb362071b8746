//! Services of the host.

use core::ffi::c_void;

use crate::common::TyStr;
use crate::transport::TyTransportTable;

/// Services of the host. Statics are per library, so a component logs through this table. It outlives
/// every component. Any thread may call any slot.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyHost {
    /// `sizeof(TyHost)` of the host.
    pub size: usize,
    /// Passed back to every slot.
    pub context: *mut c_void,
    /// Writes one line to the host's log. `target` names the component.
    pub log: Option<
        unsafe extern "C" fn(context: *mut c_void, level: u32, target: TyStr, message: TyStr),
    >,
    /// Finds the table of a transport that the host has loaded, for components that wrap others; null if
    /// there is none of that name. The table lives as long as the process.
    pub find_transport:
        Option<unsafe extern "C" fn(context: *mut c_void, name: TyStr) -> *const TyTransportTable>,
}
