//! The driver's code over a HIP that lacks what newer versions have. A process has one HIP, so this is a program of
//! its own.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::path::Path;

use tokenyard_core::ErrorKind;
use tokenyard_gpu::driver::{Driver, DriverMemory, RawDevice};
use tokenyard_rocm::HipDriver;

mod fake;

#[test]
fn without_range_handles_a_window_names_the_function_and_the_fix() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_hip_old");
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("libamdhip64.so.6");
    fake::build(&file, &["-DFAKE_WITHOUT_RANGE_HANDLES"]);
    HipDriver.load(Some(&folder)).unwrap();
    let device = RawDevice(0);
    let memory = HipDriver.memory_create(device, 4096).unwrap();
    // SAFETY: memory that lives; the range is mapped until it is unmapped.
    let error = unsafe {
        let at = HipDriver.memory_map(memory, 4096, device).unwrap();
        let exported = HipDriver.range_dmabuf(at, 4096);
        HipDriver.memory_unmap(memory, at, 4096);
        HipDriver.memory_release(memory);
        exported.unwrap_err()
    };
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let text = error.to_string();
    let expected = "has no function hipMemGetHandleForAddressRange; expected ROCm 7 or newer";
    assert!(text.contains(&format!("{} {expected}", file.display())), "{text}");
    let fix = error.fix().unwrap();
    assert!(fix.contains("upgrade ROCm") && fix.contains("leave `windows` out"), "{fix}");
}
