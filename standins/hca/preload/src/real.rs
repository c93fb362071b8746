//! The C library's own functions.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Defines a function that finds the next definition of a symbol behind this library, once.
macro_rules! next {
    ($($name:ident: $type:ty;)*) => {$(
        pub(crate) fn $name() -> $type {
            static FOUND: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
            let mut found = FOUND.load(Ordering::Acquire);
            if found.is_null() {
                const NAME: &str = concat!(stringify!($name), "\0");
                // SAFETY: the name is terminated.
                found = unsafe { dlsym()(libc::RTLD_NEXT, NAME.as_ptr().cast()) };
                if found.is_null() {
                    // There is no C library, so there is no place for an error.
                    std::process::abort();
                }
                FOUND.store(found, Ordering::Release);
            }
            // SAFETY: the C library's function of this name has this type.
            unsafe { std::mem::transmute::<*mut c_void, $type>(found) }
        }
    )*};
}

/// The loader's own function; the oldest version is in every library.
pub(crate) fn dlsym() -> unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void {
    #[cfg(target_arch = "x86_64")]
    const VERSION: &CStr = c"GLIBC_2.2.5";
    #[cfg(not(target_arch = "x86_64"))]
    const VERSION: &CStr = c"GLIBC_2.17";
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let mut found = FOUND.load(Ordering::Acquire);
    if found.is_null() {
        // SAFETY: terminated names.
        found = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), VERSION.as_ptr()) };
        if found.is_null() {
            // As below.
            std::process::abort();
        }
        FOUND.store(found, Ordering::Release);
    }
    // SAFETY: the loader's function has this type.
    unsafe { std::mem::transmute(found) }
}

next! {
    open: unsafe extern "C" fn(*const c_char, c_int, c_int) -> c_int;
    stat: unsafe extern "C" fn(*const c_char, *mut libc::stat) -> c_int;
    close: unsafe extern "C" fn(c_int) -> c_int;
    socket: unsafe extern "C" fn(c_int, c_int, c_int) -> c_int;
    ioctl: unsafe extern "C" fn(c_int, c_ulong, *mut c_void) -> c_int;
    write: unsafe extern "C" fn(c_int, *const c_void, usize) -> isize;
    read: unsafe extern "C" fn(c_int, *mut c_void, usize) -> isize;
    mmap: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void;
}
