//! Two functions of NVIDIA's driver that a program finds by `dlsym`. One makes a dmabuf: this library notes the memory
//! behind it. The other maps registers of a NIC for kernels: those of this device are ordinary memory, which the
//! driver maps only without the flag for registers.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::device::lacks;
use crate::{real, sysfs};

/// `CU_MEMHOSTREGISTER_IOMEMORY`.
const REGISTERS: c_uint = 4;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMABUF: c_uint = 1;

type Register = unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_uint;
type Export = unsafe extern "C" fn(*mut c_void, u64, usize, c_uint, u64) -> c_uint;

static REAL_REGISTER: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static REAL_EXPORT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Where the program has mapped pages of registers.
static PAGES: Mutex<Vec<usize>> = Mutex::new(Vec::new());
/// The memory behind each dmabuf, by what identifies its file: the address and the length.
static DMABUFS: Mutex<BTreeMap<(u64, u64), (u64, u64)>> = Mutex::new(BTreeMap::new());

/// # Safety
/// As for dlsym(3).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: by this function's contract.
    let found = unsafe { real::dlsym()(library, name) };
    if found.is_null() || sysfs::world().is_none() {
        return found;
    }
    // SAFETY: by this function's contract the name is terminated.
    match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"cuMemHostRegister_v2" => {
            REAL_REGISTER.store(found, Ordering::Release);
            register as Register as *mut c_void
        }
        b"cuMemGetHandleForAddressRange" => {
            REAL_EXPORT.store(found, Ordering::Release);
            export as Export as *mut c_void
        }
        _ => found,
    }
}

/// Notes where the program has mapped a page of registers.
pub(crate) fn note_page(mapped: *mut c_void) {
    PAGES.lock().unwrap_or_else(PoisonError::into_inner).push(mapped as usize);
}

/// # Safety
/// As for `cuMemHostRegister`.
unsafe extern "C" fn register(at: *mut c_void, bytes: usize, flags: c_uint) -> c_uint {
    let pages = PAGES.lock().unwrap_or_else(PoisonError::into_inner);
    let is_ours = pages.contains(&(at as usize)) && !lacks("registers");
    let flags = if is_ours { flags & !REGISTERS } else { flags };
    let real = REAL_REGISTER.load(Ordering::Acquire);
    // SAFETY: the driver's function, which `dlsym` has found before it gave this one.
    unsafe { std::mem::transmute::<*mut c_void, Register>(real)(at, bytes, flags) }
}

/// # Safety
/// As for `cuMemGetHandleForAddressRange`.
unsafe extern "C" fn export(
    handle: *mut c_void,
    address: u64,
    bytes: usize,
    kind: c_uint,
    flags: u64,
) -> c_uint {
    let real = REAL_EXPORT.load(Ordering::Acquire);
    // SAFETY: as above.
    let status = unsafe {
        std::mem::transmute::<*mut c_void, Export>(real)(handle, address, bytes, kind, flags)
    };
    if status == 0 && kind == DMABUF {
        // SAFETY: for this kind the driver has written one `int`.
        if let Some(file) = identity(unsafe { handle.cast::<c_int>().read() }) {
            let mut all = DMABUFS.lock().unwrap_or_else(PoisonError::into_inner);
            all.insert(file, (address, bytes as u64));
        }
    }
    status
}

/// Device and number of the file behind a descriptor: a copy of the descriptor has the same.
fn identity(fd: c_int) -> Option<(u64, u64)> {
    // SAFETY: zeros are a value of this structure.
    let mut found: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a place for the result.
    (unsafe { libc::fstat(fd, &mut found) } == 0).then_some((found.st_dev, found.st_ino))
}

/// The memory of a GPU behind a dmabuf: the address and the length.
pub(crate) fn behind(fd: c_int) -> Option<(u64, u64)> {
    let file = identity(fd).filter(|_| !lacks("dmabuf"))?;
    DMABUFS.lock().unwrap_or_else(PoisonError::into_inner).get(&file).copied()
}
