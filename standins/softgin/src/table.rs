//! The table of C functions that NCCL loads. They call [`Team`].

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::abi::{self, HANDLE_BYTES, Logger, NetProperties, Plugin, RmaConfig};
use crate::failure::{Failure, Result, log_to, say};
use crate::inbox::{MOST_RANKS, SignalMessage};
use crate::mesh::{Address, Listener};
use crate::region::Memory;
use crate::team::{Asked, MAX_RECVS, Range, Team};

/// Runs a call. An error is logged, and becomes a code.
fn guarded(call: &str, body: impl FnOnce() -> Result<()>) -> c_int {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => abi::SUCCESS,
        Ok(Err(failure)) => {
            say(&format!("{call}: {failure}"));
            failure.code
        }
        Err(_) => {
            say(&format!("{call}: a panic"));
            abi::INTERNAL_ERROR
        }
    }
}

fn null(what: &str) -> Failure {
    Failure::new(abi::INVALID_ARGUMENT, format!("found null; expected {what}"))
}

/// # Safety
/// `at` is null, or a pointer that this plugin gave for a `T` and has not taken back.
unsafe fn given<'a, T>(at: *mut c_void) -> Result<&'a T> {
    // SAFETY: by this function's contract.
    unsafe { at.cast::<T>().as_ref() }.ok_or_else(|| null("what this plugin gave"))
}

/// # Safety
/// As of [`given`]; nothing uses the pointer any more.
unsafe fn take_back<T>(at: *mut c_void) -> Result<()> {
    if !at.is_null() {
        // SAFETY: by this function's contract.
        drop(unsafe { Box::from_raw(at.cast::<T>()) });
    }
    Ok(())
}

/// # Safety
/// `out` is null, or valid for one pointer.
unsafe fn give<T>(out: *mut *mut c_void, value: T) -> Result<()> {
    if out.is_null() {
        return Err(null("a place for the result"));
    }
    // SAFETY: by this function's contract.
    unsafe { out.write(Box::into_raw(Box::new(value)).cast()) };
    Ok(())
}

/// Numbers of regions and requests cross as pointers that are never followed; they begin at 1.
fn number_of(handle: *mut c_void) -> Option<u64> {
    Some(handle as u64).filter(|number| *number != 0)
}

/// # Safety
/// `out` is null, or valid for one pointer.
unsafe fn give_number(out: *mut *mut c_void, number: u64) -> Result<()> {
    if out.is_null() {
        return Err(null("a place for the result"));
    }
    // SAFETY: by this function's contract.
    unsafe { out.write(number as *mut c_void) };
    Ok(())
}

/// The result of `init`; NCCL calls it twice and ends one of the two.
#[derive(Debug)]
struct Context;

unsafe extern "C" fn init(out: *mut *mut c_void, _: u64, logger: Option<Logger>) -> c_int {
    guarded("init", || {
        log_to(logger);
        // SAFETY: NCCL's promise.
        unsafe { give(out, Context) }
    })
}

unsafe extern "C" fn devices(out: *mut c_int) -> c_int {
    guarded("devices", || {
        // SAFETY: NCCL's promise.
        *unsafe { out.as_mut() }.ok_or_else(|| null("a place for the result"))? = 1;
        Ok(())
    })
}

unsafe extern "C" fn get_properties(_: c_int, out: *mut NetProperties) -> c_int {
    guarded("getProperties", || {
        let properties = NetProperties {
            name: c"softgin0".as_ptr(),
            // Attached to the first CPU.
            pci_path: std::ptr::null(),
            guid: 0x50f7_6100_0000_0001,
            // No dmabuf: NCCL would hand over descriptors.
            ptr_support: abi::PTR_HOST | abi::PTR_CUDA,
            reg_is_global: 0,
            force_flush: 0,
            speed: 100_000,
            port: 0,
            latency: 0.0,
            max_comms: 1024,
            max_recvs: MAX_RECVS,
            device_type: abi::DEVICE_TYPE_PROXY,
            device_version: 0,
            virtual_device: abi::VirtualDevice { count: 1, devices: [0; 8] },
            max_p2p_bytes: 1 << 30,
            max_coll_bytes: 1 << 30,
            max_multi_request_size: 1,
            rail: -1,
            plane: -1,
        };
        if out.is_null() {
            return Err(null("a place for the result"));
        }
        // SAFETY: NCCL's promise.
        unsafe { out.write(properties) };
        Ok(())
    })
}

unsafe extern "C" fn listen(
    _: *mut c_void,
    _: c_int,
    handle: *mut c_void,
    out: *mut *mut c_void,
) -> c_int {
    guarded("listen", || {
        let listener = Listener::new()?;
        if handle.is_null() {
            return Err(null("a place for the handle"));
        }
        // SAFETY: NCCL's promise: room for a handle.
        unsafe {
            handle.cast::<[u8; HANDLE_BYTES]>().write(listener.address.to_bytes());
            give(out, listener)
        }
    })
}

unsafe extern "C" fn connect(
    _: *mut c_void,
    handles: *mut *mut c_void,
    ranks: c_int,
    rank: c_int,
    listener: *mut c_void,
    out: *mut *mut c_void,
) -> c_int {
    guarded("connect", || {
        let count = usize::try_from(ranks).ok().filter(|count| (1..=MOST_RANKS).contains(count));
        let (Some(count), Ok(me), false) = (count, usize::try_from(rank), handles.is_null()) else {
            let text = format!("found rank {rank} of {ranks}; expected at most {MOST_RANKS} ranks");
            return Err(Failure::new(abi::INVALID_ARGUMENT, text));
        };
        // SAFETY: NCCL's promise: a handle of each rank.
        let handles = unsafe { std::slice::from_raw_parts(handles, count) };
        let address = |handle: &*mut c_void| {
            // SAFETY: as above.
            let bytes = unsafe { handle.cast::<[u8; HANDLE_BYTES]>().as_ref() };
            Address::parse(bytes.ok_or_else(|| null("a handle"))?)
        };
        let addresses = handles.iter().map(address).collect::<Result<_>>()?;
        // SAFETY: NCCL's promise: a pointer that `listen` gave.
        let listener = unsafe { given::<Listener>(listener)? };
        // SAFETY: NCCL's promise.
        unsafe { give(out, Arc::new(Team::connect(listener, addresses, me)?)) }
    })
}

unsafe extern "C" fn create_context(
    team: *mut c_void,
    config: *mut RmaConfig,
    out: *mut *mut c_void,
) -> c_int {
    guarded("createContext", || {
        // SAFETY: NCCL's promise.
        let (team, config) = unsafe { (given::<Arc<Team>>(team)?, config.as_ref()) };
        team.add_contexts(config.ok_or_else(|| null("a config"))?.contexts)?;
        // SAFETY: NCCL's promise.
        unsafe { give(out, Arc::clone(team)) }
    })
}

unsafe extern "C" fn reg_mr_sym(
    team: *mut c_void,
    at: *mut c_void,
    bytes: usize,
    kind: c_int,
    _: u64,
    out: *mut *mut c_void,
) -> c_int {
    guarded("regMrSym", || {
        // SAFETY: NCCL's promise.
        let team = unsafe { given::<Arc<Team>>(team)? };
        let on_device = kind == abi::PTR_CUDA;
        let number = team.register(Memory { base: at as u64, bytes: bytes as u64, on_device })?;
        // SAFETY: NCCL's promise.
        unsafe { give_number(out, number) }
    })
}

unsafe extern "C" fn reg_mr_sym_dmabuf(
    _: *mut c_void,
    _: *mut c_void,
    _: usize,
    _: c_int,
    _: u64,
    _: c_int,
    _: u64,
    _: *mut *mut c_void,
) -> c_int {
    guarded("regMrSymDmaBuf", || {
        let text = "found a dmabuf; expected none, as the properties say";
        Err(Failure::new(abi::INVALID_USAGE, text))
    })
}

unsafe extern "C" fn dereg_mr_sym(team: *mut c_void, region: *mut c_void) -> c_int {
    guarded("deregMrSym", || {
        // SAFETY: NCCL's promise.
        let team = unsafe { given::<Arc<Team>>(team)? };
        team.deregister(number_of(region).ok_or_else(|| null("a region"))?)
    })
}

unsafe extern "C" fn destroy_context(context: *mut c_void) -> c_int {
    // SAFETY: NCCL's promise: no call comes with it after this one.
    guarded("destroyContext", || unsafe { take_back::<Arc<Team>>(context) })
}

unsafe extern "C" fn close_coll(team: *mut c_void) -> c_int {
    guarded("closeColl", || {
        // SAFETY: NCCL's promise: no call comes with it after this one.
        unsafe {
            given::<Arc<Team>>(team)?.close();
            take_back::<Arc<Team>>(team)
        }
    })
}

unsafe extern "C" fn close_listen(listener: *mut c_void) -> c_int {
    // SAFETY: NCCL's promise: no call comes with it after this one.
    guarded("closeListen", || unsafe { take_back::<Listener>(listener) })
}

unsafe extern "C" fn iput(
    context: *mut c_void,
    _: c_int,
    source: u64,
    source_region: *mut c_void,
    bytes: usize,
    destination: u64,
    destination_region: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> c_int {
    let asked = Asked {
        own: Range { region: number_of(source_region), offset: source },
        remote: Range { region: number_of(destination_region), offset: destination },
        bytes,
        rank,
        is_get: false,
        signal: None,
        is_strong: false,
    };
    // SAFETY: NCCL's promise.
    guarded("iput", || unsafe { post(context, &asked, request) })
}

unsafe extern "C" fn iput_signal(
    context: *mut c_void,
    _: c_int,
    source: u64,
    source_region: *mut c_void,
    bytes: usize,
    destination: u64,
    destination_region: *mut c_void,
    rank: u32,
    signal: u64,
    signal_region: *mut c_void,
    value: u64,
    operation: u32,
    is_strong: bool,
    request: *mut *mut c_void,
) -> c_int {
    guarded("iputSignal", || {
        let add = match operation {
            abi::SIGNAL_INC => 1,
            abi::SIGNAL_ADD => value,
            other => {
                let text = format!("found signal operation {other}; expected 1 or 2");
                return Err(Failure::new(abi::INVALID_USAGE, text));
            }
        };
        let region = number_of(signal_region).ok_or_else(|| null("a region of signals"))?;
        let asked = Asked {
            own: Range { region: number_of(source_region), offset: source },
            remote: Range { region: number_of(destination_region), offset: destination },
            bytes,
            rank,
            is_get: false,
            signal: Some(SignalMessage { region, offset: signal, add }),
            is_strong,
        };
        // SAFETY: NCCL's promise.
        unsafe { post(context, &asked, request) }
    })
}

unsafe extern "C" fn iget(
    context: *mut c_void,
    _: c_int,
    remote: u64,
    remote_region: *mut c_void,
    bytes: usize,
    local: u64,
    local_region: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> c_int {
    let asked = Asked {
        own: Range { region: number_of(local_region), offset: local },
        remote: Range { region: number_of(remote_region), offset: remote },
        bytes,
        rank,
        is_get: true,
        signal: None,
        is_strong: false,
    };
    // SAFETY: NCCL's promise.
    guarded("iget", || unsafe { post(context, &asked, request) })
}

/// # Safety
/// The context is one of `create_context`; `request` is null, or valid for one pointer.
unsafe fn post(context: *mut c_void, asked: &Asked, request: *mut *mut c_void) -> Result<()> {
    // SAFETY: by this function's contract.
    unsafe { give_number(request, given::<Arc<Team>>(context)?.post(asked)?) }
}

/// Copied bytes are visible once the copy is done, so there is nothing to flush.
unsafe extern "C" fn iflush(
    _: *mut c_void,
    _: c_int,
    _: *mut c_void,
    _: u32,
    request: *mut *mut c_void,
) -> c_int {
    // SAFETY: NCCL's promise.
    guarded("iflush", || unsafe { give_number(request, 0) })
}

unsafe extern "C" fn test(team: *mut c_void, request: *mut c_void, done: *mut c_int) -> c_int {
    guarded("test", || {
        // SAFETY: NCCL's promise.
        let (team, done) = unsafe { (given::<Arc<Team>>(team)?, done.as_mut()) };
        let done = done.ok_or_else(|| null("a place for the result"))?;
        *done = 0;
        *done = number_of(request).map_or(Ok(true), |request| team.test(request))?.into();
        Ok(())
    })
}

unsafe extern "C" fn rma_progress(context: *mut c_void) -> c_int {
    // SAFETY: NCCL's promise.
    guarded("rmaProgress", || unsafe { given::<Arc<Team>>(context) }?.progress())
}

unsafe extern "C" fn query_last_error(_: *mut c_void, has: *mut bool) -> c_int {
    guarded("queryLastError", || {
        // SAFETY: NCCL's promise.
        *unsafe { has.as_mut() }.ok_or_else(|| null("a place for the result"))? = false;
        Ok(())
    })
}

unsafe extern "C" fn finalize(context: *mut c_void) -> c_int {
    // SAFETY: NCCL's promise: no call comes with it after this one.
    guarded("finalize", || unsafe { take_back::<Context>(context) })
}

/// The symbol that NCCL loads.
#[allow(non_upper_case_globals, reason = "NCCL's name")]
#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v14: Plugin = Plugin {
    name: c"softgin".as_ptr(),
    init,
    devices,
    get_properties,
    listen,
    connect,
    create_context,
    reg_mr_sym,
    reg_mr_sym_dmabuf,
    dereg_mr_sym,
    destroy_context,
    close_coll,
    close_listen,
    iput,
    iput_signal,
    iget,
    iflush,
    test,
    rma_progress,
    query_last_error,
    finalize,
};
