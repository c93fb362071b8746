//! Kernels name no maker: every word of a dialect is in `device/common/arch.cuh`, or in the arch file of one
//! maker.

// A test may panic.
#![allow(clippy::expect_used)]

use std::path::{Path, PathBuf};

/// Sources of device code, including those of other transports, except for the dialect's own.
fn sources() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    let others = [
        "../../standins/device_put/src",
        "../../standins/paced/src",
        "../gin/src/transport",
        "../ibgda/src",
    ];
    let device = ["device", "device/common", "device/codec", "device/moe", "device/decode"];
    let beside = ["device/ops", "src/probe", "src/transport"];
    for folder in device.into_iter().chain(beside).chain(others) {
        for entry in std::fs::read_dir(root.join(folder)).expect("a folder of the crate") {
            let path = entry.expect("an entry").path();
            let is_source = path.extension().is_some_and(|e| e == "cuh" || e == "cu");
            let is_dialect = ["arch.cuh", "arch_cuda.cuh", "arch_amd.cuh"]
                .iter()
                .any(|name| path.ends_with(name));
            if is_source && !is_dialect {
                found.push(path);
            }
        }
    }
    assert!(found.len() > 15, "found {} sources; the folders have moved", found.len());
    found
}

/// The code of a line, without its comment.
fn code(line: &str) -> &str {
    line.split_once("//").map_or(line, |(code, _)| code)
}

/// The words of a line of code.
fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Words that CUDA and HIP share, and that the model has.
const SHARED: [&str; 6] =
    ["__device__", "__shared__", "__global__", "__CUDACC__", "__AMDGCN__", "__attribute__"];

/// The dialect word of a line of code, if it has one.
fn dialect_in(code: &str) -> Option<String> {
    let is_one = |word: &&str| {
        *word == "asm"
            || word.starts_with("__") && !SHARED.contains(word)
            || ["atomicAdd", "atomicOr", "atomicMin", "atomicInc", "atomicCAS"].contains(word)
    };
    if let Some(word) = words(code).find(is_one) {
        return Some(word.to_owned());
    }
    // Halves of 64-bit words are shifted by 32; any other 32 is the size of a warp.
    let rest = code.replace("<< 32", "").replace(">> 32", "");
    words(&rest).find(|word| ["32", "32u"].contains(word)).map(str::to_owned)
}

#[test]
fn words_of_a_dialect_and_the_size_of_a_warp_are_in_arch_cuh_alone() {
    let mut found = Vec::new();
    for path in sources() {
        let text = std::fs::read_to_string(&path).expect("a source");
        for (number, line) in (1..).zip(text.lines()) {
            if let Some(word) = dialect_in(code(line)) {
                found.push(format!("{}:{number}: {word}", path.display()));
            }
        }
    }
    assert!(found.is_empty(), "move these behind device/common/arch.cuh:\n{}", found.join("\n"));
}

#[test]
fn a_dialect_s_words_are_noticed() {
    for line in ["  asm volatile(\"x\");", "#if __CUDA_ARCH__ >= 890", "x = __popc(y);", "i += 32)"]
    {
        assert!(dialect_in(line).is_some(), "{line}");
    }
    for line in ["a = b >> 32 | c << 32;", "__shared__ u32 x;", "u32 lane = lane_id();"] {
        assert_eq!(dialect_in(line), None, "{line}");
    }
    assert_eq!(dialect_in(code("x = 1;  // at most 32")), None);
}
