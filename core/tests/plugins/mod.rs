//! Builds real shared libraries with the system's C compiler.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A shared library in a folder of its own, removed on drop.
pub(crate) struct Library {
    pub(crate) path: PathBuf,
    _folder: tempfile::TempDir,
}

/// A file of this repository; an absolute path stays unchanged.
pub(crate) fn repository(path: impl AsRef<Path>) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Compiles `source`, an absolute path or one in this repository, as one shared library, without a
/// warning.
pub(crate) fn compile(source: impl AsRef<Path>, compiler: &str, options: &[&str]) -> Library {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("libplugin.so");
    compile_to(&path, &repository(source), compiler, options);
    Library { path, _folder: folder }
}

/// As [`compile`], to `out`.
pub(crate) fn compile_to(out: &Path, source: &Path, compiler: &str, options: &[&str]) {
    let output = Command::new(compiler)
        .args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-shared", "-fPIC", "-I"])
        .arg(repository("abi/include"))
        .arg(source)
        .args(options)
        .arg("-o")
        .arg(out)
        .output()
        .unwrap_or_else(|e| panic!("{compiler} cannot be run ({e}): apt-get install gcc g++"));
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{compiler} {options:?} {}:\n{printed}", source.display());
}
