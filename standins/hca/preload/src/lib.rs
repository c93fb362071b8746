//! A **stand-in for the kernel** and for a ConnectX, for tests: a library for `LD_PRELOAD` under unmodified
//! libibverbs and libmlx5. It answers their calls on `/dev/infiniband/uverbs0`. The software device of
//! `tokenyard-hca` executes the requests that they post. `../docs.md` says how to run a program under it.
//!
//! The functions below take the place of the C library's, and pass on calls that are not about the device. The
//! variadic ones (`open`, `ioctl`) are defined with all their arguments: on x86-64 and AArch64 Linux, variadic
//! integer arguments come in the same registers.

mod bytes;
mod device;
mod gpu;
mod hooks;
mod ioctl;
mod link;
mod real;
mod sysfs;
mod write;

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};

use device::{fail, is_async, is_ours, with};

/// The file that libibverbs opens.
const DEVICE: &[u8] = b"/dev/infiniband/uverbs0";

/// Runs when the library is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static INIT: extern "C" fn() = init;

extern "C" fn init() {
    sysfs::publish();
}

/// # Safety
/// `path` is null or a terminated text.
unsafe fn is_device(path: *const c_char) -> bool {
    // SAFETY: by this function's contract.
    !path.is_null()
        && sysfs::world().is_some()
        && unsafe { CStr::from_ptr(path) }.to_bytes() == DEVICE
}

/// # Safety
/// As for open(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: c_int) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { if is_device(path) { device::open() } else { real::open()(path, flags, mode) } }
}

/// # Safety
/// As for open(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: c_int) -> c_int {
    // SAFETY: by this function's contract; both are one on 64-bit machines.
    unsafe { open(path, flags, mode) }
}

/// # Safety
/// As for stat(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stat(path: *const c_char, to: *mut libc::stat) -> c_int {
    // SAFETY: by this function's contract. The device is a character device with null's numbers.
    unsafe { real::stat()(if is_device(path) { c"/dev/null".as_ptr() } else { path }, to) }
}

/// # Safety
/// As for stat(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stat64(path: *const c_char, to: *mut libc::stat) -> c_int {
    // SAFETY: by this function's contract; both are one on 64-bit machines.
    unsafe { stat(path, to) }
}

/// # Safety
/// As for close(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    device::forget(fd);
    // SAFETY: by this function's contract.
    unsafe { real::close()(fd) }
}

/// # Safety
/// As for socket(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // Refused, because libibverbs would else use the kernel's own list of devices, which is empty.
    if domain == libc::AF_NETLINK && protocol == libc::NETLINK_RDMA && sysfs::world().is_some() {
        return fail(libc::EPROTONOSUPPORT);
    }
    // SAFETY: by this function's contract.
    unsafe { real::socket()(domain, kind, protocol) }
}

/// # Safety
/// As for ioctl(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if !is_ours(fd) {
        // SAFETY: by this function's contract.
        return unsafe { real::ioctl()(fd, request, argument) };
    }
    // SAFETY: libibverbs sends to its device a header with as many attributes as the header says.
    let answer = with(|device| unsafe { ioctl::answer(device, argument.cast()) });
    answer.map_or_else(fail, |()| 0)
}

/// # Safety
/// As for write(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, from: *const c_void, count: usize) -> isize {
    if !is_ours(fd) {
        // SAFETY: by this function's contract.
        return unsafe { real::write()(fd, from, count) };
    }
    // SAFETY: by this function's contract there are `count` bytes; the pointers inside are libibverbs'.
    let answer = with(|device| unsafe {
        write::answer(device, std::slice::from_raw_parts(from.cast(), count))
    });
    answer.map_or_else(|errno| fail(errno) as isize, |()| count as isize)
}

/// # Safety
/// As for read(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, to: *mut c_void, count: usize) -> isize {
    if !is_async(fd) || count < 16 {
        // SAFETY: by this function's contract.
        return unsafe { real::read()(fd, to, count) };
    }
    loop {
        let mut token = [0; 8];
        // SAFETY: the descriptor is an eventfd, which gives 8 bytes, or waits, as the program set it up.
        let got = unsafe { real::read()(fd, token.as_mut_ptr().cast(), token.len()) };
        if got < 0 {
            return got;
        }
        // An event that is missing has ended with its queue pair.
        if let Ok(Some(event)) = with(|device| Ok(device.next_event())) {
            // SAFETY: by this function's contract there is room for `count` bytes, which is enough.
            unsafe { std::ptr::copy_nonoverlapping(event.as_ptr(), to.cast(), event.len()) };
            return event.len() as isize;
        }
    }
}

/// # Safety
/// As for mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    at: *mut c_void,
    bytes: usize,
    rights: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    if fd < 0 || !is_ours(fd) {
        // SAFETY: by this function's contract.
        return unsafe { real::mmap()(at, bytes, rights, flags, fd, offset) };
    }
    match with(|device| device.page_file(offset)) {
        Ok(file) => {
            // SAFETY: a new mapping of a file that is as long.
            let mapped = unsafe { real::mmap()(at, bytes, rights, flags, file, 0) };
            hooks::note_page(mapped);
            mapped
        }
        Err(errno) => {
            fail(errno);
            libc::MAP_FAILED
        }
    }
}

/// # Safety
/// As for mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    at: *mut c_void,
    bytes: usize,
    rights: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: by this function's contract; both are one on 64-bit machines.
    unsafe { mmap(at, bytes, rights, flags, fd, offset) }
}
