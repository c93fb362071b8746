//! Loading, by a stand-in for ROCm: a library whose functions have the right names and do nothing.

// Helpers of a test may panic as a test may.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::Command;

use tokenyard_sys_hip::{Hip, Hiprtc, LoadError};

/// A library with these functions, each of which returns its own number.
fn stand_in(folder: &Path, name: &str, symbols: &[&str]) -> PathBuf {
    let (source, file) = (folder.join("stand_in.c"), folder.join(name));
    let lines = symbols.iter().enumerate();
    let text: String =
        lines.map(|(i, s)| format!("unsigned {s}(void) {{ return {i}; }}\n")).collect();
    std::fs::write(&source, text).unwrap();
    let built = Command::new("gcc")
        .args(["-shared", "-fPIC", "-fno-builtin", "-o"])
        .args([&file, &source])
        .output()
        .unwrap_or_else(|e| panic!("gcc cannot be run ({e}): apt-get install gcc"));
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    file
}

#[test]
fn each_field_calls_the_function_of_its_symbol() {
    let folder = tempfile::tempdir().unwrap();
    let file = stand_in(folder.path(), "libamdhip64.so.6", Hip::SYMBOLS);
    let hip =
        Hip::open_first(&["libtokenyard_none.so".into(), file.display().to_string()]).unwrap();
    let number = |symbol| Hip::SYMBOLS.iter().position(|s| *s == symbol).unwrap() as u32;
    // SAFETY: the functions of the stand-in read nothing.
    let found = unsafe { [(hip.init)(0), (hip.stream_query)(std::ptr::null_mut())] };
    assert_eq!(found, [number("hipInit"), number("hipStreamQuery")]);
    assert!(hip.mem_get_handle_for_address_range.is_none(), "only later versions have it");
    let hip = Hip::open(Some(folder.path())).unwrap();
    assert_eq!(hip.file, file.display().to_string(), "a folder without .so.7 has .so.6");
}

#[test]
fn a_function_that_is_missing_is_named_whichever_it_is() {
    let folder = tempfile::tempdir().unwrap();
    for (i, missing) in [(0, Hip::SYMBOLS[0]), (1, Hip::SYMBOLS[Hip::SYMBOLS.len() - 1])] {
        let others: Vec<_> = Hip::SYMBOLS.iter().copied().filter(|s| *s != missing).collect();
        let file = stand_in(folder.path(), &format!("libamdhip64.so.{i}"), &others);
        let file = file.display().to_string();
        let error = Hip::open_first(std::slice::from_ref(&file)).unwrap_err();
        let expected = "ROCm 6 or newer";
        assert_eq!(error, LoadError::Lacks { file, function: missing, expected });
        let text = error.to_string();
        assert!(text.contains(missing) && text.contains("expected ROCm 6 or newer"), "{text}");
    }
}

#[test]
fn libraries_that_are_absent_are_named_with_what_the_loader_says() {
    let error = Hiprtc::open_first(&["libtokenyard_a.so.7".into(), "libtokenyard_a.so".into()])
        .unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("libtokenyard_a.so.7, libtokenyard_a.so cannot be loaded: "),
        "{text}"
    );
    assert!(text.contains("No such file"), "{text}");
}

#[test]
fn no_function_is_looked_up_twice() {
    let mut all = [Hip::SYMBOLS, Hiprtc::SYMBOLS].concat();
    all.sort_unstable();
    assert!(all.windows(2).all(|pair| pair[0] != pair[1]));
    assert!(Hip::SYMBOLS.iter().all(|s| s.starts_with("hip")) && Hip::SYMBOLS.len() == 71);
}
