//! The stand-in's files, loaded as the product loads AMD's. `docs/testing-gpus.md` has the tests that need a GPU.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tokenyard_core::ErrorKind;
use tokenyard_hip_on_cuda::SYMBOLS;
use tokenyard_rocm::PLATFORM;
use tokenyard_sys_hip::{Hip, Hiprtc};
use tokenyard_testkit::built_plugin;

/// A folder with both libraries, under AMD's names.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        // The folder of cargo is that of all packages.
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hip_on_cuda");
        std::fs::create_dir_all(&folder).unwrap();
        for (package, name) in [
            ("tokenyard-hip-on-cuda", "libamdhip64.so.7"),
            ("tokenyard-hiprtc-on-nvrtc", "libhiprtc.so.7"),
        ] {
            std::fs::copy(built_plugin(package), folder.join(name)).unwrap();
        }
        folder
    })
}

#[test]
fn every_function_of_the_bindings_is_there_and_no_other() {
    let hip = Hip::open(Some(folder())).unwrap();
    assert!(hip.mem_get_handle_for_address_range.is_some());
    Hiprtc::open(Some(folder())).unwrap();
    // They return no status.
    let others = ["hipGetErrorName", "hipGetErrorString", "hipGetLastError"];
    let mut own = [SYMBOLS, &others].concat();
    let mut called = [Hip::SYMBOLS, Hip::OPTIONAL].concat();
    own.sort_unstable();
    called.sort_unstable();
    assert_eq!(own, called);
}

#[test]
fn without_nvidia_s_driver_the_product_says_what_its_stand_in_lacks() {
    match PLATFORM.driver.load(Some(folder())) {
        Ok(()) => assert_eq!(PLATFORM.driver.version().unwrap(), "7.14.60850"),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            let text = error.to_string();
            let file = folder().join("libamdhip64.so.7").display().to_string();
            assert!(text.contains(&file), "{text}");
            assert!(text.contains("stand-in for HIP: "), "{text}");
        }
    }
}

#[test]
fn calls_before_the_beginning_are_refused_with_words() {
    let hip = Hip::open(Some(folder())).unwrap();
    let mut pointer = std::ptr::null_mut();
    // SAFETY: the pointer is ours; the stand-in checks that it is initialised.
    let status = unsafe { (hip.malloc)(&mut pointer, 64) };
    // Another test of this process may have initialised it, where there is a GPU.
    if status != 0 {
        assert_eq!(status, 3, "hipErrorNotInitialized");
        // SAFETY: texts of constants.
        let text = unsafe { CStr::from_ptr((hip.get_error_string)(status)) };
        assert_eq!(text, c"stand-in for HIP: hipInit has not succeeded");
        // SAFETY: no arguments.
        assert_eq!(unsafe { (hip.get_last_error)() }, 3);
    }
}

#[test]
fn without_nvrtc_the_compiler_says_so() {
    let hiprtc = Hiprtc::open(Some(folder())).unwrap();
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both numbers are ours.
    let status = unsafe { (hiprtc.version)(&mut major, &mut minor) };
    if status == 0 {
        assert!(major >= 11, "found NVRTC {major}.{minor}");
    } else {
        // SAFETY: a text of a constant.
        let text = unsafe { CStr::from_ptr((hiprtc.get_error_string)(status)) };
        assert!(text.to_str().unwrap().starts_with("stand-in for hiprtc: no libnvrtc.so"));
    }
}
