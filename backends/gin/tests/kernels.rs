//! The kernels over `ncclGin`, compiled by nvcc with NCCL's own headers of both versions. No GPU, no library of NCCL's.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use tokenyard_cuda::{Nvcc, PLATFORM};
use tokenyard_gin::{DeviceSide, GinType};
use tokenyard_gpu::GpuConfig;
use tokenyard_gpu::compile::{Architecture, Role, Rows, Target};
use tokenyard_gpu::warm::{Over, compile, warm};

/// The oldest version that the transport takes, and the newest version that it was tried with.
const VERSIONS: [&str; 2] = ["2.31.2", "2.32.3"];

fn over(version: &str, choice: GinType) -> Over {
    let headers = std::env::var("NCCL_HEADERS").unwrap_or_else(|_| {
        panic!("NCCL_HEADERS is not set; expected the folder that sys/nccl/headers.py was given")
    });
    let side = DeviceSide::source_only(format!("{headers}/{version}"), choice);
    // SAFETY: what it points to lives until the end of this function, which copies it.
    unsafe { Over::transport(&PLATFORM.dialect, "gin", Some(&side.device_api())) }.unwrap()
}

#[test]
#[ignore = "needs nvcc of CUDA 13 and NCCL's headers: the step cuda-compile fetches them, and runs this"]
fn kernels_compile_with_the_headers_of_both_versions_and_each_has_a_place_of_its_own_in_the_cache()
{
    let folder = tempfile::tempdir().unwrap();
    let config = GpuConfig { cache: Some(folder.path().join("cache")), ..GpuConfig::default() };
    let compiled = |version| {
        let programs = [(over(version, GinType::Proxy), Role::Direct)];
        warm(&PLATFORM, &config, Some(Architecture::Sm(90)), &programs).unwrap()[0].compiled
    };
    assert_eq!(VERSIONS.map(compiled), [true, true]);
    assert_eq!(VERSIONS.map(compiled), [false, false], "both are in the cache");
}

/// Functions, and the bytes of registers that they spill, as the assembler reports them.
fn spills(log: &str) -> Vec<(&str, u32)> {
    let mut function = "";
    let mut all = Vec::new();
    for line in log.lines() {
        function = line.split_once("Function properties for ").map_or(function, |(_, name)| name);
        if let Some((before, _)) = line.split_once(" bytes spill stores") {
            let bytes = before.split_whitespace().last().and_then(|word| word.parse().ok());
            all.push((function, bytes.unwrap_or(u32::MAX)));
        }
    }
    all
}

/// The dispatch spills some of its values where it calls NCCL's code.
const MOST_SPILT: [(&str, u32); 1] = [("ty_dispatch", 128)];

#[test]
#[ignore = "needs nvcc of CUDA 13 and NCCL's headers: the step cuda-compile fetches them, and runs this"]
fn kernels_for_every_type_that_nccl_s_packages_have_headers_for_compile_and_hardly_spill() {
    let nvcc = Nvcc::find(None).unwrap();
    let target = Target { compiler: &nvcc, architecture: Architecture::Sm(90), rows: Rows::Tma };
    let made = compile(target, &over(VERSIONS[1], GinType::Auto), Role::Direct).unwrap();
    let all = spills(&made.log);
    assert!(all.len() >= 11, "found {} functions: {}", all.len(), made.log);
    for (function, bytes) in all {
        let most = MOST_SPILT.iter().find(|(name, _)| *name == function).map_or(0, |it| it.1);
        assert!(bytes <= most, "{function} spills {bytes} bytes; expected at most {most}");
    }
}
