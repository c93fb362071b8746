//! The kernels, run without a GPU: their source is compiled for the host, with a stand-in for a GPU under
//! it (`model/cuda.h`) and one for the proxy and a transport beside it (`model/exchange.cpp`). It shows
//! where every byte goes and that every wait ends; it shows nothing of bulk copies, nor of what a GPU
//! does to memory that it shares with others.

// Helpers of a test may panic as a test may.
#![allow(clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::process::Command;

use tokenyard_core::abi;

/// Puts `with` in the place of what is between two texts of a file, the first one included.
fn replace(text: &str, [from, to]: [&str; 2], with: &str) -> String {
    let start = text.find(from).unwrap_or_else(|| panic!("found no `{from}`"));
    let end = start + text[start..].find(to).unwrap_or_else(|| panic!("found no `{to}` behind"));
    [&text[..start], with, &text[end..]].concat()
}

/// The file as a host compiler understands it: what is written in a GPU's own instructions is replaced.
fn for_the_host(name: &str, text: &str) -> String {
    const MEMORY: &str = include_str!("model/memory.h");
    const SHARED: &str = include_str!("model/shared.h");
    match name {
        "transport.cuh" => {
            replace(text, ["__device__ inline u64 now_ns()", "// What the host sees"], MEMORY)
        }
        "bulk.cuh" => {
            replace(text, ["__device__ inline u32 shared_address", "#if TY_ROWS_TMA"], SHARED)
        }
        "types.cuh" => [
            ("asm(\"cvt.rn.bf16x2", "w[i] = model::bf16x2(f[2 * i], f[2 * i + 1]);"),
            ("asm(\"cvt.f32.f16", "f[i] = model::from_f16(half);"),
            ("asm(\"cvt.rn.f16x2", "w[i] = model::f16x2(f[2 * i], f[2 * i + 1]);"),
        ]
        .iter()
        .fold(text.to_owned(), |text, (from, with)| replace(&text, [from, "\n"], with)),
        "exchange.cu" => {
            let shared = "static thread_local ty::u8 shared[1 << 17];";
            replace(text, ["extern __shared__", "\n"], shared)
        }
        _ => text.to_owned(),
    }
}

/// Writes the sources of a folder for the host.
fn write_all(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).expect("a folder of the crate") {
        let path = entry.expect("an entry").path();
        let is_source = path.extension().is_some_and(|e| e == "cuh" || e == "cu");
        if let Some(name) = path.file_name().and_then(|n| n.to_str()).filter(|_| is_source) {
            let text = std::fs::read_to_string(&path).expect("a source");
            std::fs::write(to.join(name), for_the_host(name, &text)).expect("written");
        }
    }
}

/// Compiles and runs the model over a face.
fn run(face: &Path, puts: bool, param_bytes: usize) {
    let folder = tempfile::tempdir().expect("a folder");
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    write_all(&crate_folder.join("src/kernels"), folder.path());
    write_all(&crate_folder.join("../device"), folder.path());
    std::fs::copy(crate_folder.join(face), folder.path().join("up_face.cuh")).expect("the face");
    let program = folder.path().join("exchange");
    let compiled = Command::new("g++")
        .args(["-std=c++20", "-O1", "-g", "-pthread", "-DTY_ROWS_TMA=0"])
        .arg(format!("-DTY_HOST_FACE_VERSION={}", abi::TY_FACE_VERSION))
        .arg(format!("-DTY_PUTS={}", u32::from(puts)))
        .arg("-DTY_GROUPED=0")
        .arg(format!("-DTY_UP_PARAM_BYTES={param_bytes}"))
        .arg("-I")
        .arg(folder.path())
        .arg(crate_folder.join("tests/model/exchange.cpp"))
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap_or_else(|e| panic!("g++ cannot be run ({e}): apt-get install g++"));
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let run = Command::new(&program).output().expect("it runs");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}

#[test]
fn rows_reach_their_places_and_come_back_over_puts_in_any_order() {
    run(Path::new("../device/proxy.cuh"), true, 40);
}

#[test]
fn rows_reach_their_places_and_come_back_over_loads_and_stores() {
    run(Path::new("src/transport/nvlink.cuh"), false, 32);
}
