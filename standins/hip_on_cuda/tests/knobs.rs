//! A function that is to fail does, and the product's error names it. One test: the variable is the
//! process's.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use tokenyard_core::ErrorKind;
use tokenyard_rocm::PLATFORM;
use tokenyard_testkit::built_plugin;

#[test]
fn a_function_fails_at_the_call_that_the_variable_names() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("libamdhip64.so");
    std::fs::copy(built_plugin("tokenyard-hip-on-cuda"), &file).unwrap();
    // SAFETY: no other thread of this program reads or writes variables: it has one test.
    unsafe { std::env::set_var("TOKENYARD_HIP_FAIL", "hipInit=100@1, hipInit=3") };
    // The later entry of a function counts.
    let error = PLATFORM.driver.load(Some(folder.path())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let text = error.to_string();
    assert!(text.contains("hipErrorNotInitialized (3): stand-in for HIP: "), "{text}");
    assert!(error.fix().is_some_and(|fix| fix.contains("/dev/kfd")), "{error}");
}
