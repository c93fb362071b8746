//! The test is a separate program, because no other test may have opened the library before.

use tokenyard_sys_fabric::Library;

/// The address of a signal's handler.
fn handler(signal: i32) -> usize {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: it only reads, and fills the action if it returns 0.
    unsafe {
        assert_eq!(libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()), 0);
        action.assume_init().sa_sigaction
    }
}

#[test]
fn opening_the_library_leaves_the_handlers_of_signals_as_they_were() {
    let signals =
        [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGABRT, libc::SIGINT, libc::SIGTERM];
    let before = signals.map(handler);
    assert!(Library::open().is_ok(), "the tests need libfabric");
    assert_eq!(signals.map(handler), before);
}
