//! Calls through the objects' tables, which are `static inline` functions in C.
//!
//! All of them rely on an open object of the right type, and on an entry in its table. libfabric guarantees
//! the entry for the objects that tokenyard opens; a missing entry gives `-FI_ENOSYS`. The domain's threading
//! model defines which threads may call them.

#![allow(clippy::too_many_arguments, reason = "the signatures are libfabric's")]

use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;

use crate::consts::{FI_ENABLE, FI_OPT_ENDPOINT};
use crate::types::*;

const ENOSYS: i32 = 38;

/// Calls an entry of a table, or returns the error that it is missing.
macro_rules! call {
    ($ops:expr, $entry:ident ( $($argument:expr),* )) => {
        match (*$ops).$entry {
            Some(entry) => entry($($argument),*),
            None => -ENOSYS as _,
        }
    };
}

/// `fi_close`.
///
/// # Safety
/// `object` is open and nothing uses it any more.
pub unsafe fn close(object: *mut fid) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { call!((*object).ops, close(object)) }
}

/// `fi_ep_bind`, `fi_mr_bind`.
///
/// # Safety
/// Both objects are open.
pub unsafe fn bind(object: *mut fid, to: *mut fid, flags: u64) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { call!((*object).ops, bind(object, to, flags)) }
}

/// `fi_enable`, `fi_mr_enable`.
///
/// # Safety
/// The object is open and bound to what it needs.
pub unsafe fn enable(object: *mut fid) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { call!((*object).ops, control(object, FI_ENABLE, null_mut())) }
}

/// `fi_domain`.
///
/// # Safety
/// `fabric` is open and `info` is an entry of its provider.
pub unsafe fn domain(
    fabric: *mut fid_fabric,
    info: *mut fi_info,
    domain: &mut *mut fid_domain,
) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { call!((*fabric).ops, domain(fabric, info, domain, null_mut())) }
}

/// `fi_av_open`.
///
/// # Safety
/// `domain` is open.
pub unsafe fn av_open(
    domain: *mut fid_domain,
    attr: &mut fi_av_attr,
    av: &mut *mut fid_av,
) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { call!((*domain).ops, av_open(domain, attr, av, null_mut())) }
}

/// `fi_cq_open`.
///
/// # Safety
/// `domain` is open.
pub unsafe fn cq_open(
    domain: *mut fid_domain,
    attr: &mut fi_cq_attr,
    cq: &mut *mut fid_cq,
) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { call!((*domain).ops, cq_open(domain, attr, cq, null_mut())) }
}

/// `fi_endpoint`.
///
/// # Safety
/// `domain` is open and `info` is the entry it was opened with.
pub unsafe fn endpoint(domain: *mut fid_domain, info: *mut fi_info, ep: &mut *mut fid_ep) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { call!((*domain).ops, endpoint(domain, info, ep, null_mut())) }
}

/// `fi_mr_regattr`.
///
/// # Safety
/// `domain` is open; the memory that `attr` names stays mapped until the region is closed; `mr_iov`
/// has the type that `flags` state.
pub unsafe fn mr_regattr(
    domain: *mut fid_domain,
    attr: &fi_mr_attr,
    flags: u64,
    mr: &mut *mut fid_mr,
) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { call!((*domain).mr, regattr(domain.cast(), attr, flags, mr)) }
}

/// `fi_av_insert` of one address: 1 if it was taken.
///
/// # Safety
/// `av` is open and `address` is as long as an address of its format.
pub unsafe fn av_insert(av: *mut fid_av, address: *const c_void, to: &mut fi_addr_t) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { call!((*av).ops, insert(av, address, 1, to, 0, null_mut())) }
}

/// `fi_av_straddr`: an address in words. `bytes` is the room in `text`, then the length that is
/// needed.
///
/// # Safety
/// As [`av_insert`]; `text` has `bytes` bytes.
pub unsafe fn av_straddr(
    av: *mut fid_av,
    address: *const c_void,
    text: *mut c_char,
    bytes: &mut usize,
) -> bool {
    // SAFETY: by this function's contract.
    unsafe {
        match (*(*av).ops).straddr {
            Some(straddr) => !straddr(av, address, text, bytes).is_null(),
            None => false,
        }
    }
}

/// `fi_setopt` of an endpoint.
///
/// # Safety
/// `ep` is open, `value` has `bytes` bytes of the type that `name` has.
pub unsafe fn setopt(ep: *mut fid_ep, name: c_int, value: *const c_void, bytes: usize) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { call!((*ep).ops, setopt(ep.cast(), FI_OPT_ENDPOINT, name, value, bytes)) }
}

/// `fi_getname`. `bytes` is the room at `address`, then the length.
///
/// # Safety
/// `ep` is enabled; `address` has `bytes` bytes.
pub unsafe fn getname(ep: *mut fid_ep, address: *mut c_void, bytes: &mut usize) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { call!((*ep).cm, getname(ep.cast(), address, bytes)) }
}

/// `fi_cq_read` of a queue with format `FI_CQ_FORMAT_DATA`: entries read, or a negative error.
///
/// # Safety
/// `cq` is open; `entries` has room for `count`.
#[inline]
pub unsafe fn cq_read(cq: *mut fid_cq, entries: *mut fi_cq_data_entry, count: usize) -> isize {
    // SAFETY: by this function's contract.
    unsafe { call!((*cq).ops, read(cq, entries.cast(), count)) }
}

/// `fi_cq_readerr`: 1 if there was an entry.
///
/// # Safety
/// `cq` is open.
pub unsafe fn cq_readerr(cq: *mut fid_cq, entry: &mut fi_cq_err_entry) -> isize {
    // SAFETY: by this function's contract.
    unsafe { call!((*cq).ops, readerr(cq, entry, 0)) }
}

/// `fi_cq_strerror`: the provider's text for an error entry, or null.
///
/// # Safety
/// `cq` is open and `entry` is the last that was read from it; `text` has `bytes` bytes. The result
/// ends with a zero byte and holds until the queue is used again.
pub unsafe fn cq_strerror(
    cq: *mut fid_cq,
    entry: &fi_cq_err_entry,
    text: *mut c_char,
    bytes: usize,
) -> *const c_char {
    // SAFETY: by this function's contract.
    unsafe {
        match (*(*cq).ops).strerror {
            Some(strerror) => strerror(cq, entry.prov_errno, entry.err_data, text, bytes),
            None => std::ptr::null(),
        }
    }
}

/// `fi_writemsg`.
///
/// # Safety
/// `ep` is enabled; everything that `message` names is valid, and its buffer stays valid until the
/// completion. With `FI_INJECT` in `flags`, the buffer is free at once, and has at most the
/// endpoint's inject size.
#[inline]
pub unsafe fn writemsg(ep: *mut fid_ep, message: &fi_msg_rma, flags: u64) -> isize {
    // SAFETY: by this function's contract.
    unsafe { call!((*ep).rma, writemsg(ep, message, flags)) }
}

/// `fi_readmsg`.
///
/// # Safety
/// As [`writemsg`]; the buffer is written.
#[inline]
pub unsafe fn readmsg(ep: *mut fid_ep, message: &fi_msg_rma, flags: u64) -> isize {
    // SAFETY: by this function's contract.
    unsafe { call!((*ep).rma, readmsg(ep, message, flags)) }
}

/// `fi_inject_writedata`: a write with data for the target's completion queue that has no
/// completion here; the buffer is free at once.
///
/// # Safety
/// `ep` is enabled; `buffer` has `bytes` bytes, at most the endpoint's inject size.
#[inline]
pub unsafe fn inject_writedata(
    ep: *mut fid_ep,
    buffer: *const c_void,
    bytes: usize,
    data: u64,
    to: fi_addr_t,
    address: u64,
    key: u64,
) -> isize {
    // SAFETY: by this function's contract.
    unsafe { call!((*ep).rma, injectdata(ep, buffer, bytes, data, to, address, key)) }
}
