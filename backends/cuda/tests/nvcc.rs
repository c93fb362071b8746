//! Kernels over a device API that includes headers from disk, compiled by nvcc, without a GPU.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::path::Path;

use tokenyard_core::transport::Transport as _;
use tokenyard_core::{ErrorKind, abi};
use tokenyard_cuda::{Nvlink, PLATFORM};
use tokenyard_gpu::GpuConfig;
use tokenyard_gpu::compile::{Architecture, Role};
use tokenyard_gpu::warm::{Over, warm};

fn text(text: &str) -> abi::TyStr {
    abi::TyStr { data: text.as_ptr(), bytes: text.len() }
}

/// The device API of `nvlink`, in the form of a vendor that has some of its source in a header.
fn vendor(folder: &Path) -> Over {
    let nvlink = Nvlink::device_source().unwrap();
    // SAFETY: the text of a constant.
    let bytes = unsafe { std::slice::from_raw_parts(nvlink.source.data, nvlink.source.bytes) };
    let source = format!(
        "static_assert(vendor::kQueues > 0, \"the header was read\");\n{}",
        std::str::from_utf8(bytes).unwrap()
    );
    let folders = [text(folder.to_str().unwrap())];
    let defines = [text("TY_UP_PRELUDE=<vendor.h>")];
    let given = abi::TyDeviceApi {
        compiler: abi::TY_COMPILER_NVCC,
        source: text(&source),
        include_folders: folders.as_ptr(),
        include_folder_count: folders.len(),
        defines: defines.as_ptr(),
        define_count: defines.len(),
        ..nvlink
    };
    // SAFETY: the data that it points to lives until the end of this function, which copies it.
    unsafe { Over::transport(&PLATFORM.dialect, "vendor", Some(&given)) }.unwrap()
}

fn write_header(folder: &Path, queues: u32) {
    let header =
        format!("#pragma once\nnamespace vendor {{ constexpr int kQueues = {queues}; }}\n");
    std::fs::write(folder.join("vendor.h"), header).unwrap();
}

#[test]
#[ignore = "needs nvcc of CUDA 13: the step cuda-compile installs it, and runs this"]
fn kernels_over_a_device_api_with_headers_are_compiled_again_when_a_header_changes() {
    let folder = tempfile::tempdir().unwrap();
    let config = GpuConfig { cache: Some(folder.path().join("cache")), ..GpuConfig::default() };
    let compiled = || {
        // The program with the fewest kernels.
        let programs = [(vendor(folder.path()), Role::IntraDomain)];
        warm(&PLATFORM, &config, Some(Architecture::Sm(90)), &programs).map(|all| all[0].compiled)
    };
    write_header(folder.path(), 4);
    assert!(compiled().unwrap(), "found it compiled before");
    assert!(!compiled().unwrap(), "it is in the cache");
    write_header(folder.path(), 8);
    assert!(compiled().unwrap(), "another header makes other kernels");
    write_header(folder.path(), 0);
    let error = compiled().unwrap_err();
    assert!(error.to_string().contains("the header was read"), "{error}");
}

#[test]
fn a_device_api_with_headers_says_where_nvcc_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    write_header(folder.path(), 4);
    let config = GpuConfig {
        cache: Some(folder.path().join("cache")),
        compiler: Some(folder.path().join("nvcc")),
        ..GpuConfig::default()
    };
    let programs = [(vendor(folder.path()), Role::Direct)];
    let error = warm(&PLATFORM, &config, Some(Architecture::Sm(90)), &programs).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.fix().is_some_and(|fix| fix.contains("`compiler` in [kernels.cuda]")), "{error}");
}
