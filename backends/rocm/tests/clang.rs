//! Kernels for AMD's GPUs, compiled into the cache by clang, without a GPU and without ROCm.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::path::PathBuf;

use tokenyard_core::ErrorKind;
use tokenyard_core::transport::Transport as _;
use tokenyard_gpu::GpuConfig;
use tokenyard_gpu::compile::{Architecture, Role, Rows};
use tokenyard_gpu::warm::{Over, warm};
use tokenyard_rocm::{PLATFORM, Xgmi};

const GFX942: Option<Architecture> = Some(Architecture::Gfx(0x942));

fn config(cache: &std::path::Path, compiler: PathBuf) -> GpuConfig {
    GpuConfig { cache: Some(cache.join("cache")), compiler: Some(compiler), ..GpuConfig::default() }
}

/// The kernels over the device API that `xgmi` gives: the program with the fewest.
fn over_xgmi() -> [(Over, Role); 1] {
    let given = Xgmi::device_source().unwrap();
    // SAFETY: its texts are constants.
    let over = unsafe { Over::transport(&PLATFORM.dialect, "xgmi", Some(&given)) }.unwrap();
    [(over, Role::IntraDomain)]
}

#[test]
#[ignore = "needs clang for AMD: the step rocm-compile installs one, and runs this"]
fn a_compiler_that_the_config_names_compiles_the_kernels_over_xgmi_once() {
    let named = std::env::var_os("TOKENYARD_TEST_CLANG").expect("TOKENYARD_TEST_CLANG names clang");
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), named.into());
    let first = warm(&PLATFORM, &config, GFX942, &over_xgmi()).unwrap();
    assert_eq!((first[0].architecture.as_str(), first[0].rows), ("gfx942", Rows::Vector));
    assert!(first[0].compiled, "found it compiled before");
    let second = warm(&PLATFORM, &config, GFX942, &over_xgmi()).unwrap();
    assert!(!second[0].compiled, "it is in the cache");
}

#[test]
fn a_compiler_that_the_config_names_and_that_is_not_there_is_not_replaced_by_another() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), folder.path().join("clang"));
    let error = warm(&PLATFORM, &config, GFX942, &over_xgmi()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains(&folder.path().join("clang").display().to_string()));
    assert!(error.fix().is_some_and(|fix| fix.contains("`compiler` in")), "{error}");
}

#[test]
fn architectures_that_there_are_no_kernels_for_are_refused_before_a_compiler_is_looked_for() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), folder.path().join("clang"));
    let mi200 = Some(Architecture::Gfx(0x90a));
    let error = warm(&PLATFORM, &config, mi200, &over_xgmi()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("found gfx90a; expected gfx942 or gfx950"), "{text}");
}
