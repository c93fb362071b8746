//! The library of HIP's names that works on host memory.

use std::path::Path;
use std::process::Command;

use tokenyard_sys_hip::Hip;

/// Compiles `fake_hip.c`, and a function that is not supported for each other symbol.
pub(crate) fn build(file: &Path, defines: &[&str]) {
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_hip.c");
    let mut text = std::fs::read_to_string(&fake).unwrap();
    let missing: Vec<_> =
        Hip::SYMBOLS.iter().filter(|symbol| !text.contains(&format!(" {symbol}("))).collect();
    for symbol in missing {
        text += &format!("unsigned {symbol}(void) {{ return fail(NOT_SUPPORTED); }}\n");
    }
    let source = file.with_file_name("all_of_fake_hip.c");
    std::fs::write(&source, text).unwrap();
    let built = Command::new("gcc")
        .args(["-shared", "-fPIC", "-pthread", "-Wall", "-o"])
        .args([file, &source])
        .args(defines)
        .output()
        .unwrap_or_else(|e| panic!("gcc cannot be run ({e}): apt-get install gcc"));
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}
